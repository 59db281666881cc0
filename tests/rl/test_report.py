"""The summary and the picture of a run."""

import math

import matplotlib.image
import pytest

from megatron_ext.rl import report
from megatron_ext.rl.metrics import MetricsWriter

PNG = b"\x89PNG\r\n\x1a\n"


def run_of(folder, steps, held_out=(), logdiff=0.0):
    with MetricsWriter(folder, tensorboard=False) as writer:
        for step in steps:
            metrics = {
                "critic/score/mean": step / 10, "critic/score/format/mean": 0.5, "critic/score/answer/mean": step / 20,
                "training/rollout_logprobs_diff_max": logdiff, "training/rollout_logprobs_mismatched_tokens": int(logdiff > 0),
            }  # fmt: skip
            if step in held_out:
                metrics["val-core/addition/acc/mean@1"] = 0.25
            writer.log(step, metrics, {"timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/step": 4.0})
    return folder


def drawn(path):
    """Height, width, and how much of the picture is not white."""
    assert path.read_bytes().startswith(PNG)
    pixels = matplotlib.image.imread(path)[:, :, :3]
    return *pixels.shape[:2], float((pixels.min(axis=2) < 0.99).mean())


@pytest.mark.parametrize(("steps", "held_out", "logdiff"), [
    (range(1, 2), (), 0.0), (range(1, 21), (5, 10), 0.0), (range(0, 4), (0,), 1e-5), (range(1, 400), (), 3.0),
])  # fmt: skip
def test_plot(tmp_path, steps, held_out, logdiff):
    path = report.plot(run_of(tmp_path, steps, held_out, logdiff))
    assert path == tmp_path / "metrics.png"
    height, width, ink = drawn(path)
    assert 900 <= height <= 2000 and 900 <= width <= 2000
    assert ink > 0.02
    assert not list(tmp_path.glob("*.partial"))


def test_plot_of_a_step_that_only_tests(tmp_path):
    """Step 0 may hold nothing but the held-out reward."""
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.log(0, {"val-core/addition/acc/mean@1": 0.25}, {"timing_s/testing": 2.0})
    assert drawn(report.plot(tmp_path))[2] > 0.02


def test_plot_needs_steps(tmp_path):
    with pytest.raises(ValueError, match="metrics.jsonl holds no step"):
        report.plot(run_of(tmp_path, []))
    with pytest.raises(FileNotFoundError):
        report.plot(tmp_path / "absent")


def axes_of(draw, rows):
    axes = report.Figure().subplots()
    draw(axes, rows)
    return axes


def test_reward_panel_shows_total_functions_and_held_out_points():
    rows = [
        {"step": 1, "critic/score/mean": 1.0, "critic/score/format/mean": 0.5},
        {"step": 2, "critic/score/mean": 3.0, "val-core/x/acc/mean@1": 2.0},
    ]
    lines = {line.get_label(): line for line in axes_of(report._plot_reward, rows).get_lines()}
    assert {label: line.get_xydata().tolist() for label, line in lines.items()} == {
        "total": [[1, 1.0], [2, 3.0]], "format": [[1, 0.5]], "held out: x": [[2, 2.0]],
    }  # fmt: skip
    assert lines["held out: x"].get_linestyle() == "None"


def test_logdiff_panel_has_a_place_for_zero():
    names = "step", "training/rollout_logprobs_diff_max", "training/rollout_logprobs_mismatched_tokens"
    rows = [dict(zip(names, values, strict=True)) for values in [(1, 0.0, 0), (2, 0.5, 3)]]
    axes = axes_of(report._plot_logdiff, rows)
    (line,) = axes.get_lines()
    assert line.get_ydata().tolist() == [0.0, 0.5]
    bottom, top = axes.get_ylim()
    assert axes.get_yscale() == "symlog" and bottom < 0.0 and top > 0.5
    heights = [axes.transData.transform((1, value))[1] for value in (0.0, 1e-7, 1e-4, 0.5)]
    assert all(math.isfinite(h) for h in heights) and heights == sorted(set(heights))
    beside = next(other for other in axes.figure.axes if other is not axes)
    (bars,) = beside.patches
    assert [part.tolist() for part in bars.get_data()[:2]] == [[0, 3], [0.5, 1.5, 2.5]]
    assert axes.get_title() == "3 mismatched tokens in 2 steps"


def test_seconds_are_stacked_in_the_order_of_a_step_and_add_up():
    timing = [
        {"step": 1, "timing_s/update_actor": 2.0, "timing_s/gen": 3.0, "timing_s/zz": 1.0, "timing_s/step": 7.0, "perf/throughput": 9.0},
        {"step": 2, "timing_s/gen": 3.0, "timing_s/testing": 4.0, "timing_s/step": 7.0},
    ]
    stacked = report.seconds_by_phase(timing)
    assert list(stacked.items()) == [
        ("gen", [3.0, 3.0]), ("update_actor", [2.0, 0.0]), ("testing", [0.0, 4.0]), ("zz", [1.0, 0.0]), ("other", [1.0, 0.0]),
    ]  # fmt: skip
    assert report.seconds_by_phase([]) == {}
