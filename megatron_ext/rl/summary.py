"""summary.json: what a run came to, from the files that it wrote."""

from __future__ import annotations

import json
import math
from typing import Any

from megatron_ext.parity import session
from megatron_ext.rl import report
from megatron_ext.rl.config import RunConfig
from megatron_ext.rl.metrics import METRICS_FILE, TIMING_FILE, read_metrics, replace_file

SUMMARY_FILE = "summary.json"
OLD_PASS = "timing_s/old_log_prob"


def write_summary(config: RunConfig, outcome: dict[str, Any]) -> dict[str, Any]:
    """summary.json of a run's folder, put in place whole, and its picture. outcome: what the files do not tell. Returns the summary."""
    rows, timing = read_metrics(config.out / METRICS_FILE), read_metrics(config.out / TIMING_FILE)
    steps = [row for row in rows if row["step"] > 0]
    summary = {
        "steps": len(steps), **totals_of(steps), **heldout_of(rows), "old_logprob_pass": old_logprob_saving(timing),
        "consistency": config.contract.consistency, "train_layout": str(config.train), "rollout_layout": str(config.rollout),
        "rollout_engines": config.rollout_engines, "versions": session.versions(), **outcome,
    }  # fmt: skip
    replace_file(config.out / SUMMARY_FILE, (json.dumps(summary, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())
    if steps:
        report.plot(config.out)
    return summary


def totals_of(steps: list[dict]) -> dict[str, Any]:
    """Over all steps: sampled tokens, logdiff, rewards of the first and the last. None where there is no step."""
    if not steps:
        return {"tokens": 0, **dict.fromkeys(("logdiff_max", "logdiff_mean_abs", "mismatched_tokens", "reward_first", "reward_last"))}
    tokens = [row["training/sampled_tokens"] for row in steps]
    sums = [row["training/rollout_logprobs_diff_mean"] * count for row, count in zip(steps, tokens, strict=True)]
    return {
        "tokens": sum(tokens), "logdiff_max": max(row["training/rollout_logprobs_diff_max"] for row in steps),
        "logdiff_mean_abs": math.fsum(sums) / sum(tokens),
        "mismatched_tokens": sum(row["training/rollout_logprobs_mismatched_tokens"] for row in steps),
        "reward_first": steps[0]["critic/score/mean"], "reward_last": steps[-1]["critic/score/mean"],
    }  # fmt: skip


def heldout_of(rows: list[dict]) -> dict[str, float | None]:
    """Mean over data sources of the held-out accuracy, before the first step and at the last evaluation."""
    found = [[value for name, value in sorted(row.items()) if name.startswith("val-core/")] for row in rows]
    means = [math.fsum(values) / len(values) for values in found if values]
    return {"heldout_before": means[0] if means else None, "heldout_after": means[-1] if len(means) > 1 else None}


def old_logprob_saving(timing: list[dict]) -> dict[str, float]:
    """What the old-logprob pass cost in the steps where it ran, and in how many it was left out."""
    rows = [row for row in timing if row["step"] > 0]
    ran = [row[OLD_PASS] for row in rows if OLD_PASS in row]
    if not ran:
        return {"passes": 0, "skipped": len(rows)}
    seconds = math.fsum(ran) / len(ran)
    without = math.fsum(row["timing_s/step"] - row.get(OLD_PASS, 0.0) for row in rows) / len(rows)
    return {
        "passes": len(ran), "skipped": len(rows) - len(ran), "seconds_per_pass": round(seconds, 3),
        "share_of_a_step_with_it": round(seconds / (seconds + without), 4),
    }  # fmt: skip
