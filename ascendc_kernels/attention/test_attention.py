"""attention_varlen, attention_paged and the gradient: the bits of reference/attention.py on every implementation; a row's bits do not depend on
its neighbours, its chunk or its pages; accuracy; refusals; registration."""

import dataclasses

import pytest
import torch
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


# The reference takes a second for some thousand rows, so lengths are short where they may be.
SHAPES = [  # lengths, query heads, key heads, head size
    ([1], 2, 2, 64),
    ([127, 2], 2, 1, 96),
    ([130, 1, 0, 17], 4, 2, 128),
    ([129], 2, 1, 192),
    ([140], 3, 3, 256),
    ([37, 128], 14, 2, 64),
    ([20], 2, 1, 16),
]


@pytest.mark.parametrize(("lengths", "heads", "key_heads", "dim"), SHAPES)
def test_varlen(implementation, mmad_order, lengths, heads, key_heads, dim):
    q, k, v = inputs(lengths, heads, key_heads, dim)
    rules = Rules(order=mmad_order)
    assert_same(op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), *rules.arguments()), expected_varlen(q, k, v, lengths, rules))


RULES = [
    Rules(kv_tile=64), Rules(causal=False), Rules(window=1), Rules(window=50), Rules(window=129, kv_tile=64), Rules(kv_split=128),
    Rules(kv_split=64, kv_tile=64, order="groups16"), Rules(window=70, kv_split=64, kv_tile=64), Rules(causal=False, kv_split=128),
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rules(implementation, dtype, rules):
    lengths = [200, 3]
    q, k, v = inputs(lengths, 4, 2, 64, dtype)
    assert_same(op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), *rules.arguments()), expected_varlen(q, k, v, lengths, rules))


def test_order_revealing_values(implementation, mmad_order, dtype):
    """Large values cancel, so that any other order shows; products that fp32 cannot hold are met as well."""
    lengths, rules = [150], Rules(order=mmad_order)
    for values in (revealing, lambda *shape, **kw: revealing(*shape, large=3e-30 if dtype == torch.bfloat16 else 3e-7, **kw)):
        q, k = (x * 2.0**-6 for x in inputs(lengths, 2, 1, 64, dtype)[:2])
        v = values(150, 1, 64, dtype=dtype, seed=5)
        assert_same(op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), *rules.arguments()), expected_varlen(q, k, v, lengths, rules))
        q, k = (revealing(150, h, 64, dtype=dtype, seed=7, large=300.0) for h in (2, 1))
        assert_same(op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), *rules.arguments()), expected_varlen(q, k, v, lengths, rules))


PAGED = [  # query lengths, kv lengths
    ([1, 1, 1], [1, 128, 129]),
    ([5, 1, 0, 130], [140, 200, 40, 130]),
]


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize(("counts", "kv_lens"), PAGED)
def test_paged_with_poisoned_slots(implementation, mmad_order, counts, kv_lens, page):
    rules = Rules(order=mmad_order)
    q, (_, k, v) = normal(sum(counts), 4, 64, seed=9), inputs(kv_lens, 4, 2, 64)
    cache = paged(k, v, kv_lens, page)
    found = op.attention_paged(q, cache.k, cache.v, cache.tables, offsets(counts), torch.tensor(kv_lens).int(), scale_of(q), *rules.arguments())
    parts = [expected_sequence(*sequence, rules) for sequence in zip(q.split(counts), k.split(kv_lens), v.split(kv_lens), strict=True)]
    assert_same(found, [torch.cat(x) for x in zip(*parts, strict=True)])


