"""The driver's end of an engine that runs in processes of its own: start, ask, watch, end. Imports no engine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

TAIL_LINES = 80
CLOSE_SECONDS = 20
_POLL_SECONDS = 0.05
Progress = Callable[[int, int], None]


class WorkerError(RuntimeError):
    """An engine's processes failed, died or did not answer in time. Carries what they reported, else the end of their log."""


class World:
    """The processes of one engine, as a context manager; `megatron_ext.service` is their end.

    name: what errors call it. timeout_s: bound on start-up and on the time between two messages. Leaving the context ends every
    process of the world, whatever state it is in.
    """

    def __init__(self, name: str, log_path: str | Path, timeout_s: float, env: dict[str, str] | None = None) -> None:
        self.name, self.log_path, self.timeout_s = name, Path(log_path), timeout_s
        self._env = env
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._folder: tempfile.TemporaryDirectory | None = None
        self._asked = ""
        self._deadline = 0.0

    def command_line(self, socket_path: Path) -> list[str]:
        """What to start; the process must serve on `socket_path`."""
        raise NotImplementedError

    def __enter__(self) -> World:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def start(self) -> None:
        """Starts the processes and returns at once."""
        if self._folder is not None:
            self._folder.cleanup()  # of processes that failed
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_ext_")
        self._socket_path = Path(self._folder.name) / "socket"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                self.command_line(self._socket_path), env={**os.environ, **(self._env or {})}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._expect("start")

    def wait_ready(self) -> None:
        """Waits for the processes to serve."""
        try:
            self._connect()
            self.answer()
        except BaseException:
            self.close()
            raise

    def call(self, command: str, progress: Progress | None = None, **arguments) -> dict[str, Any]:
        """Sends one command and waits for its answer. Raises WorkerError on an error, a dead world, or silence for too long."""
        self.send(command, **arguments)
        return self.answer(progress)

    def send(self, command: str, **arguments) -> None:
        if self._connection is None:
            raise WorkerError(f"{command}: {self.name} is not running")
        with contextlib.suppress(OSError):  # a dead world shows when its answer is read
            self._connection.send({"command": command, **arguments})
        self._expect(command)

    def answer(self, progress: Progress | None = None) -> dict[str, Any]:
        """Waits for the answer to what was sent."""
        return gather([self], None if progress is None else lambda world, done, total: progress(done, total))[0]

    def poll(self, seconds: float) -> dict[str, Any] | None:
        """The next message, if one comes within `seconds`. Raises WorkerError if it never can."""
        try:
            if self._connection.poll(seconds):
                message = self._connection.recv()
                self._expect(self._asked)
                if "error" in message:
                    raise self._failure(f"{self._asked} failed in {self.name}")
                return message
        except (EOFError, OSError) as error:
            raise self._failure(f"{self._asked}: {self.name} died") from error
        self.check_alive()
        if time.monotonic() > self._deadline:
            raise self._failure(f"{self._asked}: no answer from {self.name} after {self.timeout_s:.0f} s")
        return None

    def check_alive(self) -> None:
        """Raises WorkerError if the processes have ended."""
        if self._process is None:
            raise WorkerError(f"{self.name} is not running")
        if self._process.poll() is not None and not (self._connection is not None and self._connection.poll()):
            raise self._failure(f"{self._asked}: {self.name} ended with exit code {self._process.returncode}")

    def close(self) -> None:
        """Shuts the world down; kills what does not end by itself."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send({"command": "shutdown"})
            self._wait(CLOSE_SECONDS)
        self.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def kill(self) -> None:
        """Ends the world without asking it: its processes are the group that `start` made."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self._wait(5)
        self._process = None

    def _expect(self, command: str) -> None:
        self._asked, self._deadline = command, time.monotonic() + self.timeout_s

    def _connect(self) -> None:
        while True:
            self.check_alive()
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self._connection = Client(str(self._socket_path), family="AF_UNIX")
                return
            if time.monotonic() > self._deadline:
                raise self._failure(f"start: {self.name} not ready after {self.timeout_s:.0f} s")
            time.sleep(0.2)

    def _failure(self, text: str) -> WorkerError:
        """Ends the world and says why: what its processes reported, the first one first, else the end of the log."""
        self.kill()
        reports = sorted(self._socket_path.parent.glob("*.failure.*"), key=lambda file: file.stat().st_mtime_ns)
        if reports:
            said = "\n".join(file.read_text(errors="replace") for file in reports)
            return WorkerError(f"{text} (log: {self.log_path})\n{said}")
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        tail = "\n".join(lines[-TAIL_LINES:])
        return WorkerError(f"{text}\nend of {self.log_path}:\n{tail}")

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def gather(
    worlds: Sequence[World], progress: Callable[[World, int, int], None] | None = None, watch: Sequence[World] = ()
) -> list[dict[str, Any]]:
    """The answers of all worlds to what was sent to each, in order. Raises the first WorkerError, of them or of those in `watch`."""
    answers: dict[int, dict[str, Any]] = {}
    while len(answers) < len(worlds):
        for index, world in enumerate(worlds):
            if index in answers or (message := world.poll(_POLL_SECONDS)) is None:
                continue
            if "progress" not in message:
                answers[index] = message
            elif progress is not None:
                progress(world, *message["progress"])
        for world in watch:
            world.check_alive()
    return [answers[index] for index in range(len(worlds))]
