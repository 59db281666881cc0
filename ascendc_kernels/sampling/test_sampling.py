"""sample, support_mask and beam_step: the tokens of reference/sampling.py on every implementation; refusals; registration."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import sampling as reference
from megatron_ext.reference.elementary import exp

op = torch.ops.megatron_ext
# (rows, vocabulary, segments): one block, cut blocks, empty segments, several tiles of a segment and of a row
SHAPES = [(1, 1, 1), (2, 16, 1), (4, 130, 8), (3, 1000, 8), (2, 70, 64), (2, 10_000, 2), (1, 9001, 1)]
# (temperature, top_k, top_p, min_p): whether each is there
FILTERS = [(False, False, False, False), (True, False, False, False), (False, True, False, False), (True, False, True, False),
           (True, False, False, True), (True, True, True, True)]  # fmt: skip


def exercise() -> None:
    """Every kernel of the folder, over several rows, segments and tiles; tiles that are left out, whole and cut repeats, cuts inside a tile."""
    logits = torch.randn(2, 8300)
    logits[:, 4150:] -= 10.0  # the second of two segments is left out
    seeds, off = torch.tensor([1, 2]), (None, None, None)
    op.sample(logits, seeds, seeds, torch.tensor([0.5]), torch.tensor([20, 0]), torch.tensor([1.0, 0.2]), torch.tensor([0.0, 0.1]), 2)
    op.sample(logits[:, :4096], seeds, seeds, None, *off, 1)
    op.support_mask(logits, torch.tensor([3, 8300]))
    op.beam_step(torch.randn(3, 2), torch.randn(3, 2, 4200), 3)


def logits_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Far apart, with many equal ones and zeros of both signs, and a few that are shut out."""
    x = normal(rows, columns, dtype=torch.float32, seed=seed, scale=2.0)
    other = normal(rows, columns, dtype=torch.float32, seed=seed + 1)
    x = torch.where(other > 0.5, (x * 2).round() / 2, x)
    x = torch.where((other < -1.5) & (x < 0), torch.where(other < -2.0, -0.0, 0.0), x)
    x[:, 1:] = torch.where(other[:, 1:] < -2.3, -math.inf, x[:, 1:])
    return x


def settings_of(rows: int, wanted: tuple[bool, ...], seed: int = 0) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed + 7)
    values = [torch.rand(rows, generator=generator) + 0.4, torch.randint(0, 60, (rows,), generator=generator),
              torch.rand(rows, generator=generator) * 0.98 + 0.01, torch.rand(rows, generator=generator) * 0.2]  # fmt: skip
    return [value if there else None for value, there in zip(values, wanted, strict=True)]


