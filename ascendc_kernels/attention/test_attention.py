"""attention_varlen, attention_paged and the gradient: the bits of reference/attention.py on every implementation; a row's bits do not depend on
its neighbours, its chunk or its pages; accuracy; refusals; registration."""

import contextlib
import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reduction_order import MMAD_ORDERS
from megatron_ext.reference import attention as reference

op = torch.ops.megatron_ext
NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Rules:
    """The settings of a call that decide its bits."""

    kv_tile: int = 128
    order: str = "sequential"
    causal: bool = True
    window: int | None = None
    kv_split: int | None = None

    def arguments(self) -> tuple:
        return self.kv_tile, MMAD_ORDERS.index(self.order), self.causal, self.window, self.kv_split

    def reference(self) -> tuple:
        return self.kv_tile, self.order, self.causal, self.window, self.kv_split


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def scale_of(q: torch.Tensor) -> float:
    return q.shape[-1] ** -0.5


def expected_sequence(q, k, v, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D] are the last rows of k and v [L, Hkv, D]."""
    group, first = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    heads = [reference.attention(q[:, h], k[:, h // group], v[:, h // group], first, scale_of(q), *rules.reference()) for h in range(q.shape[1])]
    return torch.stack([o for o, _ in heads], 1), torch.stack([lse for _, lse in heads], 1)


def expected_varlen(q, k, v, lengths, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [expected_sequence(*sequence, rules) for sequence in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])


def expected_backward(d_out, q, k, v, out, lse, lengths, rules: Rules) -> list[torch.Tensor]:
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    group, start = q.shape[1] // k.shape[1], 0
    for length in lengths:
        rows = slice(start, start + length)
        for h in range(q.shape[1]) if length else ():
            parts = reference.attention_backward(d_out[rows, h], q[rows, h], k[rows, h // group], v[rows, h // group], out[rows, h], lse[rows, h],
                                                 scale_of(q), rules.kv_tile, rules.order, rules.causal, rules.window)  # fmt: skip
            dq[rows, h] = parts[0]
            dk[rows, h // group] += parts[1]
            dv[rows, h // group] += parts[2]
        start += length
    return [dq, dk, dv]


def inputs(lengths, heads: int, key_heads: int, dim: int, dtype=torch.bfloat16, make=normal, seed: int = 0) -> list[torch.Tensor]:
    rows = sum(lengths)
    return [make(rows, h, dim, dtype=dtype, seed=3 * seed + i) for i, h in enumerate((heads, key_heads, key_heads))]


def assert_same(found, expected, what: str = "") -> None:
    for name, a, b in zip(("out", "lse"), found, expected, strict=True):
        assert_same_bits(a, b, f"{name} {what}")


@dataclasses.dataclass(frozen=True)
class Cache:
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor


def paged(k, v, kv_lens, page: int, seed: int = 0) -> Cache:
    """Keys of all sequences [sum of kv_lens, Hkv, D] in pages at random places; unused slots, spare blocks and table entries are poison."""
    pages = [-(-length // page) for length in kv_lens]
    blocks = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed)).int()
    caches = [torch.full((len(blocks), page, *x.shape[1:]), NAN, dtype=x.dtype) for x in (k, v)]
    tables = torch.full((len(kv_lens), max(pages, default=0) + 2), 2**30, dtype=torch.int32)
    start = used = 0
    for b, length in enumerate(kv_lens):
        tables[b, : pages[b]] = blocks[used : used + pages[b]]
        for position in range(length):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[tables[b, position // page], position % page] = x[start + position]
        start, used = start + length, used + pages[b]
    return Cache(*caches, tables)


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop. With eight blocks some have queries only, and add product to product with
    nothing in between."""
    lengths, heads, key_heads, dim = [300], 2, 1, 16
    q, k, v = inputs(lengths, heads, key_heads, dim)
    for rules in (Rules(), Rules(kv_tile=64, kv_split=64)):
        op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), *rules.arguments())
    rows = [x[:150] for x in (q, q, k, v, q)]  # any numbers will do
    for blocks in (1, 8):
        with threads(blocks):
            op.attention_backward(*rows, torch.full((150, heads), 5.0), offsets([150]), scale_of(q))


# ---- the bits of the reference. It takes a second for some thousand rows, so lengths are short where they may be, and its results are kept for all
# implementations.


