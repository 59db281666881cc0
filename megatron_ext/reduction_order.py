"""The one order of every floating-point reduction.

Each number here fixes an order by LOGICAL index: never by rank, batch size, thread or core count. Training and rollout
agree bit for bit because both read this object; `digest()` is what they exchange to prove it. docs/order.md gives the reasons.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

MMAD_ORDERS = ("sequential", "groups16")
GRADIENT_ORDERS = ("fixed-dp",)
FRACTAL = 16
ROW_SUM_BLOCK = 64
KV_TILES = (64, 128)  # whole blocks of a row sum; a tile of keys with the widest head is what the cube core loads at once


class OrderError(ValueError):
    """A shape or a layout that the order does not define."""


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@dataclasses.dataclass(frozen=True)
class ReductionOrder:
    """The order contract.

    segments: equal contiguous pieces of every contraction that tensor parallelism may cut; pieces are joined by a balanced
        binary tree, so a TP=n rank owns a whole subtree for every power of two n <= segments.
    kv_tile: keys per online-softmax step, anchored at position 0 of a sequence.
    mmad_order: order inside one piece. "sequential": one accumulator, ascending k. "groups16": the 16 products of a fractal
        are added by an adjacent-pair tree, the groups one after another.
    max_expert_segments: upper bound on the leaves of the expert tree (None: the largest power of two that divides E).
    gradient_order: "fixed-dp": gradients do not depend on TP, SP, PP at one DP and EP.
    subnormals: "keep": IEEE subnormals are neither flushed on input nor on output; checked in every process.
    """

    segments: int = 8
    kv_tile: int = 128
    mmad_order: str = "sequential"
    max_expert_segments: int | None = None
    gradient_order: str = "fixed-dp"
    subnormals: str = "keep"

    def __post_init__(self) -> None:
        if not is_power_of_two(self.segments):
            raise OrderError(f"segments must be a power of two, found {self.segments}")
        if self.kv_tile not in KV_TILES:
            raise OrderError(f"kv_tile must be one of {KV_TILES}, found {self.kv_tile}")
        if self.mmad_order not in MMAD_ORDERS:
            raise OrderError(f"mmad_order must be one of {MMAD_ORDERS}, found {self.mmad_order!r}")
        if self.gradient_order not in GRADIENT_ORDERS:
            raise OrderError(f"gradient_order must be one of {GRADIENT_ORDERS}, found {self.gradient_order!r}")
        if self.subnormals != "keep":
            raise OrderError(f"subnormals must be 'keep' (no kernel here flushes them), found {self.subnormals!r}")
        if self.max_expert_segments is not None and not is_power_of_two(self.max_expert_segments):
            raise OrderError(f"max_expert_segments must be a power of two, found {self.max_expert_segments}")

    def local_segments(self, tensor_parallel: int) -> int:
        """Pieces owned by one of `tensor_parallel` ranks. Raises OrderError if the ranks cannot own whole subtrees."""
        if not is_power_of_two(tensor_parallel) or self.segments % tensor_parallel:
            raise OrderError(
                f"tensor parallel size {tensor_parallel} does not divide segments={self.segments} as a power of two; "
                f"choose a TP in {[2**i for i in range(self.segments.bit_length())]}"
            )
        return self.segments // tensor_parallel

    def check_contraction(self, size: int, name: str = "K") -> None:
        """Raises OrderError unless `size` can be cut into `segments` pieces of whole 16-element fractals."""
        if size % (FRACTAL * self.segments):
            raise OrderError(
                f"{name}={size} is not a multiple of {FRACTAL} x segments = {FRACTAL * self.segments}; "
                "choose fewer --reduction-segments or another model width"
            )

    def expert_segments(self, num_experts: int) -> int:
        """Leaves of the expert tree: the largest power of two that divides `num_experts`."""
        segments = num_experts & -num_experts
        return min(segments, self.max_expert_segments) if self.max_expert_segments else segments

    def check_expert_parallel(self, num_experts: int, expert_parallel: int) -> None:
        """Raises OrderError unless every EP rank owns whole subtrees of the expert tree."""
        leaves = self.expert_segments(num_experts)
        if not is_power_of_two(expert_parallel) or leaves % expert_parallel:
            raise OrderError(
                f"expert parallel size {expert_parallel} does not divide the {leaves} expert segments of "
                f"{num_experts} experts; choose an EP in {[2**i for i in range(leaves.bit_length())]}"
            )

    def padded_vocab(self, vocab_size: int) -> int:
        """Columns of the vocabulary, the same for every TP: V rounded up to 16 x segments."""
        quantum = FRACTAL * self.segments
        return (vocab_size + quantum - 1) // quantum * quantum

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """sha256 over every field: two processes with equal digests add in the same order."""
        text = json.dumps({**self.to_dict(), "fractal": FRACTAL, "row_sum_block": ROW_SUM_BLOCK}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
