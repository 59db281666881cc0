"""Opens a checkpoint of either kind: which kind it is, the model's configuration, and its logical tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.checkpoint.hf_config import flags_from_hf, read_hf_config
from megatron_ext.checkpoint.hf_folder import CONFIG_FILE, SafetensorsFolder, check_tensors
from megatron_ext.checkpoint.mapping import EMBEDDING, HEAD, ModelShape, hf_shapes
from megatron_ext.checkpoint.tensors import CheckpointError, LogicalTensors, Part
from megatron_ext.checkpoint.torch_dist import TRACKER_FILE, TorchDistFolder, iteration_folder

HF_COMPANIONS = "hf"  # in a converted Megatron checkpoint: configuration and tokenizer of the Hugging Face folder that it came from


@dataclass(frozen=True)
class OpenCheckpoint:
    """kind: "hf" or "megatron". companions: the folder with config.json and tokenizer. tensors: those of the model, in its order."""

    kind: str
    path: Path
    companions: Path
    config: dict[str, Any]
    shape: ModelShape
    tensors: LogicalTensors


def is_megatron(path: str | Path) -> bool:
    """Whether a folder is taken for a Megatron checkpoint."""
    path = Path(path)
    return (path / TRACKER_FILE).exists() or (path / ".metadata").exists()


def open_checkpoint(path: str | Path, like: str | Path | None = None) -> OpenCheckpoint:
    """like: Hugging Face folder with the configuration of a Megatron checkpoint that does not carry its own.

    Raises CheckpointError, or UnsupportedModel for a model that is not Qwen3 dense or MoE.
    """
    return open_megatron(path, like) if is_megatron(path) else open_hf(path)


def open_hf(path: str | Path) -> OpenCheckpoint:
    path = Path(path)
    config = read_config(path)
    shape = ModelShape.from_hf(config)
    folder, expected = SafetensorsFolder(path), hf_shapes(shape)
    check_tensors(folder, expected, HEAD if shape.tied else None)
    if shape.tied and HEAD in folder.specs:
        _check_tied_head(folder)
    return OpenCheckpoint("hf", path, path, config, shape, Part(folder, list(expected)))


def _check_tied_head(folder: SafetensorsFolder) -> None:
    """A tied model's head may be stored once more; it has to be the embedding."""
    same = folder.specs[HEAD] == folder.specs[EMBEDDING] and all(
        torch.equal(folder.read(HEAD, *rows).view(torch.uint8), folder.read(EMBEDDING, *rows).view(torch.uint8)) for rows in folder.slabs(HEAD)
    )
    if not same:
        raise CheckpointError(f"{folder.where(HEAD)}: {HEAD} differs from {EMBEDDING}, and {CONFIG_FILE} says that they are tied")


def open_megatron(path: str | Path, like: str | Path | None = None) -> OpenCheckpoint:
    path = Path(path)
    folder = iteration_folder(path)
    companions = Path(like) if like else next((p / HF_COMPANIONS for p in (path, folder.parent) if (p / HF_COMPANIONS).is_dir()), None)
    if companions is None:
        raise CheckpointError(f"{path}: carries no Hugging Face configuration; name a folder that has it (--like)")
    config = read_config(companions)
    shape = ModelShape.from_hf(config)
    return OpenCheckpoint("megatron", path, companions, config, shape, TorchDistFolder(folder, shape))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model that is built. Raises CheckpointError or UnsupportedModel."""
    try:
        config = read_hf_config(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: cannot be read ({error})") from error
    try:
        flags_from_hf(config)  # refuses what is not built
    except KeyError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: lacks the field {error}") from error
    return config
