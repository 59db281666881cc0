"""The MoE router. Legend: s positions, b sequences, T tokens of this rank, H hidden, E experts, k slots."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe import router
from torch.distributed import ProcessGroup

from megatron_ext import ops
from megatron_ext.patches import hit
from megatron_ext.train import microbatch
from megatron_ext.train.linear import accumulate_wgrad, gather_sequence
from megatron_ext.train.microbatch import RowLayout


class _RouterLogits(torch.autograd.Function):
    """fp32 logits [s, b, E]. Under sequence parallelism the other ranks' rows enter the weight gradient in their place."""

    @staticmethod
    def forward(ctx, x, w_EH, group: ProcessGroup, sequence_parallel: bool, layout: RowLayout):
        ctx.save_for_backward(x, w_EH)
        ctx.weight, ctx.group, ctx.sequence_parallel, ctx.layout = w_EH, group, sequence_parallel, layout
        return ops.router_logits(x, w_EH)

    @staticmethod
    def backward(ctx, dlogits):
        x, w_EH = ctx.saved_tensors
        dlogits = dlogits.to(x.dtype)
        rows = [ctx.layout.rows(gather_sequence(t, ctx.group) if ctx.sequence_parallel else t) for t in (dlogits, x)]
        dw = accumulate_wgrad(ctx.weight, *rows, ctx.layout.cu_seqlens)
        return ops.router_dgrad(dlogits, w_EH), dw, None, None, None


class TopKRouter(router.TopKRouter):
    """Megatron's router as `ops.route`; returns slots instead of a dense probability map."""

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """[s, b, H] -> (fp32 weights [T, k], int64 expert ids [T, k]), slots by descending score."""
        hit("megatron.core.transformer.moe.router:TopKRouter")
        self._maintain_float32_expert_bias()
        logits = _RouterLogits.apply(input, self.weight, self.tp_group, self.config.sequence_parallel, microbatch.current())
        return ops.route(logits.flatten(0, 1), self.topk, correction_bias=self.expert_bias, **route_options(self.config))


def route_options(config) -> dict:
    """Megatron's router settings in the terms of `ops.route`.

    Megatron's softmax over the chosen logits is the renormalised softmax over all of them; `moe_router_pre_softmax` leaves
    the renormalisation out. Sigmoid scores are renormalised when more than one expert is chosen.
    """
    sigmoid = config.moe_router_score_function == "sigmoid"
    return {
        "score_function": config.moe_router_score_function,
        "renormalize": config.moe_router_topk > 1 if sigmoid else not config.moe_router_pre_softmax,
        "scale": config.moe_router_topk_scaling_factor or 1.0,
        "num_groups": config.moe_router_num_groups,
        "topk_groups": config.moe_router_group_topk,
    }
