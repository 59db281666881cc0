"""Metrics: values by hand, no dependence on order or machine, and files that survive a crash and a resume."""

import decimal
import json
import math
import sys
import types

import numpy as np
import pytest

from megatron_ext.ops import PolicyObjective
from megatron_ext.rl import metrics
from megatron_ext.rl.metrics import MetricsWriter, read_metrics


def f32(*rows):
    return [np.array(row, dtype=np.float32) for row in rows]


def test_sequence_metrics():
    found = metrics.sequence_metrics([2, 4, 4, 6], [1, 8, 8, 3], max_prompt_len=6, max_response_len=8)
    assert found == {
        "prompt_length/mean": 4.0, "prompt_length/max": 6.0, "prompt_length/min": 2.0, "prompt_length/clip_ratio": 0.25,
        "response_length/mean": 5.0, "response_length/max": 8.0, "response_length/min": 1.0, "response_length/clip_ratio": 0.5,
    }  # fmt: skip


def test_longer_than_allowed_or_nothing_is_refused():
    with pytest.raises(ValueError, match="response_length: 9 tokens, at most 8"):
        metrics.sequence_metrics([1], [9], 4, 8)
    with pytest.raises(ValueError, match="prompt_length: no value"):
        metrics.sequence_metrics([], [], 4, 8)


def test_reward_metrics_with_advantages_per_token():
    found = metrics.reward_metrics({"format": [0.0, 1.0], "answer": [1.0, 1.0]}, [1.0, 2.0], [np.array([-1.0, -1.0, -1.0]), np.array([1.0])])
    assert found == {
        "critic/score/mean": 1.5, "critic/score/max": 2.0, "critic/score/min": 1.0,
        "critic/rewards/mean": 1.5, "critic/rewards/max": 2.0, "critic/rewards/min": 1.0,
        "critic/advantages/mean": -0.5, "critic/advantages/max": 1.0, "critic/advantages/min": -1.0,
        "critic/score/format/mean": 0.5, "critic/score/answer/mean": 1.0,
    }  # fmt: skip


def test_reward_metrics_with_a_penalty_and_advantages_per_response():
    found = metrics.reward_metrics({}, [1.0, 2.0], [-1.0, 1.0], rewards=[0.5, 2.0])
    assert found["critic/rewards/mean"] == 1.25 and found["critic/score/mean"] == 1.5 and found["critic/advantages/mean"] == 0.0


def test_reward_metrics_name_a_column_of_another_length():
    with pytest.raises(ValueError, match="score of format: 1 values for 2 responses"):
        metrics.reward_metrics({"format": [1.0]}, [1.0, 2.0], [0.0, 0.0])


def test_validation_metrics():
    found = metrics.validation_metrics(["sum", "sort", "sum"], {"exact": [1.0, 0.0, 0.0], "close": [1.0, 0.5, 0.0]}, [2.0, 0.5, 0.0])
    assert found == {
        "val-core/sum/acc/mean@1": 0.5, "val-aux/sum/close/mean@1": 0.5, "val-aux/sum/reward/mean@1": 1.0,
        "val-core/sort/acc/mean@1": 0.0, "val-aux/sort/close/mean@1": 0.5, "val-aux/sort/reward/mean@1": 0.5,
    }  # fmt: skip


def test_actor_metrics_by_hand():
    """Ratios 1.5, 1 with a positive advantage (the first is clipped), 0.5 with a negative one (clipped)."""
    new, old = f32([math.log(0.75), -1.0], [math.log(0.25)]), f32([math.log(0.5), -1.0], [math.log(0.5)])
    found = metrics.actor_metrics(new, old, [1.0, -1.0], PolicyObjective(kl_coef=0.1), "token-mean", f32([math.log(0.75), -1.0], [math.log(0.5)]))
    assert found["actor/pg_clipfrac"] == 2 / 3 and found["actor/pg_loss"] == pytest.approx((-1.2 - 1 + 0.8) / 3, rel=1e-6)
    assert found["actor/ppo_kl"] == pytest.approx((-math.log(1.5) + math.log(2)) / 3, rel=1e-6)
    assert found["actor/kl_loss"] == pytest.approx((2 - math.log(2) - 1) / 3, rel=1e-6) and found["actor/kl_coef"] == 0.1
    whole = metrics.actor_metrics(new, old, [1.0, -1.0], PolicyObjective(importance_level="sequence"), "seq-mean-token-mean")
    assert whole["actor/pg_loss"] == pytest.approx((-1.2 + 0.8) / 2, rel=1e-6) and whole["actor/pg_clipfrac"] == 1.0 and "actor/kl_loss" not in whole  # sqrt(1.5) lies above 1.2 too


