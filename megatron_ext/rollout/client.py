"""Starts rollout engines in processes of their own, and spreads requests over them. Imports no engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.contract import ENVIRONMENT_VARIABLE, Contract
from megatron_ext.rollout.engine import Rollout, SamplingSpec
from megatron_ext.weight_digest import check_equal
from megatron_ext.world import Progress, World, gather


class RolloutWorld(World):
    """One rollout engine. cores: CPU cores that it may use."""

    def __init__(self, name: str, contract: Contract, cores: Sequence[int], log_path: str | Path, timeout_s: float = 600.0) -> None:
        super().__init__(name, log_path, timeout_s, {ENVIRONMENT_VARIABLE: contract.to_json()})
        self._cores = cores

    def command_line(self, socket_path: Path) -> list[str]:
        return [sys.executable, "-m", "megatron_ext.rollout.server", str(socket_path), ",".join(map(str, self._cores))]


class RolloutPool:
    """Equal engines on one model, as a context manager. A request's tokens do not depend on which engine serves it.

    Every command is sent to all engines at once. watch: other worlds without which waiting is pointless.
    """

    def __init__(self, count: int, contract: Contract, log_dir: str | Path, timeout_s: float = 600.0) -> None:
        if count < 1:
            raise ValueError(f"rollout engines: expected at least 1, found {count}")
        shares = share_cores(sorted(os.sched_getaffinity(0)), count)
        self.contract = contract
        self.worlds = [
            RolloutWorld(f"rollout engine {index}", contract, cores, Path(log_dir) / f"rollout_{index}.log", timeout_s)
            for index, cores in enumerate(shares)
        ]
        self.watch: list[World] = []

    def __enter__(self) -> RolloutPool:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def start(self, hf_dir: str, **engine_arguments) -> None:
        """Starts every engine on a Hugging Face folder. engine_arguments: those of RolloutEngine."""
        for world in self.worlds:
            world.start()
        for world in self.worlds:
            world.wait_ready()
        self._all("start", hf_dir=str(hf_dir), **engine_arguments)

    def generate(self, prompts: Sequence[Sequence[int]], spec: SamplingSpec, progress: Progress | None = None) -> list[Rollout]:
        """One continuation per prompt, in order. Neighbouring prompts go to one engine: they share prefixes."""
        shares = request_shares(len(prompts), len(self.worlds))
        busy = [(world, share) for world, share in zip(self.worlds, shares, strict=True) if share]
        for world, share in busy:
            seeds, labels = [spec.seeds[i] for i in share] if spec.seeds else (), [spec.labels[i] for i in share] if spec.labels else ()
            world.send("generate", prompts=[list(prompts[i]) for i in share], spec=replace(spec, seeds=seeds, labels=labels))
        answers = gather([world for world, _ in busy], _summed(progress, len(prompts)), [*self.worlds, *self.watch])
        return [rollout for answer in answers for rollout in answer["rollouts"]]

    def load_weights(self, folder: str | Path) -> None:
        """A Hugging Face folder into every engine; prefix caches are dropped, and proved dropped."""
        self._all("load_weights", folder=str(folder))

    def check_digest(self, expected: dict[str, str]) -> None:
        """Raises DigestMismatch naming the logical tensors in which an engine differs from `expected`."""
        for answer in self._all("digest"):
            check_equal(expected, answer["digest"])

    def report(self) -> list[dict[str, Any]]:
        """RolloutEngine.report() of every engine; "process" names the engine too."""
        reports = zip(self.worlds, self._all("report"), strict=True)
        return [{**entry, "process": f"{world.name}, {entry['process']}"} for world, answer in reports for entry in answer["processes"]]

    def assert_hit(self) -> None:
        """Raises WorkerError naming every adapter of the model that some worker never used."""
        self._all("assert_hit")

    def stats(self) -> dict[str, int]:
        """Sums over all engines of RolloutEngine.stats()."""
        totals: dict[str, int] = {}
        for answer in self._all("stats"):
            for name, value in answer["stats"].items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def close(self) -> None:
        for world in self.worlds:
            world.close()

    def kill(self) -> None:
        """Ends every engine at once."""
        for world in self.worlds:
            world.kill()

    def _all(self, command: str, **arguments) -> list[dict[str, Any]]:
        for world in self.worlds:
            world.send(command, **arguments)
        return gather(self.worlds, watch=self.watch)


def share_cores(cores: Sequence[int], engines: int) -> list[list[int]]:
    """Equal shares of `cores`; engines share cores only where there are too few."""
    each = max(1, len(cores) // engines)
    return [[cores[(index * each + i) % len(cores)] for i in range(each)] for index in range(engines)]


def request_shares(count: int, engines: int) -> list[range]:
    """Contiguous, nearly equal shares of `count` requests."""
    bounds = [count * index // engines for index in range(engines + 1)]
    return [range(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]


def _summed(progress: Progress | None, total: int) -> Callable[[World, int, int], None] | None:
    done: dict[str, int] = {}

    def report(world: World, finished: int, _: int) -> None:
        done[world.name] = finished
        progress(sum(done.values()), total)

    return report if progress else None
