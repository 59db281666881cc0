"""What a person sees while a run goes on: bars and the last steps on a terminal, plain lines in a log file."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

COLUMNS = {
    "reward": "reward", "held_out": "held-out", "logdiff_max": "logdiff max", "mismatched_tokens": "mismatched tokens",
    "grad_norm": "grad norm", "seconds": "seconds",
}  # fmt: skip
STEPS_SHOWN = 8
HEARTBEAT_S = 30.0  # between the lines of one phase in a log file


def row_of(metrics: Mapping[str, float], timing: Mapping[str, float]) -> dict[str, float | None]:
    """The row of LiveView.step() from what MetricsWriter.log() gets; held_out is the mean over the held-out sources."""
    held_out = [metrics[name] for name in sorted(metrics) if name.startswith("val-core/")]
    return {
        "reward": metrics.get("critic/score/mean"),
        "held_out": math.fsum(held_out) / len(held_out) if held_out else None,
        "logdiff_max": metrics.get("training/rollout_logprobs_diff_max"),
        "mismatched_tokens": metrics.get("training/rollout_logprobs_mismatched_tokens"),
        "grad_norm": metrics.get("actor/grad_norm"),
        "seconds": timing.get("timing_s/step"),
    }


class Phase:
    """One phase at work. done and total in units of the phase; total None: how much there is to do is not known."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done: float = 0
        self.started = time.monotonic()
        self.shown = lambda: None

    def update(self, done: float, total: float | None = None) -> None:
        """Sets what is done in all, not what was added."""
        self.done = done
        self.total = self.total if total is None else total
        self.shown()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def count(self) -> str:
        """For example "512/1024 tokens"; empty if nothing is counted."""
        if self.total is None and not self.done:
            return ""
        of = "" if self.total is None else f"/{_number(self.total)}"
        return f"{_number(self.done)}{of} {self.unit}".rstrip()

    def line(self, end: str) -> str:
        return f"{self.name}: {', '.join(filter(None, [self.count, end]))}"


class LiveView:
    """total_steps: number of the last step; first_step: the one that comes next, more than 1 in a resumed run.

    On a terminal: a bar over the steps, one in each running phase, a table of the last steps. Elsewhere: one line per finished phase and
    step, one every 30 s inside a phase, no control characters. Leaving it, also by an exception, restores the terminal; an exception is
    then named with the phase that it came from, and passed on.
    """

    def __init__(self, total_steps: int, first_step: int = 1, console: Console | None = None) -> None:
        # Decided here, not by rich: FORCE_COLOR and the like would put escape codes into log files.
        self.console = console or Console(highlight=False, force_terminal=sys.stdout.isatty())
        self.on_terminal = self.console.is_terminal and not self.console.is_dumb_terminal
        self._total_steps, self._step = total_steps, first_step
        self._rows: collections.deque[tuple[int, dict]] = collections.deque(maxlen=STEPS_SHOWN)
        self._failed: tuple[BaseException | None, str] = (None, "")
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(), console=self.console, auto_refresh=False,
        )  # fmt: skip
        self._bar = self._progress.add_task("steps", total=total_steps, completed=first_step - 1, count=f"{first_step - 1}/{total_steps}")
        self._live = Live(console=self.console, get_renderable=self._renderable, refresh_per_second=4) if self.on_terminal else None

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._live:
            self._live.stop()
        if error is not None:
            where = f" in {self._failed[1]}" if self._failed[0] is error else ""
            what = ": ".join(filter(None, [kind.__name__, str(error).strip().partition("\n")[0]]))
            self.say(f"stopped at step {min(self._step, self._total_steps)}/{self._total_steps}{where}: {what}")

    @contextlib.contextmanager
    def phase(self, name: str, total: float | None = None, unit: str = "") -> Iterator[Phase]:
        """A phase of the current step, or before the first or after the last one. Phases may nest."""
        phase = Phase(name, total, unit)
        try:
            with self._bar_of(phase) if self.on_terminal else self._heartbeat_of(phase):
                yield phase
        except BaseException as error:
            if self._failed[0] is not error:  # else an inner phase has it
                self._failed = (error, name)
            raise
        if not self.on_terminal:
            self.say(phase.line(f"{phase.seconds:.1f} s"))

    def step(self, step: int, row: Mapping[str, float | None]) -> None:
        """A finished step; the keys of `row` are those of COLUMNS, where absent or None shows as "-". Raises ValueError for others."""
        unknown = sorted(set(row) - set(COLUMNS))
        if unknown:
            raise ValueError(f"step {step}: the view has no column {unknown}, only {list(COLUMNS)}")
        self._step = step + 1
        self._rows.append((step, dict(row)))
        self._progress.update(self._bar, completed=step, count=f"{step}/{self._total_steps}")
        if self._live:
            self._live.refresh()
        else:
            shown = ", ".join(f"{heading} {_cell(key, row[key])}" for key, heading in COLUMNS.items() if row.get(key) is not None)
            self.say(f"step {step}/{self._total_steps}: {shown}")

    def say(self, text: str) -> None:
        """One or more lines of text, above the live area. Paths below the working folder are shown relative to it."""
        self.console.print(Text(_clean(text)), soft_wrap=True)

    def _renderable(self) -> Group:
        return Group(self._table(), self._progress) if self._rows else Group(self._progress)

    def _table(self) -> Table:
        table = Table()
        for heading in ("step", *COLUMNS.values()):
            table.add_column(heading, justify="right")
        for step, row in self._rows:
            style = "red" if row.get("mismatched_tokens") else None
            table.add_row(str(step), *(_cell(key, row.get(key)) for key in COLUMNS), style=style)
        return table

    @contextlib.contextmanager
    def _bar_of(self, phase: Phase) -> Iterator[None]:
        task = self._progress.add_task(phase.name, total=phase.total, count=phase.count)
        phase.shown = lambda: self._progress.update(task, completed=phase.done, total=phase.total, count=phase.count)
        try:
            yield
        finally:
            self._progress.remove_task(task)

    @contextlib.contextmanager
    def _heartbeat_of(self, phase: Phase) -> Iterator[None]:
        """A thread, because a phase may wait for an engine and call nothing meanwhile."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(HEARTBEAT_S):
                self.say(phase.line(f"{phase.seconds:.0f} s so far"))

        teller = threading.Thread(target=tell, name=f"heartbeat of {phase.name}", daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()


def _number(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) and not value.is_integer() else str(int(value))


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return {"seconds": f"{value:.1f}", "mismatched_tokens": f"{value:.0f}"}.get(key, f"{value:.4g}")


def _clean(text: str) -> str:
    text = text.replace(os.getcwd() + os.sep, "")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
