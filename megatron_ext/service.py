"""An engine process's end of the connection to its driver (`megatron_ext.world`): listen, answer, report failures.

A request is a dict with "command" and its arguments, the answer a dict; before it may come {"progress": (done, total)}. An
exception is answered as {"error": text} and ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time
import traceback
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROGRESS_SECONDS = 0.3


class Channel:
    """The connection of one process, called `name` in errors. Only the process that `listens` has one; all can report failures."""

    def __init__(self, socket_path: str, name: str, listens: bool = True) -> None:
        self.connection: Connection | None = None
        self._name = name
        self._failure_file = Path(f"{socket_path}.failure.{name.replace(' ', '_')}")
        self._last_progress = 0.0
        if listens:
            with Listener(socket_path, family="AF_UNIX") as listener:
                self.connection = listener.accept()

    def answer(self, answer: dict[str, Any]) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError):  # the driver is gone; the next receive ends the process
                self.connection.send(answer)

    def progress(self, done: int, total: int) -> None:
        """Tells how far the current command is, not too often."""
        if self.connection is not None and time.monotonic() - self._last_progress > _PROGRESS_SECONDS:
            self._last_progress = time.monotonic()
            self.answer({"progress": (done, total)})

    def report_failure(self, text: str | None = None) -> None:
        """Tells the driver about `text`, else the exception being handled: by a file, and where there is a connection by an answer."""
        text = f"{self._name}: {text or traceback.format_exc()}"
        with contextlib.suppress(OSError):  # the driver has gone and taken its folder along
            self._failure_file.write_text(text)
        self.answer({"error": text})

    def receive(self) -> dict[str, Any]:
        """The next request; "shutdown" if the driver is gone."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return {"command": "shutdown"}


class Commands:
    """Methods called do_<command> answer requests; what they return is the answer."""

    def run(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        handler = getattr(self, f"do_{command}", None)
        if handler is None:
            known = sorted(name.removeprefix("do_") for name in dir(self) if name.startswith("do_"))
            raise ValueError(f"unknown command {command!r}; expected one of {known}")
        started = time.monotonic()
        answer = handler(**arguments) or {}
        return {**answer, "seconds": time.monotonic() - started}


def serve(commands: Commands, channel: Channel) -> None:
    """Answers requests until "shutdown"."""
    while (request := channel.receive())["command"] != "shutdown":
        channel.answer(commands.run(request.pop("command"), request))


def die_with_parent() -> None:
    """Asks Linux to end this process when the one that started it is gone: killed, it could not end its children itself."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
