"""Linear layers beside torch: python -m ascendc_kernels.linear.bench_linear"""

import sys

import torch
import torch.nn.functional as F

from ascendc_kernels.bench.harness import HIDDEN, Case, main, normal

SEGMENTS = 8


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    x, w, dy = normal(rows, HIDDEN), normal(HIDDEN, HIDDEN), normal(rows, HIDDEN)
    x_fp32, w_fp32, grad, boundaries = x.float(), w.float(), torch.zeros(HIDDEN, HIDDEN), [0, rows]
    flops = 2.0 * rows * HIDDEN * HIDDEN
    return [
        Case("linear", rows, lambda: op.linear(x, w, SEGMENTS, 0), {"torch bf16": lambda: F.linear(x, w), "torch fp32": lambda: F.linear(x_fp32, w_fp32)}, flops),
        Case("linear fp32 root", rows, lambda: op.linear_fp32(x, w, SEGMENTS, 0), {"torch bf16": lambda: F.linear(x, w).float()}, flops),
        Case("linear groups16", rows, lambda: op.linear(x, w, SEGMENTS, 1), {"torch bf16": lambda: F.linear(x, w)}, flops),
        Case("dgrad", rows, lambda: op.dgrad(dy, w, SEGMENTS, False, 0), {"torch bf16": lambda: dy @ w}, flops),
        Case("wgrad into fp32", rows, lambda: op.wgrad_(grad, dy, x, boundaries, 0), {"torch bf16": lambda: grad.add_(dy.T @ x)}, flops),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
