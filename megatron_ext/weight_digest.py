"""Position-sensitive digest of a logical tensor, additive over its shards.

digest = (sum over elements of mix(index, bits)) mod 2^64, twice with different constants: 128 bits. Each rank digests what it
holds with the element's index in the LOGICAL tensor; the sums of disjoint regions add up to the digest of the whole, so that a
sharded engine never gathers its weights. Swapped, stale, zeroed or reshaped tensors change it. `mix` is the finalizer of
splitmix64 (Steele, Lea, Flood 2014). This detects faults; it is not a cryptographic hash.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

import torch

MASK = (1 << 64) - 1
SEEDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
CHUNK = 1 << 16  # elements at a time: what they need stays in a core's cache


class DigestMismatch(RuntimeError):
    """A logical tensor differs between replicas, is incomplete, or differs between the two sides."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A hyper-rectangle of a logical tensor: what one rank holds, and its digest."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]
    dtype: str
    digest: tuple[int, int]


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def xor_shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >> bits, as unsigned numbers."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64 finalizer on int64 (wrapping), in place."""
    xor_shifted(x, 30).mul_(signed(MULTIPLIERS[0]))
    xor_shifted(x, 27).mul_(signed(MULTIPLIERS[1]))
    return xor_shifted(x, 31)


def element_bits(x: torch.Tensor) -> torch.Tensor:
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(width).reshape(-1)


def logical_indices(start: int, stop: int, shape: tuple[int, ...], logical_shape: tuple[int, ...], offsets: tuple[int, ...]) -> torch.Tensor:
    """Index in the logical tensor of the elements [start, stop) of a shard, in its own order."""
    if shape[1:] == logical_shape[1:]:  # whole rows: no need to take the index apart
        return torch.arange(start, stop).add_(offsets[0] * math.prod(shape[1:]) if shape else 0)
    rest, index, stride = torch.arange(start, stop), torch.zeros(stop - start, dtype=torch.int64), 1
    for dim in reversed(range(len(shape))):
        index += (rest % shape[dim] + offsets[dim]) * stride
        rest //= shape[dim]
        stride *= logical_shape[dim]
    return index


def region_digest(shard: torch.Tensor, logical_shape: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[int, int]:
    """Digest of `shard`, which lies at `offsets` in a tensor of `logical_shape`. Raises ValueError if it does not fit."""
    shape = tuple(shard.shape)
    fits = len(shape) == len(logical_shape) and all(o + s <= n for o, s, n in zip(offsets, shape, logical_shape, strict=True))
    if not fits:
        raise ValueError(f"a shard of shape {shape} at {offsets} does not fit in {tuple(logical_shape)}")
    bits = element_bits(shard.detach().cpu())
    totals = [0, 0]
    for start in range(0, bits.numel(), CHUNK):
        stop = min(start + CHUNK, bits.numel())
        index, chunk = logical_indices(start, stop, shape, tuple(logical_shape), tuple(offsets)), bits[start:stop].to(torch.int64)
        for i, seed in enumerate(SEEDS):
            # Integer sums wrap: exact in any order.
            mixed = mix((index * signed(seed)).add_(1)).bitwise_xor_((chunk * signed(SEEDS[1 - i])).add_(i))
            totals[i] += int(mix(mixed).sum())
    return totals[0] & MASK, totals[1] & MASK


def region(shard: torch.Tensor, logical_shape: tuple[int, ...] | None = None, offsets: tuple[int, ...] | None = None) -> Region:
    """The Region of a shard; by default the shard is the whole tensor."""
    logical_shape = tuple(logical_shape or shard.shape)
    offsets = tuple(offsets or (0,) * len(logical_shape))
    dtype = str(shard.dtype).removeprefix("torch.")
    return Region(offsets, tuple(shard.shape), logical_shape, dtype, region_digest(shard, logical_shape, offsets))


def merge_regions(name: str, regions: list[Region]) -> str:
    """Digest of one logical tensor from all ranks' regions; replicas must agree and regions must tile the tensor."""
    distinct: dict[tuple, Region] = {}
    for part in regions:
        known = distinct.setdefault((part.offsets, part.shape), part)
        if known != part:
            raise DigestMismatch(f"{name}: replicas of region offsets={part.offsets} shape={part.shape} differ between ranks: {known}, {part}")
    logical = {(part.logical_shape, part.dtype) for part in distinct.values()}
    if len(logical) != 1:
        raise DigestMismatch(f"{name}: ranks disagree about shape or dtype: {sorted(map(str, logical))}")
    shape, dtype = logical.pop()
    covered, needed = sum(math.prod(part.shape) for part in distinct.values()), math.prod(shape)
    if covered != needed:
        raise DigestMismatch(f"{name}: the ranks hold {covered} of {needed} elements; regions {sorted(distinct)}")
    totals = [sum(part.digest[i] for part in distinct.values()) & MASK for i in (0, 1)]
    return f"{dtype}{list(shape)}:{totals[0]:016x}{totals[1]:016x}"


def merge(reports: Iterable[dict[str, list[Region]]]) -> dict[str, str]:
    """{logical name: "dtype[shape]:128-bit hex"} from every rank's {logical name: regions}. Raises DigestMismatch."""
    regions: dict[str, list[Region]] = collections.defaultdict(list)
    for report in reports:
        for name, parts in report.items():
            regions[name].extend(parts)
    return {name: merge_regions(name, parts) for name, parts in sorted(regions.items())}


def check_equal(train: dict[str, str], rollout: dict[str, str], sides: tuple[str, str] = ("train", "rollout")) -> None:
    """Raises DigestMismatch naming every logical tensor that is missing or different on one side. sides: what to call the two."""
    problems = [
        f"{name}: {sides[0]} {train.get(name, 'absent')}, {sides[1]} {rollout.get(name, 'absent')}"
        for name in sorted(train.keys() | rollout.keys())
        if train.get(name) != rollout.get(name)
    ]
    if problems:
        raise DigestMismatch(f"{len(problems)} logical tensors differ between {sides[0]} and {sides[1]}:\n" + "\n".join(problems))
