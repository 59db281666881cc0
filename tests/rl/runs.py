"""Runs of the loop as a user starts them: a command line, real engines, a folder that it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from processes import adopt_orphans, descendants

ROOT = Path(__file__).resolve().parents[2]


SMALL = ("--prompts-per-step", 4, "--samples-per-prompt", 4, "--micro-batch-size", 8, "--eval-interval", 3, "--eval-temperature", 0,
         "--verify-old-logprob", 0, "--timeout", 300, "--no-tensorboard")  # fmt: skip
ONE_RANK = ("--rollout-tp", 1, "--no-rollout-ep")


class Run:
    """The job of the quickstart, smaller, in a process of its own. Whatever it leaves behind becomes a child of this process."""

    def __init__(self, arguments: tuple, out: Path, *options: object) -> None:
        adopt_orphans()
        self.out, self._others = out, set(descendants(os.getpid()))
        command = [sys.executable, "-m", *arguments, "--out", out, *SMALL, *options]
        self.process = subprocess.Popen(
            [*map(str, command)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    @classmethod
    def quickstart(cls, out: Path, *options: object) -> Run:
        return cls(("megatron_ext.rl.quickstart",), out, *options)

    @classmethod
    def loop(cls, task: Path, out: Path, *options: object) -> Run:
        files = ("--hf", task / "model", "--prompts", task / "train.jsonl", "--heldout", task / "heldout.jsonl")
        return cls(("megatron_ext.rl", "@configs/grpo_quickstart.args", *files), out, *options)

    def wait(self, seconds: float = 400) -> tuple[int, str]:
        """(exit code, everything it printed)."""
        try:
            output, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            for pid in self.processes():
                os.kill(pid, 9)
            raise
        return self.process.returncode, output

    def wait_for_step(self, step: int, seconds: float = 300) -> None:
        """Until the step stands in metrics.jsonl."""
        deadline, file = time.monotonic() + seconds, self.out / "metrics.jsonl"
        while not (file.exists() and f'"step": {step},' in file.read_text()):
            assert self.process.poll() is None, f"ended before step {step}: {self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.05)

    def processes(self, *words: str) -> list[int]:
        """Living processes of this run whose command line, or title, holds all the words."""
        mine = set(descendants(os.getpid())) - self._others
        return sorted(pid for pid in mine if all(word in _title(pid) for word in words))

    def assert_nothing_left(self, seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, f"still alive: {[(pid, _title(pid)) for pid in left]}"
            time.sleep(0.2)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
