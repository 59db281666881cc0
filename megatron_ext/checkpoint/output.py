"""A folder that appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.checkpoint.tensors import CheckpointError

PARTIAL, REPLACED = ".partial", ".replaced"


@contextlib.contextmanager
def whole_folder(out: Path, needed_bytes: int, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder beside `out`, renamed to `out` when the block ends without an error.

    What a killed run left is removed by the next one. Raises CheckpointError if `out` is in the way, or the disk too small.
    """
    out = out.resolve()
    if not overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists already; choose another folder, or --overwrite to replace it when the new one is whole")
    partial, replaced = out.with_name(out.name + PARTIAL), out.with_name(out.name + REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < needed_bytes:
        partial.rmdir()
        raise CheckpointError(f"{out}: needs {needed_bytes >> 20} MiB, {free >> 20} MiB are free")
    yield partial
    if out.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
    partial.rename(out)
    _sync(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
