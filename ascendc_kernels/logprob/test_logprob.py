"""Vocabulary sums, logprobs and their gradient: the bits of reference/logprob.py on every implementation; refusals; registration."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal

from ascendc_kernels import library
from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import elementary, logprob
from megatron_ext.reference.sums import ordered_sum

op = torch.ops.megatron_ext
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# rows, columns, valid, segments: padding inside a segment and over whole segments, blocks of 64 that are cut, tiles of a kernel that are cut
SHAPES = [(1, 16, 16, 1), (3, 512, 500, 8), (2, 512, 130, 8), (5, 1008, 1001, 1), (2, 9216, 9216, 2), (1, 17_280, 17_200, 4),
          (2, 64, 0, 4), (2, 64, 7, 4)]  # fmt: skip


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop, with and without a temperature."""
    logits, ids, grad = torch.randn(3, 9216), torch.tensor([0, 9000, 17]), torch.ones(3)
    for temperature in (None, torch.tensor([0.5, 1.0, 2.0])):
        row_max = op.vocab_max(logits, 9000, temperature)
        exp_sum = op.vocab_exp_sum(logits, row_max, 9000, 2, temperature)
        for dtype in DTYPES:
            op.vocab_dlogits(logits, row_max, exp_sum, ids, grad, 9000, dtype, temperature)
        op.token_logprob(logits, ids, temperature, 2)
        op.log_softmax(logits, temperature, 2)
    op.logprob_from_parts(torch.randn(9000), torch.randn(9000), torch.rand(9000))


