"""Training's weights into the rollout engines at every step, whatever the layouts of the two sides, and the proof that they arrived."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from megatron_ext.rollout.client import RolloutPool
from megatron_ext.train.client import TrainWorld

_SHARED_MEMORY = Path("/dev/shm")


class WeightSync:
    """Logical tensors through a folder that both sides reach; by default one in shared memory, so that no disk is involved.

    Training's ranks send their shards to rank 0, which writes whole tensors; every rollout rank reads its own slices. Then both
    sides digest every logical tensor they hold, where they hold it. verify: False only for stock numerics, whose rollout packs
    its weights beyond recognition.
    """

    def __init__(self, world: TrainWorld, pool: RolloutPool, verify: bool, folder: str | Path | None = None) -> None:
        self._world, self._pool, self._verify = world, pool, verify
        parent = folder or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)
        self.folder = Path(tempfile.mkdtemp(prefix="megatron_ext_weights_", dir=parent))

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exc_info) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def __call__(self) -> str:
        """Digest of all weights. Raises DigestMismatch naming the logical tensors that are stale, zeroed or swapped in a rollout engine."""
        self.export()
        self._pool.load_weights(self.folder)
        digest = self._world.call("digest")["digest"]
        if self._verify:
            self._pool.check_digest(digest)
        return hashlib.sha256(json.dumps(digest, sort_keys=True).encode()).hexdigest()

    def export(self) -> None:
        self._world.call("export_hf", path=str(self.folder))
