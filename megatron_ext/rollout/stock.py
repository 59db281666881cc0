"""What vLLM's stock numeric path needs to run on a CPU at all (contract.consistency == False)."""

from __future__ import annotations

import torch

from megatron_ext.patches import original

EXPERTS_TARGET = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply"


def apply_experts(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale,
    a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
) -> None:  # fmt: skip
    """Stands in for `CPUUnquantizedExperts.apply`, whose kernel indexes local weights by global expert ids (it crashes).

    Ids become local ones; an expert of another rank becomes local expert 0 with weight zero, so the stock kernel, its
    order and its types stay, and vLLM's own all-reduce adds the ranks.
    """
    if expert_map is not None:
        local = expert_map[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(local < 0, 0)
        topk_ids = local.clamp(min=0).to(topk_ids.dtype)
    original(EXPERTS_TARGET)(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, None, a1q_scale,
        a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    )  # fmt: skip


def pack_experts(model: torch.nn.Module) -> None:
    """Packs expert weights for the CPU kernel after vLLM's `reload_weights`, which leaves them as they are in the checkpoint.

    vLLM packs on the first load only: later loads expect kernels that read checkpoint order, and the CPU's does not.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