def identities(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds of both signs and of all 64 bits; positions beyond 32 bits."""
    ids = torch.arange(rows)
    return (ids * 0x123456789ABCDEF1) ^ -3, ids * 0x1_0000_0003


@functools.cache  # the same for every implementation
def case(rows: int, columns: int, segments: int, wanted: tuple[bool, ...], seed: int = 0):
    arguments = (logits_of(rows, columns, seed), *identities(rows), *settings_of(rows, wanted, seed), segments)
    tokens, last = reference.sample(*arguments)
    return arguments, tokens, last, reference.support_mask(arguments[0], last)


def check(*shape_and_filters) -> None:
    arguments, tokens, last, mask = case(*shape_and_filters)
    found = op.sample(*arguments)
    assert found[1].tolist() == last.tolist()
    assert found[0].tolist() == tokens.tolist()
    assert torch.equal(op.support_mask(arguments[0], last), mask)
    assert mask.gather(1, tokens[:, None]).all()


@pytest.mark.parametrize("wanted", FILTERS)
def test_tokens_and_supports(implementation, wanted):
    for shape in SHAPES:
        check(*shape, wanted)


def test_the_vocabulary_of_qwen3(implementation):
    if implementation[1] == "checked":
        return check(1, 152_000, 8, (False, True, False, False))
    check(2, 151_936, 8, (True, False, True, False))
    check(2, 151_936, 8, (False, False, False, False))


@pytest.mark.full
@pytest.mark.parametrize("wanted", FILTERS)
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_many_rows(implementation, rows, wanted):
    check(rows, 20_000, 8, wanted)


def test_equal_logits(implementation):
    """A row of one value: filters cut it by id alone."""
    logits, one = torch.full((3, 9000), 1.5), torch.zeros(3, dtype=torch.int64)
    last = op.sample(logits, one, one, None, torch.tensor([1, 5000, 9000]), None, None, 8)[1]
    assert last.tolist() == [0, 4999, 8999]
    last = op.sample(logits, one, one, None, None, torch.tensor([1e-6, 0.5, 0.75]), None, 1)[1]
    assert last.tolist() == [0, 4499, 6749]
    last = op.sample(logits, one, one, None, None, None, torch.tensor([0.0, 0.5, 1.0]), 1)[1]
    assert last.tolist() == [9000, 8999, 8999]


@functools.cache  # the same for every implementation
def boundary_case(columns: int, segments: int):
    """top_p at the mass of a prefix, or one unit in the last place beside it: a sum in another order ends it elsewhere."""
    logits = (normal(1, columns, dtype=torch.float32) * 4)[0]
    order = reference.by_likelihood(logits)
    weights = exp(logits - logits.max())
    total = reference.mass(weights, segments)
    counts = torch.linspace(1, columns - 1, 40).long().tolist()
    shares = torch.stack([reference.mass(reference.first_tokens(weights, order, count), segments) for count in counts]) / total
    top_p = torch.cat([shares, shares.nextafter(torch.tensor(1.0)), shares.nextafter(torch.tensor(0.0))]).clamp(1e-6, 1.0)
    rows = len(top_p)
    arguments = (logits.expand(rows, -1), *identities(rows), None, None, top_p, None, segments)
    return arguments, reference.sample(*arguments)


@pytest.mark.parametrize(("columns", "segments"), [(1000, 8), (5000, 1)])
def test_masses_are_added_in_the_order(implementation, columns, segments):
    arguments, expected = boundary_case(columns, segments)
    found = op.sample(*arguments)
    assert found[1].tolist() == expected[1].tolist()
    assert found[0].tolist() == expected[0].tolist()


# (step of the draw, a seed whose number at position 0 is 0, a seed whose number is 1/2, a token behind those of the first place)
EDGES = [(0, 12121362, 515707, 700), (1, 10710051, 335182, 100), (2, 15372235, 11916830, 9)]


@pytest.mark.parametrize(("step", "zero", "half", "far"), EDGES)
def test_numbers_at_an_edge(implementation, step, zero, half, far):
    """u = 0 passes by a segment, block or token without weight; u = 1/2 is not in the first of two equal halves."""
    assert [reference.words_of(seed, 0)[step] >> 8 for seed in (zero, half)] == [0, 1 << 23]
    logits = torch.full((2, 1024), -math.inf)
    logits[:, far], logits[1, 5] = 0.0, 0.0
    arguments = (logits, torch.tensor([zero, half]), torch.zeros(2, dtype=torch.int64), None, None, None, None, 2)
    assert op.sample(*arguments)[0].tolist() == reference.sample(*arguments)[0].tolist() == [far, far]


def test_rows_without_a_token(implementation):
    logits, temperature = logits_of(6, 5000), torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    logits[5, 4] = 3e38  # finite, its quotient by the temperature is not
    logits[0, 4990], logits[1, 3], logits[2], logits[4, 4500] = math.nan, math.inf, -math.inf, math.nan
    arguments = (logits, *identities(6), temperature, torch.full((6,), 30), torch.full((6,), 0.9), None, 8)
    found, expected = op.sample(*arguments), reference.sample(*arguments)
    assert found[0].tolist() == expected[0].tolist()
    assert (found[0] == -1).tolist() == [True, True, True, False, True, True]
    assert found[1].tolist() == expected[1].tolist()
    assert torch.equal(op.support_mask(logits, found[1]), reference.support_mask(logits, found[1]))


def test_strides_and_neighbours_do_not_show(implementation):
    whole = logits_of(9, 3000)
    filters = (True, True, True, True)
    for logits in (whole[:, 11:2900], whole[::3, 5:700], whole[:1, :2000].expand(4, 2000)):
        rows = len(logits)
        seeds, positions = identities(rows)
        values = settings_of(rows, filters)
        together = op.sample(logits, seeds, positions, *values, 8)
        for i in range(rows):
            alone = op.sample(logits[i : i + 1].clone(), seeds[i : i + 1], positions[i : i + 1], *(v[i : i + 1] for v in values), 8)
            assert [int(x) for x in alone] == [int(x[i]) for x in together]
        assert torch.equal(op.support_mask(logits, together[1]), reference.support_mask(logits, together[1]))


def test_threads_do_not_show(threaded):
    logits, values = logits_of(40, 20_000), settings_of(40, (True, True, True, True))
    scores, logprobs = normal(40, 3, dtype=torch.float32), logits[:, :18_000].view(40, 3, 6000)

    def run():
        tokens, last = op.sample(logits, *identities(40), *values, 8)
        return tokens, last, op.support_mask(logits, last), *op.beam_step(scores, logprobs, 5)

    results = threaded(run)
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert torch.equal(a, b), f"result {i} with {threads} threads"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 900), st.integers(0, 6), st.sampled_from(FILTERS), st.integers(0, 2**31))
def test_generated(rows, columns, levels, wanted, seed):
    check(rows, columns, 2**levels, wanted, seed)


@pytest.mark.parametrize(("requests", "beams", "columns", "kept"), [(1, 1, 1, 1), (2, 3, 50, 5), (3, 2, 4500, 64), (1, 4, 64, 8), (2, 1, 9000, 4)])
def test_beam_step(implementation, requests, beams, columns, kept):
    scores = normal(requests, beams, dtype=torch.float32)
    logprobs = logits_of(requests * beams, columns).view(requests, beams, columns)
    for name, a, b in zip(("scores", "parents", "tokens"), op.beam_step(scores, logprobs, kept), reference.beam_step(scores, logprobs, kept), strict=True):
        if name == "scores":
            assert_same_bits(a, b, name)
        else:
            assert a.tolist() == b.tolist(), name


def test_beams_that_do_not_exist(implementation):
    """-inf and NaN are no continuations; equal ones go to the lower beam, then to the lower token."""
    scores = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf, math.nan, -math.inf]])
    logprobs = torch.zeros(2, 3, 200)
    logprobs[0, 0, 2:], logprobs[0, 2, 1:], logprobs[0, 0, 0] = -math.inf, math.nan, -1.0
    found, parents, tokens = op.beam_step(scores, logprobs, 5)
    assert found.tolist() == [[0.0, 0.0, -1.0, -math.inf, -math.inf], [-math.inf] * 5]
    assert parents.tolist() == [[0, 2, 0, -1, -1], [-1] * 5]
    assert tokens.tolist() == [[1, 0, 0, -1, -1], [-1] * 5]


def test_no_rows():
    none, ids = torch.empty(0, 64), torch.empty(0, dtype=torch.int64)
    assert [x.shape for x in op.sample(none, ids, ids, None, None, None, None, 8)] == [(0,), (0,)]
    assert op.support_mask(none, ids).shape == (0, 64)
    assert [x.shape for x in op.beam_step(torch.empty(0, 2), torch.empty(0, 2, 9), 3)] == [(0, 3)] * 3


def refused(**changes):
    rows = torch.zeros(2, dtype=torch.int64)
    arguments = {"logits": torch.zeros(2, 16), "seeds": rows, "positions": rows, "temperature": None, "top_k": None, "top_p": None, "min_p": None,
                 "segments": 8} | changes  # fmt: skip
    return op.sample(*arguments.values())


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: refused(logits=torch.zeros(2, 16).half()), TypeError, "sample: logits must be Float, found Half"),
    (lambda: refused(logits=torch.zeros(16, 2).T), ValueError, r"columns of a row must lie side by side, found strides \[1, 2\]"),
    (lambda: refused(seeds=torch.zeros(2)), TypeError, "seeds must be Long, found Float"),
    (lambda: refused(positions=torch.zeros(3).long()), ValueError, r"positions must have shape \[2\]"),
    (lambda: refused(temperature=torch.zeros(1)), ValueError, "temperature must be positive and finite, found 0 at 0"),
    (lambda: refused(top_k=torch.tensor([3, -1])), ValueError, r"top_k must be at least 0 \(0 keeps all tokens\), found -1 at 1"),
    (lambda: refused(top_p=torch.tensor([0.0, 1.0])), ValueError, r"top_p must be above 0 and at most 1 .*, found 0 at 0"),
    (lambda: refused(top_p=torch.tensor([math.nan, 1.0])), ValueError, "top_p must be above 0 and at most 1 .*, found nan at 0"),
    (lambda: refused(min_p=torch.tensor([0.5, 1.5])), ValueError, r"min_p must be 0 to 1 \(0 keeps all tokens\), found 1.5 at 1"),
    (lambda: refused(segments=3), ValueError, "segments must be a power of two, at most 64, found 3"),
    (lambda: refused(logits=torch.zeros(1, 270_000).expand(2, -1), segments=1), ValueError, "make segments of 270000, at most 262144 are supported"),
    (lambda: op.support_mask(torch.zeros(2, 4), torch.tensor([4, 5])), IndexError, r"last must be in \[-1, 4\], found 5 at 1"),
    (lambda: op.beam_step(torch.zeros(2, 3), torch.zeros(2, 2, 9), 1), ValueError, r"scores must have shape \[B, W\] and logprobs \[B, W, V\]"),
    (lambda: op.beam_step(torch.zeros(2, 1), torch.zeros(2, 1, 9), 10), ValueError, "kept must be 1 to 64 and at most W x V, found 10 of 1 x 9"),
    (lambda: op.beam_step(torch.zeros(1, 1), torch.zeros(1, 1, 900), 65), ValueError, "kept must be 1 to 64"),
    (lambda: op.beam_step(torch.zeros(1, 1).requires_grad_(), torch.zeros(1, 1, 9), 2)[0].sum().backward(), RuntimeError, "not implemented"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_registration():
    logits, ids = logits_of(3, 128), torch.arange(3)
    torch.library.opcheck(op.sample.default, (logits, ids, ids, *settings_of(3, (True, True, True, True)), 8))
    torch.library.opcheck(op.sample.default, (logits, ids, ids, None, None, None, None, 8))
    torch.library.opcheck(op.support_mask.default, (logits, ids))
    torch.library.opcheck(op.beam_step.default, (torch.zeros(3, 2), logits.view(3, 2, 64), 4))
