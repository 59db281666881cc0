"""The live view: bars on a terminal, plain lines in a file, and an intact terminal whatever happens."""

import io
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from megatron_ext.rl import live
from megatron_ext.rl.live import LiveView

ROW = {"reward": 0.5, "held_out": None, "logdiff_max": 0.0, "mismatched_tokens": 0, "grad_norm": 1.25, "seconds": 12.34}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal():
    return Console(force_terminal=True, file=io.StringIO(), width=120, height=40, color_system="truecolor", legacy_windows=False, _environ={})


def log_file():
    return Console(force_terminal=False, file=io.StringIO(), width=80)


def printed(view):
    return view.console.file.getvalue()


def without_times(text):
    return re.sub(r"\d+\.\d s", "T s", text)


def test_plain_lines():
    with LiveView(10, first_step=3, console=log_file()) as view:
        view.say("resumed after step 2")
        with view.phase("generate", total=1024, unit="tokens") as phase:
            phase.update(512)
            phase.update(1024)
        with view.phase("weight sync"):
            pass
        view.step(3, {**ROW, "held_out": 0.25})
    assert without_times(printed(view)) == (
        "resumed after step 2\n"
        "generate: 1024/1024 tokens, T s\n"
        "weight sync: T s\n"
        "step 3/10: reward 0.5, held-out 0.25, logdiff max 0, mismatched tokens 0, grad norm 1.25, seconds 12.3\n"
    )


def test_a_long_phase_reports_in_between_even_if_it_only_waits(monkeypatch):
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.05)
    with LiveView(1, console=log_file()) as view:
        with view.phase("update", total=16, unit="micro-batches") as phase:
            phase.update(3)
            time.sleep(0.4)
        at_end = len(printed(view))
        time.sleep(0.2)
    lines = printed(view).splitlines()
    assert 2 <= len(lines) <= 9 and len(printed(view)) == at_end
    assert lines[0].startswith("update: 3/16 micro-batches, ") and lines[0].endswith(" s so far")
    assert re.fullmatch(r"update: 3/16 micro-batches, 0\.\d s", lines[-1])


def test_a_short_phase_has_one_line():
    with LiveView(1, console=log_file()) as view, view.phase("adv"):
        pass
    assert len(printed(view).splitlines()) == 1


def test_log_files_hold_no_control_characters_and_no_long_paths():
    with LiveView(1, console=log_file()) as view:
        view.say(f"checkpoint \x1b[31m[bold]\r in {os.getcwd()}/runs/7/" + "x" * 200)
    text = printed(view)
    assert text.count("\n") == 1 and all(c.isprintable() for c in text.rstrip("\n"))
    assert "[bold]" in text and " in runs/7/x" in text


def test_a_pipe_stays_plain_even_if_colour_is_forced(tmp_path):
    script = (
        "from megatron_ext.rl.live import LiveView\n"
        "with LiveView(1) as view:\n"
        "    with view.phase('generate', 4, 'tokens') as phase: phase.update(4)\n"
        "    view.step(1, {'reward': 1.0, 'mismatched_tokens': 3})\n"
        "    print('a library line')\n"
    )
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "20", "TTY_COMPATIBLE": "1"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert without_times(result.stdout) == \
        "generate: 4/4 tokens, T s\nstep 1/1: reward 1, mismatched tokens 3\na library line\n"  # fmt: skip
    assert result.stderr == ""


def test_a_dumb_terminal_is_treated_as_a_file():
    console = Console(force_terminal=True, file=io.StringIO(), _environ={"TERM": "dumb"})
    with LiveView(1, console=console) as view, view.phase("adv"):
        pass
    assert "\x1b" not in printed(view) and printed(view).startswith("adv: ")


