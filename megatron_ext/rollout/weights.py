"""Weights of a loaded vLLM model as logical Hugging Face tensors: which part of which tensor a rank holds, and loading.

`parts` is the one place that knows how the fused, sharded and replicated parameters of the adapters lie in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_ext.rollout.embedding import OrderedParallelLMHead, OrderedVocabParallelEmbedding
from megatron_ext.rollout.linear import (
    OrderedMergedColumnParallelLinear,
    OrderedQKVParallelLinear,
    OrderedReplicatedLinear,
    OrderedRowParallelLinear,
)
from megatron_ext.rollout.moe import OrderedRoutedExperts
from megatron_ext.rollout.norm import OrderedRMSNorm
from megatron_ext.rollout.router import OrderedGateLinear
from megatron_ext.rollout.settings import RolloutError
from megatron_ext.weight_digest import Region, region

# Scales of a quantised KV cache, which is refused: nothing reads them.
_UNREAD_BUFFERS = {"_k_scale", "_v_scale", "_q_scale", "_prob_scale"}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Part:
    """A hyper-rectangle of the logical tensor `name`: `shard` lies at `offsets` in a tensor of `logical_shape`."""

    name: str
    shard: torch.Tensor
    logical_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def parts(model: torch.nn.Module) -> Iterator[Part]:
    """Every part this rank holds, replicas too. Raises RolloutError if a parameter, or a buffer with state, belongs to no known adapter."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        unread = module._non_persistent_buffers_set | _UNREAD_BUFFERS
        stateful = [name for name, _ in module.named_buffers(recurse=False) if name not in unread]
        if stateful:
            raise RolloutError(f"{path} ({type(module).__name__}) holds buffers {stateful} that no adapter describes: unsupported model")
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        if not own:
            continue  # none, or tied to one already reported
        seen.update(map(id, own))
        cut = next((cut for kind, cut in _CUTS if isinstance(module, kind)), None)
        if cut is None:
            raise RolloutError(f"{path} ({type(module).__name__}) holds parameters that no adapter describes: unsupported model")
        yield from cut(path, module)


def regions(model: torch.nn.Module) -> dict[str, list[Region]]:
    """{Hugging Face name: regions of this rank}, for megatron_ext.weight_digest.merge."""
    found: dict[str, list[Region]] = {}
    for part in parts(model):
        found.setdefault(part.name, []).append(region(part.shard, part.logical_shape, part.offsets))
    return found


def read_checkpoint(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every safetensors file in a Hugging Face folder."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RolloutError(f"{folder}: no .safetensors files, expected an exported Hugging Face checkpoint")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())


def load_checkpoint(model: torch.nn.Module, folder: str) -> None:
    """Copies a checkpoint into the adapters' parameters. Raises RolloutError naming the logical tensors it does not have."""
    read: set[str] = set()

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read_checkpoint(folder):
            read.add(name)
            yield name, tensor

    model.load_weights(noted())
    missing = sorted({part.name for part in parts(model)} - read)
    if missing:
        raise RolloutError(f"{folder}: lacks {len(missing)} tensors of the model ({missing[:5]} ...); export the whole model")


def _whole(path: str, module: torch.nn.Module) -> Iterator[Part]:
    weight = module.weight.data
    yield Part(f"{path}.weight", weight, tuple(weight.shape), (0,) * weight.ndim)


def _vocabulary(path: str, module: torch.nn.Module) -> Iterator[Part]:
    start, rows = module.shard_indices.org_vocab_start_index, module.shard_indices.num_org_elements
    shape = (module.org_vocab_size, module.embedding_dim)
    yield Part(f"{path}.weight", module.weight.data[:rows], shape, (start, 0))


def _row_parallel(path: str, module: torch.nn.Module) -> Iterator[Part]:
    weight = module.weight.data
    shape = (weight.shape[0], module.input_size)
    yield Part(f"{path}.weight", weight, shape, (0, module.tp_rank * weight.shape[1]))


def _merged(path: str, module: torch.nn.Module) -> Iterator[Part]:
    sizes = [size // module.tp_size for size in module.output_sizes]
    for name, shard, total in zip(_names(path, "gate_up_proj"), module.weight.data.split(sizes), module.output_sizes):
        yield Part(name, shard, (total, module.input_size), (module.tp_rank * shard.shape[0], 0))


def _qkv(path: str, module: torch.nn.Module) -> Iterator[Part]:
    heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
    totals = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)
    ranks = (module.tp_rank, *(module.tp_rank // module.num_kv_head_replicas,) * 2)
    shards = module.weight.data.split([count * module.head_size for count in heads])
    for name, shard, total, rank in zip(_names(path, "qkv_proj"), shards, totals, ranks):
        yield Part(name, shard, (total * module.head_size, module.input_size), (rank * shard.shape[0], 0))


def _names(path: str, fused: str) -> list[str]:
    """Checkpoint names of the projections in a fused one."""
    parent, _, last = path.rpartition(".")
    if last != fused:
        raise RolloutError(f"{path}: expected a module called {fused}; its place in the checkpoint is not known")
    return [f"{parent}.{name}.weight" for name in _FUSED[fused]]


def _experts(path: str, module: OrderedRoutedExperts) -> Iterator[Part]:
    prefix = path.removesuffix(".routed_experts")
    config = module.moe_config
    tp_rank, width, hidden = config.tp_rank if config.tp_size > 1 else 0, config.intermediate_size, module.hidden_size
    for index in range(module.local_num_experts):
        expert = f"{prefix}.{module.first_expert + index}"
        for name, shard in zip(("gate_proj", "up_proj"), module.w13_weight.data[index].chunk(2)):
            yield Part(f"{expert}.{name}.weight", shard, (width, hidden), (tp_rank * shard.shape[0], 0))
        down = module.w2_weight.data[index]
        yield Part(f"{expert}.down_proj.weight", down, (hidden, width), (tp_rank * down.shape[0], 0))


_CUTS = (
    (OrderedQKVParallelLinear, _qkv),
    (OrderedMergedColumnParallelLinear, _merged),
    (OrderedRowParallelLinear, _row_parallel),
    ((OrderedGateLinear, OrderedReplicatedLinear, OrderedRMSNorm), _whole),
    ((OrderedVocabParallelEmbedding, OrderedParallelLMHead), _vocabulary),
    (OrderedRoutedExperts, _experts),
)
