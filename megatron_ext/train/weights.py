"""Hugging Face weights in and out of a running Megatron model, without ever holding the whole model on one rank.

What lies where is said in `checkpoint.mapping`; `held` adds what this rank holds of it. Loading copies rectangles out of safetensors
files, exporting collects them on rank 0 tensor by tensor, digests need no exchange of weights at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_ext import weight_digest as digest
from megatron_ext.checkpoint import mapping
from megatron_ext.checkpoint.hf_folder import SafetensorsFolder, copy_companions, remove_weights, write_safetensors
from megatron_ext.checkpoint.mapping import MegatronTensor, ModelShape
from megatron_ext.checkpoint.tensors import CheckpointError, TensorSpec
from megatron_ext.train.moe import OutputColumnLinear


@dataclass(frozen=True)
class Held:
    """A parameter of this rank: its part of a Megatron tensor, or of one expert in it. ranks: among how many the tensor is cut."""

    tensor: MegatronTensor
    weight: torch.Tensor
    rank: int = 0
    ranks: int = 1
    expert: tuple[int, ...] = ()
    cut: int | None = None

    def rectangles(self) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """(view into the parameter, offsets in the Megatron tensor)"""
        lead = len(self.expert)
        if self.cut is None:
            yield self.weight, (*self.expert, *(0,) * self.weight.dim())
            return
        halves = self.weight.chunk(2, self.cut - lead) if self.tensor.gated else (self.weight,)
        for index, view in enumerate(halves):
            size, offsets = view.shape[self.cut - lead], [*self.expert, *(0,) * self.weight.dim()]
            offsets[self.cut] = (index * self.ranks + self.rank) * size
            yield view, tuple(offsets)


@dataclass(frozen=True)
class Shard:
    """A rectangle of the Hugging Face tensor `name`, as a writable view into a parameter of this rank."""

    name: str
    logical_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    view: torch.Tensor

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.view.shape, strict=True))


def shards(model, vocab_size: int) -> Iterator[Shard]:
    """Every rectangle that this rank's pipeline stage (an unwrapped GPTModel) holds. Vocabulary padding belongs to none."""
    for part in held(model, vocab_size):
        lead = len(part.expert)
        pieces = [piece for piece in part.tensor.pieces if piece.at[:lead] == part.expert]
        for view, offsets in part.rectangles():
            for piece in pieces:
                found = mapping.overlap(piece, offsets, (*(1,) * lead, *view.shape))
                if found is not None:
                    there, here = found
                    yield Shard(piece.name, piece.logical_shape, tuple(s.start for s in there), view[here[lead:]])


def held(model, vocab_size: int) -> Iterator[Held]:
    """What this rank's pipeline stage holds."""
    shape, tp = _model_shape(model, vocab_size), mpu.get_tensor_model_parallel_group()
    if model.pre_process:
        yield _cut(mapping.embedding(shape), model.embedding.word_embeddings.weight, tp)
    for layer in model.decoder.layers:
        yield from _layer(layer, shape, tp)
    if model.post_process:
        yield Held(mapping.final_norm(shape), model.decoder.final_layernorm.weight.data)
        if not (shape.tied and model.pre_process):
            yield _cut(mapping.head(shape), model.output_layer.weight, tp)


def _model_shape(model, vocab_size: int) -> ModelShape:
    config = model.config
    return ModelShape(
        hidden=config.hidden_size, heads=config.num_attention_heads, groups=config.num_query_groups, head_dim=config.kv_channels,
        dense_width=config.ffn_hidden_size, experts=config.num_moe_experts or 0, expert_width=config.moe_ffn_hidden_size or 0, vocab=vocab_size,
        tied=model.share_embeddings_and_output_weights, experts_in=(),
    )  # fmt: skip


def _cut(tensor: MegatronTensor, weight: torch.Tensor, group: dist.ProcessGroup, expert: tuple[int, ...] = (), cut: int | None = None) -> Held:
    return Held(tensor, weight.data, group.rank(), group.size(), expert, tensor.cut if cut is None else cut)


def _layer(layer, shape: ModelShape, tp: dist.ProcessGroup) -> Iterator[Held]:
    index, attention, mlp = layer.layer_number - 1, layer.self_attention, layer.mlp
    tensors = {tensor.name.split(".", 3)[3]: tensor for tensor in mapping.layer_tensors(shape, index, layer.is_moe_layer)}
    yield Held(tensors["self_attention.linear_qkv.layer_norm_weight"], layer.input_layernorm.weight.data)
    yield Held(tensors["mlp.linear_fc1.layer_norm_weight"], layer.pre_mlp_layernorm.weight.data)
    for name in ("linear_qkv", "linear_proj"):
        yield _cut(tensors[f"self_attention.{name}.weight"], getattr(attention, name).weight, tp)
    if attention.q_layernorm is not None:
        for name in ("q_layernorm", "k_layernorm"):
            yield Held(tensors[f"self_attention.{name}.weight"], getattr(attention, name).weight.data)
    if layer.is_moe_layer:
        yield from _experts(mlp, tensors, index)
    else:
        for name in ("linear_fc1", "linear_fc2"):
            yield _cut(tensors[f"mlp.{name}.weight"], getattr(mlp, name).weight, tp)


