"""permute, unpermute, combine: the bits of reference/moe.py on every implementation; refusals; registration."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.reference import moe as reference

op = torch.ops.megatron_ext
BF16 = torch.bfloat16
EXPERTS = [12, 60, 128, 160, 384]
# (tokens, hidden, experts, top_k)
SHAPES = [(1, 40, 12, 10), (9, 33, 60, 8), (17, 2100, 16, 4), (5, 7, 7, 3)]


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop: sums that begin, run on, wait and are joined; a token without rows."""
    tokens, experts = torch.tensor([0, 0, 0, 0, 0, 2, 2]), torch.tensor([0, 1, 2, 5, 7, 6, 3])
    y, weights = normal(7, 5000), torch.rand(7)
    op.combine(y, weights, tokens, experts, 3, 8, 4, 0, 8)
    op.combine_rows(y, weights, tokens, experts, 3, 8, 4)
    op.combine_backward(torch.randn(3, 5000), y, weights, tokens)
    op.unpermute(normal(50, 5000), torch.randperm(50))


def segments_of(experts: int) -> int:
    return ReductionOrder().expert_segments(experts)


def choices(tokens: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """[T, k]: top_k experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k, dtype=torch.long)


def copies(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and expert of every copy, in any order. The last token has none, if there are two."""
    ids = choices(tokens, experts, top_k, seed)[: tokens - 1 if tokens > 1 else tokens]
    order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(seed))
    return torch.arange(len(ids)).repeat_interleave(top_k)[order], ids.flatten()[order]


@functools.cache  # the same for every implementation
def case(tokens, hidden, experts, top_k, dtype, seed=0):
    token_ids, expert_ids = copies(tokens, experts, top_k, seed)
    rows = revealing(len(token_ids), hidden, dtype=dtype, seed=seed), normal(len(token_ids), dtype=torch.float32, seed=seed), token_ids, expert_ids
    tree = tokens, experts, segments_of(experts)
    dout = revealing(tokens, hidden, dtype=torch.float32, seed=seed + 1)
    return rows, tree, dout, (reference.combine(*rows, *tree, (0, experts)), reference.combine_rows(*rows, *tree), *reference.combine_backward(dout, *rows[:3]))


def check(*shape, dtype=BF16, seed=0):
    rows, tree, dout, (root, finished, dy, dweights) = case(*shape, dtype, seed)
    assert_same_bits(op.combine(*rows, *tree, 0, tree[1]), root, "combine")
    assert_same_bits(op.combine_rows(*rows, *tree), finished, "combine_rows")
    ours = op.combine_backward(dout, *rows[:3])
    assert_same_bits(ours[0], dy, "dy")
    assert_same_bits(ours[1], dweights, "dweights")


@pytest.mark.parametrize("shape", SHAPES)
def test_combine(implementation, dtype, shape):
    check(*shape, dtype=dtype)


@pytest.mark.parametrize("experts", EXPERTS)
def test_numbers_of_experts(implementation, experts):
    for top_k in (1, 8, 10):
        check(6, 20, experts, top_k)


@pytest.mark.full
@pytest.mark.parametrize("experts", EXPERTS)
def test_many_tokens(implementation, dtype, experts):
    check(1000, 70, experts, 8, dtype=dtype)
    check(4096, 9, experts, 10, dtype=dtype)


@pytest.mark.parametrize("segments", [1, 2, 8, 16])
def test_the_order_is_a_tree_of_experts(implementation, segments):
    """1e20, 1, -1e20, 1 from left to right leaves 1; a tree of neighbours leaves 0; experts far apart meet high in the tree."""
    y = torch.tensor([1e20, 1.0, -1e20, 1.0]).to(BF16)[:, None].expand(4, 70)
    rows = y, torch.ones(4), torch.zeros(4, dtype=torch.long)
    for experts in ([0, 1, 2, 3], [0, 1, 8, 9], [3, 4, 7, 12], [0, 4, 5, 6], [15, 14, 1, 0]):
        expected = reference.combine(*rows, torch.tensor(experts), 1, 16, segments, (0, 16))
        assert_same_bits(op.combine(*rows, torch.tensor(experts), 1, 16, segments, 0, 16), expected, f"experts {experts}")


def test_signed_zeros(implementation):
    """A part keeps the sign of its only leaf; +0 is added when the tree is finished; a token without a leaf is +0."""
    rows = torch.full((1, 40), -0.0, dtype=BF16), torch.ones(1), torch.tensor([1]), torch.tensor([2])
    zeros = torch.zeros(3, 40)
    minus = zeros.clone()
    minus[1] = -0.0
    assert_same_bits(op.combine(*rows, 3, 4, 4, 0, 4), minus)
    assert_same_bits(op.combine_rows(*rows, 3, 4, 4), zeros.to(BF16))


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_parts_of_ranks_are_subtrees(implementation, ranks):
    """Rows of all experts at one place, or a part from every rank: the same bits."""
    rows, tree, *_ = case(12, 24, 16, 5, BF16)
    parts = []
    for rank in range(ranks):
        first, last = rank * 16 // ranks, (rank + 1) * 16 // ranks
        mine = ((rows[3] >= first) & (rows[3] < last)).nonzero().flatten()
        parts.append(op.combine(*(x[mine] for x in rows), *tree, first, last))
        assert_same_bits(parts[-1], reference.combine(*(x[mine] for x in rows), *tree, (first, last)), f"part {rank}")
    assert_same_bits(reference.combine_finish(torch.stack(parts), BF16), op.combine_rows(*rows, *tree))


