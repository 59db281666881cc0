"""Sampling of vLLM's V1 model runner: logprobs are those of the sampled distribution, from the same ops as training.

The draw is `ops.sample`: Philox4x32-10 with the request's seed as key and the output position as counter, down the tree of the
exponent sum. So a request draws the same token alone or in a batch, before or after a preemption, with chunked or whole prefill, on
any TP size, with either kernel backend.
"""

from __future__ import annotations

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from megatron_ext import ops
from megatron_ext.contract import Contract
from megatron_ext.patches import original
from megatron_ext.rollout.settings import GREEDY_BELOW, LABEL, RolloutError, check_sampling

TARGET = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample"


def sample(self, logits, spec_decode_metadata) -> SamplerOutput:
    """Stands in for `GPUModelRunner._sample`: logits [B, V], one row per request of the batch."""
    if Contract.from_environment().consistency:
        return _ordered_sample(self, logits, spec_decode_metadata)
    return _stock_sample(self, logits, spec_decode_metadata)


def _ordered_sample(runner, logits, spec_decode_metadata) -> SamplerOutput:
    if spec_decode_metadata is not None:
        raise RolloutError("speculative decoding; unset speculative_config")
    if logits is None or logits.dtype != torch.float32:
        raise RolloutError(f"logits are {None if logits is None else logits.dtype}, expected float32 on every rank")
    requests = [runner.requests[name] for name in runner.input_batch.req_ids]
    for request in requests:
        check_sampling(request.sampling_params)
    # vLLM winds generators of unfinished prefills back by an offset that CPU generators do not have (it raises). Ours are
    # not used at all: the draw is a function of (seed, position).
    runner.input_batch.generators.clear()
    check_rows(finite_rows(logits), requests, "non-finite logits")
    greedy = [request.sampling_params.temperature < GREEDY_BELOW for request in requests]
    temperatures = torch.tensor([1.0 if g else r.sampling_params.temperature for g, r in zip(greedy, requests)])
    logprobs = ops.log_softmax(logits, temperatures)
    seeds = [None if g else r.sampling_params.seed for g, r in zip(greedy, requests)]
    tokens = choose(logits, temperatures, seeds, [len(r.output_token_ids) for r in requests])
    check_rows(tokens >= 0, requests, "logits overflow when they are divided by the temperature")
    wanted = runner.input_batch.sampling_metadata.max_num_logprobs
    return SamplerOutput(
        sampled_token_ids=tokens.to(torch.int32).unsqueeze(-1),
        logprobs_tensors=None if wanted is None else gather_logprobs(logprobs, tokens, wanted),
    )


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """[B, V] -> bool [B]. Minimum and maximum, to which NaN spreads, take a small part of the time of `isfinite` on a CPU."""
    return logits.amin(dim=1).isfinite() & logits.amax(dim=1).isfinite()


def check_rows(good_B: torch.Tensor, requests: list, problem: str) -> None:
    """Raises RolloutError with the problem, the first request that is not good and its position."""
    if good_B.all():
        return
    request = requests[int((~good_B).nonzero()[0])]
    label = (request.sampling_params.extra_args or {}).get(LABEL, request.req_id)
    raise RolloutError(f"{problem}: {label}, response position {len(request.output_token_ids)}")


def choose(logits: torch.Tensor, temperatures: torch.Tensor, seeds: list[int | None], positions: list[int]) -> torch.Tensor:
    """logits fp32 [B, V], temperatures fp32 [B]; seeds: one per row, None for the most likely token -> token ids int64 [B].

    Among equally likely tokens the lowest id is the most likely one.
    """
    only_first = torch.tensor([int(seed is None) for seed in seeds])  # top-k: 0 keeps all
    keys = torch.tensor([as_int64(seed or 0) for seed in seeds])
    return ops.sample(logits, keys, torch.tensor(positions), temperatures, only_first if only_first.any() else None)[0]


def as_int64(seed: int) -> int:
    """The lower 64 bits, as int64 holds them."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def gather_logprobs(logprobs: torch.Tensor, tokens: torch.Tensor, count: int) -> LogprobsTensors:
    """The sampled token's logprob and rank, then the `count` most likely ones; count = -1: the whole distribution."""
    if count == -1:
        return LogprobsTensors(torch.empty(0), logprobs, torch.empty(0))
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1))
    top_logprobs, top_ids = torch.topk(logprobs, count, dim=-1)
    return LogprobsTensors(
        logprob_token_ids=torch.cat((tokens.unsqueeze(-1), top_ids), dim=-1).to(torch.int32),
        logprobs=torch.cat((chosen, top_logprobs), dim=-1),
        selected_token_ranks=(logprobs >= chosen).sum(-1),
    )


def _stock_sample(runner, logits, spec_decode_metadata) -> SamplerOutput:
    """The stock sampler, without the step that CPU generators cannot do.

    After sampling, vLLM winds back the generator of every request whose prefill is not finished, by an offset that only
    device generators have. Those generators are wound back here, by their state, and kept out of vLLM's sight until the
    next step.
    """
    batch = runner.input_batch
    for index, name in enumerate(batch.req_ids):
        if runner.requests[name].generator is not None:
            batch.generators[index] = runner.requests[name].generator
    unfinished = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    states = {index: batch.generators[index].get_state() for index in unfinished if index in batch.generators}
    output = original(TARGET)(runner, logits, spec_decode_metadata)
    for index, state in states.items():
        batch.generators.pop(index).set_state(state)
    return output
