"""The optimizer steps of one rollout batch, and the logdiff gate: past a failed one nothing is synced, logged or saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.parity import logdiff
from megatron_ext.rl import gate
from megatron_ext.rl.config import RunConfig
from megatron_ext.rl.live import LiveView
from megatron_ext.rl.metrics import actor_metrics
from megatron_ext.rl.sampling import Response
from megatron_ext.train.client import TrainWorld


@dataclass(frozen=True)
class Update:
    """train_logprobs: of the policy that sampled, as training computes them. warning: what the gate had to say."""

    train_logprobs: list[np.ndarray]
    metrics: dict[str, float]
    warning: str | None


class Updater:
    """Runs the passes of a step in the training world, each as a phase of the view."""

    def __init__(self, config: RunConfig, world: TrainWorld, live: LiveView) -> None:
        self.config, self.world, self.live = config, world, live

    def __call__(self, responses: Sequence[Response], advantages: Sequence[float], step: int, timed) -> Update:
        """One step's optimizer steps. timed: context manager factory (name) that adds to the step's times.

        The old logprobs are the rollout's: they equal training's, which the gate checks, so the pass that would compute them is left
        out. It runs where nothing else shows training's logprobs of every token before the weights change (several updates), where
        it was asked for (--verify-old-logprob), and with stock numerics, where it matters.
        """
        config = self.config
        rollout = [response.logprobs for response in responses]
        reference = self._pass(responses, "ref", timed, reference=True) if config.objective.kl_coef else None
        recomputed, warning = None, None
        if self._needs_old_pass(step):
            recomputed = self._pass(responses, "old_log_prob", timed)
            warning = self._gate(responses, recomputed, step, "the old-logprob pass")
        old = rollout if config.contract.consistency else recomputed
        told = self._optimize(responses, advantages, old, reference, timed)
        new = [values for answer in told for values in answer["logprobs"]]
        train = recomputed if config.updates_per_step > 1 else new
        if config.updates_per_step == 1:
            warning = self._gate(responses, new, step, "the update's own forward pass") or warning
        metrics = actor_metrics(new, old, advantages, config.objective, config.aggregation, reference)
        return Update(train, {**metrics, **_told_metrics(told)}, warning)

    def _needs_old_pass(self, step: int) -> bool:
        every = self.config.verify_old_logprob
        return self.config.updates_per_step > 1 or not self.config.contract.consistency or bool(every and step % every == 0)

    def _gate(self, responses: Sequence[Response], train: list[np.ndarray], step: int, source: str) -> str | None:
        verdict = logdiff.compare(train, [r.logprobs for r in responses], [r.rollout.token_ids for r in responses])
        return gate.check(verdict, self.config.logdiff_policy, step, [r.name for r in responses], source)

    def _pass(self, responses: Sequence[Response], name: str, timed, reference: bool = False) -> list[np.ndarray]:
        """A forward pass over all responses, without gradients."""
        sequences = [response.for_training(0.0, None, None) for response in responses]
        with timed(name), self.live.phase(name, unit="micro-batches") as phase:
            return self.world.call("logprobs", phase.update, sequences=sequences, reference=reference, **self._batching())["logprobs"]

    def _optimize(self, responses, advantages, old, reference, timed) -> list[dict]:
        """One answer of train_step per update; an update takes the groups of neighbouring prompts."""
        reference = [None] * len(responses) if reference is None else reference
        rows = zip(responses, advantages, old, reference, strict=True)
        sequences = [response.for_training(advantage, o, r) for response, advantage, o, r in rows]
        each = len(sequences) // self.config.updates_per_step
        told = []
        for start in range(0, len(sequences), each):
            with timed("update_actor"), self.live.phase("update_actor", unit="micro-batches") as phase:
                told.append(self.world.call(
                    "train_step", phase.update, sequences=sequences[start : start + each], objective=vars(self.config.objective),
                    aggregation=self.config.aggregation, **self._batching(),
                ))  # fmt: skip
        return told

    def _batching(self) -> dict:
        config = self.config
        return {"temperature": config.temperature, "micro_batch_size": config.micro_batch_size, "pack": config.pack}


def _told_metrics(told: Sequence[dict]) -> dict[str, float]:
    """Means over the updates of a step; the learning rate is that of the last."""
    count = len(told)
    return {
        "actor/loss": sum(answer["loss"] for answer in told) / count,
        "actor/grad_norm": sum(float(answer["grad_norm"]) for answer in told) / count,
        "actor/lr": told[-1]["lr"],
        "actor/skipped_updates": sum(answer["skipped"] for answer in told),
    }
