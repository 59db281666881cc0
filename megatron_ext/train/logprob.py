"""Token log-probabilities from hidden states, over a vocabulary cut by TP. Logits stay fp32 and exist only for the rows asked for.

Legend: s positions, b sequences, R = s x b rows, P predicted tokens, Vl vocabulary columns of this rank, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.train.finite import NonFinite
from megatron_ext.train.linear import accumulate_wgrad, gather_sequence, join_partials
from megatron_ext.train.microbatch import RowLayout


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a micro-batch predicts. rows_P: row that predicts; targets_P: token id; cu_P: int32 boundaries by sequence; names: what
    errors call the sequences."""

    rows_P: torch.Tensor
    targets_P: torch.Tensor
    cu_P: torch.Tensor
    temperature: float
    names: tuple[str, ...] = ()

    def place(self, index: int) -> str:
        """The sequence and response position of predicted token `index`."""
        sequence = int(torch.searchsorted(self.cu_P, index, right=True)) - 1
        name = self.names[sequence] if self.names else f"sequence {sequence}"
        return f"{name}, response position {index - int(self.cu_P[sequence])}"


@dataclass(frozen=True)
class VocabShard:
    """Columns [first, first + width) of the padded vocabulary; `valid` of them are real tokens."""

    group: ProcessGroup
    first: int
    width: int
    valid: int

    @classmethod
    def of(cls, group: ProcessGroup, width: int, vocab_size: int) -> VocabShard:
        first = group.rank() * width
        return cls(group, first, width, min(max(vocab_size - first, 0), width))

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Column of each id on this rank, -1 where it lies on another."""
        local = ids - self.first
        return torch.where((local >= 0) & (local < self.width), local, -1)


class TokenLogprobs(torch.autograd.Function):
    """Hidden states [s (/ ranks under sequence parallelism), b, H] and weight [Vl, H] -> fp32 log-probabilities [P]."""

    @staticmethod
    def forward(ctx, hidden, weight_VH, shard: VocabShard, prediction: Prediction, sequence_parallel: bool, layout: RowLayout):
        hit("megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss")
        total = gather_sequence(hidden, shard.group) if sequence_parallel else hidden
        x_PH = layout.rows(total)[prediction.rows_P]
        logits_PV = ops.linear_fp32(x_PH, weight_VH)
        check_logits(logits_PV, prediction)
        max_P, sum_P = _softmax_parts(logits_PV, shard, prediction.temperature)
        local_P = shard.local(prediction.targets_P)
        ctx.save_for_backward(x_PH, weight_VH, logits_PV, max_P, sum_P, local_P)
        ctx.weight, ctx.shard, ctx.prediction = weight_VH, shard, prediction
        ctx.sequence_parallel, ctx.layout = sequence_parallel, layout
        target_P = _target_logits(logits_PV, local_P, prediction.targets_P, shard)
        return ops.logprob_from_parts(ops.scale_logits(target_P, prediction.temperature), max_P, sum_P)

    @staticmethod
    def backward(ctx, grad_P):
        x_PH, weight_VH, logits_PV, max_P, sum_P, local_P = ctx.saved_tensors
        shard, prediction, layout = ctx.shard, ctx.prediction, ctx.layout
        dlogits_PV = ops.vocab_dlogits(logits_PV, max_P, sum_P, local_P, grad_P, shard.valid, x_PH.dtype, prediction.temperature)
        segments = ops.active_order().local_segments(shard.group.size())
        dx_PH = join_partials(ops.dgrad_fp32(dlogits_PV, weight_VH, segments), shard.group, False, x_PH.dtype)
        drows_RH = dx_PH.new_zeros(layout.seq * layout.batch, dx_PH.shape[1])
        drows_RH[prediction.rows_P] = dx_PH
        dhidden = layout.unrows(drows_RH)
        if ctx.sequence_parallel:
            dhidden = dhidden.chunk(shard.group.size())[shard.group.rank()]
        dweight = accumulate_wgrad(ctx.weight, dlogits_PV, x_PH, prediction.cu_P)
        return dhidden.contiguous(), dweight, None, None, None, None


def check_logits(logits_PV: torch.Tensor, prediction: Prediction) -> None:
    """Raises NonFinite naming the sequence and position of the first row with a logit that is infinite or no number."""
    if not logits_PV.isfinite().all():
        row = int((~logits_PV.isfinite()).any(dim=1).nonzero()[0])
        raise NonFinite(f"non-finite logits: {prediction.place(row)}")


def _softmax_parts(logits_PV: torch.Tensor, shard: VocabShard, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and exponent sum over the whole vocabulary: exact maximum, then every rank's subtree joined by the tree."""
    max_P = collectives.max_all_reduce(ops.vocab_max(logits_PV, shard.valid, temperature), shard.group)
    segments = ops.active_order().local_segments(shard.group.size())
    sum_P = ops.vocab_exp_sum(logits_PV, max_P, shard.valid, segments, temperature)
    return max_P, ops.ordered_sum(collectives.all_gather_stack(sum_P, shard.group))


def _target_logits(logits_PV, local_P, targets_P, shard: VocabShard) -> torch.Tensor:
    """Each target's logit, from the rank that holds its column."""
    mine_P = logits_PV.gather(1, local_P.clamp(min=0)[:, None])[:, 0]
    every_rP = collectives.all_gather_stack(mine_P, shard.group)
    return every_rP.gather(0, (targets_P // shard.width)[None])[0]
