"""Megatron's model flags from a Hugging Face configuration. Imports no engine: launchers use it before they start one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class UnsupportedModel(ValueError):
    """A Hugging Face configuration asks for something that the training side does not build. Lists every field."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(["this model is not supported:", *(f"  - {problem}" for problem in problems)]))


ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
# Fields with the one value we build. A missing field has it.
_FIXED_FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "output_router_logits": (False, None),
}
_READ_FIELDS = frozenset({
    "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "rms_norm_eps", "rope_theta", "rope_parameters", "tie_word_embeddings",
    "max_position_embeddings", "vocab_size", "dtype", "torch_dtype",
})  # fmt: skip
# Fields that change nothing we compute.
_IGNORED_FIELDS = frozenset({
    "model_type", "transformers_version", "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "max_window_layers", "sliding_window", "layer_types", "router_aux_loss_coef", "_name_or_path", "id2label", "label2id",
    "return_dict", "output_hidden_states", "output_attentions", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder",
    "_attn_implementation", "use_qk_norm", "task_specific_params", "finetuning_task", "is_decoder",
})  # fmt: skip
# --bf16 implies the accumulation in fp32; fp32 models run without the contract only.
_DTYPE_FLAGS = {"bfloat16": ["--bf16"], "float16": ["--fp16", "--accumulate-allreduce-grads-in-fp32"], "float32": []}


def read_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """The parsed config.json of a Hugging Face folder."""
    return json.loads((Path(hf_dir) / "config.json").read_text())


def flags_from_hf(hf_config: dict[str, Any]) -> list[str]:
    """Megatron's model flags for a Hugging Face configuration. Raises UnsupportedModel naming every field that is not built."""
    problems = _config_problems(hf_config)
    if problems:
        raise UnsupportedModel(problems)
    flags = _dense_flags(hf_config)
    if is_moe(hf_config):
        flags += _moe_flags(hf_config)
    return [str(flag) for flag in flags]


def is_moe(hf: Mapping[str, Any]) -> bool:
    return hf["architectures"] == ["Qwen3MoeForCausalLM"]


def expert_layers(hf: Mapping[str, Any]) -> list[bool]:
    """For every layer, whether it has experts."""
    if not is_moe(hf):
        return [False] * hf["num_hidden_layers"]
    step, dense_only = hf.get("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or [])
    return [index not in dense_only and (index + 1) % step == 0 for index in range(hf["num_hidden_layers"])]


def rope_base(hf: dict[str, Any]) -> float:
    """rope_theta, where either generation of transformers writes it."""
    return (hf.get("rope_parameters") or {}).get("rope_theta") or hf.get("rope_theta") or 10000.0


def model_dtype(hf: dict[str, Any]) -> str:
    return hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"


def _config_problems(hf: dict[str, Any]) -> list[str]:
    problems = []
    if len(hf.get("architectures") or []) != 1 or hf["architectures"][0] not in ARCHITECTURES:
        problems.append(f"architectures: expected one of {ARCHITECTURES}, found {hf.get('architectures')}")
    for name, allowed in _FIXED_FIELDS.items():
        value = hf.get(name, allowed[0])
        if value not in allowed:
            problems.append(f"{name}: expected {allowed[0]!r}, found {value!r}")
    if set(hf.get("layer_types") or []) - {"full_attention"}:
        problems.append(f"layer_types: expected only 'full_attention', found {sorted(set(hf['layer_types']))}")
    rope_type = (hf.get("rope_parameters") or {}).get("rope_type", "default")
    if rope_type != "default":
        problems.append(f"rope_parameters.rope_type: expected 'default', found {rope_type!r}")
    if rope_base(hf) != int(rope_base(hf)):
        problems.append(f"rope_theta: expected a whole number (Megatron's --rotary-base is one), found {rope_base(hf)!r}")
    if model_dtype(hf) not in _DTYPE_FLAGS:
        problems.append(f"dtype: expected one of {sorted(_DTYPE_FLAGS)}, found {model_dtype(hf)!r}")
    known = _READ_FIELDS | _IGNORED_FIELDS | set(_FIXED_FIELDS)
    problems += [f"{name}: unknown field with value {hf[name]!r}" for name in sorted(set(hf) - known)]
    return problems


def _dense_flags(hf: dict[str, Any]) -> list[Any]:
    heads, groups = hf["num_attention_heads"], hf["num_key_value_heads"]
    flags = [
        "--num-layers", hf["num_hidden_layers"],
        "--hidden-size", hf["hidden_size"],
        "--ffn-hidden-size", hf["intermediate_size"],
        "--num-attention-heads", heads,
        "--kv-channels", hf.get("head_dim") or hf["hidden_size"] // heads,
        "--group-query-attention", "--num-query-groups", groups,
        "--qk-layernorm",
        "--normalization", "RMSNorm", "--norm-epsilon", hf["rms_norm_eps"],
        "--swiglu", "--disable-bias-linear",
        "--position-embedding-type", "rope", "--rotary-base", int(rope_base(hf)), "--rotary-percent", 1.0,
        "--hidden-dropout", 0.0, "--attention-dropout", 0.0,
        "--max-position-embeddings", hf["max_position_embeddings"], "--seq-length", hf["max_position_embeddings"],
        "--vocab-size", hf["vocab_size"],
        "--attention-softmax-in-fp32",
        "--calculate-per-token-loss",
        *_DTYPE_FLAGS[model_dtype(hf)],
    ]  # fmt: skip
    return flags if hf.get("tie_word_embeddings") else [*flags, "--untie-embeddings-and-output-weights"]


def _moe_flags(hf: dict[str, Any]) -> list[Any]:
    flags = [
        "--num-experts", hf.get("num_experts") or hf["num_local_experts"],
        "--moe-ffn-hidden-size", hf["moe_intermediate_size"],
        "--moe-layer-freq", "(" + "+".join(f"[{int(value)}]" for value in expert_layers(hf)) + ")",
        "--moe-router-topk", hf["num_experts_per_tok"],
        "--moe-router-dtype", "fp32",
        "--moe-router-score-function", "softmax",
        "--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", 0.0,
    ]  # fmt: skip
    return flags if hf.get("norm_topk_prob") else [*flags, "--moe-router-pre-softmax"]
