"""Every foreign name this package takes over, as data, and the machinery that binds them fail-closed.

`megatron_ext.enable` calls `apply`; adapters call `hit` and `original`; runs end with `report().assert_hit()`.
"""

from megatron_ext.patches.apply import Report, apply, hit, original, report, unapply, verify
from megatron_ext.patches.patch import Patch, PatchError

__all__ = ["Patch", "PatchError", "Report", "apply", "hit", "original", "report", "unapply", "verify"]
