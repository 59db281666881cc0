"""megatron_ext: training logprobs bitwise equal to those of the rollout. `enable()` is the one entry; importing does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.contract import Contract
    from megatron_ext.patches.apply import Report

__version__ = "0.1.0"


def enable(side: str, contract: Contract, facts: dict) -> Report:
    """Configures the ops for `contract` and binds every active patch row of `side` in this process.

    side: "train" or "rollout". facts: the layout that decides which rows are active, e.g. {"device": "cpu", "tp": 2,
    "ep": 2, "etp": 1, "dispatcher": "alltoall"}. Returns a report of every row: bound or native, active, hits so far.
    Raises PatchError (nothing is bound then) if any row does not fit the installed upstream, PlatformError if this
    process flushes subnormals.
    """
    from megatron_ext import ops, patches
    from megatron_ext.ops.subnormals import check_subnormals

    ops.configure(contract.order, contract.kernel_backend)
    check_subnormals()
    return patches.apply(side, contract, facts)
