"""Starts a Megatron worker world and talks to it. Imports no engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from megatron_ext.platform.cpu import ENVIRONMENT, MEGATRON_FLAGS
from megatron_ext.train.hf_config import flags_from_hf, read_hf_config

TAIL_LINES = 80
CLOSE_SECONDS = 20


class WorkerError(RuntimeError):
    """The worker world failed, died or did not answer in time. Carries the end of its log."""


def layout_flags(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    sequence_parallel: bool | None = None,
    dispatcher: str = "alltoall",
    micro_batch_size: int = 1,
) -> list[str]:
    """Megatron's parallelism flags. Sequence parallelism follows TP > 1 unless said otherwise."""
    flags = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp, "--expert-model-parallel-size", ep]
    flags += ["--moe-token-dispatcher-type", dispatcher, "--micro-batch-size", micro_batch_size]
    flags += ["--expert-tensor-parallel-size", etp] if etp is not None else []
    flags += ["--sequence-parallel"] if (tp > 1 if sequence_parallel is None else sequence_parallel) else []
    return [str(flag) for flag in flags]


def optimizer_flags(lr: float = 1e-4, train_iters: int = 1000) -> list[str]:
    """Adam with a constant learning rate."""
    flags = ["--lr", lr, "--train-iters", train_iters, "--lr-decay-style", "constant", "--weight-decay", 0.0, "--clip-grad", 1.0]
    return [str(flag) for flag in flags]


def cpu_flags(hf_dir: str | Path, *more: str, **layout) -> list[str]:
    """All flags of a CPU world for a Hugging Face model: model, layout (see layout_flags), optimizer, device; then `more`."""
    return [*flags_from_hf(read_hf_config(hf_dir)), *layout_flags(**layout), *optimizer_flags(), *MEGATRON_FLAGS, *more]


class TrainWorld:
    """`nproc` worker processes under torchrun, as a context manager.

    args: flags of the worker (`cpu_flags` makes them). timeout_s: bound on start-up and on every answer. Leaving the context
    ends every process of the world, whatever state it is in.
    """

    def __init__(self, nproc: int, args: list[str], log_path: str | Path, timeout_s: float = 600.0, env: dict[str, str] | None = None):
        self.nproc, self.args, self.timeout_s = nproc, list(args), timeout_s
        self.log_path = Path(log_path)
        self._env = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(env or {})}
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> TrainWorld:
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_ext_")
        socket_path = self._socket_path = Path(self._folder.name) / "worker"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.nproc), "--nnodes", "1",
            "--master-addr", "127.0.0.1", "--master-port", str(_free_port()),
            "-m", "megatron_ext.train.worker", "--worker-socket", str(socket_path), *self.args,
        ]  # fmt: skip
        try:
            with open(self.log_path, "wb") as log:
                self._process = subprocess.Popen(
                    command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            self._connect(socket_path)
            self._answer("start")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def call(self, command: str, **arguments) -> dict[str, Any]:
        """Sends one command and waits for its answer. Raises WorkerError on an error, a dead world, or no answer in time."""
        if self._connection is None:
            raise WorkerError(f"{command}: the worker world is not running")
        with contextlib.suppress(OSError):  # a dead world shows when its answer is read
            self._connection.send({"command": command, **arguments})
        return self._answer(command)

    def close(self) -> None:
        """Shuts the world down; kills what does not end by itself."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send({"command": "shutdown"})
            self._wait(CLOSE_SECONDS)
            self._connection.close()
            self._connection = None
        self._kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _connect(self, socket_path: Path) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            self._check_alive("start")
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                self._connection = Client(str(socket_path), family="AF_UNIX")
                return
            if time.monotonic() > deadline:
                raise self._failure(f"start: not ready after {self.timeout_s:.0f} s")
            time.sleep(0.2)

    def _answer(self, command: str) -> dict[str, Any]:
        try:
            answer = self._receive(command)
        except (EOFError, OSError) as error:
            raise self._failure(f"{command}: the worker world died") from error
        if "error" in answer:
            raise self._failure(f"{command} failed in the worker world")
        return answer

    def _receive(self, command: str) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while not self._connection.poll(0.5):
            self._check_alive(command)
            if time.monotonic() > deadline:
                raise self._failure(f"{command}: no answer after {self.timeout_s:.0f} s")
        return self._connection.recv()

    def _check_alive(self, command: str) -> None:
        if self._process.poll() is not None and not (self._connection is not None and self._connection.poll()):
            raise self._failure(f"{command}: the worker world ended with exit code {self._process.returncode}")

    def _failure(self, text: str) -> WorkerError:
        """Ends the world and says why: what its ranks reported, the first one first, else the end of the log."""
        self._end()
        reports = sorted(self._socket_path.parent.glob("*.failure.*"), key=lambda file: file.stat().st_mtime_ns)
        if reports:
            said = "\n".join(file.read_text(errors="replace") for file in reports)
            return WorkerError(f"{text} (log: {self.log_path})\n{said}")
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        tail = "\n".join(lines[-TAIL_LINES:])
        return WorkerError(f"{text}\nend of {self.log_path}:\n{tail}")

    def _end(self) -> None:
        """Ends the world without asking it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._kill()

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _kill(self) -> None:
        """Ends torchrun and its workers: they are the process group that this object started."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self._wait(5)
        self._process = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
