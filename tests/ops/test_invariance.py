"""No result of a row depends on its neighbours, on tensor parallel degree, on offset, stride, chunking or page size."""

import pytest
import torch

from inputs import cancelling_rows, normal, revealing
from megatron_ext import ops
from megatron_ext.parity.bits import assert_same_bits, differing
from megatron_ext.reduction_order import OrderError, ReductionOrder


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_row_parallel_partials_join_to_the_same_root(configured, dtype, tp):
    x, w = revealing(9, 256, dtype=dtype), revealing(16, 256, dtype=dtype, seed=1)
    segments = configured.local_segments(tp)
    parts = [ops.linear_fp32(a, b, segments) for a, b in zip(x.chunk(tp, 1), w.chunk(tp, 1), strict=True)]
    assert_same_bits(ops.ordered_sum(torch.stack(parts)), ops.linear_fp32(x, w), f"TP{tp}")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_gated_dgrad_follows_logical_segments(configured, dtype, tp):
    dy, w = revealing(9, 512, dtype=dtype), revealing(512, 32, dtype=dtype, seed=1)
    segments = configured.local_segments(tp)

    def shard(x, dim, rank):  # stored [gate | up] per rank
        gate, up = x.chunk(2, dim)
        return torch.cat([gate.chunk(tp, dim)[rank], up.chunk(tp, dim)[rank]], dim)

    parts = [ops.dgrad_fp32(shard(dy, 1, r), shard(w, 0, r), segments, gated=True) for r in range(tp)]
    assert_same_bits(ops.ordered_sum(torch.stack(parts)), ops.dgrad_fp32(dy, w, gated=True), f"TP{tp}")


def test_the_inputs_reveal_a_wrong_order(configured, dtype):
    """The same numbers in another order give other bits, so the equalities above mean something."""
    x, w = revealing(9, 256, dtype=dtype), revealing(16, 256, dtype=dtype, seed=1)
    right = ops.linear_fp32(x, w)
    assert differing(ops.linear_fp32(x, w, segments=4), right).any()
    rolled = torch.arange(256).roll(32)  # the tree pairs segments (7, 0), (1, 2), ... instead of (0, 1), (2, 3), ...
    assert differing(ops.linear_fp32(x[:, rolled], w[:, rolled]), right).any()


def test_cancellation_shows_which_order_is_used(dtype):
    """1e20, 1, -1e20, 1: the running accumulator keeps only the last 1 of every piece, the pair tree none or all."""
    x, w = cancelling_rows(1, 256, dtype), torch.ones(1, 256, dtype=dtype)
    results = {}
    for mode in ("sequential", "groups16"):
        ops.configure(ReductionOrder(mmad_order=mode), "ascendc")
        results[mode] = ops.linear_fp32(x, w).item()
    if dtype == torch.bfloat16:
        assert results == {"sequential": 8.0, "groups16": 0.0}


@pytest.mark.parametrize("op", ["linear", "norm", "swiglu", "route", "log_softmax"])
def test_a_row_is_the_same_alone_in_a_batch_and_at_any_stride(configured, op):
    weight = revealing(64, 256, seed=1)
    run = {
        "linear": lambda x: ops.linear_fp32(x, weight),
        "norm": lambda x: ops.rms_norm(x, weight[0, :256].contiguous(), 1e-6),
        "swiglu": lambda x: ops.swiglu(x),
        "route": lambda x: ops.route(x.float(), 4)[0],
        "log_softmax": lambda x: ops.log_softmax(x.float()),
    }[op]
    x = normal(19, 256, scale=4)
    whole = run(x)
    for row in (0, 7, 18):
        assert_same_bits(run(x[row : row + 1]), whole[row : row + 1], f"{op} row {row} alone")
    wide = torch.zeros(19, 3 * 256 + 5, dtype=x.dtype)
    wide[:, 3 : 3 + 256] = x
    assert_same_bits(run(wide[:, 3 : 3 + 256]), whole, f"{op} in a wider matrix, offset 3")
    assert_same_bits(run(x.T.contiguous().T), whole, f"{op} column-major")


@pytest.mark.parametrize("name", ["exp", "log"])
def test_elementary_at_every_offset_length_and_stride(configured, name):
    function = getattr(ops, name)
    x = normal(300, dtype=torch.float32, scale=20).abs()
    whole = function(x)
    for start in range(0, 40):
        for length in (1, 2, 7, 8, 9, 31, 64, 65):
            assert_same_bits(function(x[start : start + length]), whole[start : start + length], f"{name}[{start}:+{length}]")
    for stride in (2, 3, 5):
        assert_same_bits(function(x[::stride]), whole[::stride], f"{name}[::{stride}]")


