"""The gradient norm has the same bits however the gradients are cut over ranks and parameters."""

import math

import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron_ext.train.grad_norm import grad_norm_fp32

CASES = {
    "normal": torch.randn(4096, generator=torch.Generator().manual_seed(0)),
    "wide range": torch.randn(4096, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 15, 4096),
    "subnormal": torch.full((4096,), 1e-41),
    "one": torch.nn.functional.pad(torch.tensor([3.0]), (0, 4095)),
    "zero": torch.zeros(4096),
}


def compare_cuts(rank, world):
    alone = [dist.new_group([r]) for r in range(world)][rank]
    for name, grad in CASES.items():
        whole = grad_norm_fp32([grad], grad_stats_parallel_group=alone)
        mine = grad.view(-1, world, 16)[:, rank].flatten()
        cut = grad_norm_fp32([mine[:100], mine[100:101], mine[101:].flip(0)], grad_stats_parallel_group=dist.group.WORLD)
        assert cut == whole, (name, cut, whole)
        exact = math.sqrt(math.fsum(float(g) ** 2 for g in grad))
        assert math.isclose(whole, exact, rel_tol=1e-12), (name, whole, exact)
    assert grad_norm_fp32([torch.tensor([1.0, math.inf])], grad_stats_parallel_group=alone) == math.inf
    assert grad_norm_fp32([], grad_stats_parallel_group=alone) == 0.0


def test_norm_does_not_depend_on_the_cut():
    run_ranks(4, compare_cuts)


def nan_is_reported(rank, world):
    norm = grad_norm_fp32([torch.tensor([1.0, math.nan if rank == 1 else 2.0])], grad_stats_parallel_group=dist.group.WORLD)
    assert norm == math.inf


def test_nan_on_one_rank_reaches_all():
    run_ranks(2, nan_is_reported)