def test_the_order_of_rows_and_strides_do_not_show(implementation):
    (y, weights, tokens, experts), tree, dout, (root, *_) = case(9, 33, 60, 8, BF16)
    order = torch.argsort(experts, stable=True)
    assert_same_bits(op.combine(y[order], weights[order], tokens[order], experts[order], *tree, 0, 60), root)
    wide, double = torch.cat([y, y], 1)[:, :33], torch.stack([weights, weights], 1)[:, 0]
    assert_same_bits(op.combine(wide, double, tokens.repeat(2)[: len(tokens)], torch.stack([experts, tokens], 1)[:, 0], *tree, 0, 60), root)
    assert_same_bits(op.combine_backward(dout.T.contiguous().T, wide, double, tokens)[0], reference.combine_backward(dout, y, weights, tokens)[0])


def test_a_token_does_not_depend_on_its_neighbours(implementation):
    (y, weights, tokens, experts), tree, _, (root, *_) = case(17, 2100, 16, 4, BF16)
    mine = (tokens == 3).nonzero().flatten()
    assert_same_bits(op.combine(y[mine], weights[mine], tokens[mine] - 3, experts[mine], 1, *tree[1:], 0, 16)[0], root[3])


def test_permute_and_unpermute(implementation, dtype):
    x, tokens, index = revealing(7, 4200, dtype=dtype), torch.tensor([3, 0, 0, 6, 2]), torch.tensor([4, 2, 0, 6, 1, 5, 3])
    for rows in (x, x[:, 5:70], x.T.contiguous().T, x[:, :1]):
        assert_same_bits(op.permute(rows, tokens), reference.permute(rows, tokens))
        assert_same_bits(op.unpermute(rows, index), reference.unpermute(rows, index))
        assert_same_bits(op.permute(op.unpermute(rows, index), index), rows.contiguous())


def test_threads_do_not_show(threaded):
    rows, tree, dout, _ = case(300, 200, 16, 4, BF16)
    index = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(0))
    results = threaded(lambda: (op.combine(*rows, *tree, 0, 16), op.combine_rows(*rows, *tree), *op.combine_backward(dout, *rows[:3]),
                                op.permute(rows[0], index), op.unpermute(rows[0], index)))  # fmt: skip
    for threads, found in results.items():
        for i, (ours, alone) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(ours, alone, f"result {i} with {threads} threads")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 300), st.sampled_from([1, 6, 7, 12, 16, 24, 64]), st.integers(1, 10), st.integers(0, 2**31))
def test_generated(tokens, hidden, experts, top_k, seed):
    check(tokens, hidden, experts, min(top_k, experts), seed=seed)


def test_gradients(implementation, dtype):
    (y, weights, tokens, experts), tree, dout, (*_, dy, dweights) = case(9, 33, 60, 8, dtype)
    leaves = [y.clone().requires_grad_(), weights.clone().requires_grad_()]
    for ours, expected in zip(torch.autograd.grad(op.combine(*leaves, tokens, experts, *tree, 0, 60), leaves, dout), (dy, dweights), strict=True):
        assert_same_bits(ours, expected)
    narrow = dout.to(dtype)
    expected = reference.combine_backward(narrow.float(), y, weights, tokens)
    for ours, each in zip(torch.autograd.grad(op.combine_rows(*leaves, tokens, experts, *tree), leaves, narrow), expected, strict=True):
        assert_same_bits(ours, each)
    x = revealing(9, 33, dtype=dtype).requires_grad_()
    dx = torch.autograd.grad(op.permute(x, tokens, experts, *tree[1:]), x, y)[0]
    assert_same_bits(dx, reference.combine_rows(y, torch.ones(len(y)), tokens, experts, *tree))
    index = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    assert_same_bits(torch.autograd.grad(op.unpermute(leaves[0], index), leaves[0], y)[0], reference.permute(y, index))


def test_the_gradient_is_that_of_the_formula():
    """The formula by gradcheck in float64, and our gradient against the formula's, within the rounding of bf16."""
    (y, weights, tokens, _), tree, dout, _ = case(3, 8, 12, 3, BF16)

    def formula(y, weights):
        return torch.zeros(3, 8, dtype=y.dtype).index_add(0, tokens, y * weights[:, None])

    exact = [normal(*y.shape, dtype=torch.float64).requires_grad_(), weights.double().requires_grad_()]
    assert torch.autograd.gradcheck(formula, exact)
    dy, dweights = op.combine_backward(normal(3, 8, dtype=torch.float32), exact[0].detach().to(BF16), weights, tokens)
    narrow = [exact[0].detach().to(BF16).double().requires_grad_(), exact[1]]
    expected = torch.autograd.grad(formula(*narrow), narrow, normal(3, 8, dtype=torch.float32).double())
    assert torch.allclose(dy.double(), expected[0], rtol=2**-8, atol=2**-16)
    assert torch.allclose(dweights.double(), expected[1], rtol=1e-5, atol=1e-5)