def test_terminal_shows_bars_and_the_table():
    with LiveView(10, first_step=3, console=terminal()) as view:
        assert view.on_terminal
        with view.phase("generate", total=1024, unit="tokens") as phase:
            phase.update(512)
            view._live.refresh()
        during = ESCAPE.sub("", printed(view))
        view.step(3, {**ROW, "held_out": 0.25})
        view.say("above [the] table")
    after = ESCAPE.sub("", printed(view))[len(during) :]
    assert "generate" in during and "512/1024 tokens" in during and "2/10" in during and "reward" not in during
    final = after[after.index("above [the] table") :]
    assert "3/10" in final and "generate" not in final
    for text in ("reward", "held-out", "logdiff max", "mismatched tokens", "grad norm", "0.25", "1.25", "12.3"):
        assert text in final


def test_a_total_that_becomes_known_later():
    with LiveView(2, console=terminal()) as view, view.phase("update", unit="micro-batches") as phase:
        assert phase.count == ""
        phase.update(3)
        assert phase.count == "3 micro-batches"
        phase.update(4, total=16)
        view._live.refresh()
    assert "4/16 micro-batches" in ESCAPE.sub("", printed(view))


def test_only_the_last_steps_are_in_the_table():
    with LiveView(100, console=terminal()) as view:
        for step in range(1, 31):
            view.step(step, {"reward": 1000.0 + step})
        assert [step for step, _ in view._rows] == list(range(31 - live.STEPS_SHOWN, 31))


class Stopped(RuntimeError):
    pass


def run_until_it_breaks(view):
    with view, view.phase("step"), view.phase("generate", 8, "tokens") as phase:
        phase.update(3)
        raise Stopped("engine died\nwith details")


def test_the_terminal_is_restored_and_the_error_comes_last():
    view = LiveView(5, console=terminal())
    before = sys.stdout, sys.stderr
    with pytest.raises(Stopped):
        run_until_it_breaks(view)
    assert (sys.stdout, sys.stderr) == before and not view._live.is_started
    text = printed(view)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hidden) == text.count(shown) == 1
    assert ESCAPE.sub("", text[text.index(shown) :]).strip() == "stopped at step 1/5 in generate: Stopped: engine died"


def test_in_a_file_the_error_is_a_line():
    view = LiveView(5, console=log_file())
    with pytest.raises(Stopped):
        run_until_it_breaks(view)
    assert printed(view) == "stopped at step 1/5 in generate: Stopped: engine died\n"


def test_an_error_that_was_handled_is_not_blamed_later():
    view = LiveView(1, console=log_file())
    with pytest.raises(KeyboardInterrupt), view:
        try:
            with view.phase("generate"):
                raise Stopped
        except Stopped:
            pass
        view.step(1, {})
        raise KeyboardInterrupt
    assert printed(view).splitlines()[-1] == "stopped at step 1/1: KeyboardInterrupt"


def test_an_unknown_column_is_refused():
    with LiveView(1, console=log_file()) as view, pytest.raises(ValueError, match=r"no column \['rewrad'\]"):
        view.step(1, {"rewrad": 1.0})


def test_row_of_the_metrics():
    metrics = {
        "critic/score/mean": 0.5, "val-core/a/acc/mean@1": 0.25, "val-core/b/reward/mean@1": 0.75, "actor/grad_norm": 2.0,
        "training/rollout_logprobs_diff_max": 0.0, "training/rollout_logprobs_mismatched_tokens": 0,
    }  # fmt: skip
    row = live.row_of(metrics, {"timing_s/step": 9.0})
    assert row == {"reward": 0.5, "held_out": 0.5, "logdiff_max": 0.0, "mismatched_tokens": 0, "grad_norm": 2.0, "seconds": 9.0}
    assert set(row) == set(live.COLUMNS)
    assert live.row_of({}, {}) == dict.fromkeys(live.COLUMNS)


def test_importing_is_light():
    code = "import sys; import megatron_ext.rl.metrics, megatron_ext.rl.report, megatron_ext.rl.live; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert not {"torch", "vllm", "megatron", "transformers", "tensorboard", "wandb"} & set(loaded)
