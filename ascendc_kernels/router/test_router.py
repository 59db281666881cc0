"""route and its gradient: the bits of reference/router.py on every implementation; refusals; registration."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import router as reference

op = torch.ops.megatron_ext
# (experts, top_k): 12 to 384 experts, up to 10 slots, one expert
SIZES = [(12, 2), (60, 4), (128, 8), (160, 6), (384, 10), (5, 5), (1, 1)]
# (score_function, renormalize, scale, with a correction bias)
RULES = [("softmax", True, 1.0, False), ("softmax", False, 2.5, True), ("sigmoid", True, 2.5, True), ("sigmoid", False, 1.0, False)]
# (experts, top_k, groups, kept): groups whose sizes are and are not multiples of a DataBlock; DeepSeek-V2 and V3
GROUPS = [(16, 3, 4, 2), (60, 6, 5, 3), (160, 6, 8, 3), (256, 8, 8, 4), (24, 4, 12, 12), (12, 2, 1, 1)]


def exercise() -> None:
    """Every kernel of the folder, over several rows and slots, with and without groups, bias and renormalisation; whole and cut repeats."""
    logits, bias, dweights = torch.randn(4, 100), torch.randn(100), torch.randn(4, 3)
    for score_function in ("softmax", "sigmoid"):
        for x in (logits, logits[:, :64]):
            _, ids = op.route(x, 3, score_function)
            op.route_backward(dweights, x, ids, score_function, True, 2.0)
            op.route_backward(dweights, x, ids, score_function, False, 2.0)
            op.route(x, 3, score_function, False)
        op.route(logits, 3, score_function, True, 2.0, bias, 10, 4)
        op.route(logits, 3, score_function, True, 2.0, None, 4, 2)


def logits_of(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Far apart, close together, and with ties inside and across groups."""
    logits = normal(tokens, experts, dtype=torch.float32, seed=seed, scale=3)
    logits[1::3] = (logits[1::3] * 2).round() / 2
    logits[2::7] = 0.0
    return logits


def bias_of(experts: int, biased: bool) -> torch.Tensor | None:
    return (normal(experts, dtype=torch.float32, seed=5) * 8).round() / 16 if biased else None


@functools.cache  # the same for every implementation
def case(tokens, experts, top_k, rule, groups=(None, None), seed=0):
    score_function, renormalize, scale, biased = rule
    logits, dweights = logits_of(tokens, experts, seed), normal(tokens, top_k, dtype=torch.float32, seed=seed + 1)
    weights, ids = reference.route(logits, top_k, score_function, renormalize, scale, bias_of(experts, biased), *groups)
    return logits, dweights, weights, ids, reference.route_backward(dweights, logits, ids, score_function, renormalize, scale)


def check(tokens, experts, top_k, rule, groups=(None, None), seed=0):
    score_function, renormalize, scale, biased = rule
    logits, dweights, weights, ids, dlogits = case(tokens, experts, top_k, rule, groups, seed)
    ours = op.route(logits, top_k, score_function, renormalize, scale, bias_of(experts, biased), *groups)
    assert ours[1].tolist() == ids.tolist()
    assert_same_bits(ours[0], weights, "weights")
    assert_same_bits(op.route_backward(dweights, logits, ids, score_function, renormalize, scale), dlogits, "dlogits")


@pytest.mark.parametrize("rule", RULES)
def test_rules_and_sizes(implementation, rule):
    for experts, top_k in SIZES:
        check(9, experts, top_k, rule)


@pytest.mark.parametrize("rule", RULES)
def test_groups(implementation, rule):
    for experts, top_k, groups, kept in GROUPS:
        check(9, experts, top_k, rule, (groups, kept))


