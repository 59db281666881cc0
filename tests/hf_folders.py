"""Small random Hugging Face folders, made in a moment, without an engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_ext.checkpoint.folder import open_checkpoint
from megatron_ext.checkpoint.hf_folder import write_safetensors
from megatron_ext.checkpoint.mapping import ModelShape, hf_shapes
from megatron_ext.checkpoint.tensors import TensorSpec, digests
from megatron_ext.parity.bits import assert_same_bits

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "attention_bias": False, "max_position_embeddings": 4096, "vocab_size": 1001, "torch_dtype": "bfloat16",
}  # fmt: skip
MOE = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 4,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
CONFIGS = {
    "dense": DENSE, "dense tied": {**DENSE, "tie_word_embeddings": True}, "moe": MOE, "moe tied": {**MOE, "tie_word_embeddings": True},
    "moe with dense layers": {**MOE, "mlp_only_layers": [1, 2]},
}  # fmt: skip


def make_hf(folder, config, dtype=torch.bfloat16, max_file_bytes=1 << 20, seed=0, change=lambda tensors: None):
    """A folder whose every tensor is different. change: edits the tensors before they are written."""
    generator = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(ModelShape.from_hf(config))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    change(tensors)
    folder.mkdir(parents=True)
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_safetensors(folder, specs, tensors.items(), max_file_bytes)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tensors_of(folder):
    return {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_folder(one, other):
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys()
    for name in left:
        assert_same_bits(right[name], left[name], name)


def digests_of(path):
    return digests(open_checkpoint(path).tensors)
