"""Vocabulary-parallel token embedding. Legend: s positions, b sequences, R = s x b rows, Vl vocabulary of this rank, H hidden."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.train.linear import gather_sequence
from megatron_ext.train.microbatch import RowLayout

TIED_GRAD = "tied_embedding_grad"  # the second accumulator of a weight that is embedding and output layer at once


class _EmbedTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_VH, ids_bs, first: int, group, sequence_parallel: bool, tied: bool, layout: RowLayout):
        ctx.group, ctx.sequence_parallel, ctx.tied, ctx.layout = group, sequence_parallel, tied, layout
        ctx.weight = weight_VH
        local_bs = ids_bs - first
        here_bs = (local_bs >= 0) & (local_bs < weight_VH.shape[0])
        ctx.save_for_backward(local_bs, here_bs)
        out = torch.where(here_bs[..., None], weight_VH[local_bs.clamp(0, weight_VH.shape[0] - 1)], 0.0)
        if group.size() > 1:
            out = collectives.select_nonzero_rows_sum(out, group)
        out = out.transpose(0, 1)
        return (out.chunk(group.size())[group.rank()] if sequence_parallel else out).contiguous()

    @staticmethod
    def backward(ctx, dout):
        local_bs, here_bs = ctx.saved_tensors
        dout_R = ctx.layout.rows(gather_sequence(dout, ctx.group) if ctx.sequence_parallel else dout)
        here_R = here_bs.flatten()
        accumulator, finish = _accumulator(ctx.weight, ctx.tied)
        ops.embedding_wgrad_(accumulator, local_bs.flatten()[here_R], dout_R[here_R])
        return finish(), *(None,) * 6


def _accumulator(weight: torch.nn.Parameter, tied: bool):
    """The fp32 tensor that row gradients go to, and what then gives autograd's answer for the weight."""
    if getattr(weight, "main_grad", None) is None:
        grad = torch.zeros(weight.shape, dtype=torch.float32)
        return grad, lambda: grad.to(weight.dtype)
    if not tied:
        weight.grad_added_to_main_grad = True
        return weight.main_grad, lambda: None
    if getattr(weight, TIED_GRAD, None) is None:
        setattr(weight, TIED_GRAD, torch.zeros_like(weight.main_grad))
    return getattr(weight, TIED_GRAD), lambda: None


def embed_tokens(embedding: VocabParallelEmbedding, ids_bs: torch.Tensor, sequence_parallel: bool, tied: bool, layout: RowLayout):
    """int64 ids [b, s] -> [s (/ ranks under sequence parallelism), b, H].

    tied: the weight is also the output layer of this stage; its embedding gradient is then kept apart until
    `gradients.finalize_model_grads` adds it once, so that the order does not depend on the pipeline layout.
    """
    hit("megatron.core.tensor_parallel.layers:VocabParallelEmbedding")
    return _EmbedTokens.apply(
        embedding.weight, ids_bs, embedding.vocab_start_index, embedding.tp_group, sequence_parallel, tied, layout
    )
