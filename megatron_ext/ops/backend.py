"""Which order and which kernels the ops of this process use. Set once, by `megatron_ext.enable`."""

from __future__ import annotations

import types

from megatron_ext.reduction_order import ReductionOrder

_active: tuple[ReductionOrder, types.ModuleType] | None = None


class NotConfigured(RuntimeError):
    """An op was called before `megatron_ext.enable(...)`."""


def configure(order: ReductionOrder, backend: str) -> None:
    """backend: "native" or "reference". Builds the native kernels if they are missing."""
    global _active
    if backend == "native":
        from megatron_ext.ops import native as kernels

        kernels.library()
    elif backend == "reference":
        from megatron_ext.ops import reference_kernels as kernels
    else:
        raise ValueError(f"kernel backend must be 'native' or 'reference', found {backend!r}")
    _active = (order, kernels)


def active_order() -> ReductionOrder:
    if _active is None:
        raise NotConfigured("no reduction order in this process; call megatron_ext.enable(side, contract, facts) first")
    return _active[0]


def kernels() -> types.ModuleType:
    active_order()
    return _active[1]
