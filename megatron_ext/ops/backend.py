"""Which order and which kernels the ops of this process use. Set once, by `megatron_ext.enable`."""

from __future__ import annotations

import types

from megatron_ext.reduction_order import ReductionOrder

_active: tuple[ReductionOrder, types.ModuleType] | None = None


class NotConfigured(RuntimeError):
    """An op was called before `megatron_ext.enable(...)`."""


def configure(order: ReductionOrder, backend: str) -> None:
    """backend: "ascendc" or "reference". Builds the operators if they are out of date; raises BuildError if that fails."""
    global _active
    if backend == "ascendc":
        from megatron_ext.ops import ascendc as kernels

        kernels.load()
    elif backend == "reference":
        from megatron_ext.ops import reference_kernels as kernels
    else:
        raise ValueError(f"kernel backend must be 'ascendc' or 'reference', found {backend!r}")
    _active = (order, kernels)


def active_order() -> ReductionOrder:
    if _active is None:
        raise NotConfigured("no reduction order in this process; call megatron_ext.enable(side, contract, facts) first")
    return _active[0]


def kernels() -> types.ModuleType:
    active_order()
    return _active[1]
