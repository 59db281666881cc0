"""RMSNorm modules and the residual sum. Both round where the rollout rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.train import microbatch


class _RMSNorm(torch.autograd.Function):
    """Rows of other ranks (`gather`) enter the weight gradient in their place, so that no sum over ranks remains to be made."""

    @staticmethod
    def forward(ctx, x, w_H, eps: float, gather: Callable[[torch.Tensor], torch.Tensor], own: Callable[[torch.Tensor], torch.Tensor], layout):
        ctx.save_for_backward(x, w_H)
        ctx.weight, ctx.eps, ctx.gather, ctx.own, ctx.layout = w_H, eps, gather, own, layout
        return ops.rms_norm(x, w_H, eps)

    @staticmethod
    def backward(ctx, dy):
        x, w_H = ctx.saved_tensors
        rows = [ctx.layout.rows(ctx.gather(part)) for part in (dy, x)]
        main_grad = getattr(ctx.weight, "main_grad", None)
        accumulator = torch.zeros(w_H.shape) if main_grad is None else main_grad
        dx = ctx.own(ctx.layout.unrows(ops.rms_norm_backward_(accumulator, *rows, w_H, ctx.eps)))
        if main_grad is None:
            return dx, accumulator.to(w_H.dtype), *(None,) * 4
        ctx.weight.grad_added_to_main_grad = True
        return dx, *(None,) * 5


class RMSNorm(torch.nn.Module):
    """RMSNorm in the one order, usable under sequence parallelism. Built by layer specs.

    over_heads: a q/k norm, whose rows are (token, head) and lie on the TP ranks by head.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, over_heads: bool = False, **kwargs) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self._group = get_tensor_model_parallel_group()
        self._cut_dim = None if self._group.size() == 1 else 2 if over_heads else 0 if config.sequence_parallel else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, H] or [s, b, heads, D] -> the same shape and type."""
        hit("megatron.core.transformer.torch_norm:WrappedTorchNorm")
        return _RMSNorm.apply(x, self.weight, self.eps, self._gather, self._own, microbatch.current())

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._cut_dim is None else collectives.all_gather_concat(x, self._group, self._cut_dim)

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._cut_dim is None else x.chunk(self._group.size(), dim=self._cut_dim)[self._group.rank()]


class StockRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, for --no-consistency: Megatron's wrapper refuses sequence parallelism, which only needs the mark."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **kwargs) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def residual_add(training: bool, fused: bool) -> Callable:
    """Takes the place of get_bias_dropout_add in layer specs: residual + x, rounded once to the model type."""

    def add(x_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        hit("megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add")
        x, bias = x_with_bias
        if bias is not None or dropout:
            raise ValueError(f"residual_add: expected no bias and no dropout, found bias={bias is not None}, dropout={dropout}")
        return residual + x

    return add