@pytest.mark.full
@pytest.mark.parametrize("tokens", [1, 1000, 4096])
@pytest.mark.parametrize("rule", RULES)
def test_many_tokens(implementation, rule, tokens):
    check(tokens, 128, 8, rule)
    check(tokens, 256, 8, rule, (8, 4))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_index(implementation, score_function):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0, -1.0]])
    assert op.route(logits, 5, score_function)[1].tolist() == [[1, 3, 6, 2, 4]]
    assert op.route(torch.zeros(2, 300), 10, score_function)[1].tolist() == [list(range(10))] * 2
    # Groups of two: the second one and the fourth are equal, the second is kept.
    assert op.route(logits, 2, score_function, True, 1.0, None, 4, 1)[1].tolist() == [[1, 0]]


def test_a_bias_chooses_and_never_weighs(implementation):
    logits, bias = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([9.0, 0.0, 0.0, 0.0])
    weights, ids = op.route(logits, 2, "sigmoid", False, 1.0, bias)
    assert ids.tolist() == [[0, 3]]
    assert_same_bits(weights, reference.scores(logits, "sigmoid")[:, [0, 3]])


def test_infinities_and_nan(implementation):
    """An expert that a bias of -inf shuts out comes last, in the order of indices; a row of NaN chooses as the reference does."""
    logits = normal(3, 12, dtype=torch.float32)
    logits[1] = float("nan")
    logits[2, 3:] = float("-inf")
    bias = torch.zeros(12)
    bias[4:] = float("-inf")
    for rule in (("softmax", False, 1.0), ("sigmoid", True, 1.0)):
        for extra in ((None,), (bias,), (bias, 3, 2)):
            ids = reference.route(logits, 6, *rule, *extra, *(None,) * (3 - len(extra)))[1]
            assert op.route(logits, 6, *rule, *extra)[1].tolist() == ids.tolist(), (rule, extra)


def test_strides_and_neighbours_do_not_show(implementation):
    whole = logits_of(8, 70)
    for logits in (whole[:, 3:67], whole[::2], whole.T.contiguous().T, whole[2:3].expand(4, 70)):
        weights, ids = reference.route(logits, 4, "softmax", True, 1.0, None, None, None)
        for ours in (op.route(logits, 4), [torch.cat(rows) for rows in zip(*(op.route(row[None], 4) for row in logits), strict=True)]):
            assert ours[1].tolist() == ids.tolist()
            assert_same_bits(ours[0], weights)


def test_threads_do_not_show(threaded):
    logits, dweights = logits_of(700, 128), normal(700, 8, dtype=torch.float32, seed=1)

    def run():
        weights, ids = op.route(logits, 8, "sigmoid", True, 2.5, bias_of(128, True), 8, 4)
        return weights, ids.int(), op.route_backward(dweights, logits, ids, "softmax", True, 1.0)

    results = threaded(run)
    for threads, found in results.items():
        for i, (ours, alone) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(ours, alone, f"result {i} with {threads} threads")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(2, 30), st.integers(1, 10), st.integers(1, 12), st.sampled_from(RULES), st.integers(0, 2**31))
def test_generated(tokens, groups, size, top_k, kept, rule, seed):
    kept = min(kept, groups)
    check(tokens, groups * size, min(top_k, kept * size), rule, (groups, kept), seed)


@pytest.mark.parametrize("rule", RULES)
def test_gradients(implementation, rule):
    logits, dweights, *_, dlogits = case(9, 60, 4, rule)
    score_function, renormalize, scale, biased = rule
    leaf = logits.clone().requires_grad_()
    weights, ids = op.route(leaf, 4, score_function, renormalize, scale, bias_of(60, biased))
    assert not ids.requires_grad
    assert_same_bits(torch.autograd.grad(weights, leaf, dweights)[0], dlogits)


