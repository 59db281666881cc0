"""Numbers that are infinite or no numbers stop a run, by name, before they reach the weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_NAMED = 5


class NonFinite(RuntimeError):
    """A logit, weight or gradient is infinite or no number. Says which."""


def check_weights(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises NonFinite naming the parameters of this rank that hold a non-finite value."""
    _check("weights", named_parameters)


def check_gradients(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The same for their accumulated gradients (Megatron's main_grad)."""
    _check("gradients", ((name, p.main_grad) for name, p in named_parameters if p.requires_grad))


def _check(what: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    found = [f"{name} ({_count(values)} of {values.numel()})" for name, values in tensors if not values.isfinite().all()]
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise NonFinite(f"non-finite {what}: {', '.join(found[:_NAMED])}{more}")


def _count(values: torch.Tensor) -> int:
    return int((~values.isfinite()).sum())