def _experts(moe, tensors: dict[str, MegatronTensor], layer: int) -> Iterator[Held]:
    yield Held(tensors["mlp.router.weight"], moe.router.weight.data)
    if getattr(moe.router, "expert_bias", None) is not None:
        bias = moe.router.expert_bias
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        yield Held(mapping.whole_tensor("mlp.router.expert_bias", name, tuple(bias.shape)), bias.data)
    fc1, fc2 = (tensors[f"mlp.experts.experts.{name}.weight"] for name in ("linear_fc1", "linear_fc2"))
    group = mpu.get_expert_tensor_parallel_group()
    for index, expert in zip(moe.local_expert_indices, moe.experts.local_experts, strict=True):
        yield _cut(fc1, expert.linear_fc1.weight, group, (index,))
        yield _cut(fc2, expert.linear_fc2.weight, group, (index,), cut=1 if isinstance(expert.linear_fc2, OutputColumnLinear) else None)


# Loading


def load_hf(model, vocab_size: int, folder: str | Path) -> None:
    """Copies every parameter of this rank from a Hugging Face folder; padded vocabulary rows become zero.

    Raises CheckpointError if a tensor is missing, has another shape or type, or if the folder holds tensors that no rank wants.
    """
    source = SafetensorsFolder(folder)
    with torch.no_grad():
        for part in held(model, vocab_size):
            if part.tensor.padded:
                part.weight.zero_()
        for shard in shards(model, vocab_size):
            shard.view.copy_(_read(source, shard))
    _check_all_wanted(source, {shard.name for shard in shards(model, vocab_size)}, model.share_embeddings_and_output_weights)


def _read(source: SafetensorsFolder, shard: Shard) -> torch.Tensor:
    expected, found = TensorSpec(shard.logical_shape, shard.view.dtype), source.specs.get(shard.name)
    if found != expected:
        raise CheckpointError(f"{shard.name}: expected {expected}, found {found or 'no such tensor'} in {source.folder}")
    return source.read_region(shard.name, shard.slices)


def _check_all_wanted(source: SafetensorsFolder, names: set[str], tied: bool) -> None:
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    unwanted = set(source.specs) - set().union(*everywhere) - ({mapping.HEAD} if tied else set())
    if unwanted:
        raise CheckpointError(f"{source.folder} holds tensors that this model has no place for: {sorted(unwanted)[:10]}")


# Digests and export


def digest_hf(model, vocab_size: int) -> dict[str, str]:
    """Digest of every logical tensor by its Hugging Face name, equal on all ranks. Raises DigestMismatch if replicas differ."""
    check_covered(model, vocab_size)
    regions: dict[str, list[digest.Region]] = {}
    for shard in shards(model, vocab_size):
        if shard.view.numel():
            regions.setdefault(shard.name, []).append(digest.region(shard.view, shard.logical_shape, shard.offsets))
    everywhere: list[dict[str, list[digest.Region]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, regions)
    return digest.merge(everywhere)


def check_covered(model, vocab_size: int) -> None:
    """Raises CheckpointError naming parameters, or buffers that carry state, which `held` leaves out: no sync would carry them."""
    covered = {part.weight.untyped_storage().data_ptr() for part in held(model, vocab_size)}
    missed = [name for name, tensor in _state(model) if tensor.numel() and tensor.untyped_storage().data_ptr() not in covered]
    if missed:
        raise CheckpointError(f"no Hugging Face tensor stands for {missed}; see megatron_ext/train/weights.py:held")


def _state(model) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def export_hf(model, vocab_size: int, folder: str | Path, like: str | Path | None = None) -> None:
    """Writes complete tensors as a Hugging Face folder, one after another on rank 0; other files are copied from `like`.

    Collective over all ranks. The folder is usable when the call returns on every rank.
    """
    folder = Path(folder)
    pieces, mine = _pieces(model, vocab_size)
    tensors = ((name, _collect(parts, mine.get(name, {}))) for name, parts in pieces.items())
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        remove_weights(folder)
        if like is not None and Path(like).resolve() != folder.resolve():
            copy_companions(Path(like), folder)
        write_safetensors(folder, {name: parts[0].spec for name, parts in pieces.items()}, tensors)
    else:
        for _ in tensors:
            pass
    dist.barrier()


@dataclass(frozen=True)
class _Piece:
    """A rectangle of a logical tensor, and the lowest rank that holds it, which sends it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    spec: TensorSpec


def _pieces(model, vocab_size: int) -> tuple[dict[str, list[_Piece]], dict]:
    """({name: its rectangles on all ranks, each once}, {name: {offsets: this rank's view}}). The same order on every rank."""
    mine: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    listing = {}
    for shard in shards(model, vocab_size):
        mine.setdefault(shard.name, {})[shard.offsets] = shard.view
        listing[shard.name, shard.offsets] = (tuple(shard.view.shape), TensorSpec(shard.logical_shape, shard.view.dtype))
    everywhere: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, listing)
    owners = {key: rank for rank, keys in reversed(list(enumerate(everywhere))) for key in keys}
    found: dict[str, list[_Piece]] = {}
    for name, offsets in sorted(owners):
        owner = owners[name, offsets]
        shape, spec = everywhere[owner][name, offsets]
        found.setdefault(name, []).append(_Piece(offsets, shape, owner, spec))
    return found, mine


def _collect(pieces: list[_Piece], mine: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor | None:
    """Assembles one logical tensor on rank 0. mine: this rank's rectangles of it, by offsets."""
    rank, spec = dist.get_rank(), pieces[0].spec
    whole = torch.empty(spec.shape, dtype=spec.dtype) if rank == 0 else None
    for piece in pieces:
        if piece.owner == rank:
            part = mine[piece.offsets].detach().contiguous()
            if rank != 0:
                dist.send(part.view(torch.uint8), dst=0)
        elif rank == 0:
            part = torch.empty(piece.shape, dtype=spec.dtype)
            dist.recv(part.view(torch.uint8), src=piece.owner)
        if whole is not None:
            whole[tuple(slice(start, start + size) for start, size in zip(piece.offsets, piece.shape, strict=True))] = part
    return whole