def test_timing_metrics():
    assert metrics.timing_metrics({"gen": 3.0, "step": 4.0}, tokens=80, devices=2) == {
        "timing_s/gen": 3.0, "timing_s/step": 4.0, "perf/total_num_tokens": 80, "perf/time_per_step": 4.0, "perf/throughput": 10.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="'step' > 0"):
        metrics.timing_metrics({"gen": 3.0}, tokens=80)


# Logprobs whose exponentials are known: float32(ln 2) and so on are used through their exact float64 values.
HALF, QUARTER = (float(np.float32(math.log(x))) for x in (0.5, 0.25))


def test_logdiff_metrics_by_hand():
    """Two responses: [1/2, 1/4] against [1/4, 1/4], and [1/2] against [1/2]."""
    found = metrics.logdiff_metrics(f32([HALF, QUARTER], [HALF]), f32([QUARTER, QUARTER], [HALF]))
    d = HALF - QUARTER  # ln 2
    close = lambda value: pytest.approx(value, rel=1e-7)  # noqa: E731
    assert found.pop("training/rollout_logprobs_mismatched_tokens") == 1
    assert found.pop("training/rollout_probs_diff_valid") == 1
    assert found.pop("training/rollout_logprobs_diff_max") == d
    assert found == {
        "training/rollout_logprobs_diff_mean": close(math.log(2) / 3),
        "training/rollout_probs_diff_max": close(0.25),
        "training/rollout_probs_diff_mean": close(0.25 / 3),
        "training/rollout_probs_diff_std": close(math.sqrt(((1 / 4 - 1 / 12) ** 2 + 2 / 144) / 2)),
        "training/rollout_actor_probs_pearson_corr": close(0.5),  # of (1/2, 1/4, 1/2) and (1/4, 1/4, 1/2)
        "rollout_corr/kl": close(-math.log(2) / 3),
        "rollout_corr/k3_kl": close((1 - math.log(2)) / 3),  # mean(2 - ln 2 - 1, 0, 0)
        "rollout_corr/chi2_token": close(1.0),  # mean(4, 1, 1) - 1
        "rollout_corr/chi2_seq": close(1.5),  # mean(4, 1) - 1
        "rollout_corr/training_log_ppl": close((1.5 + 1) / 2 * math.log(2)),
        "rollout_corr/training_ppl": close((2**1.5 + 2) / 2),
        "rollout_corr/rollout_log_ppl": close((2 + 1) / 2 * math.log(2)),
        "rollout_corr/rollout_ppl": close((4 + 2) / 2),
        "rollout_corr/log_ppl_diff": close(-math.log(2) / 4),
        "rollout_corr/log_ppl_diff_max": 0.0,
        "rollout_corr/log_ppl_diff_min": close(-math.log(2) / 2),
        "rollout_corr/log_ppl_abs_diff": close(math.log(2) / 4),
        "rollout_corr/ppl_ratio": close((2**-0.5 + 1) / 2),
    }


def test_equal_logprobs_give_exact_zeros_and_ones():
    rows = np.random.default_rng(0).uniform(-12, 0, 300).astype(np.float32)
    found = metrics.logdiff_metrics([rows[:100], rows[100:]], [rows[:100], rows[100:]])
    ones = {"training/rollout_probs_diff_valid", "training/rollout_actor_probs_pearson_corr", "rollout_corr/ppl_ratio"}
    of_one_side = {f"rollout_corr/{side}_{name}" for side in ("training", "rollout") for name in ("ppl", "log_ppl")}
    assert {name: value for name, value in found.items() if name not in of_one_side} == {
        name: 1 if name in ones else 0 for name in found if name not in of_one_side
    }