@functools.cache
def varlen_example(lengths: tuple, heads: int, key_heads: int, dim: int, dtype: torch.dtype, rules: Rules) -> tuple:
    q, k, v = inputs(lengths, heads, key_heads, dim, dtype)
    return (q, k, v), expected_varlen(q, k, v, lengths, rules)


def check_varlen(lengths, heads, key_heads, dim, rules: Rules, dtype=torch.bfloat16) -> None:
    (q, k, v), expected = varlen_example(lengths, heads, key_heads, dim, dtype, rules)
    assert_same(op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), *rules.arguments()), expected)


SHAPES = [  # lengths, query heads, key heads, head size
    ((1,), 2, 2, 64),
    ((127, 2), 2, 1, 96),
    ((130, 1, 0, 17), 4, 2, 128),
    ((129,), 2, 1, 192),
    ((140,), 3, 3, 256),
    ((37, 128), 14, 2, 64),
    ((20,), 2, 1, 16),
]


@pytest.mark.parametrize(("lengths", "heads", "key_heads", "dim"), SHAPES)
def test_varlen(implementation, mmad_order, lengths, heads, key_heads, dim):
    check_varlen(lengths, heads, key_heads, dim, Rules(order=mmad_order))


RULES = [
    Rules(kv_tile=64), Rules(causal=False), Rules(window=1), Rules(window=50), Rules(window=129, kv_tile=64), Rules(kv_split=128),
    Rules(kv_split=64, kv_tile=64, order="groups16"), Rules(window=70, kv_split=64, kv_tile=64), Rules(causal=False, kv_split=128),
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rules(implementation, dtype, rules):
    check_varlen((200, 3), 4, 2, 64, rules, dtype)


@functools.cache
def paged_example(counts: tuple, kv_lens: tuple, heads: int, key_heads: int, dim: int, page: int, dtype: torch.dtype, rules: Rules) -> tuple:
    q, (_, k, v) = normal(sum(counts), heads, dim, dtype=dtype, seed=9), inputs(kv_lens, heads, key_heads, dim, dtype)
    parts = [expected_sequence(*sequence, rules) for sequence in zip(q.split(counts), k.split(kv_lens), v.split(kv_lens), strict=True)]
    return q, paged(k, v, kv_lens, page), [torch.cat(x) for x in zip(*parts, strict=True)]


def check_paged(counts, kv_lens, heads, key_heads, dim, page, rules: Rules, dtype=torch.bfloat16) -> None:
    q, cache, expected = paged_example(counts, kv_lens, heads, key_heads, dim, page, dtype, rules)
    lens = torch.tensor(kv_lens).int()
    assert_same(op.attention_paged(q, cache.k, cache.v, cache.tables, offsets(counts), lens, scale_of(q), *rules.arguments()), expected)


PAGED = [  # query lengths, lengths, query heads, key heads, head size, page
    ((1, 1, 1, 1), (1, 128, 129, 255), 14, 2, 64, 16),
    ((5, 1, 0, 130), (140, 200, 40, 130), 4, 2, 64, 128),
    ((2, 1), (130, 3), 2, 1, 96, 32),
    ((1, 1), (127, 140), 8, 1, 128, 64),
    ((1,), (131,), 2, 1, 192, 128),
    ((3, 1), (3, 129), 3, 3, 256, 16),
]


@pytest.mark.parametrize(("counts", "kv_lens", "heads", "key_heads", "dim", "page"), PAGED)
def test_paged_with_poisoned_slots(implementation, mmad_order, counts, kv_lens, heads, key_heads, dim, page):
    check_paged(counts, kv_lens, heads, key_heads, dim, page, Rules(order=mmad_order))


@pytest.mark.parametrize("rules", [Rules(window=40), Rules(kv_split=128), Rules(causal=False)], ids=str)
def test_paged_rules(implementation, rules):
    check_paged((3, 1), (180, 300), 2, 1, 64, 32, rules)


MANY = tuple(range(1, 256, 4))


@pytest.mark.full
@pytest.mark.parametrize(("counts", "kv_lens"), [
    ((1,) * 65, (*MANY, 20_000)), (tuple(1 + n % 3 for n in MANY), tuple(3 + n for n in MANY)), ((130,), (20_000,)),
])  # fmt: skip
def test_long_and_many(implementation, counts, kv_lens):
    """64 sequences of mixed lengths; decode and a chunk over 20,000 keys."""
    check_paged(counts, kv_lens, 2, 1, 64, 32, Rules())


@pytest.mark.full
@pytest.mark.parametrize("rules", [Rules(order=order, kv_tile=tile) for order in MMAD_ORDERS for tile in (64, 128)], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(14, 2), (8, 1), (3, 3)])
def test_every_head_size(implementation, dtype, dim, heads, key_heads, rules):
    check_varlen((127, 1, 258), heads, key_heads, dim, rules, dtype)
    check_paged((1, 2, 40, 1), (129, 256, 300, 1), heads, key_heads, dim, 64, rules, dtype)


