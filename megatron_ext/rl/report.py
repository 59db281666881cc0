"""The picture of a run, made from its metrics."""

from __future__ import annotations

import io
import os
import pathlib

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_ext.rl.metrics import ACCURACY, METRICS_FILE, TIMING_FILE, read_metrics, replace_file

PLOT_FILE = "metrics.png"
PHASES = ("gen", "old_log_prob", "ref", "reward", "adv", "update_actor", "update_weights", "testing", "save_checkpoint")  # as they follow in a step
SMALLEST_LOGDIFF = 1e-9  # below, the axis is linear, so that 0 has a place on it


def plot(out_dir: str | os.PathLike) -> pathlib.Path:
    """metrics.png in a run's folder, from its metrics.jsonl and timing.jsonl: reward, logdiff and seconds per step.

    Raises ValueError if no step was logged, FileNotFoundError if a file is missing.
    """
    out_dir = pathlib.Path(out_dir)
    metrics, timing = read_metrics(out_dir / METRICS_FILE), read_metrics(out_dir / TIMING_FILE)
    if not metrics:
        raise ValueError(f"{METRICS_FILE} holds no step to plot")
    figure = Figure(figsize=(10, 11), dpi=110, layout="constrained")
    reward, logdiff, seconds = figure.subplots(3, 1, sharex=True)
    _plot_reward(reward, metrics)
    _plot_logdiff(logdiff, metrics)
    _plot_seconds(seconds, timing)
    seconds.set_xlabel("step")
    seconds.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    seconds.set_xlim(metrics[0]["step"] - 0.5, metrics[-1]["step"] + 0.5)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    path = out_dir / PLOT_FILE
    replace_file(path, picture.getvalue())
    return path


def series(rows: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Steps that have the metric, and its values."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def step_edges(rows: list[dict]) -> list[float]:
    """Where the place of each row's step begins, and where that of the last one ends; steps are consecutive."""
    return [row["step"] - 0.5 for row in rows] + [rows[-1]["step"] + 0.5]


def names_like(rows: list[dict], start: str, end: str) -> list[str]:
    """Metric names start + anything + end, sorted."""
    fits = {name for row in rows for name in row if name.startswith(start) and name.endswith(end) and len(name) > len(start) + len(end)}
    return sorted(fits)


def _plot_reward(axes: Axes, metrics: list[dict]) -> None:
    axes.plot(*series(metrics, "critic/score/mean"), color="black", marker=".", label="total")
    for name in names_like(metrics, "critic/score/", "/mean"):
        axes.plot(*series(metrics, name), marker=".", linewidth=1, alpha=0.7, label=name.removeprefix("critic/score/").removesuffix("/mean"))
    end = f"/{ACCURACY}/mean@1"
    for name in names_like(metrics, "val-core/", end):
        source = name.removeprefix("val-core/").removesuffix(end)
        axes.plot(*series(metrics, name), linestyle="none", marker="D", label=f"held out: {source}")
    axes.set_ylabel("mean reward")
    axes.legend(loc="best", fontsize="small")
    axes.grid(alpha=0.3)


def _plot_logdiff(axes: Axes, metrics: list[dict]) -> None:
    steps, values = series(metrics, "training/rollout_logprobs_diff_max")
    axes.set_yscale("symlog", linthresh=SMALLEST_LOGDIFF)
    axes.plot(steps, values, color="tab:red", marker=".", label="max |training - rollout logprob|")
    axes.set_ylim(-SMALLEST_LOGDIFF / 2, max([1e-6, *(100 * value for value in values)]))  # room for the legend
    axes.set_ylabel("logdiff max (natural log)")
    axes.grid(alpha=0.3)
    counts = [row.get("training/rollout_logprobs_mismatched_tokens", 0) for row in metrics]
    beside = axes.twinx()
    axes.set_zorder(beside.get_zorder() + 1)  # the line in front of the bars
    axes.patch.set_visible(False)
    beside.stairs(counts, step_edges(metrics), fill=True, color="tab:gray", alpha=0.4, label="mismatched tokens")
    beside.set_ylim(0, max([1, *counts]) * 1.3)
    beside.yaxis.get_major_locator().set_params(integer=True)
    beside.set_ylabel("tokens whose bits differ")
    axes.set_title(f"{sum(counts)} mismatched tokens in {len(steps)} step{"s" * (len(steps) != 1)}", fontsize="medium")
    axes.legend(handles=[*axes.get_legend_handles_labels()[0], *beside.get_legend_handles_labels()[0]], loc="upper right", fontsize="small")


def _plot_seconds(axes: Axes, timing: list[dict]) -> None:
    axes.set_ylabel("seconds per step")
    axes.grid(alpha=0.3)
    stacked = seconds_by_phase(timing)
    if stacked:
        axes.stackplot(step_edges(timing), [values + values[-1:] for values in stacked.values()], labels=list(stacked), step="post")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def seconds_by_phase(timing: list[dict]) -> dict[str, list[float]]:
    """One value per row and phase, 0 where the phase did not run; "other" is what is left of the whole step."""
    found = {name.removeprefix("timing_s/") for name in names_like(timing, "timing_s/", "")} - {"step"}
    phases = [*(p for p in PHASES if p in found), *sorted(found.difference(PHASES))]
    stacked = {phase: [row.get(f"timing_s/{phase}", 0.0) for row in timing] for phase in phases}
    parts = [sum(values) for values in zip(*stacked.values(), strict=True)] or [0.0] * len(timing)
    other = [max(0.0, row.get("timing_s/step", 0.0) - part) for row, part in zip(timing, parts, strict=True)]
    return stacked | ({"other": other} if any(other) else {})
