"""Megatron's torch_dist checkpoints, read and written by one process, chunk by chunk.

The format is torch.distributed.checkpoint's (DCP): `.metadata` says which chunk of which tensor lies where in which file. DCP's own
storage classes do the reading and writing here; the plans, which Megatron's ranks would make together, are made by one process for all
of them, and data is fetched when its turn comes.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter, LoadPlan, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ext.checkpoint.hf_folder import raise_listed
from megatron_ext.checkpoint.mapping import MegatronTensor, ModelShape, Piece, megatron_tensors, overlap
from megatron_ext.checkpoint.megatron_layout import Chunk, MegatronLayout, chunks
from megatron_ext.checkpoint.tensors import SLAB_BYTES, CheckpointError, LogicalTensors, TensorSpec

TRACKER_FILE, FORMAT_FILE, DCP_FILE = "latest_checkpointed_iteration.txt", "metadata.json", ".metadata"
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")
_EXTRA_STATE = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")  # modules that Megatron saves one for
COMMON_STATE = "common_state/shard_0_1"
# How to build the sharded state dict that finds our keys (megatron.core.dist_checkpointing: content_metadata).
CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "non_homogeneous_layers": True}


# Writing


def write_torch_dist(
    folder: Path, shape: ModelShape, layout: MegatronLayout, source: LogicalTensors, padded_vocab: int, common: Mapping[str, Any],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:  # fmt: skip
    """Writes what Megatron's ranks of `layout` would write, into an empty folder. `metadata.json`, without which Megatron takes the
    folder for no checkpoint, comes last. common: the state that all ranks share (args, iteration, ...)."""
    planner, plans = _Planner(source, on_bytes), [[] for _ in range(layout.ranks)]
    for tensor in megatron_tensors(shape, padded_vocab):
        dtype = tensor_dtype(tensor, source.specs)
        for chunk in chunks(tensor, layout, shape.layers, dtype.itemsize, SLAB_BYTES):
            plans[chunk.rank].append(planner.tensor_item(tensor, chunk, dtype))
        owner = chunk.rank
        for name in _extra_state_names(tensor):
            plans[owner].append(planner.object_item(name, None))
    plans[0].append(planner.object_item(COMMON_STATE, {**common, "content_metadata": CONTENT_METADATA}))
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    global_plans, metadata = create_default_global_save_plan(writer.prepare_global_plan([SavePlan(items) for items in plans]))
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in global_plans])
    (folder / FORMAT_FILE).write_text(json.dumps(_FORMAT))


def tensor_dtype(tensor: MegatronTensor, specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """Type of a Megatron tensor. Raises CheckpointError if its pieces have different ones."""
    found = {specs[piece.name].dtype: piece.name for piece in tensor.pieces}
    if len(found) != 1:
        kinds = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        raise CheckpointError(f"{tensor.name} would join tensors of different types ({kinds}); convert with one type for all (--dtype)")
    return next(iter(found))


def _extra_state_names(tensor: MegatronTensor) -> Iterator[str]:
    if not tensor.name.endswith(_EXTRA_STATE):
        return
    count = tensor.shape[0] if tensor.per_expert else 1
    yield from (f"{tensor.name.removesuffix('weight')}_extra_state/shard_{index}_{count}" for index in range(count))


class _Planner(DefaultSavePlanner):
    """Hands the writer each item's data when it comes to write it."""

    def __init__(self, source: LogicalTensors, on_bytes: Callable[[int], None]) -> None:
        super().__init__()
        self._source, self._on_bytes = source, on_bytes
        self._tensors: dict[tuple[str, torch.Size], tuple[MegatronTensor, Chunk, torch.dtype]] = {}
        self._objects: dict[str, Any] = {}

    def tensor_item(self, tensor: MegatronTensor, chunk: Chunk, dtype: torch.dtype) -> WriteItem:
        offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
        self._tensors[tensor.name, offsets] = (tensor, chunk, dtype)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=dtype), torch.Size(tensor.shape))
        return WriteItem(MetadataIndex(tensor.name, offsets), WriteItemType.SHARD, tensor_data=data)

    def object_item(self, name: str, value: Any) -> WriteItem:
        self._objects[name] = value
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, offset = write_item.index.fqn, write_item.index.offset
        if write_item.type == WriteItemType.BYTE_IO:
            data = io.BytesIO()
            torch.save([self._objects[name]], data)
            return data
        data = read_chunk(self._source, *self._tensors[name, offset])
        self._on_bytes(data.nbytes)
        return data


