"""Tensor-parallel linear layers in the one order. Legend: s positions, b sequences, K in, N out, R = s x b rows.

Column parallel: N is cut. The forward needs no sum across ranks, the input gradient does. Row parallel: K is cut, the
forward needs the sum. Both sums are trees over segments of which a rank owns a whole subtree, joined by `collectives`.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch.distributed import ProcessGroup

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.train import microbatch
from megatron_ext.train.microbatch import RowLayout


def gather_sequence(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """[s / ranks, b, ...] -> [s, b, ...]."""
    return x if group.size() == 1 else collectives.all_gather_concat(x, group, 0)


def join_partials(partial: torch.Tensor, group: ProcessGroup, sequence_parallel: bool, dtype: torch.dtype) -> torch.Tensor:
    """Joins every rank's fp32 subtree [s, b, N] at the root and rounds once; [s / ranks, b, N] under sequence parallelism."""
    if group.size() == 1:
        return partial.to(dtype)
    join = collectives.ordered_reduce_scatter if sequence_parallel else collectives.ordered_all_reduce
    joined = join(partial.flatten(0, -2), group, dtype)
    return joined.view(-1, *partial.shape[1:])


def accumulator_of(weight: torch.nn.Parameter) -> torch.Tensor:
    """The running fp32 accumulator `weight.main_grad`; without one (no DDP), zeros."""
    main_grad = getattr(weight, "main_grad", None)
    return torch.zeros(weight.shape, dtype=torch.float32) if main_grad is None else main_grad


def gradient_of(weight: torch.nn.Parameter, accumulator: torch.Tensor) -> torch.Tensor | None:
    """What a backward pass returns: None if it added to `weight.main_grad`, as for Megatron's fused accumulation; else the gradient."""
    if getattr(weight, "main_grad", None) is None:
        return accumulator.to(weight.dtype)
    weight.grad_added_to_main_grad = True
    return None


def accumulate_wgrad(
    weight: torch.nn.Parameter, dy_RN: torch.Tensor, x_RK: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor | None:
    """Adds dy^T x to the weight's accumulator, row after row; see `gradient_of` for what it returns."""
    accumulator = accumulator_of(weight)
    if dy_RN.shape[0]:
        ops.wgrad_(accumulator, dy_RN, x_RK, cu_seqlens)
    return gradient_of(weight, accumulator)


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, group: ProcessGroup, sequence_parallel: bool, gated: bool, layout: RowLayout):
        ctx.save_for_backward(x, weight_NK)
        ctx.group, ctx.sequence_parallel, ctx.gated, ctx.layout = group, sequence_parallel, gated, layout
        ctx.weight = weight_NK
        return ops.linear(gather_sequence(x, group) if sequence_parallel else x, weight_NK)

    @staticmethod
    def backward(ctx, dy):
        x, weight_NK = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            segments = ops.active_order().local_segments(ctx.group.size())
            partial = ops.dgrad_fp32(dy, weight_NK, segments, gated=ctx.gated)
            dx = join_partials(partial, ctx.group, ctx.sequence_parallel, x.dtype)
        if ctx.needs_input_grad[1]:
            total = gather_sequence(x, ctx.group) if ctx.sequence_parallel else x
            dw = accumulate_wgrad(ctx.weight, ctx.layout.rows(dy), ctx.layout.rows(total), ctx.layout.cu_seqlens)
        return dx, dw, None, None, None, None


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_NK, group: ProcessGroup, sequence_parallel: bool, layout: RowLayout):
        ctx.save_for_backward(x, weight_NK)
        ctx.group, ctx.sequence_parallel, ctx.layout = group, sequence_parallel, layout
        ctx.weight = weight_NK
        segments = ops.active_order().local_segments(group.size())
        return join_partials(ops.linear_fp32(x, weight_NK, segments), group, sequence_parallel, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight_NK = ctx.saved_tensors
        if ctx.sequence_parallel:
            dy = gather_sequence(dy, ctx.group)
        dx = ops.dgrad(dy, weight_NK) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = accumulate_wgrad(ctx.weight, ctx.layout.rows(dy), ctx.layout.rows(x), ctx.layout.cu_seqlens)
        return dx, dw, None, None, None


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """Megatron's column-parallel linear with every sum in the one order. `stride=2` marks a [gate | up] weight."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None or self.gather_output:
            raise ValueError(
                f"{type(self).__name__}: bias and gather_output are not supported "
                f"(found bias={self.bias is not None}, gather_output={self.gather_output}); use --disable-bias-linear"
            )
        self.gated = kwargs.get("stride", 1) == 2

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """[s (/ ranks under sequence parallelism), b, K] -> ([s, b, N / ranks], no bias)."""
        hit("megatron.core.tensor_parallel.layers:ColumnParallelLinear")
        weight = self.weight if weight is None else weight
        layout = microbatch.current()
        return _ColumnParallel.apply(input_, weight, self.tp_group, self.sequence_parallel, self.gated, layout), None


class RowParallelLinear(layers.RowParallelLinear):
    """Megatron's row-parallel linear with every sum in the one order."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.bias is not None or not self.input_is_parallel:
            raise ValueError(
                f"{type(self).__name__}: expected no bias and a parallel input "
                f"(found bias={self.bias is not None}, input_is_parallel={self.input_is_parallel}); use --disable-bias-linear"
            )

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, b, K / ranks] -> ([s (/ ranks under sequence parallelism), b, N], no bias)."""
        hit("megatron.core.tensor_parallel.layers:RowParallelLinear")
        layout = microbatch.current()
        return _RowParallel.apply(input_, self.weight, self.tp_group, self.sequence_parallel, layout), None