def paged(k, v, page, cu, order_of_blocks):
    """Scatters packed keys into a shuffled paged cache whose unused slots are NaN; returns caches and block tables."""
    lens = (cu[1:] - cu[:-1]).tolist()
    pages = [(n + page - 1) // page for n in lens]
    blocks = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(order_of_blocks))
    k_cache, v_cache = (torch.full((len(blocks), page, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in (k, v))
    tables, slots, used = torch.full((len(lens), max(pages)), 10**6, dtype=torch.int32), [], 0
    for b, n in enumerate(lens):
        mine = blocks[used : used + pages[b]]
        used += pages[b]
        tables[b, : pages[b]] = mine
        positions = torch.arange(n)
        slots.append(mine[positions // page] * page + positions % page)
    ops.write_kv_cache(k, v, k_cache, v_cache, torch.cat(slots))
    return k_cache, v_cache, tables


@pytest.mark.parametrize("page", [16, 32, 128])
def test_attention_is_the_same_in_training_prefill_chunks_and_decode(configured, page):
    cu = torch.tensor([0, 1, 129, 430, 447], dtype=torch.int32)
    q, k, v = (normal(447, heads, 64, seed=i) for i, heads in enumerate((14, 2, 2)))
    expected = ops.attention_varlen(q, k, v, cu, 0.125)
    k_cache, v_cache, tables = paged(k, v, page, cu, order_of_blocks=page)
    lens = cu[1:] - cu[:-1]
    assert_same_bits(ops.attention_paged(q, k_cache, v_cache, tables, cu, lens, 0.125), expected, "prefill")
    for b in range(len(lens)):
        alone = ops.attention_varlen(*(x[cu[b] : cu[b + 1]] for x in (q, k, v)), torch.tensor([0, lens[b]]), 0.125)
        assert_same_bits(alone, expected[cu[b] : cu[b + 1]], f"sequence {b} alone")
    for chunk in (1, 100):  # decode and chunked prefill of sequence 2, mixed with a decode of sequence 3
        for start in range(0, 301, chunk if chunk > 1 else 37):
            end = min(start + chunk, 301)
            rows = torch.cat([torch.arange(129 + start, 129 + end), torch.tensor([446])])
            got = ops.attention_paged(q[rows], k_cache, v_cache, tables[2:4], torch.tensor([0, end - start, end - start + 1]),
                                      torch.tensor([end, 17]), 0.125)  # fmt: skip
            assert_same_bits(got, expected[rows], f"chunk [{start}, {end})")


def test_attention_does_not_copy_or_need_dense_caches(configured):
    """vLLM keeps K and V pages side by side: the page stride is twice a page."""
    cu = torch.tensor([0, 70], dtype=torch.int32)
    q, k, v = (normal(70, 2, 64, seed=i) for i in range(3))
    both_caches = torch.full((8, 2, 16, 2, 64), float("nan"), dtype=torch.bfloat16)
    tables, slots = torch.tensor([[5, 1, 7, 0, 2]], dtype=torch.int32), torch.arange(70)
    slots = tables[0, slots // 16] * 16 + slots % 16
    ops.write_kv_cache(k, v, both_caches[:, 0], both_caches[:, 1], slots)
    got = ops.attention_paged(q, both_caches[:, 0], both_caches[:, 1], tables, cu, cu[1:], 0.125)
    assert_same_bits(got, ops.attention_varlen(q, k, v, cu, 0.125), "interleaved cache")


@pytest.mark.parametrize("ep", [1, 2, 4, 8, 16])
def test_combine_does_not_depend_on_expert_parallelism_or_row_order(configured, dtype, ep):
    experts, tokens = 16, 12
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:5] for t in range(tokens)])
    y, weights = revealing(tokens * 5, 24, dtype=dtype), normal(tokens * 5, dtype=torch.float32)
    token_ids, expert_ids = torch.arange(tokens).repeat_interleave(5), ids.flatten()
    expected = ops.combine_finish(ops.combine(y, weights, token_ids, expert_ids, tokens, experts)[None], dtype)
    parts = []
    for rank in range(ep):
        first, last = rank * experts // ep, (rank + 1) * experts // ep
        mine = ((expert_ids >= first) & (expert_ids < last)).nonzero().flatten()
        mine = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(rank))]
        parts.append(ops.combine(y[mine], weights[mine], token_ids[mine], expert_ids[mine], tokens, experts, (first, last)))
    assert_same_bits(ops.combine_finish(torch.stack(parts), dtype), expected, f"EP{ep}")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_logprob_does_not_depend_on_the_vocabulary_shards(configured, tp):
    vocab = 1000
    logits = normal(6, vocab, dtype=torch.float32, scale=8)
    padded = torch.nn.functional.pad(logits, (0, configured.padded_vocab(vocab) - vocab), value=float("nan"))
    width = padded.shape[1] // tp
    shards, valid = padded.chunk(tp, 1), [max(0, min(width, vocab - r * width)) for r in range(tp)]
    row_max = torch.stack([ops.vocab_max(s, n) for s, n in zip(shards, valid, strict=True)]).amax(0)
    segments = configured.local_segments(tp)
    sums = ops.ordered_sum(torch.stack([ops.vocab_exp_sum(s, row_max, n, segments) for s, n in zip(shards, valid, strict=True)]))
    ids = torch.arange(6) * 150
    target = logits.gather(1, ids[:, None])[:, 0]
    assert_same_bits(ops.logprob_from_parts(target, row_max, sums), ops.token_logprob(logits, ids), f"TP{tp}")
    assert_same_bits(ops.log_softmax(logits).gather(1, ids[:, None])[:, 0], ops.token_logprob(logits, ids), "log_softmax")


