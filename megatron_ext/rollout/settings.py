"""What a rollout refuses, by name and before the first token, with what to do instead.

Nothing here imports vLLM's engine: the checks read the attributes of the configuration they are given.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from megatron_ext.contract import Contract
from megatron_ext.patches import original

GREEDY_BELOW = 1e-5  # vLLM's own bound: a lower temperature means greedy decoding
LOGPROBS_MODE = "processed_logprobs"
LABEL = "megatron_ext_label"  # SamplingParams.extra_args: what errors call the request
_MODEL_DTYPES = ("torch.bfloat16", "torch.float16")


class RolloutError(ValueError):
    """The rollout cannot be consistent, or the engine does not do what was asked of it."""


def check_sampling(params) -> None:
    """Raises RolloutError for a request whose sampled distribution is not softmax(logits / temperature).

    params: vllm.SamplingParams. Greedy decoding (temperature 0) is allowed.
    """
    neutral = {
        "top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,),
        "repetition_penalty": (1.0,), "min_tokens": (0,), "logit_bias": (None,), "allowed_token_ids": (None,),
        "bad_words": (None, []), "structured_outputs": (None,), "prompt_logprobs": (None,), "logprob_token_ids": (None, []),
        "thinking_token_budget": (None,), "repetition_detection": (None,),
    }  # fmt: skip
    problems = [
        f"{name}={getattr(params, name)!r} (expected {' or '.join(map(repr, allowed))})"
        for name, allowed in neutral.items()
        if getattr(params, name, allowed[0]) not in allowed
    ]
    if params.temperature >= GREEDY_BELOW and params.seed is None:
        problems.append("seed=None (expected one seed per request, so that a draw does not depend on the batch)")
    if problems:
        raise RolloutError(
            f"sampling parameters that change the sampled distribution or the draw: {'; '.join(problems)}. The training side "
            "recomputes softmax(logits / temperature); remove them"
        )


def check_engine(config) -> None:
    """Raises RolloutError listing every setting of a vllm.config.VllmConfig that consistency does not allow."""
    problems = [*_execution_problems(config), *_parallel_problems(config.parallel_config), *_model_problems(config)]
    if problems:
        raise RolloutError("this rollout engine cannot be consistent:\n" + "\n".join(f"  - {text}" for text in problems))


def _execution_problems(config) -> Iterable[str]:
    if str(config.compilation_config.mode.name) != "NONE":
        yield f"compilation mode {config.compilation_config.mode.name}: compiled graphs bypass the adapters; set enforce_eager=True"
    if config.use_v2_model_runner:
        yield "model runner V2: its sampler is not adapted; set VLLM_USE_V2_MODEL_RUNNER=0"
    if config.scheduler_config.async_scheduling:
        yield "async scheduling: output positions are not known when sampling; set async_scheduling=False"
    if config.speculative_config is not None:
        yield "speculative decoding: draws from another distribution; unset speculative_config"
    if config.lora_config is not None:
        yield "LoRA: has no place in the order contract; merge the adapter into the weights"
    if config.kv_transfer_config is not None:
        yield "KV transfer: cached keys of another engine; unset kv_transfer_config"
    page, tile = config.cache_config.block_size, _order().kv_tile
    if not page or tile % page:
        yield f"block_size={page}: must divide the KV tile {tile}; set block_size to 16, 32, 64 or 128"
    if config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"):
        yield f"kv_cache_dtype={config.cache_config.cache_dtype!r}: a quantised cache rounds keys; set 'auto'"


def _parallel_problems(parallel) -> Iterable[str]:
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            yield f"{name}={size}: not supported in a rollout; set 1 (use TP and EP)"
    if parallel.enable_eplb:
        yield "expert-parallel load balancing: moves experts between ranks; set enable_eplb=False"
    if parallel.expert_placement_strategy != "linear":
        yield f"expert_placement_strategy={parallel.expert_placement_strategy!r}: set 'linear'"
    if parallel.distributed_executor_backend != "mp":
        yield f"distributed_executor_backend={parallel.distributed_executor_backend!r}: adapters live in worker processes; set 'mp'"
    try:
        _order().local_segments(parallel.tensor_parallel_size)
    except ValueError as error:
        yield str(error)


def _model_problems(config) -> Iterable[str]:
    model = config.model_config
    if model.quantization is not None:
        yield f"quantization={model.quantization!r}: give an unquantised model"
    if str(model.dtype) not in _MODEL_DTYPES:
        yield f"dtype={model.dtype}: set bfloat16 or float16"
    if model.get_sliding_window() is not None:
        yield f"sliding window {model.get_sliding_window()}: the training side sees every earlier token; use a model without it"
    if model.logprobs_mode != LOGPROBS_MODE:
        yield f"logprobs_mode={model.logprobs_mode!r}: set {LOGPROBS_MODE!r} (logprobs of the sampled distribution)"
    if model.logits_processors:
        yield f"logits_processors={model.logits_processors}: they change the sampled distribution; remove them"


def _order():
    contract = Contract.from_environment()
    if contract is None:
        raise RolloutError("no contract in this process: MEGATRON_EXT_CONTRACT is not set; start through RolloutEngine")
    return contract.order


def check_plugins() -> None:
    """Raises RolloutError if VLLM_PLUGINS would keep our plug-in out of the engine's processes."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "megatron_ext" not in allowed.split(","):
        raise RolloutError(f"VLLM_PLUGINS={allowed!r} leaves out megatron_ext; add it or unset the variable")


# Stand-ins in the process that takes requests. They ask the environment, not a binding, whether consistency is on: one
# process may start engines of either kind one after the other.


def verify_sampling_params(self, model_config, speculative_config, structured_outputs_config, tokenizer) -> None:
    """Stands in for `SamplingParams.verify`."""
    original("vllm.sampling_params:SamplingParams.verify")(
        self, model_config, speculative_config, structured_outputs_config, tokenizer
    )
    if _consistent():
        check_sampling(self)


def check_and_update_config(cls, vllm_config) -> None:
    """Stands in for `CpuPlatform.check_and_update_config`: vLLM's own settings first, then ours are checked."""
    original("vllm.platforms.cpu:CpuPlatform.check_and_update_config")(cls, vllm_config)
    if _consistent() and vllm_config.model_config is not None:
        check_engine(vllm_config)


def _consistent() -> bool:
    contract = Contract.from_environment()
    return contract is not None and contract.consistency
