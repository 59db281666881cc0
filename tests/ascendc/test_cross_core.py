"""Flags and meetings between cores: the results are right and do not depend on the number of threads."""

import pytest
import torch
from host_library import library, runnable_variants

BLOCKS = 9
ROUNDS = 5


def rotated(cores: int, by: int) -> torch.Tensor:
    return (torch.arange(cores) + by) % cores


def expected(kernel: str) -> torch.Tensor:
    """One value per row."""
    cores = BLOCKS if kernel in ("sync_all", "group_flag") else 2 * BLOCKS
    first = torch.arange(cores)
    if kernel == "pair_flag":
        return torch.cat([first, (first ^ 1) + 1])
    if kernel == "mixed_sync_all":
        return torch.cat([first, rotated(cores, 3) + 1])
    return torch.cat([rotated(cores, r) + r for r in range(ROUNDS + 1)])


@pytest.mark.parametrize("kernel", ["sync_all", "group_flag", "pair_flag", "mixed_sync_all"])
@pytest.mark.parametrize("flavour, threads, repeats", [("checked", 1, 1), ("fast", 1, 5), ("fast", 2, 50), ("fast", 4, 50)])
def test_exchange(kernel, flavour, threads, repeats):
    lib = library("cross_core.cpp", flavour, runnable_variants()[0] if flavour == "fast" else "portable")
    rows = expected(kernel).float()
    for _ in range(repeats):
        gm = torch.full((rows.numel(), 64), -1.0)
        lib.run(kernel, gm, BLOCKS, threads)
        assert torch.equal(gm, rows[:, None].expand(-1, 64))
