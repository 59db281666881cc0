"""Hugging Face folders: safetensors read by rows, and written tensor by tensor without holding a file in memory.

Only safetensors: no pickle of a Hugging Face folder is ever loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_ext.checkpoint.tensors import CheckpointError, LogicalTensors, TensorSpec, row_slabs, stream

MAX_FILE_BYTES = 4 << 30
INDEX_FILE, CONFIG_FILE = "model.safetensors.index.json", "config.json"
DIGEST_FILE = "digests.json"  # of one folder's tensors: it does not go along
# Configuration, tokenizer and licence files go along with weights; nothing else does.
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_COMPANION_NAMES = ("LICENSE", "NOTICE")
# Names of types in a safetensors header (https://huggingface.co/docs/safetensors, "Format").
_TYPE_CODES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}
_TYPES = {code: dtype for dtype, code in _TYPE_CODES.items()}


class SafetensorsFolder:
    """The tensors of a Hugging Face folder.

    Raises CheckpointError naming file and tensor: no safetensors, a truncated file, a file or tensor of the index that is missing, a
    tensor in two files, a type that is not supported.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        names = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"no *.safetensors in {self.folder}; expected a Hugging Face folder with safetensors weights")
        self._file_of: dict[str, str] = {}
        self._files = {name: _open(self.folder / name) for name in names}
        self.specs: dict[str, TensorSpec] = {}
        for file_name, file in self._files.items():
            for name in file.keys():
                self._add(name, file_name)
        self._check_index()

    def _add(self, name: str, file_name: str) -> None:
        if name in self._file_of:
            raise CheckpointError(f"{name}: found in two files of {self.folder}, {self._file_of[name]} and {file_name}")
        found = self._files[file_name].get_slice(name)
        if found.get_dtype() not in _TYPES:
            raise CheckpointError(f"{self.folder / file_name}: {name} is of type {found.get_dtype()}; expected one of {sorted(_TYPES)}")
        self._file_of[name] = file_name
        self.specs[name] = TensorSpec(tuple(found.get_shape()), _TYPES[found.get_dtype()])

    def _check_index(self) -> None:
        index = self.folder / INDEX_FILE
        if not index.exists():
            return
        try:
            expected = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index}: no index of safetensors files ({error!r})") from error
        for name, file_name in sorted(expected.items()):
            if file_name not in self._files:
                raise CheckpointError(f"{self.folder / file_name}: missing; the index has {name} in it")
            if self._file_of.get(name) != file_name:
                raise CheckpointError(f"{self.folder / file_name}: lacks {name}, which the index has in it; found in {self._file_of.get(name)}")
        extra = sorted(self._file_of.keys() - expected.keys())
        if extra:
            raise CheckpointError(f"{self.folder / self._file_of[extra[0]]}: holds {extra[0]}, which {INDEX_FILE} does not know")

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.folder / self._file_of[name]

    def slabs(self, name: str) -> Iterator[tuple[int, int]]:
        return row_slabs(self.specs[name])

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.read_region(name, (slice(start, stop),))

    def read_region(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A rectangle; dimensions without a slice are whole. Raises CheckpointError if there is no such tensor."""
        if name not in self._file_of:
            raise CheckpointError(f"{name}: not in {self.folder}")
        return self._files[self._file_of[name]].get_slice(name)[slices]


def _open(file: Path):
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from error


def check_tensors(folder: SafetensorsFolder, expected: Mapping[str, tuple[int, ...]], tied_head: str | None = None) -> None:
    """Raises CheckpointError listing tensors that are missing, unexpected or of another shape. tied_head: a tensor that may be there."""
    problems = [f"{name}: missing in {folder.folder}" for name in expected if name not in folder.specs]
    for name, spec in folder.specs.items():
        if name in expected and spec.shape != expected[name]:
            problems.append(f"{name}: expected shape {list(expected[name])}, found {list(spec.shape)} in {folder.where(name)}")
        elif name not in expected and name != tied_head:
            problems.append(f"{name}: unexpected, in {folder.where(name)}")
    raise_listed(f"{folder.folder} does not hold the model of its {CONFIG_FILE}", problems)


def raise_listed(title: str, problems: list[str], shown: int = 10) -> None:
    """Raises CheckpointError if there are problems."""
    if problems:
        more = [f"  ... and {len(problems) - shown} more"] if len(problems) > shown else []
        raise CheckpointError("\n".join([f"{title}:", *(f"  - {problem}" for problem in problems[:shown]), *more]))


# Writing


def write_safetensors(
    folder: Path, specs: Mapping[str, TensorSpec], slabs: Iterable[tuple[str, torch.Tensor]], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Writes tensors as one or several safetensors files, the latter with an index. At most one slab is in memory.

    slabs: (name, rows), in the order of `specs`, rows of a tensor one after another. A file that is not finished is shorter than
    its header says, which every reader refuses. Raises CheckpointError if a slab does not continue its tensor.
    """
    files = _plan_files(specs, max_file_bytes)
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)] if len(files) > 1 else ["model.safetensors"]
    stream = iter(slabs)
    for name, members in zip(names, files, strict=True):
        with open(folder / name, "wb") as file:
            file.write(_header({member: specs[member] for member in members}))
            for member in members:
                _write_tensor(file, member, specs[member], stream)
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        weight_map = {member: name for name, members in zip(names, files, strict=True) for member in members}
        total = sum(spec.nbytes for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _plan_files(specs: Mapping[str, TensorSpec], limit: int) -> list[list[str]]:
    """Names per file, none larger than `limit` unless a single tensor is."""
    files: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if files[-1] and size + spec.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += spec.nbytes
    return files


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Eight bytes of length, then JSON padded by spaces to a multiple of 8 (https://huggingface.co/docs/safetensors, "Format")."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        start, end = end, end + spec.nbytes
        entries[name] = {"dtype": _TYPE_CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file, name: str, spec: TensorSpec, slabs: Iterator[tuple[str, torch.Tensor]]) -> None:
    written = 0
    while written < spec.nbytes:
        found, slab = next(slabs, (None, None))
        if found != name or slab.dtype != spec.dtype or written + slab.nbytes > spec.nbytes:
            raise CheckpointError(f"{name}: expected {spec.nbytes - written} more bytes of {spec}, found a slab of {found}")
        file.write(slab.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        written += slab.nbytes


def write_hf(folder: Path, source: LogicalTensors, on_bytes: Callable[[int], None] = lambda count: None, limit: int = MAX_FILE_BYTES) -> None:
    """Logical tensors as safetensors files."""

    def counted():
        for name, slab in stream(source):
            on_bytes(slab.nbytes)
            yield name, slab

    write_safetensors(folder, source.specs, counted(), limit)


def remove_weights(folder: Path) -> None:
    for stale in folder.glob("*.safetensors"):
        stale.unlink()
    (folder / INDEX_FILE).unlink(missing_ok=True)


def companions(folder: Path) -> list[Path]:
    """Configuration, tokenizer and licence files of a folder; never weights."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.endswith((".index.json", DIGEST_FILE)))
    return [file for file in files if file.suffix in _COMPANION_SUFFIXES or file.name.startswith(_COMPANION_NAMES)]


def copy_companions(source: Path, folder: Path) -> None:
    for file in companions(source):
        shutil.copyfile(file, folder / file.name)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
