"""SwiGLU beside torch and vLLM: python -m ascendc_kernels.swiglu.bench_swiglu"""

import sys

import torch
import torch.nn.functional as F

from ascendc_kernels.bench.harness import EXPERT_WIDTH, Case, main, normal, vllm_peer


def torch_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate_up[:, :EXPERT_WIDTH]) * gate_up[:, EXPERT_WIDTH:]


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    gate_up, da, out = normal(rows, 2 * EXPERT_WIDTH), normal(rows, EXPERT_WIDTH), normal(rows, EXPERT_WIDTH)

    def forward_and_backward(function):
        leaf = gate_up.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, da)

    return [
        Case("swiglu", rows, lambda: op.swiglu(gate_up),
             {"torch bf16": lambda: torch_swiglu(gate_up), **vllm_peer("silu_and_mul", lambda kernels: kernels.silu_and_mul(out, gate_up))}),
        Case("swiglu fwd + bwd", rows, lambda: forward_and_backward(op.swiglu), {"torch bf16": lambda: forward_and_backward(torch_swiglu)}),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
