"""The patch table: every foreign name this package takes over, joined from the tables of the two sides.

A side's table is imported only by the processes of that side.
"""

import importlib

from megatron_ext.patches.patch import Patch

_TABLES = {
    "train": (("megatron_ext.patches.table_train", "TRAIN_ROWS"), ("megatron_ext.patches.table_train", "CPU_ROWS")),
    "rollout": (("megatron_ext.patches.table_rollout", "ROLLOUT_ROWS"),),
}


def rows(side: str) -> tuple[Patch, ...]:
    """Every row of a side ("train" or "rollout"), in table order."""
    return tuple(row for module, name in _TABLES[side] for row in getattr(importlib.import_module(module), name))