def read_chunk(source: LogicalTensors, tensor: MegatronTensor, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """A chunk of a Megatron tensor, put together from logical tensors; vocabulary padding is zero."""
    whole = torch.zeros(chunk.sizes, dtype=dtype)
    for piece in tensor.pieces:
        found = overlap(piece, chunk.offsets, chunk.sizes)
        if found is not None:
            there, here = found
            rows, *columns = there
            whole[here] = source.read(piece.name, rows.start, rows.stop)[(slice(None), *columns)]
    return whole


# Reading


class TorchDistFolder:
    """The weights of a Megatron checkpoint as logical tensors; optimizer and other state is left alone.

    folder: that of one iteration. Layers may have keys of their own or share one, expert layers may name their norm as either of
    Megatron's layer specs does. Raises CheckpointError naming file and tensor.
    """

    def __init__(self, folder: str | Path, shape: ModelShape) -> None:
        self.folder, self._shape = Path(folder), shape
        self.metadata, self._reader = open_metadata(self.folder)
        self._stored = {k: v for k, v in self.metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.specs: dict[str, TensorSpec] = {}
        self._home: dict[str, tuple[MegatronTensor, str, tuple[int, ...]]] = {}  # of a logical tensor: key and leading indices
        self._pieces: dict[str, list[Piece]] = {}
        self._last: tuple[Any, torch.Tensor] | None = None
        self._locate_all()
        _check_files(self.folder, self.metadata)

    def _locate_all(self) -> None:
        problems, used = [], set()
        for tensor in megatron_tensors(self._shape):
            key, lead, problem = self._locate(tensor)
            if problem:
                problems.append(problem)
                continue
            used.add(key)
            for piece in tensor.pieces:
                self._home[piece.name] = (tensor, key, lead)
                self._pieces.setdefault(piece.name, []).append(piece)
                self.specs[piece.name] = TensorSpec(piece.logical_shape, self._stored[key].properties.dtype)
        unexpected = [key for key in self._stored if key.startswith(_MODEL_PREFIXES) and key not in used]
        problems += [f"{key} {list(self._stored[key].size)}: unexpected, in {self.folder / DCP_FILE}" for key in unexpected]
        raise_listed(f"{self.folder} does not hold the model of its configuration", problems)

    def _locate(self, tensor: MegatronTensor) -> tuple[str, tuple[int, ...], str | None]:
        """(key, leading indices, what is wrong) of a Megatron tensor."""
        for key, lead, layers in _candidates(tensor, self._shape.layers):
            if key not in self._stored:
                continue
            found, expected = tuple(self._stored[key].size), (*layers, *tensor.shape)
            fits = found == expected or (tensor.padded and found[1:] == expected[1:] and found[0] >= expected[0])
            return key, lead, None if fits else f"{key}: expected shape {list(expected)}, found {list(found)} in {self.folder / DCP_FILE}"
        return "", (), f"{tensor.name} ({tensor.pieces[0].name}): missing in {self.folder / DCP_FILE}"

    def slabs(self, name: str) -> Iterator[tuple[int, int]]:
        """The stored chunks of vocabulary tensors; everything else is small enough to come whole."""
        tensor, key, _ = self._home[name]
        rows = self.specs[name].shape[0]
        starts = sorted({min(chunk.offsets[0], rows) for chunk in self._stored[key].chunks} if tensor.padded else {0})
        yield from ((start, stop) for start, stop in zip(starts, [*starts[1:], rows], strict=True) if start < stop)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor, key, lead = self._home[name]
        if tensor.padded:
            return self._rectangle(key, (start, 0), (stop - start, tensor.shape[1]))
        pieces = self._pieces[name]
        inner = pieces[0].at[: len(tensor.shape) - len(pieces[0].shape)]  # of an expert
        unit = self._unit(key, (*lead, *inner), tensor.shape[len(inner) :])
        whole = torch.empty(self.specs[name].shape, dtype=unit.dtype)
        for piece in pieces:
            at = piece.at[len(inner) :]
            source = tuple(slice(a, a + size) for a, size in zip(at, piece.shape, strict=True))
            whole[tuple(slice(o, o + size) for o, size in zip(piece.offsets, piece.shape, strict=True))] = unit[source]
        return whole[start:stop]

    def _unit(self, key: str, lead: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """One layer's, or one expert's, part of a stored tensor. Kept, because queries, keys and values, or gate and up, share one."""
        if self._last is None or self._last[0] != (key, lead):
            self._last = None  # two at once are not needed
            offsets, sizes = (*lead, *(0,) * len(shape)), (*(1,) * len(lead), *shape)
            self._last = ((key, lead), self._rectangle(key, offsets, sizes).view(shape))
        return self._last[1]

    def _rectangle(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        stored = self._stored[key]
        items = create_read_items_for_chunk_list(key, stored, [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))])
        held = sum(math.prod(item.lengths) for item in items)
        if held != math.prod(sizes):
            raise CheckpointError(f"{key}: {self.folder} holds {held} of the {math.prod(sizes)} elements at {list(offsets)}, {list(sizes)}")
        into = torch.empty(sizes, dtype=stored.properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), _Into(into)).wait()
        except (OSError, RuntimeError, EOFError, AssertionError, pickle.UnpicklingError) as error:
            files = sorted({self.metadata.storage_data[item.storage_index].relative_path for item in items})
            raise CheckpointError(f"{key}: cannot be read from {', '.join(str(self.folder / file) for file in files)}: {error}") from error
        return into


class _Into(DefaultLoadPlanner):
    """Puts what the reader finds into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item) -> torch.Tensor:
        return self._target[tuple(slice(o, o + size) for o, size in zip(read_item.dest_offsets, read_item.lengths, strict=True))]

    def commit_tensor(self, read_item, tensor: torch.Tensor) -> None:
        """It is in place."""


def _candidates(tensor: MegatronTensor, layers: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(key, leading indices, leading sizes) under which a tensor may be stored."""
    names = [tensor.name]
    if tensor.name.endswith(".mlp.linear_fc1.layer_norm_weight"):
        names.append(tensor.name.replace(".mlp.linear_fc1.layer_norm_weight", ".pre_mlp_layernorm.weight"))
    for name in names:
        yield name, (), ()
        if tensor.layer is not None:
            yield name.replace(f"decoder.layers.{tensor.layer}.", "decoder.layers.", 1), (tensor.layer,), (layers,)


def open_metadata(folder: Path):
    """(DCP's metadata, a reader that knows it). Raises CheckpointError if this is no finished torch_dist checkpoint."""
    try:
        found = json.loads((folder / FORMAT_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / FORMAT_FILE}: {error}; expected a finished Megatron checkpoint") from error
    if found.get("sharded_backend") != _FORMAT["sharded_backend"]:
        raise CheckpointError(f"{folder / FORMAT_FILE}: expected the format {_FORMAT['sharded_backend']}, found {found.get('sharded_backend')}")
    reader = FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{folder / DCP_FILE}: cannot be read ({error!r})") from error
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return metadata, reader


def _check_files(folder: Path, metadata) -> None:
    """Raises CheckpointError naming every file that is missing or shorter than what the metadata says it holds."""
    ends: dict[str, tuple[int, str]] = {}
    for index, info in metadata.storage_data.items():
        ends[info.relative_path] = max(ends.get(info.relative_path, (0, "")), (info.offset + info.length, index.fqn))
    problems = []
    for name, (end, key) in sorted(ends.items()):
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size is None or size < end:
            problems.append(f"{folder / name}: " + (f"has {size} bytes of {end}" if size is not None else "missing") + f"; it holds {key}")
    raise_listed(f"{folder} is not whole", problems)


def iteration_folder(path: str | Path) -> Path:
    """The folder of the newest iteration of a checkpoint directory, or `path` if it is one itself. Raises CheckpointError."""
    path = Path(path)
    if (path / FORMAT_FILE).exists() or (path / DCP_FILE).exists():
        return path
    tracker = path / TRACKER_FILE
    try:
        name = tracker.read_text().strip()
        return path / (name if name == "release" else f"iter_{int(name):07d}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: no Megatron checkpoint ({error}); expected {TRACKER_FILE} or an iteration's folder") from error


def read_common(folder: Path) -> dict[str, Any]:
    """What all ranks share: args, iteration and the like, as Megatron reads it (weights_only)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages that are not needed, and that there is no process group
        from megatron.core.dist_checkpointing.serialization import load_common_state_dict

        try:
            return load_common_state_dict(str(folder))
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{folder}: {COMMON_STATE} cannot be read ({error})") from error
