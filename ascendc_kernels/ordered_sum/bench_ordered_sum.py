"""Ordered sum beside torch's sum: python -m ascendc_kernels.ordered_sum.bench_ordered_sum"""

import sys

import torch

from ascendc_kernels.bench.harness import BF16, HIDDEN, Case, main, normal

PARTS = 8


def cases(rows: int) -> list[Case]:
    parts = normal(PARTS, rows, HIDDEN, dtype=torch.float32)
    return [
        Case("ordered_sum of 8", rows, lambda: torch.ops.megatron_ext.ordered_sum(parts, BF16), {"torch fp32": lambda: parts.sum(0).to(BF16)}),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