@pytest.mark.parametrize(("train", "rollout", "expected"), [
    ([-0.1] * 7, [-0.1] * 7, 1.0),  # constant and equal
    ([-0.1] * 7, [-0.2] * 7, 0.0),  # constant, not equal: no relation to see
    ([-0.1] * 3, [-0.1, -0.2, -0.3], 0.0),
    ([-0.3], [-0.4], 0.0),
    ([math.log(0.2), math.log(0.4)], [math.log(0.4), math.log(0.2)], -1.0),
])  # fmt: skip
def test_pearson_is_never_nan(train, rollout, expected):
    found = metrics.logdiff_metrics(f32(train), f32(rollout))
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected)


def test_one_ulp_and_a_signed_zero_are_counted_and_k3_stays_positive():
    small = np.float32(-0.01)
    ulp = np.nextafter(small, np.float32(0))
    found = metrics.logdiff_metrics(f32([ulp, 0.0, -2.0]), f32([small, -0.0, -2.0]))
    d = float(ulp) - float(small)
    assert found["training/rollout_logprobs_mismatched_tokens"] == 2
    assert found["training/rollout_logprobs_diff_max"] == d
    assert found["rollout_corr/k3_kl"] == pytest.approx(d * d / 2 / 3, rel=1e-6, abs=0)


def test_empty_responses_do_not_count():
    full = metrics.logdiff_metrics(f32([HALF]), f32([QUARTER]))
    assert metrics.logdiff_metrics(f32([], [HALF], []), f32([], [QUARTER], [])) == full


def test_order_of_responses_changes_no_bit():
    random = np.random.default_rng(1)
    train = [random.uniform(-20, 0, n).astype(np.float32) for n in random.integers(1, 60, 50)]
    rollout = [row + random.normal(0, 1e-3, len(row)).astype(np.float32) for row in train]
    order = random.permutation(len(train))
    shuffled = metrics.logdiff_metrics([train[i] for i in order], [rollout[i] for i in order])
    assert shuffled == metrics.logdiff_metrics(train, rollout)
    scores, advantages = random.normal(size=50), random.normal(size=50)
    assert metrics.reward_metrics({"a": scores}, scores, advantages) == \
        metrics.reward_metrics({"a": scores[order]}, scores[order], advantages[order])  # fmt: skip


def test_a_sum_that_naive_addition_loses_is_exact():
    assert metrics.validation_metrics(["x"] * 4, {"f": [1e20, 1.0, -1e20, 1.0]}, [0.0] * 4)["val-core/x/acc/mean@1"] == 0.5


def test_mean_of_a_constant_is_the_constant():
    for n in range(1, 200):
        assert metrics.validation_metrics(["x"] * n, {"f": [0.1] * n}, [0.0] * n)["val-core/x/acc/mean@1"] == 0.1


def test_exp_is_within_one_ulp():
    points = np.concatenate([np.linspace(-40, 40, 801), np.array([-700.5, -1e-9, 0.0, 1e-300, 0.3465, 0.3466, 700.5])])
    decimal.getcontext().prec = 40
    for x, value in zip(points, metrics.exp(points), strict=True):
        exact = decimal.Decimal(float(x)).exp()
        assert abs(decimal.Decimal(float(value)) - exact) <= decimal.Decimal(math.ulp(float(value)))
    assert metrics.exp(np.array([-5000.0, 0.0])).tolist() == [0.0, 1.0]


def test_exp_has_these_bits():
    """Recorded: a machine where they differ would write another metrics.jsonl."""
    assert [float(v).hex() for v in metrics.exp(np.array([-12.25, -0.7, 0.1, 3.0]))] == EXP_BITS


EXP_BITS = ["0x1.411fb0da07714p-18", "0x1.fc80db9dd5542p-2", "0x1.1aec7b35a00d4p+0", "0x1.415e5bf6fb106p+4"]


@pytest.mark.parametrize(("train", "rollout", "message"), [
    (f32([1.0]), f32([1.0], [2.0]), "1 training and 2 rollout"),
    (f32([1.0]), f32([1.0, 2.0]), "response 0: 1 training logprobs, 2 rollout"),
    (f32([1.0]), [np.array([1.0])], "response 0: rollout logprobs must be float32, found float64"),
    (f32([1.0], [1.0, -np.inf]), f32([1.0], [1.0, 1.0]), "response 1: training logprob at position 1 is -inf"),
    (f32([]), f32([]), "no sampled token"),
])  # fmt: skip
def test_logprobs_that_cannot_be_compared_are_refused(train, rollout, message):
    with pytest.raises(ValueError, match=message):
        metrics.logdiff_metrics(train, rollout)


