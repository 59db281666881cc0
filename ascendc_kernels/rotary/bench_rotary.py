"""Rotary embedding beside torch and vLLM: python -m ascendc_kernels.rotary.bench_rotary"""

import sys

import torch

from ascendc_kernels.bench.harness import BF16, HEAD_DIM, HEADS, KV_HEADS, Case, main, normal, vllm_peer
from megatron_ext.reference.rope import rope_tables


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    positions = torch.arange(rows)
    cos, sin = rope_tables(positions, HEAD_DIM, 1e6, BF16)
    qkv, dy = normal(rows, HEADS + 2 * KV_HEADS, HEAD_DIM), normal(rows, HEADS, HEAD_DIM)
    q, k = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS]
    cache = torch.cat([cos, sin], dim=-1)
    flat_q, flat_k = q.reshape(rows, -1), k.reshape(rows, -1)  # vLLM rotates in place

    def forward_and_backward(function):
        leaf = q.detach().requires_grad_()
        return torch.autograd.grad(function(leaf, cos, sin), leaf, dy)

    def vllm(style: bool):
        return vllm_peer("rotary_embedding", lambda kernels: kernels.rotary_embedding(positions, flat_q, flat_k, HEAD_DIM, cache, style))

    return [
        Case("rotary q and k", rows, lambda: op.apply_rope_qk(q, k, cos, sin),
             {"torch bf16": lambda: (rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)), **vllm(True)}),
        Case("rotary interleaved", rows, lambda: op.apply_rope_qk(q, k, cos, sin, True),
             {"torch bf16": lambda: (rotate_neighbours(q, cos, sin), rotate_neighbours(k, cos, sin)), **vllm(False)}),
        Case("rotary fwd + bwd", rows, lambda: forward_and_backward(op.apply_rope), {"torch bf16": lambda: forward_and_backward(rotate_halves)}),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
