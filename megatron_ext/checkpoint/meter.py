"""What a person sees of a long pass over tensors, and the memory that it took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

HEARTBEAT_S = 10.0  # between the lines of a pass, where the output is no terminal
SAMPLE_S = 0.02


@contextlib.contextmanager
def progress(console: Console, text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes on a terminal, a line now and then elsewhere. Yields the function that is called with bytes done."""
    if console.is_terminal:
        bar = Progress(TextColumn(text), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console)
        with bar:
            task = bar.add_task(text, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done, said = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        if time.monotonic() - said > HEARTBEAT_S:
            said = time.monotonic()
            console.print(f"{text}: {done >> 20} of {total >> 20} MiB", soft_wrap=True)

    yield advance


class PeakMemory:
    """The most memory of its own that this process had inside the block, in bytes above what it had before.

    Counts anonymous pages (RssAnon of /proc/self/status), not the page cache behind mapped files, which the kernel takes back at will.
    """

    def __enter__(self) -> PeakMemory:
        self._before = self._most = _anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._most = max(self._most, _anonymous_bytes())

    def __exit__(self, *exc_info) -> None:
        self._most = max(self._most, _anonymous_bytes())
        self._over.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self._most - self._before


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))