def write(folder, steps, **options):
    with MetricsWriter(folder, tensorboard=False, **options) as writer:
        for step in steps:
            writer.log(step, {"b": 0.1 * step, "a": np.float64(step), "n": np.int64(step)}, {"timing_s/step": 1.5, "rollout/cache_hits": 7})


def test_lines_are_sorted_and_exact(tmp_path):
    write(tmp_path, [1, 2, 3])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[2] == '{"a": 3.0, "b": 0.30000000000000004, "n": 3, "step": 3}'
    assert (tmp_path / "timing.jsonl").read_text().splitlines()[0] == '{"rollout/cache_hits": 7, "step": 1, "timing_s/step": 1.5}'
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 2, "a": 2.0, "b": 0.2, "n": 2}


def test_equal_runs_write_equal_bytes(tmp_path):
    for name, seconds in (("one", 1.0), ("two", 2.0)):
        with MetricsWriter(tmp_path / name, tensorboard=False) as writer:
            for step in (1, 2):
                found = metrics.logdiff_metrics(f32([-1.0, -2.0]), f32([-1.0, -2.1]))
                ordered = dict(sorted(found.items(), reverse=name == "two"))
                writer.log(step, ordered, metrics.timing_metrics({"step": seconds}, tokens=4))
    one, two = tmp_path / "one", tmp_path / "two"
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    assert (one / "timing.jsonl").read_bytes() != (two / "timing.jsonl").read_bytes()


@pytest.mark.parametrize(("given", "message"), [
    ({"metrics": {"actor/pg_loss": math.nan}}, "step 1: metric actor/pg_loss is nan"),
    ({"metrics": {"actor/grad_norm": np.float32(np.inf)}}, "step 1: metric actor/grad_norm is inf"),
    ({"timing": {"perf/throughput": math.inf}}, "step 1: metric perf/throughput is inf"),
    ({"metrics": {"actor/lr": "1e-6"}}, "step 1: metric actor/lr must be a number, found '1e-6'"),
    ({"metrics": {"a": np.bool_(True)}}, "step 1: metric a must be a number"),
    ({"metrics": {"step": 3}}, "'step' is the key of the step itself"),
    ({"metrics": {"timing_s/gen": 3.0}}, r"step 1: \['timing_s/gen'\] depend on the machine and belong to timing.jsonl"),
    ({"metrics": {"hits": 3}, "timing": {"hits": 3}}, r"\['hits'\] depend on the machine"),
])  # fmt: skip
def test_what_cannot_be_logged_is_refused_by_name_and_not_written(tmp_path, given, message):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match=message):
            writer.log(1, given.get("metrics", {}), given.get("timing", {}))
        assert read_metrics(tmp_path / "metrics.jsonl") == read_metrics(tmp_path / "timing.jsonl") == []
        writer.log(1, {"a": 1}, {})


def test_steps_are_consecutive(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match="step 2 logged where step 0 or 1 is due"):
            writer.log(2, {}, {})
        writer.log(0, {}, {})
        with pytest.raises(ValueError, match="step 0 logged where step 1 is due"):
            writer.log(0, {}, {})


def test_a_used_folder_is_not_continued_by_accident(tmp_path):
    write(tmp_path, [1])
    with pytest.raises(ValueError, match="already holds steps of a run: rewind"):
        write(tmp_path, [2])


@pytest.mark.parametrize("torn", [b"", b'{"a": 5.0, "b": 0.', b'{"a": 5.0, "b": 0.5, "n": 5, "step": 5}'])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, torn):
    write(tmp_path / "straight", [1, 2, 3, 4, 5])
    write(tmp_path / "resumed", [1, 2, 3, 4])
    with open(tmp_path / "resumed/metrics.jsonl", "ab") as file:
        file.write(torn)
    with MetricsWriter(tmp_path / "resumed", tensorboard=False) as writer:
        writer.rewind(2)
        assert [row["step"] for row in read_metrics(tmp_path / "resumed/metrics.jsonl")] == [1, 2]
        assert [row["step"] for row in read_metrics(tmp_path / "resumed/timing.jsonl")] == [1, 2]
        for step in (3, 4, 5):
            writer.log(step, {"b": 0.1 * step, "a": np.float64(step), "n": np.int64(step)}, {})
    assert (tmp_path / "resumed/metrics.jsonl").read_bytes() == (tmp_path / "straight/metrics.jsonl").read_bytes()
    assert sorted(path.name for path in (tmp_path / "resumed").iterdir()) == ["metrics.jsonl", "timing.jsonl"]


