"""Checkpoints of a run: Megatron's (model, optimizer, schedule) and, beside it, what the loop needs to go on with the same bits.

The state of the loop is small, because its random choices are functions: prompts of (seed, step), tokens of (seed, step, prompt,
sample). Training draws no random numbers (dropout is refused), so there is no generator to save.

    <out>/checkpoints/step_000010/megatron/   <out>/checkpoints/step_000010/run.json
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER, _STATE, _PARTIAL = "checkpoints", "run.json", ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, unfinished, or of another run."""


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint. step: the last step it contains."""

    folder: Path
    step: int
    identity: dict[str, Any]

    @property
    def megatron(self) -> Path:
        return self.folder / "megatron"


def save(world, out: Path, step: int, identity: dict[str, Any], keep: int) -> Checkpoint:
    """Writes a checkpoint under its final name only when it is whole; then removes all but the newest `keep` (0: none)."""
    final = out / FOLDER / f"step_{step:06d}"
    partial = final.with_suffix(_PARTIAL)
    for leftover in (partial, final):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    world.call("save_checkpoint", path=str(partial / "megatron"))
    (partial / _STATE).write_text(json.dumps({"step": step, "identity": identity}, indent=1, sort_keys=True) + "\n")
    partial.rename(final)
    for old in all_steps(out)[:-keep] if keep else []:
        shutil.rmtree(old)
    return Checkpoint(final, step, identity)


def all_steps(out: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    return sorted(folder for folder in (out / FOLDER).glob("step_*") if folder.suffix != _PARTIAL)


def find(source: str, out: Path) -> Checkpoint:
    """The checkpoint "latest" of this run, or that of a folder. Raises CheckpointError."""
    if source == "latest":
        found = all_steps(out)
        if not found:
            raise CheckpointError(f"--resume latest: no finished checkpoint under {out / FOLDER}; start without --resume")
        folder = found[-1]
    else:
        folder = Path(source)
    try:
        state = json.loads((folder / _STATE).read_text())
        return Checkpoint(folder, int(state["step"]), state["identity"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} is no finished checkpoint of this loop: {error}; expected {_STATE} beside megatron/") from error


def check_identity(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Raises CheckpointError naming every option in which the resumed run would be another one."""
    names = sorted(checkpoint.identity.keys() | identity.keys())
    differing = [n for n in names if checkpoint.identity.get(n) != identity.get(n)]
    if differing:
        lines = [f"  - {n}: {checkpoint.identity.get(n)!r} in the checkpoint, {identity.get(n)!r} now" for n in differing]
        raise CheckpointError("\n".join([f"{checkpoint.folder} was written by a run with other options:", *lines]))