def test_nothing_to_do():
    y, none = normal(0, 8), torch.empty(0, dtype=torch.long)
    assert_same_bits(op.combine(y, torch.empty(0), none, none, 3, 8, 8, 0, 8), torch.zeros(3, 8))
    assert op.combine_rows(y, torch.empty(0), none, none, 0, 8, 8).shape == (0, 8)
    assert [x.shape for x in op.combine_backward(torch.zeros(3, 8), y, torch.empty(0), none)] == [(0, 8), (0,)]
    assert op.permute(normal(3, 8), none).shape == (0, 8)
    assert op.unpermute(y, none).shape == (0, 8)


def refused(**changes):
    arguments = {"y": normal(2, 8), "weights": torch.ones(2), "tokens": torch.tensor([0, 0]), "experts": torch.tensor([1, 2]), "num_tokens": 1,
                 "num_experts": 12, "segments": 4, "first": 0, "last": 12} | changes  # fmt: skip
    return op.combine(*arguments.values())


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: refused(y=torch.zeros(2, 8)), TypeError, "y must be bfloat16 or float16, found Float"),
    (lambda: refused(y=normal(2, 2, 8)), ValueError, r"y must be \[R, H\], found shape \[2, 2, 8\]"),
    (lambda: refused(weights=torch.ones(2).half()), TypeError, "weights must be Float, found Half"),
    (lambda: refused(weights=torch.ones(3)), ValueError, r"weights must be \[R = 2\], found shape \[3\]"),
    (lambda: refused(tokens=torch.tensor([0, 0]).int()), TypeError, "token_ids must be Long, found Int"),
    (lambda: refused(tokens=torch.tensor([0])), ValueError, r"token_ids must be \[R = 2\], found shape \[1\]"),
    (lambda: refused(tokens=torch.tensor([0, 1])), IndexError, "token_ids must be 0 to 0, found 1"),
    (lambda: refused(experts=torch.tensor([1, 12])), IndexError, "expert_ids must be 0 to 11, found 12"),
    (lambda: refused(segments=8), ValueError, "that divides the experts, found 8 of 12 experts"),
    (lambda: refused(segments=3), ValueError, "segments must be a power of two below 2\\^16 that divides the experts, found 3"),
    (lambda: refused(last=9), ValueError, r"experts \[0, 9\) are not a subtree of 12 experts in 4 segments"),
    (lambda: refused(first=3, last=9), ValueError, "not a subtree"),
    (lambda: op.combine_backward(torch.zeros(1, 9), normal(2, 8), torch.ones(2), torch.tensor([0, 0])), ValueError, r"dout must be \[T, H = 8\]"),
    (lambda: op.permute(torch.zeros(2, 8), torch.tensor([0])), TypeError, "x must be bfloat16 or float16, found Float"),
    (lambda: op.permute(normal(2, 8), torch.tensor([2])), IndexError, "token_ids must be 0 to 1, found 2"),
    (lambda: op.permute(normal(2, 8).requires_grad_(), torch.tensor([1])), ValueError, "expert_ids, num_experts and segments are needed"),
    (lambda: op.unpermute(normal(2, 8), torch.tensor([0])), ValueError, r"index must be \[R = 2\], found shape \[1\]"),
    (lambda: op.unpermute(normal(2, 8), torch.tensor([0, -1])), IndexError, "index must be 0 to 1, found -1"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_gradient_of_the_gradient_is_refused():
    y = normal(2, 8).requires_grad_()
    with pytest.raises(RuntimeError, match="not implemented"):
        op.combine_backward(torch.zeros(1, 8), y, torch.ones(2), torch.tensor([0, 0]))[0].sum().backward()


def test_registration():
    y, weights, tokens, experts = normal(3, 8), torch.ones(3), torch.tensor([0, 1, 1]), torch.tensor([1, 0, 3])
    leaves = y.clone().requires_grad_(), weights.clone().requires_grad_()
    torch.library.opcheck(op.combine.default, (*leaves, tokens, experts, 2, 4, 4, 0, 4))
    torch.library.opcheck(op.combine_rows.default, (*leaves, tokens, experts, 2, 4, 4))
    torch.library.opcheck(op.combine_backward.default, (torch.zeros(2, 8), y, weights, tokens))
    torch.library.opcheck(op.permute.default, (normal(2, 8).requires_grad_(), tokens, experts, 4, 4))
    torch.library.opcheck(op.permute.default, (normal(2, 8), tokens))
    torch.library.opcheck(op.unpermute.default, (leaves[0], torch.tensor([2, 0, 1])))