@pytest.mark.parametrize("rule", RULES)
def test_the_gradient_is_that_of_the_formula(rule):
    """The formula by gradcheck in float64, and our gradient against the formula's, within the rounding of fp32."""
    score_function, renormalize, scale, _ = rule
    logits, dweights = normal(5, 12, dtype=torch.float32), normal(5, 3, dtype=torch.float32, seed=1)
    _, ids = op.route(logits, 3, score_function, renormalize, scale)

    def formula(x):
        chosen = (x.softmax(1) if score_function == "softmax" else x.sigmoid()).gather(1, ids)
        return (chosen / chosen.sum(1, keepdim=True) if renormalize else chosen) * scale

    exact = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(formula, exact)
    expected = torch.autograd.grad(formula(exact), exact, dweights.double())[0]
    assert torch.allclose(op.route_backward(dweights, logits, ids, score_function, renormalize, scale).double(), expected, rtol=1e-4, atol=1e-6)


def test_no_tokens():
    weights, ids = op.route(torch.empty(0, 16), 4)
    assert weights.shape == ids.shape == (0, 4)
    assert ids.dtype == torch.int64
    assert op.route_backward(weights, torch.empty(0, 16), ids, "softmax", True, 1.0).shape == (0, 16)


def refused(**changes):
    arguments = {"logits": torch.zeros(2, 16), "top_k": 4, "score_function": "softmax", "renormalize": True, "scale": 1.0, "bias": None, "groups": None,
                 "kept": None} | changes  # fmt: skip
    return op.route(*arguments.values())


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: refused(logits=torch.zeros(2, 16).half()), TypeError, "logits must be Float, found Half"),
    (lambda: refused(logits=torch.zeros(16)), ValueError, r"logits must be \[T, E\], found shape \[16\]"),
    (lambda: refused(score_function="tanh"), ValueError, "score_function must be 'softmax' or 'sigmoid', found 'tanh'"),
    (lambda: refused(top_k=17), ValueError, "top_k=17 of 16 experts"),
    (lambda: refused(top_k=0), ValueError, "top_k=0 of 16 experts"),
    (lambda: refused(logits=torch.zeros(2, 2049)), ValueError, "at most 2048 experts and 128 slots are supported .*, found 2049 and 4"),
    (lambda: refused(bias=torch.zeros(15)), ValueError, r"correction_bias must be \[E = 16\], found shape \[15\]"),
    (lambda: refused(groups=3, kept=1), ValueError, "16 experts cannot form 3 groups"),
    (lambda: refused(groups=4), ValueError, "topk_groups=0 of 4 groups"),
    (lambda: refused(groups=4, kept=5), ValueError, "topk_groups=5 of 4 groups"),
    (lambda: refused(groups=8, kept=1), ValueError, "top_k=4, but 1 groups hold only 2 experts"),
    (lambda: refused(groups=16, kept=8, bias=torch.zeros(16)), ValueError, "groups of 16 / 16 hold one"),
    (lambda: op.route_backward(torch.zeros(2, 3), torch.zeros(2, 16), torch.zeros(2, 4).long(), "softmax", True, 1.0), ValueError, r"expected \[T, k\]"),
    (lambda: op.route_backward(torch.zeros(2, 1), torch.zeros(2, 4), torch.full((2, 1), 4), "softmax", True, 1.0), IndexError, "ids must be 0 to 3, found 4"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_gradient_of_the_gradient_is_refused():
    with pytest.raises(RuntimeError, match="not implemented"):
        op.route_backward(torch.zeros(1, 1).requires_grad_(), torch.zeros(1, 4), torch.zeros(1, 1).long(), "softmax", True, 1.0).sum().backward()


def test_registration():
    logits = normal(3, 16, dtype=torch.float32)
    torch.library.opcheck(op.route.default, (logits.clone().requires_grad_(), 4, "sigmoid", True, 2.5, torch.zeros(16), 4, 2))
    torch.library.opcheck(op.route.default, (logits, 4))
    torch.library.opcheck(op.route_backward.default, (torch.zeros(3, 4), logits, op.route(logits, 4)[1], "softmax", True, 1.0))
