"""What each rank of test_four_ranks.py checks. Every rank computes the whole reference by itself and compares its share."""

import torch
import torch.distributed as dist

from inputs import normal, revealing
from megatron_ext import collectives, ops
from megatron_ext.parity.bits import assert_same_bits, differing
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.reference import activation, linear, moe
from megatron_ext.reference import collectives as reference_collectives
from megatron_ext.reference.logprob import logprob_from_parts, vocab_exp_sum, vocab_max

SEGMENTS = 8


def subgroup(rank: int, world: int, size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours. All ranks create all groups, in one order."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[rank // size]


def check_everything(rank: int, world: int, mmad_order: str) -> None:
    ops.configure(ReductionOrder(mmad_order=mmad_order), "ascendc")
    check_collectives(rank, world)
    check_vocabulary(rank, world)
    check_linears(rank, world, mmad_order)
    check_experts(rank, world, mmad_order)


def check_collectives(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for rows, columns in ((4, 3), (5, 7), (64, 512)):  # one message of partials, an uneven one, and all-to-all then all-gather
        parts = revealing(world, rows, columns, dtype=torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            expected = reference_collectives.all_reduce(parts, dtype)
            assert_same_bits(collectives.ordered_all_reduce(parts[rank], group, dtype), expected, f"all_reduce {rows}x{columns}")
            if rows % world == 0:
                expected = reference_collectives.reduce_scatter(parts, dtype)[rank]
                assert_same_bits(collectives.ordered_reduce_scatter(parts[rank], group, dtype), expected, "reduce_scatter")
    check_backend_sum_differs(rank, world)
    check_exact_collectives(rank, world, group)


def check_backend_sum_differs(rank: int, world: int) -> None:
    """The inputs reveal an order: the backend's own SUM gives other bits."""
    parts = revealing(world, 64, 512, dtype=torch.float32)
    backend_sum = parts[rank].clone()
    dist.all_reduce(backend_sum)
    assert differing(backend_sum, reference_collectives.all_reduce(parts, torch.float32)).any()


def check_exact_collectives(rank: int, world: int, group) -> None:
    rows = [torch.full((r + p, 3), 10.0 * r + p).to(torch.bfloat16) for r in range(world) for p in range(world)]
    mine = rows[rank * world : (rank + 1) * world]
    got = collectives.all_to_all_rows(torch.cat(mine), [r + rank for r in range(world)], [rank + p for p in range(world)], group)
    assert_same_bits(got, torch.cat([rows[r * world + rank] for r in range(world)]), "all_to_all_rows")
    table = normal(8, 6)
    table[:, 0] = -0.0
    owned = torch.zeros_like(table)
    owned[2 * rank : 2 * rank + 2] = table[2 * rank : 2 * rank + 2]
    assert_same_bits(collectives.select_nonzero_rows_sum(owned, group), table, "select_nonzero_rows_sum keeps -0")
    values = revealing(world, 9, dtype=torch.float32)
    assert_same_bits(collectives.max_all_reduce(values[rank], group), values.amax(0) + 0.0, "max_all_reduce")
    assert_same_bits(collectives.all_gather_concat(table[rank : rank + 1], group, 1), table[:world].reshape(1, -1), "all_gather_concat")


def check_vocabulary(rank: int, world: int) -> None:
    """The vocabulary-parallel logprob over 4 ranks, as train/logprob.py composes it."""
    logits = normal(6, 1024, dtype=torch.float32, scale=8)
    width, valid = 1024 // world, 1000
    shard, mine = logits[:, rank * width : (rank + 1) * width], min(width, valid - rank * width)
    row_max = collectives.max_all_reduce(ops.vocab_max(shard, mine), dist.group.WORLD)
    exp_sum = collectives.ordered_all_reduce(ops.vocab_exp_sum(shard, row_max, mine, SEGMENTS // world), dist.group.WORLD)
    whole_max = vocab_max(logits, valid)
    whole_sum = vocab_exp_sum(logits, whole_max, valid, SEGMENTS)
    got = ops.logprob_from_parts(logits[:, 3], row_max, exp_sum)
    assert_same_bits(got, logprob_from_parts(logits[:, 3], whole_max, whole_sum), "vocabulary-parallel logprob")


def gated_shard(weight: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Rank's part of a [gate | up] weight or activation along dimension 0: [gate part | up part]."""
    gate, up = weight.chunk(2)
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])


def check_linears(rank: int, world: int, mmad_order: str) -> None:
    """Column- and row-parallel linears of the training side for TP 1, 2, 4, with and without sequence parallelism."""
    for tp in (1, 2, 4):
        group = subgroup(rank, world, tp)
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            check_column_parallel(group, sequence_parallel, mmad_order)
            check_row_parallel(group, sequence_parallel, mmad_order)


def own_rows(x_sb: torch.Tensor, group, sequence_parallel: bool) -> torch.Tensor:
    return x_sb.chunk(group.size())[group.rank()].contiguous() if sequence_parallel else x_sb


def check_column_parallel(group, sequence_parallel: bool, mmad_order: str) -> None:
    from megatron_ext.train.linear import _ColumnParallel
    from megatron_ext.train.microbatch import RowLayout

    s, b, k, n = 8, 2, 128, 512
    layout, tp, rank = RowLayout.padded(s, b), group.size(), group.rank()
    x, w, dy = revealing(s, b, k), revealing(n, k, seed=1), revealing(s, b, n, seed=2)
    y_ref = linear.linear_fp32(x.view(-1, k), w, SEGMENTS, mmad_order).to(x.dtype).view(s, b, n)
    dx_ref = linear.dgrad_fp32(dy.view(-1, n), w, SEGMENTS, True, mmad_order).to(x.dtype).view(s, b, k)
    dw_ref = linear.wgrad(torch.zeros(n, k), layout.rows(dy), layout.rows(x), [0, s, 2 * s], mmad_order)

    shard = lambda t: gated_shard(t, tp, rank)  # noqa: E731
    weight = torch.nn.Parameter(shard(w))
    weight.main_grad = torch.zeros(weight.shape)
    leaf = own_rows(x, group, sequence_parallel).clone().requires_grad_()
    y = _ColumnParallel.apply(leaf, weight, group, sequence_parallel, True, layout)
    y.backward(shard(dy.permute(2, 0, 1)).permute(1, 2, 0).contiguous())
    what = f"column TP{tp} SP={sequence_parallel} {mmad_order}"
    assert_same_bits(y, shard(y_ref.permute(2, 0, 1)).permute(1, 2, 0), what + " y")
    assert_same_bits(leaf.grad, own_rows(dx_ref, group, sequence_parallel), what + " dx")
    assert_same_bits(weight.main_grad, shard(dw_ref), what + " dw")


def check_row_parallel(group, sequence_parallel: bool, mmad_order: str) -> None:
    from megatron_ext.train.linear import _RowParallel
    from megatron_ext.train.microbatch import RowLayout

    s, b, k, n = 8, 2, 256, 128
    layout, tp, rank = RowLayout.padded(s, b), group.size(), group.rank()
    x, w, dy = revealing(s, b, k), revealing(n, k, seed=1), revealing(s, b, n, seed=2)
    y_ref = linear.linear_fp32(x.view(-1, k), w, SEGMENTS, mmad_order).to(x.dtype).view(s, b, n)
    dx_ref = linear.dgrad_fp32(dy.view(-1, n), w, SEGMENTS, False, mmad_order).to(x.dtype).view(s, b, k)
    dw_ref = linear.wgrad(torch.zeros(n, k), layout.rows(dy), layout.rows(x), [0, s, 2 * s], mmad_order)

    weight = torch.nn.Parameter(w.chunk(tp, 1)[rank].contiguous())
    weight.main_grad = torch.zeros(weight.shape)
    leaf = x.chunk(tp, 2)[rank].contiguous().requires_grad_()
    y = _RowParallel.apply(leaf, weight, group, sequence_parallel, layout)
    y.backward(own_rows(dy, group, sequence_parallel))
    what = f"row TP{tp} SP={sequence_parallel} {mmad_order}"
    assert_same_bits(y, own_rows(y_ref, group, sequence_parallel), what + " y")
    assert_same_bits(leaf.grad, dx_ref.chunk(tp, 2)[rank], what + " dx")
    assert_same_bits(weight.main_grad, dw_ref.chunk(tp, 1)[rank].contiguous(), what + " dw")


class MoEProblem:
    """One MoE layer over the tokens of all data-parallel ranks, and its reference."""

    ranks, tokens, hidden, width, experts, top_k = 4, 6, 128, 128, 16, 4

    def __init__(self, mmad_order: str) -> None:
        r, t = self.ranks, self.tokens
        self.x = revealing(r, t, self.hidden, large=3e4)
        self.dout = normal(r, t, self.hidden, seed=9)
        self.fc1 = revealing(self.experts, 2 * self.width, self.hidden, seed=1, large=300.0)
        self.fc2 = revealing(self.experts, self.hidden, self.width, seed=2, large=300.0)
        self.weights = normal(r, t, self.top_k, dtype=torch.float32, seed=3).abs()
        generator = torch.Generator().manual_seed(4)
        # Expert 5 gets no token and expert 0 one from every token: an empty and a crowded expert.
        others = torch.tensor([e for e in range(1, self.experts) if e != 5])
        picks = [others[torch.randperm(len(others), generator=generator)[: self.top_k - 1]] for _ in range(r * t)]
        self.ids = torch.stack([torch.cat([torch.tensor([0]), pick]) for pick in picks]).view(r, t, self.top_k)
        self.mmad_order = mmad_order
        self.reference()

    def reference(self) -> None:
        x = self.x.flatten(0, 1)
        token_ids = torch.arange(len(x)).repeat_interleave(self.top_k)
        expert_ids, weights = self.ids.flatten(), self.weights.flatten()
        y = torch.empty(len(token_ids), self.hidden, dtype=x.dtype)
        dx_copies = torch.empty_like(y)
        self.dfc1, self.dfc2 = torch.zeros(self.fc1.shape), torch.zeros(self.fc2.shape)
        dout = self.dout.flatten(0, 1)
        for expert in range(self.experts):
            rows = (expert_ids == expert).nonzero().flatten()
            if not len(rows):
                continue
            xe = x[token_ids[rows]]
            gate_up = linear.linear_fp32(xe, self.fc1[expert], SEGMENTS, self.mmad_order).to(x.dtype)
            act = activation.swiglu(gate_up)
            y[rows] = linear.linear_fp32(act, self.fc2[expert], SEGMENTS, self.mmad_order).to(x.dtype)
            dy = (dout[token_ids[rows]].float() * weights[rows, None]).to(x.dtype)
            dact = linear.dgrad_fp32(dy, self.fc2[expert], SEGMENTS, False, self.mmad_order).to(x.dtype)
            dgate_up = activation.swiglu_backward(dact, gate_up)
            dx_copies[rows] = linear.dgrad_fp32(dgate_up, self.fc1[expert], SEGMENTS, True, self.mmad_order).to(x.dtype)
            source = token_ids[rows] // self.tokens
            starts = [0, *((source[1:] != source[:-1]).nonzero().flatten() + 1).tolist(), len(rows)]
            self.dfc1[expert] = linear.wgrad(self.dfc1[expert], dgate_up, xe, starts, self.mmad_order)
            self.dfc2[expert] = linear.wgrad(self.dfc2[expert], dy, act, starts, self.mmad_order)
        arguments = (token_ids, expert_ids, len(x), self.experts, self.experts, (0, self.experts))
        out = moe.combine_finish(moe.combine(y, weights, *arguments)[None], x.dtype)
        dx = moe.combine_finish(moe.combine(dx_copies, torch.ones_like(weights), *arguments)[None], x.dtype)
        self.out, self.dx = out.view_as(self.x), dx.view_as(self.x)


def check_experts(rank: int, world: int, mmad_order: str) -> None:
    """Experts fed by several data-parallel ranks: DP4 with EP 1, 2 and 4, both dispatchers, forward and gradients."""
    from megatron.core import parallel_state

    problem = MoEProblem(mmad_order)
    for ep in (4, 2, 1):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
        for dispatcher in ("alltoall", "allgather"):
            check_expert_layer(rank, ep, dispatcher, problem)
        parallel_state.destroy_model_parallel()


def check_expert_layer(rank: int, ep: int, dispatcher: str, problem: MoEProblem) -> None:
    from megatron.core import parallel_state

    from megatron_ext.train.dispatch import DISPATCHERS, ExpertGroup, plan_routing
    from megatron_ext.train.microbatch import RowLayout
    from megatron_ext.train.moe import WeightBank, _grouped

    group = ExpertGroup(
        whole=parallel_state.get_expert_tensor_and_model_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        tensor=parallel_state.get_expert_tensor_parallel_group(),
    )
    first, last = group.experts_of(group.expert.rank(), problem.experts)
    banks = [WeightBank([torch.nn.Parameter(w.clone()) for w in weights[first:last]]) for weights in (problem.fc1, problem.fc2)]
    for bank in banks:
        for weight in bank.weights:
            weight.main_grad = torch.zeros(weight.shape)
    x = problem.x[rank].clone().requires_grad_()
    weights = problem.weights[rank].clone().requires_grad_()
    tp = parallel_state.get_tensor_model_parallel_group()
    routing = plan_routing(problem.ids[rank], group, problem.experts, RowLayout.padded(problem.tokens, 1), tp)
    settings = {"counts": routing.counts(), "boundaries": routing.boundaries(), "group": group.tensor}
    dispatch = DISPATCHERS[dispatcher]()
    rows = dispatch.dispatch(x, routing)
    y = _grouped(ops.swiglu(_grouped(rows, banks[0], gated=True, **settings)), banks[1], gated=False, **settings)
    out = dispatch.combine(y, weights, routing)
    out.backward(problem.dout[rank])
    what = f"EP{ep} {dispatcher} {problem.mmad_order}"
    assert_same_bits(out, problem.out[rank], what + " out")
    assert_same_bits(x.grad, problem.dx[rank], what + " dx")
    if ep == 4:  # with a smaller EP the expert gradients are summed over expert-data-parallel ranks afterwards
        for name, bank, expected in (("fc1", banks[0], problem.dfc1), ("fc2", banks[1], problem.dfc2)):
            assert_same_bits(torch.stack([w.main_grad for w in bank.weights]), expected[first:last], f"{what} d{name}")
