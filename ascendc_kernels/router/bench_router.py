"""The router beside torch: python -m ascendc_kernels.router.bench_router"""

import sys

import torch

from ascendc_kernels.bench.harness import Case, main, normal

EXPERTS, TOP_K, GROUPS, KEPT = 128, 8, 8, 4


def renormalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(1, keepdim=True)


def stock_softmax(logits: torch.Tensor):
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return renormalised(weights), ids


def stock_groups(logits: torch.Tensor, bias: torch.Tensor):
    """As DeepSeek-V3 publishes it."""
    scores = logits.sigmoid()
    choice = scores + bias
    kept = choice.view(-1, GROUPS, EXPERTS // GROUPS).topk(2).values.sum(-1).topk(KEPT).indices
    mask = torch.zeros(len(logits), GROUPS, dtype=torch.bool).scatter_(1, kept, True).repeat_interleave(EXPERTS // GROUPS, 1)
    ids = choice.masked_fill(~mask, -torch.inf).topk(TOP_K).indices
    return renormalised(scores.gather(1, ids)) * 2.5, ids


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    logits, bias = normal(rows, EXPERTS, dtype=torch.float32), normal(EXPERTS, dtype=torch.float32) / 8
    dweights, ids = normal(rows, TOP_K, dtype=torch.float32), op.route(logits, TOP_K)[1]

    def gradient(forward):
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(forward(leaf)[0], leaf, dweights)

    return [
        Case("route softmax", rows, lambda: op.route(logits, TOP_K), {"torch fp32": lambda: stock_softmax(logits)}),
        Case("route sigmoid groups", rows, lambda: op.route(logits, TOP_K, "sigmoid", True, 2.5, bias, GROUPS, KEPT),
             {"torch fp32": lambda: stock_groups(logits, bias)}),
        Case("route_backward", rows, lambda: op.route_backward(dweights, logits, ids, "softmax", True, 1.0), {}),
        Case("route fwd + bwd", rows, lambda: gradient(lambda leaf: op.route(leaf, TOP_K)), {"torch fp32": lambda: gradient(stock_softmax)}),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
