"""exp, log and row sums beside torch: python -m ascendc_kernels.elementary.bench_elementary"""

import sys

import torch

from ascendc_kernels.bench.harness import HIDDEN, Case, main

EXPERTS = 128


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    x, logits = torch.rand(rows, HIDDEN), torch.randn(rows, EXPERTS)
    return [
        Case("exp", rows, lambda: op.exp(x), {"torch fp32": lambda: x.exp()}),
        Case("log", rows, lambda: op.log(x), {"torch fp32": lambda: x.log()}),
        Case("row_sum", rows, lambda: op.row_sum(x), {"torch fp32": lambda: x.sum(-1)}),
        Case("row_sum of 128", rows, lambda: op.row_sum(logits), {"torch fp32": lambda: logits.sum(-1)}),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
