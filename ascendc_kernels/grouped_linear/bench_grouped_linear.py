"""Experts beside torch and vLLM: python -m ascendc_kernels.grouped_linear.bench_grouped_linear

`rows` are tokens, each of which goes to 8 of 128 experts, as in Qwen3-30B-A3B.
"""

import functools
import sys

import torch
import torch.nn.functional as F

from ascendc_kernels.bench.harness import EXPERT_WIDTH, HIDDEN, Case, main, normal, vllm_kernels

EXPERTS, TOP_K, SEGMENTS = 128, 8, 8


@functools.cache
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up, down: 1.2 GB. Values do not matter, so all experts have the same."""
    gate_up, down = normal(1, 2 * EXPERT_WIDTH, HIDDEN) / HIDDEN**0.5, normal(1, HIDDEN, EXPERT_WIDTH) / EXPERT_WIDTH**0.5
    return gate_up.repeat(EXPERTS, 1, 1), down.repeat(EXPERTS, 1, 1)


@functools.cache
def gradients() -> list[torch.Tensor]:
    return list(torch.zeros(EXPERTS, 2 * EXPERT_WIDTH, HIDDEN))


def by_expert(x: torch.Tensor, w: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([F.linear(rows, w[expert]) for expert, rows in enumerate(x.split(counts)) if len(rows)])


def add_by_expert(grads, dy: torch.Tensor, x: torch.Tensor, counts: list[int]) -> None:
    for grad, dy_rows, x_rows in zip(grads, dy.split(counts), x.split(counts), strict=True):
        if len(x_rows):
            grad.add_(dy_rows.T @ x_rows)


def our_experts(x, ids, topk_weights):
    """Permute, gate and up, SwiGLU, down, combine, as a rollout does."""
    op, (w13, w2), flat = torch.ops.megatron_ext, weights(), ids.flatten()
    order = torch.argsort(flat, stable=True)
    tokens, experts, counts = order // TOP_K, flat[order], torch.bincount(flat, minlength=EXPERTS)
    y = op.grouped_linear(op.swiglu(op.grouped_linear(x[tokens], w13, counts, SEGMENTS, 0)), w2, counts, SEGMENTS, 0)
    return op.combine_rows(y, topk_weights.flatten()[order], tokens, experts, x.shape[0], EXPERTS, EXPERTS)


@functools.cache
def packed(kernels) -> list[torch.Tensor]:
    results = [torch.empty_like(w) for w in weights()]
    for w, result in zip(weights(), results, strict=True):
        kernels.prepack_moe_weight(w, result, "vec")
    return results


def vllm_experts(kernels, x, ids, topk_weights):
    out = torch.empty_like(x)
    kernels.cpu_fused_moe(out, x, *packed(kernels), None, None, topk_weights, ids, False, "silu", "vec")
    return out


def cases(rows: int) -> list[Case]:
    op, w = torch.ops.megatron_ext, weights()[0]
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
    topk_weights, ids_int32 = torch.rand(rows, TOP_K), ids.int()
    number = torch.bincount(ids.flatten(), minlength=EXPERTS)
    counts, starts = number.tolist(), torch.cat([number.new_zeros(1), number.cumsum(0)])
    tokens = normal(rows, HIDDEN)
    x, dy, grads = normal(rows * TOP_K, HIDDEN), normal(rows * TOP_K, 2 * EXPERT_WIDTH), gradients()
    flops, kernels = 2.0 * rows * TOP_K * w[0].numel(), vllm_kernels()
    vllm = {"vLLM": lambda: vllm_experts(kernels, tokens, ids_int32, topk_weights)} if kernels is not None and hasattr(kernels, "cpu_fused_moe") else {}
    return [
        Case("grouped_linear", rows, lambda: op.grouped_linear(x, w, number, SEGMENTS, 0), {"torch bf16": lambda: by_expert(x, w, counts)}, flops),
        Case("grouped_dgrad", rows, lambda: op.grouped_dgrad(dy, w, number, SEGMENTS, True, 0),
             {"torch bf16": lambda: by_expert(dy, w.transpose(1, 2), counts)}, flops),
        Case("grouped_wgrad into fp32", rows, lambda: op.grouped_wgrad_(grads, dy, x, number, starts, 0),
             {"torch bf16": lambda: add_by_expert(grads, dy, x, counts)}, flops),
        Case("expert MLP and combine", rows, lambda: our_experts(tokens, ids, topk_weights), vllm, 1.5 * flops),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
