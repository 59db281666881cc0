"""Every flag, barrier and queue call of the committed kernels, left out in turn: the checked flavour reports each one.

The model leaves a call out by its place in the source (host_model/deletion.h). `exercise` of an operator's own test module runs all
kernels of the folder in shapes that need all of their synchronisation.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pathlib
import re

import pytest
import torch

from ascendc_kernels import build, library

ROOT = build.ROOT
FOLDERS = sorted({source.parent.name for source in build.operator_sources("kernel")})
CALL = re.compile(r"\b(SetFlag|WaitFlag|PipeBarrier|EnQue|DeQue|AllocTensor|FreeTensor|CrossCoreSetFlag|CrossCoreWaitFlag|SyncAll)\b[^;]*;")


@pytest.fixture(scope="module")
def checked():
    library.use("portable", "checked", "model")
    handle = ctypes.CDLL(str(build.kernel_library("checked", "portable")))
    handle.ascendc_host_visited.restype = ctypes.c_char_p
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # all tiles in one block: a flag that frees a slot is needed from the third tile of a block on
    yield handle
    torch.set_num_threads(threads)
    handle.ascendc_host_leave_out(b"")
    library.use(library.runnable_variants()[0])


def exercise(folder: str) -> None:
    importlib.import_module(f"ascendc_kernels.{folder}.test_{folder}").exercise()


def places(checked: ctypes.CDLL, folder: str) -> list[str]:
    """"file:line function" of the calls that the sources of a folder have made."""
    visited = checked.ascendc_host_visited().decode().splitlines()
    return [place for place in visited if file_of(place).parent == ROOT / folder]


def file_of(place: str) -> pathlib.Path:
    return pathlib.Path(os.path.normpath(place.rpartition(":")[0]))


def users(folder: str) -> list[str]:
    """Folders whose kernels run calls of `folder`: itself, and those that include one of its headers."""
    sources = {each: "".join(path.read_text() for path in (ROOT / each).glob("*_kernel.*")) for each in FOLDERS}
    if folder == "include":
        headers = [f'"{path.name}"' for path in (ROOT / "include").glob("*.h") if CALL.search(path.read_text())]
        return [each for each, text in sources.items() if any(header in text for header in headers)]
    return [folder, *(each for each, text in sources.items() if f'"../{folder}/' in text)]


def calls_in_source(folder: str) -> set[tuple[str, int]]:
    pattern = "*.h" if folder == "include" else "*_kernel.*"
    sources = (ROOT / folder).glob(pattern)
    return {(path.name, number) for path in sources for number, line in enumerate(path.read_text().splitlines(), 1) if CALL.search(line)}


def is_reported(checked: ctypes.CDLL, folders: list[str], place: str) -> bool:
    checked.ascendc_host_leave_out(place.encode())
    try:
        for folder in folders:
            exercise(folder)
    except RuntimeError:
        return True
    finally:
        checked.ascendc_host_leave_out(b"")
    return False


@pytest.mark.parametrize("folder", [*FOLDERS, "include"])
def test_every_call_that_is_left_out_is_reported(checked, folder):
    exercised = users(folder)
    for each in exercised:
        exercise(each)
    tried = places(checked, folder)
    assert calls_in_source(folder) <= {place_in_file(place) for place in tried}, "calls that no exercise reaches"
    missed = [place for place in tried if not is_reported(checked, exercised, place)]
    assert not missed, "left out, and nothing was reported: needless, or not seen by the model:\n" + "\n".join(missed)


def place_in_file(place: str) -> tuple[str, int]:
    return file_of(place).name, int(place.rpartition(":")[2].split()[0])
