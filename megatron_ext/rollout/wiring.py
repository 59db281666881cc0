"""Hands the adapters to vLLM's own extension points, and proves after loading that the model is made of nothing else."""

from __future__ import annotations

import importlib

import torch

from megatron_ext.patches import PatchError, original
from megatron_ext.patches.patch import split_import_string
from megatron_ext.patches.table_rollout import ROLLOUT_ROWS
from megatron_ext.rollout.settings import RolloutError

LOAD_TARGET = "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model"

# Modules that only call their children, one line per file of vLLM, read for 0.32. Everything else must be an adapter.
_STRUCTURE = {
    "torch.nn.modules.container": ("ModuleList",),
    "vllm.model_executor.models.qwen2": ("Qwen2MLP",),
    "vllm.model_executor.models.qwen3": ("Qwen3ForCausalLM", "Qwen3Model", "Qwen3DecoderLayer", "Qwen3Attention"),
    "vllm.model_executor.models.qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeModel", "Qwen3MoeDecoderLayer", "Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeMLP",
    ),
}  # fmt: skip


def register_adapters(role: str) -> None:
    """Registers every adapter on a native seam of vLLM. Called once per process, after the table has been verified."""
    if role != "worker":
        return  # models are built in workers only
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for row in ROLLOUT_ROWS:
        if row.seam == "register_oot":
            _load(row.target).register_oot(_load(row.replacement))
        elif row.seam == "registry":
            register_backend(AttentionBackendEnum.CPU_ATTN, row.replacement.replace(":", "."))


def load_model(self, load_dummy_weights: bool = False) -> None:
    """Stands in for `CPUModelRunner.load_model`: loads, then checks every module of the model."""
    original(LOAD_TARGET)(self, load_dummy_weights)
    self.megatron_ext_targets = check_model(self.model)


def check_model(model: torch.nn.Module) -> set[str]:
    """Returns the targets of the rows whose adapters the model contains.

    Raises RolloutError naming each module that would compute by stock code.
    """
    adapters = {_load(row.replacement): row.target for row in ROLLOUT_ROWS if row.seam == "register_oot"}
    present, problems = set(), []
    for path, module in model.named_modules():
        kind = type(module)
        if kind in adapters:
            present.add(adapters[kind])
        elif kind.__name__ not in _STRUCTURE.get(kind.__module__, ()):
            problem, target = _check_attention(module)
            problems += [f"{path or 'the model'} ({kind.__module__}.{kind.__name__}): {problem}"] if problem else []
            present |= {target} if target else set()
    if problems:
        raise RolloutError(
            "these modules would compute outside the order contract (expected an adapter of megatron_ext.rollout):\n  "
            + "\n  ".join(problems)
            + "\nUse a supported model (Qwen3, Qwen3-MoE), or write an adapter and its row in patches/table_rollout.py"
        )
    return present


def _check_attention(module: torch.nn.Module) -> tuple[str | None, str | None]:
    """(problem, target of the adapter inside). vLLM's attention module is a shell around the backend's implementation."""
    from vllm.model_executor.layers.attention import Attention

    from megatron_ext.rollout.attention import TARGET, OrderedAttention

    if type(module) is not Attention:
        return "no adapter is registered for this class", None
    if type(module.impl) is not OrderedAttention:
        return f"attention runs {type(module.impl).__name__}, expected OrderedAttention", None
    if module.query_quant is not None:
        return "queries are quantised", None
    return None, TARGET


def demanded_rows(rows: list[dict[str, object]], present: set[str]) -> list[dict[str, object]]:
    """The report's rows with `must_hit` as this model decides it: an adapter the model contains must have been used."""
    seams = {row.target: row.seam for row in ROLLOUT_ROWS}
    return [
        {**row, "must_hit": row["target"] in present} if seams[row["target"]] in ("register_oot", "registry") else row
        for row in rows
    ]


def assert_hit(rows: list[dict[str, object]], where: str) -> None:
    """Raises PatchError naming the rows that had to be used in process `where` and were not."""
    missed = [row for row in rows if row["active"] and row["must_hit"] and not row["hits"]]
    if missed:
        raise PatchError(f"{row['target']} was never used in {where}: the engine ran its stock path there" for row in missed)


def _load(import_string: str):
    module, path = split_import_string(import_string)
    found = importlib.import_module(module)
    for name in path:
        found = getattr(found, name)
    return found

