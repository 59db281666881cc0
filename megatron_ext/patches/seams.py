"""The seams that must be covered, written down apart from the table.

The table says what is patched; this list says what has to be. `apply` refuses when a seam in force has no active row, so a
row cannot be deleted, or switched off by its condition, without an error that names what would run stock. Every row of
the table is named here (a test enforces it), and every numeric seam of the engines is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_ext.patches.patch import Patch, evaluate_condition


@dataclass(frozen=True)
class Seam:
    """Something that must not run stock: `targets` are the rows which together take it over.

    name: what it is, for messages. breaks: what goes wrong when it runs stock.
    active_when, consistency_only: as in `Patch`.
    """

    name: str
    breaks: str
    targets: tuple[str, ...]
    active_when: str = "always"
    consistency_only: bool = True


def required(side: str) -> tuple[Seam, ...]:
    """The seams of a side."""
    return {"train": TRAIN_SEAMS, "rollout": ROLLOUT_SEAMS}[side]


def uncovered(
    seams: Iterable[Seam], active: Iterable[Patch], facts: Mapping[str, object], consistency: bool
) -> Iterator[str]:
    """One problem for every target of a seam in force that no active row claims."""
    claimed = {row.target for row in active}
    for seam in seams:
        try:
            in_force = (consistency or not seam.consistency_only) and evaluate_condition(seam.active_when, facts)
        except ValueError as error:
            yield f"seam {seam.name!r}: {error}"
            continue
        if in_force:
            yield from (
                f"{target}: no active row covers it, expected one for the seam {seam.name!r} ({seam.breaks}); put the row back "
                f"into the table or correct its active_when"
                for target in seam.targets if target not in claimed
            )  # fmt: skip


TRAIN_SEAMS: tuple[Seam, ...] = ()
ROLLOUT_SEAMS: tuple[Seam, ...] = ()
