"""RMSNorm beside torch and vLLM: python -m ascendc_kernels.rms_norm.bench_rms_norm"""

import sys

import torch
import torch.nn.functional as F

from ascendc_kernels.bench.harness import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Case, main, normal, vllm_peer

EPS = 1e-6


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    x, residual, w = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(HIDDEN)
    out, scratch, scratch_residual = torch.empty_like(x), x.clone(), residual.clone()
    qkv = normal(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, w_head = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], normal(HEAD_DIM)

    def torch_backward():
        leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(F.rms_norm(leaf, (HIDDEN,), weight, EPS), (leaf, weight), residual)

    def our_backward():
        leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(op.rms_norm(leaf, weight, EPS), (leaf, weight), residual)

    return [
        Case("rms_norm", rows, lambda: op.rms_norm(x, w, EPS),
             {"torch bf16": lambda: F.rms_norm(x, (HIDDEN,), w, EPS), **vllm_peer("rms_norm", lambda kernels: kernels.rms_norm(out, x, w, EPS))}),
        Case("add + rms_norm", rows, lambda: op.add_rms_norm(x, residual, w, EPS),
             {"torch bf16": lambda: F.rms_norm(x + residual, (HIDDEN,), w, EPS),
              **vllm_peer("fused_add_rms_norm", lambda kernels: kernels.fused_add_rms_norm(scratch, scratch_residual, w, EPS))}),
        Case("qk_norm", rows, lambda: op.qk_norm(q, k, w_head, w_head, EPS),
             {"torch bf16": lambda: (F.rms_norm(q, (HEAD_DIM,), w_head, EPS), F.rms_norm(k, (HEAD_DIM,), w_head, EPS))}),
        Case("rms_norm fwd + bwd", rows, our_backward, {"torch bf16": torch_backward}),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
