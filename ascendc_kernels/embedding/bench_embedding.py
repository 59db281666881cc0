"""Embedding lookup and its gradient beside torch: python -m ascendc_kernels.embedding.bench_embedding"""

import sys

import torch
import torch.nn.functional as F

from ascendc_kernels.bench.harness import HIDDEN, Case, main, normal

ROWS = 151936 // 8  # vocabulary rows of a rank of eight


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    ids, weight, dy, grad = torch.randint(ROWS, (rows,)), normal(ROWS, HIDDEN), normal(rows, HIDDEN), torch.zeros(ROWS, HIDDEN)
    return [
        Case("embedding", rows, lambda: op.embedding(ids, weight), {"torch bf16": lambda: F.embedding(ids, weight)}),
        Case("embedding wgrad", rows, lambda: op.embedding_wgrad_(grad, ids, dy), {"torch fp32": lambda: grad.index_add_(0, ids, dy.float())}),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
