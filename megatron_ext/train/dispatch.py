"""Token dispatchers: rows to experts and back, with equal bits for both and for every EP and ETP.

A token copy is one (token, slot). Both dispatchers deliver to an EP rank the copies of its experts, sorted by expert and
inside an expert by the place of the token in the global batch, so no layout shows in an expert's weight gradient. They differ
in what travels back: finished rows (all-to-all) or the root of the EP rank's subtree of the combine tree (allgather).

Legend: T tokens of this rank, G tokens of the whole expert group (TP x EP), k slots, C copies of this rank's tokens,
R copies at this rank's experts, H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.parallel_state import get_data_parallel_rank
from torch.distributed import ProcessGroup

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.train.microbatch import RowLayout

_MAX_ROWS = 1 << 40  # rows of one micro-batch; data-parallel rank and row make one sort key


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks which share the experts. Rank of the whole = ep_rank x etp_size + etp_rank."""

    whole: ProcessGroup
    expert: ProcessGroup
    tensor: ProcessGroup

    def __post_init__(self) -> None:
        expected = self.expert.rank() * self.tensor.size() + self.tensor.rank()
        if self.whole.rank() != expected or self.whole.size() != self.expert.size() * self.tensor.size():
            raise ValueError(
                f"expert group: rank {self.whole.rank()} of {self.whole.size()}, expected rank {expected} of "
                f"{self.expert.size()} x {self.tensor.size()} with expert-tensor ranks innermost"
            )

    def experts_of(self, ep_rank: int, num_experts: int) -> tuple[int, int]:
        """Range [first, last) of the experts of an EP rank."""
        local = num_experts // self.expert.size()
        return ep_rank * local, (ep_rank + 1) * local


@dataclass(frozen=True)
class Copies:
    """Token copies in a fixed order: token index, slot, expert, source rank in the expert group, sequence key."""

    tokens: torch.Tensor
    slots: torch.Tensor
    experts: torch.Tensor
    sources: torch.Tensor
    sequences: torch.Tensor

    def __len__(self) -> int:
        return self.tokens.numel()

    def take(self, index: torch.Tensor) -> Copies:
        return Copies(*(x[index] for x in (self.tokens, self.slots, self.experts, self.sources, self.sequences)))


@dataclass(frozen=True)
class Routing:
    """Where every token copy of the expert group goes; all ranks compute it from the same gathered facts.

    lengths: tokens of every rank. at_experts: the copies that this rank's experts receive, `tokens` indexing the G gathered
    tokens. mine: the copies of this rank's own tokens, grouped by EP rank, `tokens` indexing its T tokens.
    """

    group: ExpertGroup
    num_experts: int
    lengths: list[int]
    at_experts: Copies
    mine: Copies

    @property
    def expert_range(self) -> tuple[int, int]:
        return self.group.experts_of(self.group.expert.rank(), self.num_experts)

    @property
    def num_tokens(self) -> int:
        return self.lengths[self.group.whole.rank()]

    def counts(self) -> torch.Tensor:
        """int64 [local experts]: rows per expert."""
        first, last = self.expert_range
        return torch.bincount(self.at_experts.experts - first, minlength=last - first)

    def boundaries(self) -> torch.Tensor:
        """int64: the rows at which another expert or another sequence starts, and their number."""
        experts, sequences = self.at_experts.experts, self.at_experts.sequences
        changes = (experts[1:] != experts[:-1]) | (sequences[1:] != sequences[:-1])
        return torch.cat([torch.zeros(1, dtype=torch.int64), changes.nonzero().flatten() + 1, torch.tensor([len(self.at_experts)])])

    def whole_lengths_of_peers(self) -> list[int]:
        """Tokens of the ranks with this expert-tensor rank, one per EP rank."""
        return self.lengths[self.group.tensor.rank() :: self.group.tensor.size()]


def gather_tokens(x: torch.Tensor, lengths: list[int], group: ProcessGroup) -> torch.Tensor:
    """[T, ...] of every rank -> [G, ...]. Lengths may differ; only bytes travel."""
    if group.size() == 1:
        return x
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: x.shape[0]] = x
    stacked = collectives.all_gather_stack(padded, group)
    return torch.cat([part[:length] for part, length in zip(stacked, lengths, strict=True)])


