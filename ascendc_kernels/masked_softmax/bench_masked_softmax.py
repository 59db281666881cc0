"""Masked softmax of attention scores beside torch: python -m ascendc_kernels.masked_softmax.bench_masked_softmax"""

import sys

import torch

from ascendc_kernels.bench.harness import BF16, Case, main, normal

KEYS, SCALE = 4096, 0.088388


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    x, dp, mask = normal(rows, KEYS), normal(rows, KEYS), torch.rand(rows, KEYS) < 0.3
    x32, p = x.float(), op.masked_softmax(x, mask, SCALE)
    causal = torch.ones(rows, KEYS, dtype=torch.bool).triu(KEYS - rows + 1)

    def stock(scores, masked):
        return (scores * SCALE).masked_fill(masked, -torch.inf).softmax(-1)

    def gradient(forward):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(forward(leaf), leaf, dp)

    return [
        Case("masked_softmax", rows, lambda: op.masked_softmax(x, mask, SCALE), {"torch bf16": lambda: stock(x, mask)}),
        Case("masked_softmax fp32", rows, lambda: op.masked_softmax(x32, mask, SCALE), {"torch fp32": lambda: stock(x32, mask)}),
        Case("causal softmax", rows, lambda: op.masked_softmax(x, None, SCALE, True), {"torch bf16": lambda: stock(x, causal)}),
        Case("plain softmax", rows, lambda: op.masked_softmax(x, None, 1.0), {"torch bf16": lambda: x.softmax(-1)}),
        Case("plain softmax fp32", rows, lambda: op.masked_softmax(x32, None, 1.0), {"torch fp32": lambda: x32.softmax(-1)}),
        Case("masked_softmax bwd", rows, lambda: op.masked_softmax_backward(dp, p, SCALE),
             {"torch bf16": lambda: torch.ops.aten._softmax_backward_data(dp, p, -1, BF16) * SCALE}),
        Case("masked_softmax fwd + bwd", rows, lambda: gradient(lambda leaf: op.masked_softmax(leaf, mask, SCALE)),
             {"torch bf16": lambda: gradient(lambda leaf: stock(leaf, mask))}),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
