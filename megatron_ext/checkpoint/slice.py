"""The first layers of a large checkpoint as a Hugging Face folder of their own: true widths, a depth that fits a small machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.folder import OpenCheckpoint
from megatron_ext.checkpoint.hf_folder import copy_companions, write_config, write_hf
from megatron_ext.checkpoint.mapping import ModelShape, hf_shapes
from megatron_ext.checkpoint.tensors import CheckpointError, LogicalTensors, Part


def first_layers_config(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The configuration of a model of the first `layers` layers. Raises CheckpointError if it has fewer."""
    there = config["num_hidden_layers"]
    if not 1 <= layers <= there:
        raise CheckpointError(f"--layers {layers}: expected 1 to {there}, the layers of the model")
    cut = {**config, "num_hidden_layers": layers}
    if config.get("layer_types"):
        cut["layer_types"] = config["layer_types"][:layers]
    if config.get("mlp_only_layers"):
        cut["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < layers]
    return cut


def first_layers(checkpoint: OpenCheckpoint, layers: int) -> tuple[dict[str, Any], LogicalTensors]:
    """(configuration, tensors) of the first layers, embedding, final norm and head."""
    config = first_layers_config(checkpoint.config, layers)
    return config, Part(checkpoint.tensors, list(hf_shapes(ModelShape.from_hf(config))))


def write_first_layers(checkpoint: OpenCheckpoint, layers: int, folder: Path, on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Writes them into an existing folder, with tokenizer."""
    config, tensors = first_layers(checkpoint, layers)
    write_hf(folder, tensors, on_bytes)
    copy_companions(checkpoint.companions, folder)
    write_config(folder, config)