def plan_routing(expert_ids_Tk: torch.Tensor, group: ExpertGroup, num_experts: int, layout: RowLayout, tp: ProcessGroup) -> Routing:
    """Gathers expert ids and the tokens' places in the batch over the expert group, and derives every order from them."""
    tokens, top_k = expert_ids_Tk.shape
    rows_T = _rows_here(tokens, layout, tp)
    header = torch.tensor([tokens, get_data_parallel_rank()])
    headers = collectives.all_gather_stack(header, group.whole) if group.whole.size() > 1 else header[None]
    lengths = headers[:, 0].tolist()
    facts = torch.cat([expert_ids_Tk, rows_T[:, None], layout.sequence_ids()[rows_T][:, None]], dim=1)
    facts_G = gather_tokens(facts, lengths, group.whole)
    sources_G = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    replica_G = headers[:, 1][sources_G] * _MAX_ROWS
    copies = Copies(
        tokens=torch.arange(facts_G.shape[0]).repeat_interleave(top_k),
        slots=torch.arange(top_k).repeat(facts_G.shape[0]),
        experts=facts_G[:, :top_k].flatten(),
        sources=sources_G.repeat_interleave(top_k),
        sequences=(replica_G + facts_G[:, top_k + 1]).repeat_interleave(top_k),
    )
    place_C = (replica_G + facts_G[:, top_k]).repeat_interleave(top_k)
    copies = copies.take(torch.argsort(place_C, stable=True))
    copies = copies.take(torch.argsort(copies.experts, stable=True))
    first, last = group.experts_of(group.expert.rank(), num_experts)
    rank = group.whole.rank()
    mine = copies.take(copies.sources == rank)
    return Routing(
        group=group,
        num_experts=num_experts,
        lengths=lengths,
        at_experts=copies.take((copies.experts >= first) & (copies.experts < last)),
        mine=Copies(mine.tokens - sum(lengths[:rank]), mine.slots, mine.experts, mine.sources, mine.sequences),
    )


def _rows_here(tokens: int, layout: RowLayout, tp: ProcessGroup) -> torch.Tensor:
    """Row numbers of this rank's tokens: all of the micro-batch, or under sequence parallelism this rank's slice of it."""
    positions = tokens // layout.batch
    if positions == layout.seq:
        return layout.row_ids(0, layout.seq)
    if positions * tp.size() != layout.seq:
        raise ValueError(
            f"{tokens} tokens on this rank are neither the whole micro-batch ({layout.seq} x {layout.batch}) nor 1/{tp.size()} of it"
        )
    return layout.row_ids(tp.rank() * positions, positions)


# All-to-all: every copy goes to all expert-tensor ranks of its expert and comes back from the one with this rank's index.