@functools.cache
def revealing_examples(dtype: torch.dtype, rules: Rules) -> list[tuple]:
    """Large values cancel, in the values or in the scores; products that fp32 cannot hold are met as well."""
    q, k = (x * 2.0**-6 for x in inputs((150,), 2, 1, 64, dtype)[:2])
    large_q, large_k = (revealing(150, heads, 64, dtype=dtype, seed=7, large=300.0) for heads in (2, 1))
    v = revealing(150, 1, 64, dtype=dtype, seed=5)
    tiny_v = revealing(150, 1, 64, dtype=dtype, seed=5, large=3e-30 if dtype == torch.bfloat16 else 3e-7)
    calls = [(q, k, v), (q, k, tiny_v), (large_q, large_k, v), (large_q, large_k, tiny_v)]
    return [(call, expected_varlen(*call, (150,), rules)) for call in calls]


def test_order_revealing_values(implementation, mmad_order, dtype):
    rules = Rules(order=mmad_order)
    for call, expected in revealing_examples(dtype, rules):
        assert_same(op.attention_varlen(*call, offsets([150]), 0.125, *rules.arguments()), expected)


def test_layouts_of_both_engines(implementation):
    """K and V page side by side in one allocation (vLLM on CPUs), two caches (vLLM-Ascend), heads before slots, heads of a packed QKV."""
    counts, kv_lens, page = [2, 4], [33, 70], 16
    q, (_, k, v) = normal(sum(counts), 4, 64, seed=9), inputs(kv_lens, 4, 2, 64)
    cache = paged(k, v, kv_lens, page)
    side_by_side = torch.stack([cache.k, cache.v], 1)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k, cache.v)]
    last = (cache.tables, offsets(counts), torch.tensor(kv_lens).int(), scale_of(q))
    found = op.attention_paged(q, cache.k, cache.v, *last)
    assert_same(op.attention_paged(q, side_by_side[:, 0], side_by_side[:, 1], *last), found, "side by side")
    assert_same(op.attention_paged(q, *heads_first, *last), found, "heads first")
    qkv = torch.cat([normal(50, 4, 64, seed=1), *(normal(50, 2, 64, seed=i) for i in (2, 3))], 1)
    views = (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
    assert_same(op.attention_varlen(*views, offsets([50]), 0.125), op.attention_varlen(*(x.contiguous() for x in views), offsets([50]), 0.125), "QKV")


def test_a_row_does_not_depend_on_its_call(implementation):
    """Decode, every chunking of a prefill, training alone and packed, neighbours that grow by one: the same bits."""
    length, heads, key_heads, dim = 200, 4, 2, 64
    q, k, v = inputs([length], heads, key_heads, dim)
    whole = op.attention_varlen(q, k, v, offsets([length]), scale_of(q))
    for before, after in ((5, 0), (6, 131)):
        near = inputs([before], heads, key_heads, dim, seed=7), inputs([after], heads, key_heads, dim, seed=8)
        packed = [torch.cat([near[0][i], x, near[1][i]]) for i, x in enumerate((q, k, v))]
        found = op.attention_varlen(*packed, offsets([before, length, after]), scale_of(q))
        assert_same([x[before : before + length] for x in found], whole, f"packed after {before}")
    for page, neighbour in ((16, 77), (64, 78)):
        other_k, other_v = inputs([neighbour], heads, key_heads, dim, seed=9)[1:]
        for first, last in ((0, 1), (127, 128), (128, 129), (199, 200), (0, 63), (63, 126), (126, 200), (0, 128), (128, 200), (0, 200)):
            cache = paged(torch.cat([k[:last], other_k]), torch.cat([v[:last], other_v]), [last, neighbour], page)
            rows, lens = torch.cat([q[first:last], q[:1]]), torch.tensor([last, neighbour]).int()
            found = op.attention_paged(rows, cache.k, cache.v, cache.tables, offsets([last - first, 1]), lens, scale_of(q))
            assert_same([x[:-1] for x in found], [x[first:last] for x in whole], f"rows {first} to {last}, pages of {page}")
    cache = paged(k, v, [length], 16)  # a warm prefix: two sequences share their pages
    rows, lens = torch.cat([q[-1:], q[128:]]), torch.tensor([length, length]).int()
    found = op.attention_paged(rows, cache.k, cache.v, cache.tables.repeat(2, 1), offsets([1, 72]), lens, scale_of(q))
    assert_same(found, [torch.cat([x[-1:], x[128:]]) for x in whole], "shared pages")


@functools.cache
def backward_example(lengths: tuple, heads: int, key_heads: int, dim: int, dtype: torch.dtype, rules: Rules) -> tuple:
    (q, k, v), (out, lse) = varlen_example(lengths, heads, key_heads, dim, dtype, rules)
    d_out = normal(*q.shape, dtype=dtype, seed=11)
    return (d_out, q, k, v, out, lse), expected_backward(d_out, q, k, v, out, lse, lengths, rules)


def check_backward(lengths, heads, key_heads, dim, rules: Rules, dtype=torch.bfloat16) -> None:
    operands, expected = backward_example(lengths, heads, key_heads, dim, dtype, rules)
    found = op.attention_backward(*operands, offsets(lengths), scale_of(operands[1]), *rules.arguments()[:4])
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert_same_bits(a, b, name)


BACKWARD = [((1, 130, 0, 17), 4, 2, 64), ((127,), 2, 1, 128), ((33,), 2, 1, 192), ((70,), 2, 2, 256), ((40,), 3, 1, 96), ((66,), 14, 2, 64)]


@pytest.mark.parametrize(("lengths", "heads", "key_heads", "dim"), BACKWARD)
def test_backward(implementation, mmad_order, lengths, heads, key_heads, dim):
    check_backward(lengths, heads, key_heads, dim, Rules(order=mmad_order))


@pytest.mark.parametrize("rules", [Rules(kv_tile=64), Rules(window=50), Rules(causal=False, kv_tile=64)], ids=str)
def test_backward_rules(implementation, dtype, rules):
    check_backward((150, 5), 2, 1, 64, rules, dtype)


@pytest.mark.full
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("rules", [*(Rules(order=order) for order in MMAD_ORDERS), Rules(window=129), Rules(causal=False)], ids=str)
def test_backward_of_every_head_size(implementation, dtype, dim, rules):
    check_backward((257, 1, 127), 14, 2, dim, rules, dtype)


@pytest.mark.full
def test_backward_of_many_sequences(implementation):
    check_backward(MANY, 2, 1, 64, Rules())


def test_threads_do_not_show(threaded, mmad_order):
    lengths, order = [300, 129, 1], MMAD_ORDERS.index(mmad_order)
    q, k, v = inputs(lengths, 4, 2, 64)
    d_out, cache, lens = normal(*q.shape, seed=4), paged(k, v, lengths, 128), torch.tensor(lengths).int()
    last = offsets(lengths)[1:].long() - 1

    def run():
        out, lse = op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), 128, order)
        decoded = op.attention_paged(q[last], cache.k, cache.v, cache.tables, offsets([1, 1, 1]), lens, scale_of(q), 128, order)
        return out, lse, *decoded, *op.attention_backward(d_out, q, k, v, out, lse, offsets(lengths), scale_of(q), 128, order)

    results = threaded(run)
    for count, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {count} threads")


