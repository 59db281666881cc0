"""The MoE block: router, dispatcher, experts. Legend: T tokens of this rank, R rows at its experts, H hidden, I width, E experts.

An expert's output is complete (all of its contraction, all expert-tensor ranks) and rounded before it is weighted. Under
expert tensor parallelism fc1 is cut by output column as usual, its activations are gathered, and fc2 is cut by output
column too, so that no contraction of the forward pass is cut.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts, moe_layer
from torch.distributed import ProcessGroup

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.train import microbatch
from megatron_ext.train.dispatch import DISPATCHERS, ExpertGroup, Routing, plan_routing
from megatron_ext.train.linear import accumulator_of, gradient_of, join_partials


class OutputColumnLinear(layers.ColumnParallelLinear):
    """Weight of an expert's fc2, [H / ranks, I]: cut by output column. Built by MLP where it expects a row-parallel linear."""

    def __init__(self, input_size: int, output_size: int, *, input_is_parallel: bool = True, **kwargs) -> None:
        super().__init__(input_size, output_size, gather_output=False, **kwargs)


class _GroupedLinear(torch.autograd.Function):
    """rows [R, K] sorted by expert -> [R, N / ranks]. The input gradient is joined over the expert-tensor ranks."""

    @staticmethod
    def forward(ctx, x_RK, bank: WeightBank, counts, boundaries, group: ProcessGroup, gated: bool, *weights):
        ctx.save_for_backward(x_RK, counts, boundaries)
        ctx.bank, ctx.group, ctx.gated = bank, group, gated
        return ops.grouped_linear(x_RK, bank.stacked(), counts)

    @staticmethod
    def backward(ctx, dy_RN):
        x_RK, counts, boundaries = ctx.saved_tensors
        dx = _grouped_dgrad(dy_RN, ctx.bank.stacked(), counts, ctx.group, ctx.gated)
        accumulators = [accumulator_of(weight) for weight in ctx.bank.weights]
        ops.grouped_wgrad_(accumulators, dy_RN, x_RK, counts, boundaries)
        return dx, *(None,) * 5, *(gradient_of(weight, grad) for weight, grad in zip(ctx.bank.weights, accumulators, strict=True))


def _grouped_dgrad(dy_RN, w_ENK, counts, group: ProcessGroup, gated: bool) -> torch.Tensor:
    if group.size() == 1:
        return ops.grouped_dgrad(dy_RN, w_ENK, counts, gated)
    segments = ops.active_order().local_segments(group.size())
    return join_partials(ops.grouped_dgrad_fp32(dy_RN, w_ENK, counts, segments, gated), group, False, dy_RN.dtype)


class _GatherColumns(torch.autograd.Function):
    """[R, N / ranks] -> [R, N]. All ranks hold the whole gradient already, so each takes its columns."""

    @staticmethod
    def forward(ctx, x_RN, group: ProcessGroup):
        ctx.group = group
        return collectives.all_gather_concat(x_RN, group, 1)

    @staticmethod
    def backward(ctx, dout_RN):
        return dout_RN.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].contiguous(), None


class WeightBank:
    """The weights of a rank's experts as one [E_local, N, K] tensor, without a second copy.

    The parameters stay one per expert, as checkpoints want them; their storage is one tensor of which each is a slice.
    Whatever replaces their data (a type conversion, a state dict) is followed at the next use.
    """

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        self.weights = weights
        self._stacked: torch.Tensor | None = None

    def stacked(self) -> torch.Tensor:
        if self._stacked is None or any(w.data_ptr() != s.data_ptr() for w, s in zip(self.weights, self._stacked, strict=True)):
            self._stacked = torch.stack([weight.data for weight in self.weights])
            for weight, part in zip(self.weights, self._stacked, strict=True):
                weight.data = part
        return self._stacked


class Experts(experts.SequentialMLP):
    """Megatron's experts, one MLP each for their weights and checkpoints; the arithmetic is grouped over all of them."""

    def __init__(self, num_local_experts: int, config, pg_collection=None, name: str | None = None) -> None:
        submodules = MLPSubmodules(linear_fc1=layers.ColumnParallelLinear, linear_fc2=OutputColumnLinear)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, name=name)
        self._fc1 = WeightBank([expert.linear_fc1.weight for expert in self.local_experts])
        self._fc2 = WeightBank([expert.linear_fc2.weight for expert in self.local_experts])

    def forward(self, rows_RH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Rows sorted by expert -> complete expert outputs [R, H], rounded, not weighted."""
        hit("megatron.core.transformer.moe.experts:SequentialMLP")
        grouped = partial(_grouped, counts=routing.counts(), boundaries=routing.boundaries(), group=self.tp_group)
        activations = ops.swiglu(grouped(rows_RH, self._fc1, gated=True))
        if self.tp_group.size() == 1:
            return grouped(activations, self._fc2, gated=False)
        activations = _GatherColumns.apply(activations, self.tp_group)
        return _GatherColumns.apply(grouped(activations, self._fc2, gated=False), self.tp_group)


def _grouped(x_RK: torch.Tensor, bank: WeightBank, counts, boundaries, group: ProcessGroup, gated: bool) -> torch.Tensor:
    return _GroupedLinear.apply(x_RK, bank, counts, boundaries, group, gated, *bank.weights)


class MoELayer(moe_layer.MoELayer):
    """Megatron's MoE layer with slots instead of dense maps between its parts."""

    def __init__(self, config, submodules=None, layer_number=None, pg_collection=None, is_mtp_layer=False, name=None) -> None:
        super().__init__(config, submodules, layer_number, pg_collection, is_mtp_layer, name)
        self.token_dispatcher = DISPATCHERS[config.moe_token_dispatcher_type]()
        self._expert_group = ExpertGroup(whole=pg_collection.tp_ep, expert=pg_collection.ep, tensor=pg_collection.expt_tp)

    def forward(self, hidden_states: torch.Tensor, intermediate_tensors=None, padding_mask=None) -> tuple[torch.Tensor, None]:
        """[s (/ ranks under sequence parallelism), b, H] -> (the same shape, no bias)."""
        hit("megatron.core.transformer.moe.moe_layer:MoELayer")
        if intermediate_tensors is not None:
            raise ValueError("MoELayer: no adapter covers partial execution (intermediate_tensors)")
        weights_Tk, ids_Tk = self.router(hidden_states)
        layout = microbatch.current()
        routing = plan_routing(ids_Tk, self._expert_group, self.config.num_moe_experts, layout, self.tp_group)
        rows_RH = self.token_dispatcher.dispatch(hidden_states.flatten(0, 1), routing)
        out_TH = self.token_dispatcher.combine(self.experts(rows_RH, routing), weights_Tk, routing)
        return out_TH.view(hidden_states.shape), None
