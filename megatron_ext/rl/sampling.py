"""Responses of the rollout engines to prompts, and what reward functions see of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.rl.config import RunConfig
from megatron_ext.rl.data import Prompt
from megatron_ext.rl.rewards import Sample
from megatron_ext.rl.seeds import request_seed
from megatron_ext.rollout.client import RolloutPool
from megatron_ext.rollout.engine import Rollout, SamplingSpec
from megatron_ext.world import Progress

HELDOUT_STEP = -1  # the step in the seeds of held-out evaluation: the same tokens are drawn for the same weights


@dataclass(frozen=True)
class Response:
    """One sampled response to a prompt."""

    prompt: Prompt
    sample: int
    rollout: Rollout

    @property
    def name(self) -> str:
        return response_name(self.prompt, self.sample)

    @property
    def logprobs(self) -> np.ndarray:
        return self.rollout.logprobs

    def for_reward(self, step: int, tokenizer) -> Sample:
        ids = tuple(self.rollout.token_ids)
        return Sample(
            prompt_ids=self.prompt.ids, response_ids=ids, prompt=self.prompt.text, response=tokenizer.decode(ids, skip_special_tokens=True),
            record=self.prompt.record, finish_reason=self.rollout.finish_reason, step=step, prompt_index=self.prompt.index, sample=self.sample,
        )  # fmt: skip

    def for_training(self, advantage: float, old: np.ndarray, reference: np.ndarray | None) -> dict:
        """Fields of megatron_ext.train.batch.TokenSequence. Sampled ids go to training as ids."""
        return {
            "tokens": [*self.prompt.ids, *self.rollout.token_ids], "prompt_len": len(self.prompt.ids), "advantage": advantage,
            "old_logprobs": old, "reference_logprobs": reference, "label": self.name,
        }  # fmt: skip


def response_name(prompt: Prompt, sample: int) -> str:
    return f"prompt {prompt.index} sample {sample}"


def sample(
    pool: RolloutPool, config: RunConfig, prompts: Sequence[Prompt], step: int, stop: Sequence[int], progress: Progress
) -> list[Response]:
    """`samples_per_prompt` responses to each prompt, prompt after prompt."""
    requests = [(prompt, index) for prompt in prompts for index in range(config.samples_per_prompt)]
    return _generate(pool, config, requests, step, config.temperature, stop, progress)


def sample_heldout(pool: RolloutPool, config: RunConfig, prompts: Sequence[Prompt], stop: Sequence[int], progress: Progress) -> list[Response]:
    """One response to each prompt."""
    return _generate(pool, config, [(prompt, 0) for prompt in prompts], HELDOUT_STEP, config.eval_temperature, stop, progress)


def _generate(pool, config: RunConfig, requests: list, step: int, temperature: float, stop, progress) -> list[Response]:
    spec = SamplingSpec(
        temperature=temperature, max_tokens=config.max_response_len, stop_token_ids=tuple(stop),
        seeds=[request_seed(config.seed, step, prompt.index, index) for prompt, index in requests],
        labels=[response_name(prompt, index) for prompt, index in requests],
    )  # fmt: skip
    rollouts = pool.generate([prompt.ids for prompt, _ in requests], spec, progress)
    return [Response(prompt, index, rollout) for (prompt, index), rollout in zip(requests, rollouts, strict=True)]