def logits_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Spread from where exp gives subnormals and zeros up to the maximum, with ties and zeros of both signs."""
    x = normal(rows, columns, dtype=torch.float32, seed=seed, scale=4.0)
    wide = normal(rows, columns, dtype=torch.float32, seed=seed + 1)
    x = torch.where(wide > 1.0, x * 30.0, x)
    return torch.where(wide < -1.5, torch.where(wide < -2.0, -0.0, 0.0), x)


def temperatures(rows: int) -> list[torch.Tensor | None]:
    return [None, torch.tensor([0.7]), torch.rand(rows, generator=torch.Generator().manual_seed(5)) + 0.3]


@pytest.mark.parametrize("shape", SHAPES)
def test_parts(implementation, shape):
    rows, columns, valid, segments = shape
    x = logits_of(rows, columns)
    x[:, valid:] = math.nan  # padding is never read
    for t in temperatures(rows):
        row_max = op.vocab_max(x, valid, t)
        assert_same_bits(row_max, logprob.vocab_max(x, valid, t), "row_max")
        exp_sum = op.vocab_exp_sum(x, row_max, valid, segments, t)
        assert_same_bits(exp_sum, logprob.vocab_exp_sum(x, row_max, valid, segments, t), "exp_sum")
        above = row_max + 1.5  # another rank's maximum
        assert_same_bits(op.vocab_exp_sum(x, above, valid, segments, t), logprob.vocab_exp_sum(x, above, valid, segments, t), "another maximum")
        target = x[:, 0].contiguous()
        assert_same_bits(op.logprob_from_parts(target, row_max, exp_sum), logprob.logprob_from_parts(target, row_max, exp_sum), "logprob")


def test_a_row_maximum_that_is_none(implementation):
    """Exponents of positive numbers, up to infinity, follow the reference as well."""
    x = logits_of(4, 512)
    row_max = torch.tensor([-50.0, 0.0, 30.0, -math.inf])
    assert_same_bits(op.vocab_exp_sum(x, row_max, 500, 8), logprob.vocab_exp_sum(x, row_max, 500, 8))


@pytest.mark.parametrize("shape", SHAPES[:-2])
@pytest.mark.parametrize("out", DTYPES)
def test_dlogits(implementation, shape, out):
    rows, columns, valid, _ = shape
    x, grad = logits_of(rows, columns), normal(rows, dtype=torch.float32, seed=3)
    targets = torch.tensor([valid - 1, -1, 0, valid // 2, 3])[:rows]
    for t in temperatures(rows):
        row_max = logprob.vocab_max(x, valid, t)
        exp_sum = logprob.vocab_exp_sum(x, row_max, valid, 1, t)
        arguments = (x, row_max, exp_sum, targets, grad, valid, out)
        assert_same_bits(op.vocab_dlogits(*arguments, t), logprob.vocab_dlogits(*arguments, temperature=t))


@pytest.mark.parametrize(("rows", "vocabulary", "segments"), [(1, 1, 8), (3, 130, 8), (4, 1000, 8), (2, 9001, 4), (2, 12_300, 1), (1, 20_001, 64)])
def test_whole_vocabulary(implementation, rows, vocabulary, segments):
    x, ids = logits_of(rows, vocabulary), torch.arange(rows) * 7 % vocabulary
    for t in temperatures(rows):
        assert_same_bits(op.token_logprob(x, ids, t, segments), logprob.token_logprob(x, ids, t, segments), "token_logprob")
        assert_same_bits(op.log_softmax(x, t, segments), logprob.log_softmax(x, t, segments), "log_softmax")


def test_padding_is_that_of_ranks(implementation):
    """A whole vocabulary has the bits of one that is padded and cut over four ranks."""
    vocabulary, segments, ranks = 5001, 8, 4
    x, ids = logits_of(3, vocabulary), torch.tensor([5000, 0, 17])
    shards = torch.nn.functional.pad(x, (0, -vocabulary % 128)).chunk(ranks, dim=1)
    width = shards[0].shape[1]
    valid = [min(max(vocabulary - r * width, 0), width) for r in range(ranks)]
    row_max = torch.stack([op.vocab_max(s, v) for s, v in zip(shards, valid, strict=True)]).amax(0)
    exp_sum = ordered_sum(torch.stack([op.vocab_exp_sum(s, row_max, v, segments // ranks) for s, v in zip(shards, valid, strict=True)]))
    cut = op.logprob_from_parts(x.gather(1, ids[:, None])[:, 0], row_max, exp_sum)
    assert_same_bits(op.token_logprob(x, ids, None, segments), cut)


def test_the_vocabulary_of_qwen3(implementation):
    x, ids = logits_of(2, 151_936), torch.tensor([151_935, 4])
    t = torch.tensor([1.0, 0.6])
    assert_same_bits(op.token_logprob(x, ids, t, 8), logprob.token_logprob(x, ids, t, 8))
    assert_same_bits(op.log_softmax(x, None, 8), logprob.log_softmax(x, None, 8))


def test_rows_that_are_not_finite(implementation):
    """NaN, infinities: no hang, no wrong index, no effect on the neighbour, and NaN exactly where the reference has it."""
    x = logits_of(6, 700)
    x[0, 650], x[1, 3], x[2], x[3, 10:] = math.nan, math.inf, -math.inf, -math.inf
    x[4, :3] = math.nan
    ids = torch.tensor([0, 3, 1, 2, 5, 6])
    results = [(op.token_logprob(x, ids, None, 8), logprob.token_logprob(x, ids, None, 8)),
               (op.log_softmax(x, None, 8), logprob.log_softmax(x, None, 8)),
               (op.vocab_max(x, 700), logprob.vocab_max(x, 700))]  # fmt: skip
    for ours, expected in results:
        assert torch.equal(ours.isnan(), expected.isnan())
        assert_same_bits(ours.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_strides_and_neighbours_do_not_show(implementation):
    whole = logits_of(12, 3000)
    for x in (whole[:, 11:2900], whole[::3, 5:700], whole[:1, :2000].expand(5, 2000), whole[4:, 1:]):
        ids = torch.arange(len(x))
        alone = torch.cat([logprob.token_logprob(row[None].clone(), i[None], None, 8) for row, i in zip(x, ids, strict=True)])
        assert_same_bits(op.token_logprob(x, ids, None, 8), alone)
        assert_same_bits(op.log_softmax(x, None, 8), logprob.log_softmax(x, None, 8))
    cut, targets = whole[:, 16:976], torch.arange(12)
    row_max, grad = op.vocab_max(cut, 950), normal(24, dtype=torch.float32)[::2]
    exp_sum = op.vocab_exp_sum(cut, row_max, 950, 4)
    arguments = (row_max, exp_sum, targets, grad, 950, torch.bfloat16)
    assert_same_bits(exp_sum, logprob.vocab_exp_sum(cut, row_max, 950, 4))
    assert_same_bits(op.vocab_dlogits(cut, *arguments), logprob.vocab_dlogits(cut.clone(), *arguments))


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1_100_000), (3, 600_000), (40, 60_000)])
def test_threads_do_not_show(threaded, rows, vocabulary):
    """Over rows, and over the segments of long rows where there are fewer of them than threads."""
    x = logits_of(rows, vocabulary)
    ids, grad, t = torch.arange(rows), normal(rows, dtype=torch.float32), torch.full((rows,), 0.8)

    def run():
        values, row_max, exp_sum = op.token_logprob_parts(x, ids, t, 8)
        dlogits = op.vocab_dlogits(x, row_max, exp_sum, ids, grad, vocabulary, torch.bfloat16, t)
        return values, op.log_softmax(x, None, 8), op.vocab_max(x, vocabulary), dlogits

    results = threaded(run)
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3000), st.integers(0, 6), st.floats(0.05, 10.0), st.integers(0, 2**31))
def test_generated(rows, vocabulary, levels, temperature, seed):
    x, ids = logits_of(rows, vocabulary, seed), torch.arange(rows) % vocabulary
    t = torch.tensor([temperature])
    assert_same_bits(op.token_logprob(x, ids, t, 2**levels), logprob.token_logprob(x, ids, t, 2**levels))
    assert_same_bits(op.log_softmax(x, None, 2**levels), logprob.log_softmax(x, None, 2**levels))


@pytest.mark.parametrize("variant", library.runnable_variants())
def test_exponents_below_zero_are_those_of_the_reference(variant):
    """A few million numbers from -0 to -inf, each the only one in its row that counts."""
    library.use(variant, path="native")
    bits = torch.arange(0x80000000, 0xFF800001, 1021, dtype=torch.int64)
    x = (bits - 2**32).to(torch.int32).view(torch.float32)
    rows = torch.full((len(x), 64), -math.inf)
    rows[:, 5] = x
    assert_same_bits(op.vocab_exp_sum(rows, torch.zeros(len(x)), 64, 1), elementary.exp(x))
    library.use(library.runnable_variants()[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient(implementation, dtype):
    x, ids, grad = logits_of(4, 900).requires_grad_(), torch.tensor([0, 899, 5, 77]), normal(4, dtype=torch.float32, seed=9)
    for t in temperatures(4):
        (ours,) = torch.autograd.grad(op.token_logprob(x, ids, t, 8, dtype), x, grad)
        row_max, exp_sum = logprob.vocab_parts(x.detach(), t, 8)
        expected = logprob.vocab_dlogits(x.detach(), row_max, exp_sum, ids, grad, 900, dtype, temperature=t)
        assert_same_bits(ours, expected.float())


REFUSALS = [
    (lambda x, i, r: op.vocab_max(x.double(), 10), TypeError, "vocab_max: logits must be Float, found Double"),
    (lambda x, i, r: op.vocab_max(x, 129), ValueError, "valid must be 0 to 128, the columns of logits, found 129"),
    (lambda x, i, r: op.vocab_max(x[0], 1), ValueError, r"logits must have shape \[T, V\], found \[128\]"),
    (lambda x, i, r: op.vocab_max(x.T, 2), ValueError, r"columns of a row must lie side by side, found strides \[1, 128\]"),
    (lambda x, i, r: op.vocab_max(x, 10, torch.tensor([0.0])), ValueError, "temperature must be positive and finite, found 0 at 0"),
    (lambda x, i, r: op.vocab_max(x, 10, torch.tensor([1.0, math.inf, 1.0])), ValueError, "found inf at 1"),
    (lambda x, i, r: op.vocab_max(x, 10, torch.ones(2)), ValueError, r"one value or \[3\], one for each row of logits, found shape \[2\]"),
    (lambda x, i, r: op.vocab_exp_sum(x, r, 10, 16), ValueError, "128 columns cannot be cut into 16 segments of whole 16-element blocks"),
    (lambda x, i, r: op.vocab_exp_sum(x, r, 10, 3), ValueError, "segments must be a power of two, at most 64, found 3"),
    (lambda x, i, r: op.vocab_exp_sum(x, r[1:], 10, 8), ValueError, r"row_max must have shape \[3\]"),
    (lambda x, i, r: op.logprob_from_parts(r, r[1:], r), ValueError, r"equal shapes are needed, found target_logit \[3\], row_max \[2\]"),
    (lambda x, i, r: op.vocab_dlogits(x, r, r, i, r, 10, torch.int32), TypeError, "dtype must be float32, bfloat16 or float16, found Int"),
    (lambda x, i, r: op.vocab_dlogits(x, r, r, i.int(), r, 10, torch.float32), TypeError, "targets must be Long, found Int"),
    (lambda x, i, r: op.token_logprob(x, i + 126, None, 8), IndexError, r"ids must be in \[0, 128\), found 128 at 2"),
    (lambda x, i, r: op.token_logprob(x, i - 1, None, 8), IndexError, "found -1 at 0"),
    (lambda x, i, r: op.token_logprob(x, i, None, 8, torch.int8), TypeError, "dlogits_dtype must be float32, bfloat16 or float16"),
    (lambda x, i, r: op.token_logprob(x, i, torch.ones(1).requires_grad_(), 8), NotImplementedError, "no gradient by the temperature"),
    (lambda x, i, r: op.log_softmax(x, None, 128), ValueError, "segments must be a power of two, at most 64, found 128"),
    (lambda x, i, r: op.log_softmax(x.requires_grad_(), None, 8).sum().backward(), RuntimeError, "not implemented"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS)
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call(logits_of(3, 128), torch.arange(3), torch.ones(3))


def test_no_rows_give_no_results():
    x, none, ids = torch.empty(0, 128), torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert op.vocab_max(x, 128).shape == op.token_logprob(x, ids, None, 8).shape == op.vocab_exp_sum(x, none, 128, 8).shape == (0,)
    assert op.log_softmax(x, None, 8).shape == op.vocab_dlogits(x, none, none, ids, none, 128, torch.bfloat16).shape == (0, 128)


def test_registration():
    x, ids, r, t = logits_of(3, 128), torch.arange(3), torch.ones(3), torch.tensor([0.5])
    torch.library.opcheck(op.vocab_max.default, (x, 100, t))
    torch.library.opcheck(op.vocab_exp_sum.default, (x, r, 100, 8, t))
    torch.library.opcheck(op.logprob_from_parts.default, (r, r, r))
    torch.library.opcheck(op.vocab_dlogits.default, (x, r, r, ids, r, 100, torch.bfloat16, t))
    torch.library.opcheck(op.token_logprob_parts.default, (x, ids, t, 8))
    torch.library.opcheck(op.token_logprob.default, (x, ids, None, 8))
    torch.library.opcheck(op.token_logprob.default, (x.clone().requires_grad_(), ids, t, 8))
    torch.library.opcheck(op.log_softmax.default, (x, t, 8))
