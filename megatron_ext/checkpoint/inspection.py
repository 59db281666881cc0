"""`tools/inspect_checkpoint.py`: what a checkpoint holds, and in what two of them differ, whatever kind each is."""

from __future__ import annotations

import argparse
import collections
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megatron_ext.checkpoint.convert import EXPLAINED
from megatron_ext.checkpoint.folder import OpenCheckpoint, open_checkpoint
from megatron_ext.checkpoint.hf_config import flags_from_hf
from megatron_ext.checkpoint.hf_folder import DIGEST_FILE
from megatron_ext.checkpoint.meter import progress
from megatron_ext.checkpoint.tensors import LogicalTensors, TensorSpec, digests, dtype_name
from megatron_ext.checkpoint.torch_dist import TorchDistFolder, read_common
from megatron_ext.weight_digest import check_equal

LOG_WIDTH = 160
console = Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
notices = Console(highlight=False, stderr=True)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """Everything but the tensors' values."""
    specs = checkpoint.tensors.specs
    types: dict[str, int] = collections.Counter()
    for spec in specs.values():
        types[dtype_name(spec.dtype)] += math.prod(spec.shape)
    return {
        "path": str(checkpoint.path), "kind": checkpoint.kind, "architecture": checkpoint.config["architectures"][0],
        "layers": checkpoint.shape.layers, "tied embeddings": checkpoint.shape.tied, "tensors": len(specs), "parameters": sum(types.values()),
        "bytes": sum(spec.nbytes for spec in specs.values()), "parameters by type": dict(types),
        **(_describe_megatron(checkpoint.tensors) if isinstance(checkpoint.tensors, TorchDistFolder) else _describe_files(checkpoint.path, "*.safetensors")),
    }  # fmt: skip


def _describe_files(folder: Path, pattern: str) -> dict[str, Any]:
    sizes = [file.stat().st_size for file in folder.glob(pattern)]
    return {"files": len(sizes), "file bytes": sum(sizes)}


def _describe_megatron(folder: TorchDistFolder) -> dict[str, Any]:
    common, stored = read_common(folder.folder), folder.metadata.state_dict_metadata
    args = common.get("args")
    sizes = {"TP": "tensor_model_parallel_size", "PP": "pipeline_model_parallel_size", "EP": "expert_model_parallel_size",
             "ETP": "expert_tensor_parallel_size"}  # fmt: skip
    return {
        **_describe_files(folder.folder, "*.distcp"), "iteration": common.get("iteration"),
        "written by a layout of": {name: getattr(args, field, None) for name, field in sizes.items()} if args else None,
        "chunks": sum(len(entry.chunks) for entry in stored.values() if hasattr(entry, "chunks")),
        "rows of the padded vocabulary": stored["embedding.word_embeddings.weight"].size[0],
        "keys": "one per layer" if any(key.startswith("decoder.layers.0.") for key in stored) else "shared by all layers",
        "optimizer tensors": sum("optimizer" in key and hasattr(entry, "chunks") for key, entry in stored.items()),
    }  # fmt: skip


def check_kept_digests(checkpoint: OpenCheckpoint, found: dict[str, str]) -> bool:
    """Whether the folder keeps digests (convert_checkpoint --verify). Raises DigestMismatch if a tensor has changed since."""
    file = checkpoint.path / DIGEST_FILE
    if file.exists():
        check_equal(json.loads(file.read_text()), found, (DIGEST_FILE, "found"))
    return file.exists()


# Comparison


@dataclass(frozen=True)
class Difference:
    """A tensor in which two checkpoints differ. elements: how many differ in bits; largest: of their absolute differences."""

    name: str
    left: str
    right: str
    elements: int | None = None
    largest: float | None = None


def compare(left: LogicalTensors, right: LogicalTensors, on_bytes=lambda count: None) -> Iterator[Difference]:
    """Every logical tensor that is missing on one side, or whose shape, type or bits differ."""
    for name in dict.fromkeys([*left.specs, *right.specs]):
        specs = left.specs.get(name), right.specs.get(name)
        if specs[0] != specs[1]:
            yield Difference(name, *(str(spec) if spec else "absent" for spec in specs))
            continue
        elements, largest = _compare_values(left, right, name, specs[0], on_bytes)
        if elements:
            yield Difference(name, str(specs[0]), str(specs[1]), elements, largest)


