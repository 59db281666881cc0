"""Sampling and a step of beam search over the vocabulary of Qwen3 beside torch: python -m ascendc_kernels.sampling.bench_sampling"""

import sys

import torch

from ascendc_kernels.bench.harness import VOCAB, Case, main

SEGMENTS, TOP_K, TOP_P, MIN_P = 8, 50, 0.95, 0.05
MAX_ROWS = 128  # more rows of fp32 logits take more than 100 MB
BEAMS = 4


def torch_sample(logits: torch.Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None) -> torch.Tensor:
    """The usual way: one sort for both filters, then an exponential race."""
    if min_p is not None:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    if top_k is not None and top_p is None:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -torch.inf)
    if top_p is not None:
        values, ids = logits.sort(-1)
        if top_k is not None:
            values = values.masked_fill(values < values[:, -top_k, None], -torch.inf)
        mass = values.softmax(-1).cumsum(-1)
        mass[:, -1] = 2.0  # the most likely token stays
        logits = torch.empty_like(logits).scatter_(-1, ids, values.masked_fill(mass <= 1 - top_p, -torch.inf))
    probabilities = logits.softmax(-1)
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def torch_beam_step(scores: torch.Tensor, logprobs: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    best, index = (scores[:, :, None] + logprobs).flatten(1).topk(kept, -1)
    return best, index // VOCAB, index % VOCAB


def cases(rows: int) -> list[Case]:
    if rows > MAX_ROWS:
        return []
    op = torch.ops.megatron_ext
    logits, seeds = torch.randn(rows, VOCAB) * 2, torch.arange(rows)
    k, p, m = torch.full((rows,), TOP_K), torch.full((rows,), TOP_P), torch.full((rows,), MIN_P)
    last = op.sample(logits, seeds, seeds, None, k, None, None, SEGMENTS)[1]
    requests = max(1, rows // BEAMS)
    scores, logprobs = torch.randn(requests, BEAMS), torch.randn(requests, BEAMS, VOCAB)

    def sample(top_k=None, top_p=None, min_p=None):
        return op.sample(logits, seeds, seeds, None, top_k, top_p, min_p, SEGMENTS)

    def kept_by_torch():
        value = logits.gather(1, last[:, None])
        return (logits > value) | ((logits == value) & (torch.arange(VOCAB) <= last[:, None]))

    return [
        Case("sample", rows, sample, {"torch": lambda: torch_sample(logits)}),
        Case("sample top-k", rows, lambda: sample(k), {"torch": lambda: torch_sample(logits, TOP_K)}),
        Case("sample top-p", rows, lambda: sample(None, p), {"torch": lambda: torch_sample(logits, None, TOP_P)}),
        Case("sample min-p", rows, lambda: sample(None, None, m), {"torch": lambda: torch_sample(logits, None, None, MIN_P)}),
        Case("sample top-k top-p", rows, lambda: sample(k, p), {"torch": lambda: torch_sample(logits, TOP_K, TOP_P)}),
        Case("support_mask", rows, lambda: op.support_mask(logits, last), {"torch": kept_by_torch}),
        Case("beam_step", rows, lambda: op.beam_step(scores, logprobs, 2 * BEAMS), {"torch": lambda: torch_beam_step(scores, logprobs, 2 * BEAMS)}),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
