"""SIGTERM and SIGINT end a run cleanly: at once while it samples, else when the step is done. A second one ends it at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


class Interrupted(Exception):
    """A signal came while the run was in a part that may be thrown away."""


class Signals:
    """Takes the two signals over, as a context manager, in the main thread. received: the first one's number, or None."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._may_raise = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def discardable(self) -> Iterator[None]:
        """What runs inside leaves nothing behind: a signal raises Interrupted there."""
        self.check()
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self.received is not None:
            raise Interrupted(signal.Signals(self.received).name)

    def _handle(self, number: int, frame: object) -> None:
        if self.received is not None:
            raise KeyboardInterrupt(f"second signal ({signal.Signals(number).name})")
        self.received = number
        if self._may_raise:
            self._may_raise = False
            self.check()