GENERATED = {
    "group": st.integers(1, 3), "key_heads": st.integers(1, 2), "dim": st.sampled_from([16, 48, 64, 80]), "order": st.sampled_from(MMAD_ORDERS),
    "window": st.sampled_from([None, 1, 37, 200]), "seed": st.integers(0, 2**31),
}  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4), **GENERATED)
def test_generated(lengths, group, key_heads, dim, order, window, seed):
    q, k, v = inputs(lengths, group * key_heads, key_heads, dim, seed=seed)
    rules, d_out = Rules(order=order, window=window), normal(sum(lengths), group * key_heads, dim, seed=seed + 1)
    out, lse = op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), *rules.arguments())
    assert_same((out, lse), expected_varlen(q, k, v, lengths, rules))
    found = op.attention_backward(d_out, q, k, v, out, lse, offsets(lengths), scale_of(q), *rules.arguments()[:4])
    for name, a, b in zip(("dq", "dk", "dv"), found, expected_backward(d_out, q, k, v, out, lse, lengths, rules), strict=True):
        assert_same_bits(a, b, name)


@settings(max_examples=20, deadline=None)
@given(sequences=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=4), page=st.sampled_from([16, 32, 64, 128]),
       **GENERATED)  # fmt: skip
def test_generated_pages(sequences, page, group, key_heads, dim, order, window, seed):
    """sequences: rows and the keys before them."""
    counts, kv_lens = [n for n, _ in sequences], [n + before for n, before in sequences]
    q, (_, k, v) = normal(sum(counts), group * key_heads, dim, seed=seed), inputs(kv_lens, group * key_heads, key_heads, dim, seed=seed)
    rules, cache = Rules(order=order, window=window), paged(k, v, kv_lens, page, seed=seed)
    found = op.attention_paged(q, cache.k, cache.v, cache.tables, offsets(counts), torch.tensor(kv_lens).int(), scale_of(q), *rules.arguments())
    parts = [expected_sequence(*sequence, rules) for sequence in zip(q.split(counts), k.split(kv_lens), v.split(kv_lens), strict=True)]
    assert_same(found, [torch.cat(x) for x in zip(*parts, strict=True)])


