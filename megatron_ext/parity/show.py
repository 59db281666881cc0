"""What a person sees: progress of long phases and the verdict table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from megatron_ext.parity.logdiff import Verdict
from megatron_ext.parity.session import Phases

LOG_WIDTH = 160  # columns where the output is no terminal
console = Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)


@contextlib.contextmanager
def phase(phases: Phases, name: str, text: str) -> Iterator[None]:
    """A spinner on a terminal, one line elsewhere; the time when it is over."""
    before = phases.seconds.get(name, 0.0)
    if console.is_terminal:
        with console.status(text), phases(name):
            yield
    else:
        console.print(f"{text} ...")
        with phases(name):
            yield
    console.print(f"{text}: {phases.seconds[name] - before:.1f} s")


def verdict_table(rows: Sequence[tuple[str, Verdict]]) -> Table:
    """One row per comparison."""
    table = Table(title="logdiff = training logprob - rollout logprob")
    for heading in ("run", "tokens", "differing tokens", "max |logdiff|", "mean |logdiff|", "first difference", "verdict"):
        table.add_column(heading, justify="left" if heading in ("run", "first difference") else "right")
    for name, verdict in rows:
        first = "-"
        if verdict.first:
            f = verdict.first
            first = f"prompt {f.prompt}, position {f.position}, token {f.token_id}: train {f.train!r}, rollout {f.rollout!r}"
        outcome = "[green]exact[/green]" if verdict.exact else "[red]DIFFERS[/red]"
        table.add_row(name, str(verdict.tokens), str(verdict.mismatched_tokens), f"{verdict.logdiff_max:.3g}", f"{verdict.logdiff_mean_abs:.3g}",
                      first, outcome)  # fmt: skip
    return table