def _send_rows(copies_CH: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Rows of `mine` -> rows of `at_experts`."""
    group, ep_size = routing.group, routing.group.expert.size()
    if group.whole.size() == 1:
        return copies_CH
    per_ep = _per_ep_rank(routing.mine, routing)
    blocks = copies_CH.split(per_ep)
    etp = group.tensor.size()
    send = torch.cat([blocks[ep] for ep in range(ep_size) for _ in range(etp)])
    input_splits = [n for n in per_ep for _ in range(etp)]
    arrived_by, output_splits = _arrival_order(routing.at_experts.sources, group.whole.size())
    return ops.unpermute(collectives.all_to_all_rows(send, output_splits, input_splits, group.whole), arrived_by)


def _return_rows(rows_RH: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Rows of `at_experts` -> rows of `mine`; only this rank's expert-tensor index answers its own sources."""
    group = routing.group
    if group.whole.size() == 1:
        return rows_RH
    sources, etp = routing.at_experts.sources, group.tensor.size()
    answered = (sources % etp == group.tensor.rank()).nonzero().flatten()
    order, input_splits = _arrival_order(sources[answered] // etp, group.expert.size())
    send = ops.permute(rows_RH, answered[order])
    return collectives.all_to_all_rows(send, _per_ep_rank(routing.mine, routing), input_splits, group.expert)


def _per_ep_rank(copies: Copies, routing: Routing) -> list[int]:
    """Copies for each EP rank; they are grouped by it already, because they are sorted by expert."""
    ep_size = routing.group.expert.size()
    return torch.bincount(copies.experts // (routing.num_experts // ep_size), minlength=ep_size).tolist()


def _arrival_order(sources: torch.Tensor, ranks: int) -> tuple[torch.Tensor, list[int]]:
    """Index that groups rows by source, keeping their order, and the number of rows of every source."""
    return torch.argsort(sources, stable=True), torch.bincount(sources, minlength=ranks).tolist()


def _combine_rows(copies_CH: torch.Tensor, weights_C: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, H]: the copies of this rank's tokens, summed by the expert tree."""
    return ops.combine_rows(copies_CH, weights_C, routing.mine.tokens, routing.mine.experts, routing.num_tokens, routing.num_experts)


class _ToExperts(torch.autograd.Function):
    """x [T, H] -> rows [R, H]. The gradients of a token's copies come back and are summed by the expert tree."""

    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.routing = routing
        return _send_rows(ops.permute(x_TH, routing.mine.tokens), routing)

    @staticmethod
    def backward(ctx, drows_RH: torch.Tensor):
        return _combine_rows(_return_rows(drows_RH, ctx.routing), torch.ones(len(ctx.routing.mine)), ctx.routing), None


class _FromExperts(torch.autograd.Function):
    """rows [R, H] -> copies [C, H] at their tokens' rank."""

    @staticmethod
    def forward(ctx, rows_RH: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.routing = routing
        return _return_rows(rows_RH, routing)

    @staticmethod
    def backward(ctx, dcopies_CH: torch.Tensor):
        return _send_rows(dcopies_CH, ctx.routing), None


class AllToAllDispatcher:
    """Copies travel to their experts; finished rows travel back and are combined at the token's rank."""

    def dispatch(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[T, H] -> [R, H]."""
        hit("megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher")
        return _ToExperts.apply(x_TH, routing)

    def combine(self, y_RH: torch.Tensor, weights_Tk: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Complete expert outputs [R, H] and fp32 weights [T, k] -> [T, H]."""
        weights_C = weights_Tk[routing.mine.tokens, routing.mine.slots]
        return _combine_rows(_FromExperts.apply(y_RH, routing), weights_C, routing)


# Allgather: all tokens are everywhere; the roots of the EP ranks' subtrees travel back.


def _exchange_roots(roots_GX: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Every EP rank's [G, X] -> [EP, T, X]: what each EP rank has for this rank's tokens."""
    group = routing.group
    if group.whole.size() == 1:
        return roots_GX[None]
    per_source = roots_GX.split(routing.lengths)
    peers = per_source[group.tensor.rank() :: group.tensor.size()]
    output_splits = [routing.num_tokens] * group.expert.size()
    received = collectives.all_to_all_rows(torch.cat(peers), output_splits, routing.whole_lengths_of_peers(), group.expert)
    return received.view(group.expert.size(), routing.num_tokens, *roots_GX.shape[1:])


def _sum_at_tokens(rows_RH: torch.Tensor, weights_R: torch.Tensor, routing: Routing) -> torch.Tensor:
    """fp32 [G, H]: this EP rank's subtree of the combine tree, for all tokens."""
    at = routing.at_experts
    return ops.combine(
        rows_RH, weights_R, at.tokens, at.experts, sum(routing.lengths), routing.num_experts, routing.expert_range
    )


class _GatherToExperts(torch.autograd.Function):
    """x [T, H] -> rows [R, H]. Gradients are summed by the expert tree, subtree by subtree."""

    @staticmethod
    def forward(ctx, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.routing = routing
        return ops.permute(gather_tokens(x_TH, routing.lengths, routing.group.whole), routing.at_experts.tokens)

    @staticmethod
    def backward(ctx, drows_RH: torch.Tensor):
        roots = _sum_at_tokens(drows_RH, torch.ones(drows_RH.shape[0]), ctx.routing)
        return ops.combine_finish(_exchange_roots(roots, ctx.routing), drows_RH.dtype), None


class _GatherWeights(torch.autograd.Function):
    """weights [T, k] -> [R]. The gradient of a slot comes from the one EP rank that holds its expert."""

    @staticmethod
    def forward(ctx, weights_Tk: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.routing, ctx.top_k = routing, weights_Tk.shape[1]
        weights_Gk = gather_tokens(weights_Tk, routing.lengths, routing.group.whole)
        return weights_Gk[routing.at_experts.tokens, routing.at_experts.slots]

    @staticmethod
    def backward(ctx, dweights_R: torch.Tensor):
        routing = ctx.routing
        dweights_Gk = dweights_R.new_zeros(sum(routing.lengths), ctx.top_k)
        dweights_Gk[routing.at_experts.tokens, routing.at_experts.slots] = dweights_R
        parts = _exchange_roots(dweights_Gk, routing)
        mine = routing.mine
        dweights_Tk = dweights_R.new_zeros(routing.num_tokens, ctx.top_k)
        owner = mine.experts // (routing.num_experts // routing.group.expert.size())
        dweights_Tk[mine.tokens, mine.slots] = parts[owner, mine.tokens, mine.slots]
        return dweights_Tk, None


class _JoinRoots(torch.autograd.Function):
    """The EP ranks' subtrees [G, H] -> finished tokens [T, H]."""

    @staticmethod
    def forward(ctx, roots_GH: torch.Tensor, routing: Routing, dtype: torch.dtype) -> torch.Tensor:
        ctx.routing = routing
        return ops.combine_finish(_exchange_roots(roots_GH, routing), dtype)

    @staticmethod
    def backward(ctx, dout_TH: torch.Tensor):
        return gather_tokens(dout_TH, ctx.routing.lengths, ctx.routing.group.whole).float(), None, None


class AllGatherDispatcher:
    """All tokens are gathered; every EP rank combines what its experts add, and the subtrees are joined at the token's rank."""

    def dispatch(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[T, H] -> [R, H]."""
        hit("megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher")
        return _GatherToExperts.apply(x_TH, routing)

    def combine(self, y_RH: torch.Tensor, weights_Tk: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Complete expert outputs [R, H] and fp32 weights [T, k] -> [T, H]."""
        roots = _sum_at_tokens(y_RH, _GatherWeights.apply(weights_Tk, routing), routing)
        return _JoinRoots.apply(roots, routing, y_RH.dtype)


DISPATCHERS = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}