def test_wgrad_does_not_depend_on_micro_batches(configured, dtype):
    dy, x, cu = revealing(100, 8, dtype=dtype), revealing(100, 24, dtype=dtype, seed=1), torch.tensor([0, 33, 34, 100])
    whole, parts = torch.zeros(8, 24), torch.zeros(8, 24)
    ops.wgrad_(whole, dy, x, cu)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        ops.wgrad_(parts, dy[start:end], x[start:end])
    assert_same_bits(parts, whole, "one sequence per micro-batch")


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ops.linear_fp32(normal(2, 100), normal(3, 100)), "not a multiple of 16 x 8"),
    (lambda: ops.linear_fp32(normal(2, 128, dtype=torch.float32), normal(3, 128)), "expected one dtype"),
    (lambda: ops.route(torch.zeros(2, 16), 17), "top_k=17 of 16"),
    (lambda: ops.route(torch.zeros(2, 16), 2, score_function="tanh"), "score_function must be one of"),
    (lambda: ops.attention_paged(normal(1, 2, 64), normal(1, 48, 2, 64), normal(1, 48, 2, 64), torch.zeros(1, 1), torch.tensor([0, 1]),
                                 torch.tensor([1]), 0.1), "page size 48 does not divide"),
    (lambda: ops.route(torch.zeros(2, 16), 2, "sigmoid", correction_bias=torch.zeros(16), num_groups=16, topk_groups=4), "16 groups of one expert"),
    (lambda: ops.grouped_linear(normal(3, 128), normal(2, 8, 128), torch.tensor([1, 1])), "counts sum to 2, but there are 3 rows"),
    (lambda: ops.grouped_linear(normal(3, 128), normal(2, 8, 128), torch.tensor([1, 1, 1])), "the weights of 2 experts were given"),
    (lambda: ops.combine(normal(1, 8), torch.ones(1), torch.tensor([0]), torch.tensor([9]), 1, 16, (0, 8)), "lie outside"),
    (lambda: ops.combine(normal(1, 8), torch.ones(1), torch.tensor([0]), torch.tensor([1]), 1, 12, (0, 2)), "expert parallel size 6"),
    (lambda: ops.sample(torch.zeros(2, 16), torch.zeros(2), torch.zeros(2).long()), r"seeds must be torch.int64 \[2\].*found torch.float32"),
    (lambda: ops.sample(torch.zeros(2, 16), torch.zeros(2).long(), torch.zeros(3).long()), r"positions must be torch.int64 \[2\].*\[3\]"),
    (lambda: ops.sample(torch.zeros(1, 16), torch.zeros(1).long(), torch.zeros(1).long(), 0.0), "temperatures must be positive"),
    (lambda: ops.sample(torch.zeros(1, 16), torch.zeros(1).long(), torch.zeros(1).long(), None, torch.tensor([-1])), "top_k must be at least 0"),
    (lambda: ops.sample(torch.zeros(1, 16), torch.zeros(1).long(), torch.zeros(1).long(), None, None, torch.zeros(1)), "top_p must be above 0"),
    (lambda: ops.beam_step(torch.zeros(1, 2), torch.zeros(1, 2, 3), 7), "kept=7 of 6 continuations"),
    (lambda: ops.gae(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3).bool(), 1.0, 1.0), r"values has shape \[2, 4\], mask has shape"),
    (lambda: ops.discounted_returns(torch.zeros(2, 3), torch.ones(2, 3).bool(), 1.5), "gamma must be 0 to 1, found 1.5"),
    (lambda: ops.discounted_returns(torch.zeros(2, 3), torch.ones(2, 3).bool(), 1.0, torch.zeros(3)), r"bootstrap must have shape \[2\]"),
    (lambda: ops.masked_mean(torch.zeros(2, 3), torch.zeros(2, 3).bool()), "at least 1 tokens are needed, the mask keeps 0"),
    (lambda: ops.masked_whiten(torch.zeros(1, 1), torch.ones(1, 1)), "mask must be bool"),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["ascendc", "reference"])
def test_what_the_order_does_not_define_is_refused(backend, call, message):
    ops.configure(ReductionOrder(), backend)
    with pytest.raises((ValueError, TypeError, OrderError), match=message):
        call()


def test_ops_refuse_to_run_before_enable():
    from megatron_ext.ops import backend

    backend._active = None
    with pytest.raises(ops.NotConfigured, match="megatron_ext.enable"):
        ops.linear(normal(1, 128), normal(1, 128))
