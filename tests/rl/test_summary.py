"""summary.json: totals by hand, written whole, readable for a run that never took a step."""

import json
import math

import pytest

from megatron_ext.rl import summary
from megatron_ext.rl.main import closing_line, parse
from megatron_ext.rl.metrics import MetricsWriter


def config_of(out):
    return parse(["--hf", "model", "--prompts", "prompts.jsonl", "--reward", "m:f", "--steps", "3", "--out", str(out)])


def run_of(out):
    """Step 0 tests only; of steps 1 to 3 the second ran the old-logprob pass."""
    with MetricsWriter(out, tensorboard=False) as writer:
        writer.log(0, {"val-core/a/acc/mean@1": 0.25, "val-core/b/acc/mean@1": 0.75}, {"timing_s/testing": 2.0})
        for step, tokens, logdiff in ((1, 10, 0.0), (2, 30, 0.5), (3, 20, 0.25)):
            metrics = {
                "training/sampled_tokens": tokens, "training/rollout_logprobs_diff_max": logdiff, "training/rollout_logprobs_diff_mean": logdiff / 10,
                "training/rollout_logprobs_mismatched_tokens": step, "critic/score/mean": step / 10,
            }  # fmt: skip
            heldout = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 1.0} if step == 3 else {}
            old_pass = {"timing_s/old_log_prob": 1.0} if step == 2 else {}
            writer.log(step, metrics | heldout, {"timing_s/step": 3.0 + len(old_pass)} | old_pass)


def test_totals_by_hand(tmp_path):
    run_of(tmp_path)
    found = summary.write_summary(config_of(tmp_path), {"finished": True, "stopped_by": None})
    assert (found["steps"], found["tokens"], found["logdiff_max"], found["mismatched_tokens"]) == (3, 60, 0.5, 6)
    assert found["logdiff_mean_abs"] == pytest.approx((30 * 0.05 + 20 * 0.025) / 60)
    assert (found["reward_first"], found["reward_last"]) == (0.1, 0.3)
    assert (found["heldout_before"], found["heldout_after"]) == (0.5, 0.75)
    assert found["old_logprob_pass"] == {"passes": 1, "skipped": 2, "seconds_per_pass": 1.0, "share_of_a_step_with_it": 0.25}
    assert json.loads((tmp_path / "summary.json").read_text()) == found and (tmp_path / "metrics.png").exists()
    said = closing_line(found)
    assert "held-out 0.500 -> 0.750" in said and "left out in 2 steps, saving 1.00 s or 25 % of a step each (measured in 1)" in said


def test_no_step(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False):
        pass
    found = summary.write_summary(config_of(tmp_path), {"finished": False, "stopped_by": "SIGTERM"})
    assert found["steps"] == found["tokens"] == 0 and found["logdiff_max"] is found["heldout_after"] is None
    assert closing_line(found) == "no step was finished" and not (tmp_path / "metrics.png").exists()


def test_what_is_no_number_is_refused(tmp_path):
    run_of(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        summary.write_summary(config_of(tmp_path), {"seconds": math.nan})
    assert not (tmp_path / "summary.json").exists() and not list(tmp_path.glob("*.partial"))
