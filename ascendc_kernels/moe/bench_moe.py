"""Token copies and their combination beside torch: python -m ascendc_kernels.moe.bench_moe

`rows` are tokens, each of which goes to 8 of 128 experts, as in Qwen3-30B-A3B.
"""

import sys

import torch

from ascendc_kernels.bench.harness import BF16, HIDDEN, Case, main, normal

EXPERTS, TOP_K = 128, 8


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).flatten()
    order = torch.argsort(experts, stable=True)
    tokens, experts, weights = order // TOP_K, experts[order], torch.rand(rows * TOP_K)
    x, y, dout, inverse = normal(rows, HIDDEN), normal(rows * TOP_K, HIDDEN), normal(rows, HIDDEN, dtype=torch.float32), torch.argsort(order)

    def stock_combine(to):
        return torch.zeros(rows, HIDDEN).index_add_(0, tokens, y * weights[:, None]).to(to)

    def stock_backward():
        upstream = dout[tokens]
        return (upstream * weights[:, None]).to(BF16), (upstream * y).sum(1)

    def scattered():
        out = torch.empty_like(y)
        out[order] = y
        return out

    return [
        Case("permute", rows, lambda: op.permute(x, tokens), {"torch": lambda: x.index_select(0, tokens)}),
        Case("unpermute", rows, lambda: op.unpermute(y, order), {"torch scatter": scattered, "torch gather": lambda: y.index_select(0, inverse)}),
        Case("combine", rows, lambda: op.combine(y, weights, tokens, experts, rows, EXPERTS, EXPERTS, 0, EXPERTS),
             {"torch fp32": lambda: stock_combine(torch.float32)}),
        Case("combine_rows", rows, lambda: op.combine_rows(y, weights, tokens, experts, rows, EXPERTS, EXPERTS), {"torch fp32": lambda: stock_combine(BF16)}),
        Case("combine_backward", rows, lambda: op.combine_backward(dout, y, weights, tokens), {"torch fp32": stock_backward}),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
