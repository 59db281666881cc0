"""Hugging Face weights in and out of a running Megatron model, without ever holding the whole model on one rank.

Everything is said once, in `shards`: which rectangle of which Hugging Face tensor each parameter of this rank holds. Loading
copies rectangles out of safetensors files, exporting collects them on rank 0 tensor by tensor, digests need no exchange of
weights at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_ext import weight_digest as digest
from megatron_ext.train.moe import OutputColumnLinear

MAX_FILE_BYTES = 2 << 30
INDEX_FILE = "model.safetensors.index.json"


class WeightError(RuntimeError):
    """Hugging Face weights and the model do not fit together; says which tensors."""


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
    if model.pre_process:
        yield _vocab_shard("model.embed_tokens.weight", model.embedding.word_embeddings.weight, vocab_size)
    for layer in model.decoder.layers:
        yield from _layer_shards(layer, f"model.layers.{layer.layer_number - 1}.")
    if model.post_process:
        yield _whole("model.norm.weight", model.decoder.final_layernorm.weight)
        tied = model.share_embeddings_and_output_weights
        if not (tied and model.pre_process):
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            yield _vocab_shard(name, model.output_layer.weight, vocab_size)


def _whole(name: str, weight: torch.Tensor) -> Shard:
    return Shard(name, tuple(weight.shape), (0,) * weight.dim(), weight.data)


def _cut(name: str, view: torch.Tensor, dim: int, ranks: int, rank: int) -> Shard:
    """An equal part of `dim`."""
    logical, offsets = list(view.shape), [0] * view.dim()
    logical[dim] *= ranks
    offsets[dim] = rank * view.shape[dim]
    return Shard(name, tuple(logical), tuple(offsets), view)


def _vocab_shard(name: str, weight: torch.Tensor, vocab_size: int) -> Shard:
    first = mpu.get_tensor_model_parallel_rank() * weight.shape[0]
    real = min(max(vocab_size - first, 0), weight.shape[0])
    return Shard(name, (vocab_size, weight.shape[1]), (min(first, vocab_size), 0), weight.data[:real])


def _layer_shards(layer, prefix: str) -> Iterator[Shard]:
    yield _whole(prefix + "input_layernorm.weight", layer.input_layernorm.weight)
    yield _whole(prefix + "post_attention_layernorm.weight", layer.pre_mlp_layernorm.weight)
    yield from _attention_shards(layer.self_attention, prefix + "self_attn.")
    if layer.is_moe_layer:
        yield from _moe_shards(layer.mlp, prefix + "mlp.")
    else:
        yield from _mlp_shards(layer.mlp, prefix + "mlp.", mpu.get_tensor_model_parallel_group())


def _attention_shards(attention, prefix: str) -> Iterator[Shard]:
    tp = mpu.get_tensor_model_parallel_group()
    yield from _qkv_shards(attention, prefix)
    yield _cut(prefix + "o_proj.weight", attention.linear_proj.weight.data, 1, tp.size(), tp.rank())
    if attention.q_layernorm is not None:
        yield _whole(prefix + "q_norm.weight", attention.q_layernorm.weight)
        yield _whole(prefix + "k_norm.weight", attention.k_layernorm.weight)


def _qkv_shards(attention, prefix: str) -> Iterator[Shard]:
    """Megatron stores query group after query group: its queries, then its key, then its value."""
    config, tp = attention.config, mpu.get_tensor_model_parallel_group()
    head, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups * head
    here = groups // tp.size()
    weight = attention.linear_qkv.weight.data.view(here, queries + 2 * head, -1)
    parts = {"q_proj": (0, queries), "k_proj": (queries, head), "v_proj": (queries + head, head)}
    for name, (start, size) in parts.items():
        for index in range(here):
            group = tp.rank() * here + index
            view = weight[index, start : start + size]
            yield Shard(f"{prefix}{name}.weight", (groups * size, weight.shape[2]), (group * size, 0), view)


def _mlp_shards(mlp, prefix: str, group: dist.ProcessGroup) -> Iterator[Shard]:
    gate, up = mlp.linear_fc1.weight.data.chunk(2)
    yield _cut(prefix + "gate_proj.weight", gate, 0, group.size(), group.rank())
    yield _cut(prefix + "up_proj.weight", up, 0, group.size(), group.rank())
    down_dim = 0 if isinstance(mlp.linear_fc2, OutputColumnLinear) else 1
    yield _cut(prefix + "down_proj.weight", mlp.linear_fc2.weight.data, down_dim, group.size(), group.rank())


def _moe_shards(moe, prefix: str) -> Iterator[Shard]:
    yield _whole(prefix + "gate.weight", moe.router.weight)
    if getattr(moe.router, "expert_bias", None) is not None:
        yield _whole(prefix + "gate.e_score_correction_bias", moe.router.expert_bias)
    for index, expert in zip(moe.local_expert_indices, moe.experts.local_experts, strict=True):
        yield from _mlp_shards(expert, f"{prefix}experts.{index}.", mpu.get_expert_tensor_parallel_group())


# Loading


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read by slices."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise WeightError(f"no *.safetensors in {self.folder}; expected a Hugging Face folder with safetensors weights")
        self._files = [safe_open(file, "pt") for file in files]
        self._file_of = {name: file for file in self._files for name in file.keys()}

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, shard: Shard) -> torch.Tensor:
        """The shard's rectangle. Raises WeightError if the tensor is missing or has another shape."""
        if shard.name not in self._file_of:
            raise WeightError(f"{shard.name} {shard.logical_shape}: not in {self.folder}")
        tensor = self._file_of[shard.name].get_slice(shard.name)
        if tuple(tensor.get_shape()) != shard.logical_shape:
            raise WeightError(f"{shard.name}: expected shape {shard.logical_shape}, found {tuple(tensor.get_shape())} in {self.folder}")
        return tensor[shard.slices]


