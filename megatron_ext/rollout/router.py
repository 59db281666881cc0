"""MoE gate of vLLM over `ops.router_logits`: fp32 logits from model-dtype inputs."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from megatron_ext import ops
from megatron_ext.patches import hit
from megatron_ext.rollout.linear import OrderedLinear
from megatron_ext.rollout.settings import RolloutError

TARGET = "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear"


class OrderedGateLinear(OrderedLinear, GateLinear):
    """Router logits; `out_dtype` is ignored on purpose, they are never rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """x [T, H] model dtype -> fp32 [T, E]."""
        hit(TARGET)
        return self._returned(ops.router_logits(x, self.weight.data))


def route(logits_TE: torch.Tensor, experts: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 logits [T, E] -> (weights fp32 [T, k], expert ids int64 [T, k]) by the routing settings of `experts`."""
    return ops.route(
        logits_TE,
        experts.top_k,
        score_function=experts.scoring_func,
        renormalize=experts.renormalize,
        scale=experts.routed_scaling_factor,
        correction_bias=experts.e_score_correction_bias,
        num_groups=experts.num_expert_group if experts.use_grouped_topk else None,
        topk_groups=experts.topk_group if experts.use_grouped_topk else None,
    )


def check_routing(experts: torch.nn.Module) -> None:
    """Raises RolloutError for a routing rule that `ops.route` does not have, naming the layer and the rule."""
    found = [
        name
        for name, present in (
            ("custom_routing_function", experts.custom_routing_function is not None),
            ("apply_router_weight_on_input", experts.apply_router_weight_on_input),
            (f"scoring_func={experts.scoring_func!r}", experts.scoring_func not in ("softmax", "sigmoid")),
        )
        if present
    ]
    if found:
        raise RolloutError(f"{experts.layer_name}: {', '.join(found)} not supported; expected softmax or sigmoid scores and top-k")