@pytest.mark.parametrize("rules", [Rules(window=40), Rules(kv_split=128), Rules(causal=False)], ids=str)
def test_paged_rules(implementation, rules):
    counts, kv_lens = [3, 1], [180, 300]
    q, (_, k, v) = normal(sum(counts), 2, 64, seed=9), inputs(kv_lens, 2, 1, 64)
    cache = paged(k, v, kv_lens, 32)
    found = op.attention_paged(q, cache.k, cache.v, cache.tables, offsets(counts), torch.tensor(kv_lens).int(), scale_of(q), *rules.arguments())
    parts = [expected_sequence(*sequence, rules) for sequence in zip(q.split(counts), k.split(kv_lens), v.split(kv_lens), strict=True)]
    assert_same(found, [torch.cat(x) for x in zip(*parts, strict=True)])


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
    """Decode, every chunking of a prefill, training alone and packed, other neighbours: the same bits."""
    length, heads, key_heads, dim = 200, 4, 2, 64
    q, k, v = inputs([length], heads, key_heads, dim)
    whole = op.attention_varlen(q, k, v, offsets([length]), scale_of(q))
    for before, after in ((5, 0), (6, 131)):
        near = inputs([before], heads, key_heads, dim, seed=7), inputs([after], heads, key_heads, dim, seed=8)
        packed = [torch.cat([near[0][i], x, near[1][i]]) for i, x in enumerate((q, k, v))]
        found = op.attention_varlen(*packed, offsets([before, length, after]), scale_of(q))
        assert_same([x[before : before + length] for x in found], whole, f"packed after {before}")
    for page in (16, 64):
        other_k, other_v = inputs([77], heads, key_heads, dim, seed=9)[1:]
        for chunk in (1, 63, 128):
            for first in range(0, length, chunk) if chunk > 1 else (0, 127, 128, 199):
                last = min(first + chunk, length)
                cache = paged(torch.cat([k[:last], other_k]), torch.cat([v[:last], other_v]), [last, 77], page)
                rows = torch.cat([q[first:last], q[:1]])
                lens = torch.tensor([last, 77]).int()
                found = op.attention_paged(rows, cache.k, cache.v, cache.tables, offsets([last - first, 1]), lens, scale_of(q))
                assert_same([x[:-1] for x in found], [x[first:last] for x in whole], f"rows {first} to {last}, pages of {page}")


@pytest.mark.parametrize(("lengths", "heads", "key_heads", "dim"), [([1, 130, 0, 17], 4, 2, 64), ([127], 2, 1, 128), ([70], 2, 2, 256), ([40], 3, 1, 96)])
def test_backward(implementation, mmad_order, lengths, heads, key_heads, dim):
    check_backward(lengths, heads, key_heads, dim, Rules(order=mmad_order))


@pytest.mark.parametrize("rules", [Rules(kv_tile=64), Rules(window=50), Rules(causal=False, kv_tile=64)], ids=str)
def test_backward_rules(implementation, dtype, rules):
    check_backward([150, 5], 2, 1, 64, rules, dtype)


def check_backward(lengths, heads, key_heads, dim, rules: Rules, dtype=torch.bfloat16) -> None:
    q, k, v = inputs(lengths, heads, key_heads, dim, dtype)
    d_out = normal(*q.shape, dtype=dtype, seed=11)
    out, lse = expected_varlen(q, k, v, lengths, rules)
    found = op.attention_backward(d_out, q, k, v, out, lse, offsets(lengths), scale_of(q), *rules.arguments()[:4])
    for name, a, b in zip(("dq", "dk", "dv"), found, expected_backward(d_out, q, k, v, out, lse, lengths, rules), strict=True):
        assert_same_bits(a, b, name)


def test_threads_do_not_show(threaded, mmad_order):
    lengths = [300, 129, 1]
    q, k, v = inputs(lengths, 4, 2, 64)
    d_out, order = normal(*q.shape, seed=4), MMAD_ORDERS.index(mmad_order)

    def run():
        out, lse = op.attention_varlen(q, k, v, offsets(lengths), scale_of(q), 128, order)
        return out, lse, *op.attention_backward(d_out, q, k, v, out, lse, offsets(lengths), scale_of(q), 128, order)

    results = threaded(run)
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")
