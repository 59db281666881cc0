"""Megatron's flags from a Hugging Face configuration, and the refusal of what is not built."""

import pytest

from megatron_ext.checkpoint.hf_config import UnsupportedModel, flags_from_hf

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False,
    "max_position_embeddings": 4096, "vocab_size": 1000, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
MOE = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip


def value(flags, name):
    return flags[flags.index(name) + 1]


def test_dense_flags():
    flags = flags_from_hf(DENSE)
    assert value(flags, "--num-query-groups") == "4" and value(flags, "--rotary-base") == "1000000"
    assert "--bf16" in flags and "--num-experts" not in flags and "--untie-embeddings-and-output-weights" not in flags


def test_moe_flags():
    flags = flags_from_hf(MOE)
    assert value(flags, "--num-experts") == "16" and value(flags, "--moe-layer-freq") == "([1]+[1]+[1]+[1])"
    assert "--untie-embeddings-and-output-weights" in flags and "--moe-router-pre-softmax" not in flags


def test_fp16_accumulates_in_fp32():
    flags = flags_from_hf({**DENSE, "torch_dtype": "float16"})
    assert "--fp16" in flags and "--accumulate-allreduce-grads-in-fp32" in flags


def test_layers_without_experts_and_plain_softmax():
    flags = flags_from_hf({**MOE, "mlp_only_layers": [3], "decoder_sparse_step": 2, "norm_topk_prob": False})
    assert value(flags, "--moe-layer-freq") == "([0]+[1]+[0]+[0])" and "--moe-router-pre-softmax" in flags


def test_both_generations_of_transformers_say_the_same():
    new = {k: v for k, v in MOE.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype", "num_experts")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "dtype": "bfloat16", "num_local_experts": 16}
    assert flags_from_hf(new) == flags_from_hf(MOE)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type"),
        ({"rope_theta": 10000.5}, "rope_theta"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"torch_dtype": "float64"}, "dtype"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size: unknown field"),
    ],
)
def test_unsupported_fields_are_named(change, name):
    with pytest.raises(UnsupportedModel, match=name):
        flags_from_hf({**MOE, **change})


def test_all_problems_are_listed():
    with pytest.raises(UnsupportedModel) as error:
        flags_from_hf({**MOE, "attention_bias": True, "hidden_act": "gelu", "novelty": 1})
    assert len(error.value.problems) == 3