def _compare_values(left: LogicalTensors, right: LogicalTensors, name: str, spec: TensorSpec, on_bytes) -> tuple[int, float]:
    elements, largest = 0, 0.0
    for start, stop in left.slabs(name):
        one, other = left.read(name, start, stop), right.read(name, start, stop)
        width = _BITS[spec.dtype.itemsize]
        differing = one.view(width) != other.view(width)
        if count := int(differing.sum()):
            elements += count
            largest = max(largest, float((one[differing].double() - other[differing].double()).abs().max()))
        on_bytes(one.nbytes)
    return elements, largest


def differing_flags(left: OpenCheckpoint, right: OpenCheckpoint) -> list[str]:
    """Megatron model flags that only one side's configuration asks for."""
    flags = [_with_values(flags_from_hf(checkpoint.config)) for checkpoint in (left, right)]
    return [f"{mark} {flag}" for mark, mine, other in (("left:", *flags), ("right:", *flags[::-1])) for flag in sorted(mine - other)]


def _with_values(flags: list[str]) -> set[str]:
    joined: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            joined.append(flag)
        else:
            joined[-1] += f" {flag}"
    return set(joined)


# Command line


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="inspect_checkpoint", description=__doc__, allow_abbrev=False)
    parser.add_argument("path", help="Hugging Face folder, Megatron checkpoint directory or an iteration's folder")
    parser.add_argument("--against", metavar="DIR", help="compare with this one; exit status 1 if a tensor or the model differs")
    parser.add_argument("--like", metavar="DIR", help="Hugging Face folder with the config.json of Megatron checkpoints that carry none")
    parser.add_argument("--tensors", action="store_true", help="list every logical tensor")
    parser.add_argument("--digests", action="store_true", help="digest of every logical tensor, as both engines compute it; checked against kept ones")
    parser.add_argument("--json", metavar="FILE", help="write everything there as well")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> bool:
    """Prints what was asked for; returns whether everything is equal."""
    checkpoint = open_checkpoint(args.path, args.like)
    result: dict[str, Any] = {"checkpoint": describe(checkpoint)}
    _print_summary(result["checkpoint"])
    if args.digests:
        result["digests"] = _digests(checkpoint)
    if args.tensors or args.digests:
        _print_tensors(checkpoint.tensors, result.get("digests", {}))
    equal = _compare_with(checkpoint, args, result) if args.against else True
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return equal


def _digests(checkpoint: OpenCheckpoint) -> dict[str, str]:
    total = sum(spec.nbytes for spec in checkpoint.tensors.specs.values())
    with progress(notices, "digests", total) as on_bytes:
        found = digests(checkpoint.tensors, on_bytes)
    if check_kept_digests(checkpoint, found):
        console.print(f"all digests are those of {DIGEST_FILE}")
    return found


def _compare_with(checkpoint: OpenCheckpoint, args: argparse.Namespace, result: dict[str, Any]) -> bool:
    other = open_checkpoint(args.against, args.like)
    result["against"] = describe(other)
    _print_summary(result["against"])
    result["flags"] = differing_flags(checkpoint, other)
    for line in result["flags"]:
        console.print(f"model differs, {line}")
    total = sum(spec.nbytes for spec in checkpoint.tensors.specs.values())
    with progress(notices, "comparing", total) as on_bytes:
        found = list(compare(checkpoint.tensors, other.tensors, on_bytes))
    result["differences"] = [asdict(difference) for difference in found]
    _print_differences(found)
    console.print(f"{len(found)} of {len(checkpoint.tensors.specs)} tensors differ" if found else f"all {len(other.tensors.specs)} tensors are equal, bit for bit")
    return not found and not result["flags"]


def _print_summary(description: dict[str, Any]) -> None:
    table = Table(show_header=False)
    for key, value in description.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        shown = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else shown
        table.add_row(key, str(shown))
    console.print(table)


def _print_tensors(tensors: LogicalTensors, found: dict[str, str]) -> None:
    for name, spec in tensors.specs.items():
        console.print(f"{name}  {found.get(name, spec)}", soft_wrap=True, markup=False)


def _print_differences(found: list[Difference]) -> None:
    for d in found:
        values = f"{d.elements} elements, at most {d.largest:.6g} apart" if d.elements else f"{d.left} and {d.right}"
        console.print(f"differs: {d.name}: {values}", soft_wrap=True, markup=False)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return 0 if run(args) else 1
    except EXPLAINED as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
