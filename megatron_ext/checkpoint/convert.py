"""`tools/convert_checkpoint.py`: Hugging Face folders to Megatron checkpoints and back, tensor by tensor."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megatron_ext.checkpoint.folder import HF_COMPANIONS, OpenCheckpoint, open_hf, open_megatron
from megatron_ext.checkpoint.hf_config import UnsupportedModel, flags_from_hf
from megatron_ext.checkpoint.hf_folder import DIGEST_FILE, MAX_FILE_BYTES, SafetensorsFolder, copy_companions, write_config, write_hf
from megatron_ext.checkpoint.mapping import ModelShape
from megatron_ext.checkpoint.megatron_layout import LayoutError, MegatronLayout
from megatron_ext.checkpoint.meter import PeakMemory, progress
from megatron_ext.checkpoint.output import whole_folder
from megatron_ext.checkpoint.tensors import Cast, CheckpointError, LogicalTensors, digests, dtype_name
from megatron_ext.checkpoint.torch_dist import TRACKER_FILE, TorchDistFolder, write_torch_dist
from megatron_ext.reduction_order import OrderError, ReductionOrder
from megatron_ext.weight_digest import DigestMismatch, check_equal

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RELEASE = "release"
EXPLAINED = (CheckpointError, DigestMismatch, LayoutError, OrderError, UnsupportedModel)  # their text says what to do
console = Console(highlight=False, stderr=True)


def hf_to_megatron(
    hf: str, out: str, layout: MegatronLayout = MegatronLayout(), dtype: str = "keep", padded_vocab: int | None = None,
    verify: bool = False, overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes a Megatron checkpoint that `megatron.training` loads with --load (a "release": weights, no optimizer state).

    padded_vocab: rows of embedding and head (default: as the order contract pads; Megatron loads any padding).
    """
    checkpoint = open_hf(hf)
    source, config = _cast(checkpoint, dtype)
    padded = padded_vocab or ReductionOrder().padded_vocab(checkpoint.shape.vocab)
    if padded < checkpoint.shape.vocab:
        raise LayoutError(f"--padded-vocab-size {padded} is less than the vocabulary of {checkpoint.shape.vocab}")
    layout.check(checkpoint.shape, padded)
    common = {"args": megatron_args(config, layout, padded), "checkpoint_version": 3.0, "iteration": 0, "num_floating_point_operations_so_far": 0}

    def write(folder: Path, on_bytes: Callable[[int], None]) -> LogicalTensors:
        (folder / RELEASE).mkdir()
        write_torch_dist(folder / RELEASE, checkpoint.shape, layout, source, padded, common, on_bytes)
        (folder / HF_COMPANIONS).mkdir()
        _write_companions(checkpoint, config, folder / HF_COMPANIONS)
        (folder / TRACKER_FILE).write_text(RELEASE)
        return TorchDistFolder(folder / RELEASE, checkpoint.shape)

    _convert(f"{hf} to Megatron {layout}", checkpoint.shape, source, Path(out), write, verify, overwrite)


def megatron_to_hf(
    megatron: str, out: str, like: str | None = None, dtype: str = "keep", max_file_bytes: int = MAX_FILE_BYTES,
    verify: bool = False, overwrite: bool = False,
) -> None:  # fmt: skip
    """Writes a Hugging Face folder. like: folder with config.json and tokenizer, for checkpoints that training saved."""
    checkpoint = open_megatron(megatron, like)
    source, config = _cast(checkpoint, dtype)

    def write(folder: Path, on_bytes: Callable[[int], None]) -> LogicalTensors:
        write_hf(folder, source, on_bytes, max_file_bytes)
        _write_companions(checkpoint, config, folder)
        return SafetensorsFolder(folder)

    _convert(f"{megatron} to Hugging Face", checkpoint.shape, source, Path(out), write, verify, overwrite)