def load_hf(model, vocab_size: int, folder: str | Path) -> None:
    """Copies every parameter of this rank from a Hugging Face folder; padded vocabulary rows become zero.

    Raises WeightError if a tensor is missing, has another shape or type, or if the folder holds tensors that no rank wants.
    """
    source = SafetensorsFolder(folder)
    with torch.no_grad():
        for weight in _vocab_weights(model):
            weight.zero_()
        for shard in shards(model, vocab_size):
            tensor = source.read(shard)
            if tensor.dtype != shard.view.dtype:
                raise WeightError(f"{shard.name}: expected type {shard.view.dtype}, found {tensor.dtype} in {source.folder}")
            shard.view.copy_(tensor)
    _check_all_wanted(source, {shard.name for shard in shards(model, vocab_size)}, model.share_embeddings_and_output_weights)


def _vocab_weights(model) -> list[torch.Tensor]:
    weights = [model.embedding.word_embeddings.weight] if model.pre_process else []
    if model.post_process and model.output_layer.weight is not None:
        weights.append(model.output_layer.weight)
    return weights


def _check_all_wanted(source: SafetensorsFolder, names: set[str], tied: bool) -> None:
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    unwanted = source.names() - set().union(*everywhere) - ({"lm_head.weight"} if tied else set())
    if unwanted:
        raise WeightError(f"{source.folder} holds tensors that this model has no place for: {sorted(unwanted)[:10]}")


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
    """Raises WeightError naming parameters, or buffers that carry state, which `shards` leaves out: no sync would carry them."""
    covered = {shard.view.untyped_storage().data_ptr() for shard in shards(model, vocab_size)}
    missed = [name for name, tensor in _state(model) if tensor.numel() and tensor.untyped_storage().data_ptr() not in covered]
    if missed:
        raise WeightError(f"no Hugging Face tensor stands for {missed}; see megatron_ext/train/weights.py:shards")


def _state(model) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def export_hf(model, vocab_size: int, folder: str | Path, like: str | Path | None = None) -> None:
    """Writes complete tensors as a Hugging Face folder, file by file on rank 0; other files are copied from `like`.

    Collective over all ranks. The folder is usable when the call returns on every rank.
    """
    folder, rank = Path(folder), dist.get_rank()
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_companions(like, folder)
    writer = _Writer(folder) if rank == 0 else None
    for name, tensor in _logical_tensors(model, vocab_size):
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.finish()
    dist.barrier()


def _logical_tensors(model, vocab_size: int) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Every logical tensor in name order; complete on rank 0, None elsewhere. Each rectangle is sent by its lowest rank."""
    mine = {(shard.name, shard.offsets): shard for shard in shards(model, vocab_size) if shard.view.numel()}
    listing = {key: (shard.logical_shape, tuple(shard.view.shape), shard.view.dtype) for key, shard in mine.items()}
    everywhere: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, listing)
    owners = {key: rank for rank, keys in reversed(list(enumerate(everywhere))) for key in keys}
    by_name: dict[str, list[tuple]] = {}
    for key in sorted(owners):
        by_name.setdefault(key[0], []).append(key)
    for name, keys in by_name.items():
        yield name, _collect(name, [(key, owners[key], everywhere[owners[key]][key]) for key in keys], mine)


def _collect(name: str, pieces: list[tuple], mine: dict) -> torch.Tensor | None:
    """Assembles one logical tensor on rank 0."""
    rank = dist.get_rank()
    _, _, (logical_shape, _, dtype) = pieces[0]
    whole = torch.empty(logical_shape, dtype=dtype) if rank == 0 else None
    for key, owner, (_, shape, _) in pieces:
        if owner == rank:
            piece = mine[key].view.detach().contiguous()
            if rank != 0:
                dist.send(piece.view(torch.uint8), dst=0)
        elif rank == 0:
            piece = torch.empty(shape, dtype=dtype)
            dist.recv(piece.view(torch.uint8), src=owner)
        if whole is not None:
            whole[tuple(slice(start, start + size) for start, size in zip(key[1], shape, strict=True))] = piece
    return whole


def _copy_companions(like: str | Path | None, folder: Path) -> None:
    """Configuration and tokenizer files; never weights."""
    if like is None or Path(like).resolve() == folder.resolve():
        return
    for file in Path(like).iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX_FILE:
            shutil.copy(file, folder / file.name)


class _Writer:
    """Collects tensors into files of bounded size; names them by the Hugging Face convention once their number is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[tuple[Path, list[str], int]] = []
        for stale in folder.glob("*.safetensors"):
            stale.unlink()
        (folder / INDEX_FILE).unlink(missing_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and _bytes([*self._pending.values(), tensor]) > MAX_FILE_BYTES:
            self._flush()
        self._pending[name] = tensor

    def finish(self) -> None:
        self._flush()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for index, (file, names, _) in enumerate(self._files, 1):
            final = f"model-{index:05d}-of-{len(self._files):05d}.safetensors"
            file.rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        total = sum(size for _, _, size in self._files)
        (self._folder / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))

    def _flush(self) -> None:
        file = self._folder / f"part-{len(self._files)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._files.append((file, list(self._pending), _bytes(self._pending.values())))
        self._pending = {}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