def sdpa(q, k, v, causal: bool = True) -> torch.Tensor:
    """[T, heads, D] of one sequence."""
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_the_gradient_is_that_of_the_formula(causal):
    """Ours in bf16 against the formula's in float64, within the rounding of bf16."""
    leaves = [x.requires_grad_() for x in inputs([140], 4, 2, 64)]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    d_out = normal(140, 4, 64, seed=4)
    out = op.attention_varlen(*leaves, offsets([140]), 0.125, causal=causal)[0]
    exact = sdpa(*exact_leaves, causal)
    assert torch.allclose(out.double(), exact, rtol=2**-7, atol=2**-7)
    for a, b in zip(torch.autograd.grad(out, leaves, d_out), torch.autograd.grad(exact, exact_leaves, d_out.double()), strict=True):
        assert torch.allclose(a.double(), b, rtol=2**-6, atol=2**-4)


def test_lse_is_that_of_the_formula():
    q, k, v = inputs([90], 2, 2, 64)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.125
    exact = scores.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf).logsumexp(-1).T
    assert torch.allclose(op.attention_varlen(q, k, v, offsets([90]), 0.125)[1].double(), exact, rtol=1e-5, atol=1e-5)


def test_not_less_accurate_than_torch():
    """Root mean square of the error against float64, beside scaled_dot_product_attention in bf16."""
    q, k, v = inputs([512], 4, 2, 64)
    exact = sdpa(*(x.double() for x in (q, k, v)))
    error = [(x.double() - exact).square().mean().sqrt() for x in (op.attention_varlen(q, k, v, offsets([512]), 0.125)[0], sdpa(q, k, v))]
    assert error[0] <= 1.02 * error[1]