def megatron_args(config: Mapping[str, Any], layout: MegatronLayout, padded_vocab: int) -> argparse.Namespace:
    """What Megatron keeps in a checkpoint as `args`: its own parser's answer to the model's flags."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages that a conversion does not need
        from megatron.training.arguments import add_megatron_arguments

    flags = [*flags_from_hf(config), "--transformer-impl", "local", "--tensor-model-parallel-size", layout.tp, "--pipeline-model-parallel-size", layout.pp,
             "--expert-model-parallel-size", layout.ep, "--expert-tensor-parallel-size", layout.expert_tensor_parallel,
             "--padded-vocab-size", padded_vocab, "--no-save-optim", "--no-save-rng"]  # fmt: skip
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([str(flag) for flag in flags])


def _cast(checkpoint: OpenCheckpoint, dtype: str) -> tuple[LogicalTensors, dict[str, Any]]:
    """(tensors of the wanted type, configuration that says so)."""
    if dtype == "keep":
        return checkpoint.tensors, checkpoint.config
    kept = {key: value for key, value in checkpoint.config.items() if key not in ("dtype", "torch_dtype")}
    return Cast(checkpoint.tensors, DTYPES[dtype]), {**kept, "dtype": dtype_name(DTYPES[dtype])}


def _write_companions(checkpoint: OpenCheckpoint, config: dict[str, Any], folder: Path) -> None:
    copy_companions(checkpoint.companions, folder)
    if config is not checkpoint.config:
        write_config(folder, config)


def _convert(text: str, shape: ModelShape, source: LogicalTensors, out: Path, write, verify: bool, overwrite: bool) -> None:
    """Writes, verifies and renames; prints what it came to."""
    total, started = sum(spec.nbytes for spec in source.specs.values()), time.monotonic()
    with PeakMemory() as memory, whole_folder(out, total, overwrite) as folder:
        with progress(console, text, total) as on_bytes:
            written = write(folder, on_bytes)
        if verify:
            (folder / DIGEST_FILE).write_text(json.dumps(_verify(source, written, total), indent=0) + "\n")
    layer = layer_bytes(source)
    console.print(
        f"{out}: {len(source.specs)} tensors, {total / 1e6:.1f} MB in {time.monotonic() - started:.1f} s; peak memory {memory.bytes / 1e6:.1f} MB, "
        f"{memory.bytes / layer:.1f} times a layer of {layer / 1e6:.1f} MB" + ("; digests of all tensors equal on both sides" if verify else ""),
        soft_wrap=True,
    )


def _verify(source: LogicalTensors, written: LogicalTensors, total: int) -> dict[str, str]:
    with progress(console, "digests of the source", total) as on_bytes:
        expected = digests(source, on_bytes)
    with progress(console, "digests of what was written", total) as on_bytes:
        check_equal(expected, digests(written, on_bytes), ("source", "written"))
    return expected


def layer_bytes(source: LogicalTensors) -> int:
    """Size of the largest layer."""
    sizes: dict[str, int] = {}
    for name, spec in source.specs.items():
        if name.startswith("model.layers."):
            layer = name.split(".")[2]
            sizes[layer] = sizes.get(layer, 0) + spec.nbytes
    return max(sizes.values())


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="convert_checkpoint", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("to-megatron", help="Hugging Face folder to Megatron checkpoint (torch_dist)", allow_abbrev=False)
    to_megatron.add_argument("--hf", required=True, metavar="DIR", help="config.json, safetensors, tokenizer")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        to_megatron.add_argument(f"--{name}", type=int, default=1, help=f"{what} parallel size that files and chunks are cut for; any other loads them too")
    to_megatron.add_argument("--etp", type=int, help="expert tensor parallel size; default: 1 with --ep > 1, else --tp")
    to_megatron.add_argument("--padded-vocab-size", type=int, help="rows of embedding and head; default: as the order contract pads")
    to_hf = commands.add_parser("to-hf", help="Megatron checkpoint (torch_dist) to Hugging Face folder", allow_abbrev=False)
    to_hf.add_argument("--megatron", required=True, metavar="DIR", help="checkpoint directory (its newest iteration is taken), or an iteration's folder")
    to_hf.add_argument("--like", metavar="DIR", help="Hugging Face folder with config.json and tokenizer; converted checkpoints carry their own")
    to_hf.add_argument("--max-file-size", type=int, default=MAX_FILE_BYTES >> 20, metavar="MIB", help="of a safetensors file (default: %(default)s)")
    for command in (to_megatron, to_hf):
        command.add_argument("--out", required=True, metavar="DIR", help="appears when it is whole")
        command.add_argument("--dtype", choices=("keep", *DTYPES), default="keep", help="keep each tensor's type, or cast all")
        command.add_argument("--verify", action="store_true", help=f"read back, compare digests of all logical tensors, keep them in {DIGEST_FILE}")
        command.add_argument("--overwrite", action="store_true", help="replace --out once the new checkpoint is whole")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    common = {"dtype": args.dtype, "verify": args.verify, "overwrite": args.overwrite}
    if args.command == "to-hf":
        megatron_to_hf(args.megatron, args.out, args.like, max_file_bytes=args.max_file_size << 20, **common)
    else:
        hf_to_megatron(args.hf, args.out, MegatronLayout(args.tp, args.pp, args.ep, args.etp), padded_vocab=args.padded_vocab_size, **common)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        run(args)
    except EXPLAINED as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
