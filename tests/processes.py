"""Who is alive: the tests that kill must find every process, also those that lost their parent."""

import ctypes
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """From now on, descendants that lose their parent become children of this process, not of init."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] != "Z" and int(fields[1]) == pid:
            child = int(status.parent.name)
            found += [child, *descendants(child)]
    return found


def assert_gone(pids, within_s: float = 15) -> None:
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.2)


def _is_alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
