"""The weight digest: additive over shards, and any fault of a weight sync changes it."""

import pytest
import torch

from megatron_ext.weight_digest import DigestMismatch, Region, check_equal, merge, region

W = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def whole(x):
    return merge([{"w": [region(x)]}])["w"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [1, 2])
def test_shards_add_up_to_the_whole(dim, parts):
    reports = []
    for rank, shard in enumerate(W.chunk(parts, dim)):
        offsets = (rank * shard.shape[0], 0) if dim == 0 else (0, rank * shard.shape[1])
        reports.append({"w": [region(shard, W.shape, offsets)]})
    assert merge(reports)["w"] == whole(W)


def test_replicas_count_once():
    assert merge([{"w": [region(W)]}, {"w": [region(W)]}])["w"] == whole(W)


FAULTS = {
    "zeroed": lambda w: torch.zeros_like(w),
    "one bit": lambda w: (w.view(torch.int16) ^ torch.eye(8, 6, dtype=torch.int16)[0]).view(torch.bfloat16),
    "rows swapped": lambda w: w[[1, 0, 2, 3, 4, 5, 6, 7]],
    "transposed": lambda w: w.T.contiguous(),
    "reshaped": lambda w: w.view(6, 8),
    "another type": lambda w: w.float(),
    "signs": lambda w: torch.cat([w[:7], -w[7:]]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_changes_the_digest(fault):
    assert whole(fault(W)) != whole(W)


def test_swapped_tensors_are_named():
    a, b = {"k": whole(W), "v": whole(W + 1)}, {"k": whole(W + 1), "v": whole(W)}
    with pytest.raises(DigestMismatch, match=r"2 logical tensors differ(.|\n)*k: train(.|\n)*v: train"):
        check_equal(a, b)
    with pytest.raises(DigestMismatch, match="v: train bfloat16.*rollout absent"):
        check_equal(a, {"k": whole(W)})
    check_equal(a, dict(a))


def test_gaps_and_disagreeing_replicas_are_named():
    half = region(W[:4], W.shape, (0, 0))
    with pytest.raises(DigestMismatch, match="w: the ranks hold 24 of 48 elements"):
        merge([{"w": [half]}])
    with pytest.raises(DigestMismatch, match="w: replicas of region"):
        merge([{"w": [region(W)]}, {"w": [region(W + 1)]}])
    with pytest.raises(DigestMismatch, match="disagree about shape or dtype"):
        merge([{"w": [half, Region((4, 0), (4, 6), (9, 6), "bfloat16", (0, 0))]}])


def test_a_shard_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        region(W, (8, 6), (1, 0))
