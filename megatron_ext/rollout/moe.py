"""Mixture of experts of vLLM over `ops`, serving expert maps itself.

Two layouts. Expert parallel: a rank holds whole experts, adds its own into the partial root of its subtree of the expert
tree, and one exchange of fp32 partials over the EP group completes it. Tensor parallel: gate and up are cut by output
row, down by OUTPUT column; SwiGLU activations travel once, so an expert's output is complete before it is rounded and
weighted (cutting down's contraction would move fp32 [tokens x top_k, hidden]).
"""

from __future__ import annotations

import torch
from vllm.distributed import get_ep_group, get_tp_group
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.utils import set_weight_attrs

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.rollout.router import check_routing, route
from megatron_ext.rollout.settings import RolloutError

RUNNER_TARGET = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner"
EXPERTS_TARGET = "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts"


class OrderedMoEMethod(FusedMoEMethodBase):
    """Makes the expert weights of one layer: w13 [E_local, 2 I / TP, H] as [gate | up], w2 [E_local, H / TP, I]."""

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ) -> None:
        config = self.moe
        rows_13 = 2 * intermediate_size_per_partition
        rows_2, columns_2 = hidden_size // config.tp_size, intermediate_size_per_partition * config.tp_size
        self._register(layer, "w13_weight", (num_experts, rows_13, hidden_size), params_dtype, extra_weight_attrs)
        self._register(layer, "w2_weight", (num_experts, rows_2, columns_2), params_dtype, extra_weight_attrs)

    def get_fused_moe_quant_config(self, layer):
        """None: nothing is quantised."""
        return None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as loaded, in the layout that weight sync and digests know."""

    @staticmethod
    def _register(layer, name, shape, dtype, attributes):
        weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        layer.register_parameter(name, weight)
        set_weight_attrs(weight, attributes)


class OrderedRoutedExperts(RoutedExperts):
    """The experts of one rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.moe_config
        self._check()
        order = ops.active_order()
        order.check_expert_parallel(config.num_experts, config.ep_size)
        order.local_segments(config.tp_size)
        self.first_expert = config.ep_rank * self.local_num_experts

    def _check(self) -> None:
        config = self.moe_config
        parallel = config.moe_parallel_config
        found = [
            text
            for text, present in (
                (f"quantisation {self.quant_config and self.quant_config.get_name()}", self.quant_config is not None),
                (f"activation {config.activation.value!r} (expected 'silu')", config.activation.value != "silu"),
                ("expert biases", config.has_bias),
                ("swiglu limit, alpha or beta", any((self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta))),
                ("expert-parallel load balancing (EPLB)", parallel.enable_eplb),
                ("redundant experts", config.num_experts != config.num_logical_experts),
                ("data parallel experts", parallel.dp_size > 1),
                ("sequence-parallel MoE", parallel.is_sequence_parallel),
                (f"placement {self.expert_placement_strategy!r} (expected 'linear')", self.expert_placement_strategy != "linear"),
                ("fused shared experts", self.expert_map_manager.num_fused_shared_experts > 0),
                (f"{config.num_experts} experts over EP {config.ep_size}", config.num_experts % config.ep_size != 0),
                (f"hidden size {self.hidden_size} over TP {config.tp_size}", self.hidden_size % config.tp_size != 0),
            )
            if present
        ]  # fmt: skip
        if found:
            raise RolloutError(f"{self.layer_name}: not supported: {'; '.join(found)}")
        check_routing(self)

    def _get_quant_method(self, prefix, quant_config, moe_config) -> OrderedMoEMethod:
        return OrderedMoEMethod(moe_config)

    def _load_w2(self, expert_data, shard_dim, loaded_weight, tp_rank, load_full=False) -> None:
        """Takes this rank's OUTPUT rows of down [H, I]; the stock loader takes columns."""
        rows = expert_data.shape[0]
        expert_data.copy_(loaded_weight if load_full else loaded_weight.narrow(0, rows * tp_rank, rows))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x [T, H] model dtype, weights fp32 [T, k], ids int64 [T, k] -> [T, H], complete on every rank."""
        hit(EXPERTS_TARGET)
        rows = _LocalRows(weights, ids, self.first_expert, self.local_num_experts)
        hidden = ops.swiglu(ops.grouped_linear(ops.permute(x, rows.tokens), self.w13_weight.data, rows.counts))
        if self.moe_config.tp_size > 1:
            hidden = collectives.all_gather_concat(hidden, get_tp_group().device_group, dim=-1)
        y = ops.grouped_linear(hidden, self.w2_weight.data, rows.counts)
        return self._combine(y, rows, x.shape[0])

    def _combine(self, y: torch.Tensor, rows: _LocalRows, num_tokens: int) -> torch.Tensor:
        """Outputs [R, H / TP] of this rank's experts -> [T, H] model dtype."""
        copies = (y, rows.weights, rows.tokens, rows.experts, num_tokens, self.global_num_experts)
        if self.moe_config.ep_size > 1:
            partial = ops.combine(*copies, expert_range=(self.first_expert, self.first_expert + self.local_num_experts))
            return ops.combine_finish(collectives.all_gather_stack(partial, get_ep_group().device_group), y.dtype)
        output = ops.combine_rows(*copies)
        if self.moe_config.tp_size > 1:
            output = collectives.all_gather_concat(output, get_tp_group().device_group, dim=-1)
        return output


class _LocalRows:
    """The token copies routed to this rank's experts, sorted by expert, then token.

    tokens, experts int64 [R]; weights fp32 [R]; counts int64 [E_local].
    """

    def __init__(self, weights: torch.Tensor, ids: torch.Tensor, first: int, count: int):
        top_k = ids.shape[1]
        flat = ids.flatten()
        local = ((flat >= first) & (flat < first + count)).nonzero().flatten()
        order = local[torch.argsort(flat[local], stable=True)]
        self.tokens = order.div(top_k, rounding_mode="floor")
        self.experts = flat[order]
        self.weights = weights.flatten()[order]
        self.counts = torch.bincount(self.experts - first, minlength=count)


class OrderedMoERunner(MoERunner):
    """Gate, route, experts. The experts' output is complete: nothing is reduced after it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        found = [
            name
            for name, present in (
                ("shared experts", self.shared_experts is not None),
                ("no gate", self.gate is None),
                ("a transform around the routed experts", self.routed_input_transform or self.routed_output_transform),
                ("a scale on the routed output", self.routed_scaling_factor != 1.0),
                ("data parallel or prefill context parallel", self.moe_config.dp_size > 1 or self.moe_config.pcp_size > 1),
            )
            if present
        ]
        if found:
            raise RolloutError(f"{self.layer_name}: not supported: {', '.join(found)}; expected routed experts with their gate")

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states [T, H] -> [T, H]. `router_logits` is a stand-in: the runner owns the gate."""
        hit(RUNNER_TARGET)
        logits, _ = self.gate(hidden_states)
        weights, ids = route(logits, self.routed_experts)
        return self.routed_experts(hidden_states, weights, ids)