def test_rewind_from_step_zero_and_to_the_start(tmp_path):
    write(tmp_path, [0, 1, 2])
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.rewind(1)
        writer.rewind(0)
        writer.log(1, {}, {})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    with MetricsWriter(tmp_path / "new", tensorboard=False) as writer:
        writer.rewind(0)
        writer.log(1, {}, {})


def test_rewind_names_the_file_that_lacks_lines_and_changes_nothing(tmp_path):
    write(tmp_path, [1, 2, 3])
    timing = tmp_path / "timing.jsonl"
    timing.write_bytes(timing.read_bytes()[:-1])  # step 3 is torn
    before = (tmp_path / "metrics.jsonl").read_bytes(), timing.read_bytes()
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(ValueError, match=r"timing.jsonl: steps \[3\] are missing"):
            writer.rewind(3)
        assert before == ((tmp_path / "metrics.jsonl").read_bytes(), timing.read_bytes())
        writer.rewind(2)


@pytest.mark.parametrize(("text", "message"), [
    ('{"step": 1}\n{"step": 3}\n', r"metrics.jsonl: steps \[2\] are missing"),
    ('{"step": 2}\n{"step": 3}\n', r"metrics.jsonl: steps \[1\] are missing"),
    ('{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3}\n', "metrics.jsonl: its steps are not consecutive"),
    ('{"step": 1}\n{"ste\n{"step": 3}\n', "metrics.jsonl, line 2: not JSON"),
    ("", r"metrics.jsonl: steps \[1, 2, 3\] are missing"),
])  # fmt: skip
def test_rewind_refuses_damaged_files(tmp_path, text, message):
    write(tmp_path, [1, 2, 3])
    (tmp_path / "metrics.jsonl").write_text(text)
    with MetricsWriter(tmp_path, tensorboard=False) as writer, pytest.raises(ValueError, match=message):
        writer.rewind(3)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_holds_both_files_and_forgets_what_was_rewound(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.log(step, {"critic/score/mean": step / 4}, {"timing_s/step": 2.0})
    assert scalars(tmp_path) == {"critic/score/mean": [(1, 0.25), (2, 0.5), (3, 0.75)], "timing_s/step": [(1, 2.0), (2, 2.0), (3, 2.0)]}
    with MetricsWriter(tmp_path) as writer:
        writer.rewind(1)
        writer.log(2, {"critic/score/mean": 8.0}, {"timing_s/step": 4.0})
    assert scalars(tmp_path) == {"critic/score/mean": [(1, 0.25), (2, 8.0)], "timing_s/step": [(1, 2.0), (2, 4.0)]}


@pytest.mark.parametrize(("package", "options", "what"), [
    ("wandb", {"tensorboard": False, "wandb_project": "moe-rl"}, "W&B project 'moe-rl' was asked for"),
    ("tensorboard", {"tensorboard": True}, "TensorBoard files were asked for"),
])  # fmt: skip
def test_a_missing_package_stops_the_run_before_it_starts(tmp_path, monkeypatch, package, options, what):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"{what}.*package {package} is not installed: install it, or"):
        MetricsWriter(tmp_path, **options)


def test_neither_is_needed_unless_asked(tmp_path, monkeypatch):
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path, [1])


def test_wandb_gets_both_files(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: calls.append(options) or run))
    write(tmp_path / "run7", [1], wandb_project="moe-rl")
    assert calls[0] == {"project": "moe-rl", "name": "run7", "group": "run7", "dir": str(tmp_path / "run7")}
    assert calls[1:] == [(1, {"a": 1.0, "b": 0.1, "n": 1, "timing_s/step": 1.5, "rollout/cache_hits": 7}), "finish"]


def test_a_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + "x\n" + json.dumps({"step": 2}))
    with pytest.raises(ValueError, match="metrics.jsonl, line 2: not JSON"):
        read_metrics(path)
