"""Attention beside torch and vLLM, and the accuracy of all of them: python -m ascendc_kernels.attention.bench_attention

rows: length of a training sequence, or of the keys of decode and mixed batches. Widths are those of Qwen3-30B-A3B. The error against float64 is printed
first: the largest and the root mean square, of ours and of scaled_dot_product_attention in bf16.
"""

import functools
import sys

import torch
import torch.nn.functional as F

from ascendc_kernels.bench.harness import BF16, HEAD_DIM, HEADS, KV_HEADS, Case, main, normal, vllm_kernels

op = torch.ops.megatron_ext
SCALE, PAGE, CHUNK = HEAD_DIM**-0.5, 128, 128
MAX_TRAINING_ROWS, MAX_GRADIENT_ROWS = 4096, 256  # torch takes half a second for the gradient of 128 rows
MAX_KEYS = 64 * 4096  # of all sequences of a decode batch: a cache of 0.5 GB


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def sdpa(q, k, v) -> torch.Tensor:
    """[T, heads, D] of one sequence, k and v with as many heads as q."""
    return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=SCALE)


def every_head(x: torch.Tensor) -> torch.Tensor:
    """Key heads repeated for their query heads: torch takes its fast path for them, and the repetition is not timed."""
    return x.repeat_interleave(HEADS // KV_HEADS, 1)


def varlen(q, k, v, cu) -> torch.Tensor:
    return op.attention_varlen(q, k, v, cu, SCALE)[0]


def gradients(forward, q, k, v, d_out):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(forward(*leaves), leaves, d_out)


def pair_flops(queries: int, first: int) -> float:
    """Of both contractions: query i sees first + i + 1 keys."""
    return 4.0 * HEADS * HEAD_DIM * (queries * first + queries * (queries + 1) / 2)


def training_cases(rows: int) -> list[Case]:
    if rows > MAX_TRAINING_ROWS:
        return []
    q, k, v = normal(rows, HEADS, HEAD_DIM), normal(rows, KV_HEADS, HEAD_DIM), normal(rows, KV_HEADS, HEAD_DIM)
    repeated, d_out, cu = (q, every_head(k), every_head(v)), normal(rows, HEADS, HEAD_DIM), offsets([rows])
    wide, d_out_heads = [x.float() for x in repeated], d_out.transpose(0, 1)[None]
    forward = Case("attention training", rows, lambda: varlen(q, k, v, cu),
                   {"torch bf16": lambda: sdpa(*repeated), "torch fp32": lambda: sdpa(*wide)}, pair_flops(rows, 0))  # fmt: skip
    both = Case("attention fwd + bwd", rows, lambda: gradients(lambda *x: varlen(*x, cu), q, k, v, d_out),
                {"torch bf16": lambda: gradients(sdpa, *repeated, d_out_heads)}, 3.5 * pair_flops(rows, 0))  # fmt: skip
    return [forward, both] if rows <= MAX_GRADIENT_ROWS else [forward]


class Cache:
    """Keys of a batch in pages: ours [blocks, page, heads, D], vLLM's in its own layout."""

    def __init__(self, kv_lens: list[int]):
        pages = [-(-length // PAGE) for length in kv_lens]
        self.k, self.v = (normal(sum(pages), PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
        self.kv_lens = torch.tensor(kv_lens).int()
        self.tables = torch.zeros(len(kv_lens), max(pages), dtype=torch.int32)
        blocks = torch.randperm(sum(pages)).int()
        for b, (count, end) in enumerate(zip(pages, torch.tensor(pages).cumsum(0).tolist(), strict=True)):
            self.tables[b, :count] = blocks[end - count : end]

    @functools.cached_property
    def of_vllm(self) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        whole = torch.zeros(self.k.shape[0], KV_HEADS, 2 * PAGE, HEAD_DIM, dtype=BF16)
        k, v = whole.chunk(2, dim=2)
        rows = [x.flatten(0, 1) for x in (self.k, self.v)]
        torch.ops._C.cpu_attn_reshape_and_cache(*rows, k, v, torch.arange(rows[0].shape[0]), _get_attn_isa(BF16, PAGE, HEAD_DIM), 1.0, 1.0, "auto")
        return k, v


def vllm_attention(q: torch.Tensor, cu: torch.Tensor, cache: Cache) -> dict:
    """{"vLLM": its attention over its own cache}; the schedule is made once per batch there, so it is not timed."""
    kernels = vllm_kernels()
    if kernels is None or not hasattr(kernels, "cpu_attention_with_kv_cache"):
        return {}
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    (k, v), out = cache.of_vllm, torch.empty_like(q)
    schedule = kernels.get_scheduler_metadata(len(cache.kv_lens), HEADS, KV_HEADS, HEAD_DIM, cache.kv_lens, BF16, cu, True, -1,
                                              _get_attn_isa(BF16, PAGE, HEAD_DIM), True, None, "auto")  # fmt: skip

    @torch.inference_mode()
    def run():
        kernels.cpu_attention_with_kv_cache(q, k, v, out, cu, cache.kv_lens, SCALE, True, None, -1, cache.tables, 0.0, schedule, None, None, 1.0, 1.0, "auto")
        return out

    ours = op.attention_paged(q, cache.k, cache.v, cache.tables, cu, cache.kv_lens, SCALE)[0]
    torch.testing.assert_close(run().float(), ours.float(), atol=2e-2, rtol=2e-2)  # the peer does the same work
    return {"vLLM": run}


def paged_case(name: str, rows: int, counts: list[int], kv_lens: list[int]) -> Case:
    q, cu, cache = normal(sum(counts), HEADS, HEAD_DIM), offsets(counts), Cache(kv_lens)
    flops = sum(pair_flops(count, length - count) for count, length in zip(counts, kv_lens, strict=True))

    @torch.inference_mode()  # as an engine does
    def ours():
        return op.attention_paged(q, cache.k, cache.v, cache.tables, cu, cache.kv_lens, SCALE)

    return Case(name, rows, ours, vllm_attention(q, cu, cache), flops)


def cases(rows: int) -> list[Case]:
    """rows: keys of a sequence."""
    found = training_cases(rows)
    for batch in (1, 8, 64):
        if rows * batch <= MAX_KEYS:
            found.append(paged_case(f"decode of {batch}", rows, [1] * batch, [rows] * batch))
    chunk = min(CHUNK, rows)
    found.append(paged_case("prefill chunk of 128", rows, [chunk], [rows]))
    if rows * 8 <= MAX_KEYS:
        found.append(paged_case("mixed: chunk + 7", rows, [chunk, *[1] * 7], [rows] * 8))
    return found


def show_accuracy(rows: int = 1024) -> None:
    q, k, v = normal(rows, HEADS, HEAD_DIM), normal(rows, KV_HEADS, HEAD_DIM), normal(rows, KV_HEADS, HEAD_DIM)
    repeated = (q, every_head(k), every_head(v))
    exact = sdpa(*(x.double() for x in repeated))[0].transpose(0, 1)
    for name, out in {"ours": varlen(q, k, v, offsets([rows])), "torch bf16": sdpa(*repeated)[0].transpose(0, 1)}.items():
        error = out.double() - exact
        print(f"error against float64, {rows} rows: {name:10s} largest {error.abs().max():.3e}, root mean square {error.square().mean().sqrt():.3e}")


if __name__ == "__main__":
    torch.manual_seed(0)
    from ascendc_kernels import library

    library.load()
    show_accuracy()
    sys.exit(main(__doc__, [cases]))