Q, K, CU = normal(4, 4, 32), normal(4, 2, 32), offsets([1, 3])
KV = normal(3, 16, 2, 32)
TABLES, LENS = torch.tensor([[0, 1], [2, 0]]).int(), torch.tensor([20, 5]).int()


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda: op.attention_varlen(Q.float(), K, K, CU, 0.1), TypeError, "q must be bfloat16 or float16, found Float"),
    (lambda: op.attention_varlen(Q, K.half(), K, CU, 0.1), TypeError, "k must be BFloat16, found Half"),
    (lambda: op.attention_varlen(Q, K[:3], K[:3], CU, 0.1), ValueError, "q has 4 rows, k has 3"),
    (lambda: op.attention_varlen(Q, K, K[..., :16], CU, 0.1), ValueError, "k and v must have the same 3 dimensions"),
    (lambda: op.attention_varlen(Q[..., :16], K, K, CU, 0.1), ValueError, "head size of q is 16, that of k 32"),
    (lambda: op.attention_varlen(*(normal(4, 2, d) for d in (264, 264, 264)), CU, 0.1), ValueError, "multiple of 16 up to 256, found 264"),
    (lambda: op.attention_varlen(Q[:, :3], K, K, CU, 0.1), ValueError, "3 query heads must be a multiple of 2 key heads"),
    (lambda: op.attention_varlen(normal(1, 65, 16), normal(1, 1, 16), normal(1, 1, 16), offsets([1]), 0.1), ValueError, "at most 64 for each"),
    (lambda: op.attention_varlen(Q, K, K, CU.long(), 0.1), TypeError, "cu_seqlens must be Int, found Long"),
    (lambda: op.attention_varlen(Q, K, K, offsets([1, 2]), 0.1), ValueError, "end at the 4 rows of q, found 0 and 3"),
    (lambda: op.attention_varlen(Q, K, K, torch.tensor([0, 3, 2, 4]).int(), 0.1), ValueError, "must not decrease, found 3 before 2"),
    (lambda: op.attention_varlen(Q, K, K, CU, 0.0), ValueError, "scale must be positive and finite, found 0"),
    (lambda: op.attention_varlen(Q, K, K, CU, 0.1, 100), ValueError, "kv_tile must be 64 or 128, found 100"),
    (lambda: op.attention_varlen(Q, K, K, CU, 0.1, 128, 2), ValueError, "mmad_order must be 0"),
    (lambda: op.attention_varlen(Q, K, K, CU, 0.1, window=0), ValueError, "window must be at least one key, found 0"),
    (lambda: op.attention_varlen(Q, K, K, CU, 0.1, causal=False, window=3), ValueError, "a window needs causal=True"),
    (lambda: op.attention_varlen(Q, K, K, CU, 0.1, kv_split=200), ValueError, "kv_split must be a multiple of kv_tile=128, found 200"),
    (lambda: op.attention_paged(Q, KV[:, :15], KV[:, :15], TABLES, CU, LENS, 0.1), ValueError, "page size 15 does not divide kv_tile=128"),
    (lambda: op.attention_paged(Q, KV, KV, TABLES, CU, LENS[:1], 0.1), ValueError, "block_tables has 2 sequences, cu_query_lens 2, kv_lens 1"),
    (lambda: op.attention_paged(Q, KV, KV, TABLES, CU, torch.tensor([20, 2]).int(), 0.1), ValueError, "sequence 1 has 3 queries but kv_lens says 2 keys"),
    (lambda: op.attention_paged(Q, KV, KV, TABLES, CU, torch.tensor([40, 5]).int(), 0.1), ValueError, "sequence 0 needs 3 pages, block_tables has 2"),
    (lambda: op.attention_paged(Q, KV, KV, TABLES + 2, CU, LENS, 0.1), ValueError, "page 1 of sequence 0 is block 3, the cache has 3"),
    (lambda: op.attention_paged(Q, KV.mT.contiguous().mT, KV, TABLES, CU, LENS, 0.1), ValueError, "the last dimension of a cache must be dense"),
    (lambda: op.attention_backward(Q[:3], Q, K, K, Q, torch.zeros(4, 4), CU, 0.1), ValueError, r"d_out \[3, 4, 32\]"),
    (lambda: op.attention_backward(Q, Q, K, K, Q, torch.zeros(4, 3), CU, 0.1), ValueError, r"lse must be \[T, heads\], found shape \[4, 3\]"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_no_rows_no_results():
    out, lse = op.attention_varlen(Q[:0], K[:0], K[:0], offsets([]), 0.1)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)


def test_registration():
    leaves = [x.clone().requires_grad_() for x in (Q, K, K)]
    torch.library.opcheck(op.attention_varlen.default, (*leaves, CU, 0.1))
    torch.library.opcheck(op.attention_varlen.default, (Q, K, K, CU, 0.1, 64, 1, True, 2, 64))
    torch.library.opcheck(op.attention_paged.default, (Q, KV, KV, TABLES, CU, LENS, 0.1))
    torch.library.opcheck(op.attention_backward.default, (Q, Q, K, K, Q, torch.zeros(4, 4), CU, 0.1))


def test_a_gradient_through_pages_is_refused():
    out, _ = op.attention_paged(Q.clone().requires_grad_(), KV, KV, TABLES, CU, LENS, 0.1)
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()
