"""Log-probabilities over the vocabulary of Qwen3 beside torch: python -m ascendc_kernels.logprob.bench_logprob"""

import sys

import torch
import torch.nn.functional as F

from ascendc_kernels.bench.harness import BF16, VOCAB, Case, main

SEGMENTS = 8
MAX_ROWS = 128  # more rows of fp32 logits take more than 100 MB


def cases(rows: int) -> list[Case]:
    if rows > MAX_ROWS:
        return []
    op = torch.ops.megatron_ext
    logits, ids, grad = torch.randn(rows, VOCAB), torch.randint(VOCAB, (rows,)), torch.randn(rows)
    padded = torch.nn.functional.pad(logits, (0, -VOCAB % (16 * SEGMENTS)))
    temperature = torch.tensor([0.7])
    row_max, exp_sum = op.vocab_max(logits, VOCAB), torch.rand(rows) + 1.0

    def gradient(loss):
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf, grad)

    return [
        Case("vocab_max", rows, lambda: op.vocab_max(logits, VOCAB), {"torch amax": lambda: logits.amax(-1)}),
        Case("vocab_exp_sum", rows, lambda: op.vocab_exp_sum(padded, row_max, VOCAB, SEGMENTS),
             {"torch exp + sum": lambda: (padded - row_max[:, None]).exp().sum(-1)}),
        Case("token_logprob", rows, lambda: op.token_logprob(logits, ids, None, SEGMENTS),
             {"torch fp32": lambda: -F.cross_entropy(logits, ids, reduction="none")}),
        Case("token_logprob at t", rows, lambda: op.token_logprob(logits, ids, temperature, SEGMENTS),
             {"torch fp32": lambda: -F.cross_entropy(logits / temperature, ids, reduction="none")}),
        Case("log_softmax", rows, lambda: op.log_softmax(logits, None, SEGMENTS), {"torch fp32": lambda: logits.log_softmax(-1)}),
        Case("log_softmax at t", rows, lambda: op.log_softmax(logits, temperature, SEGMENTS),
             {"torch fp32": lambda: (logits / temperature).log_softmax(-1)}),
        Case("vocab_dlogits bf16", rows, lambda: op.vocab_dlogits(logits, row_max, exp_sum, ids, grad, VOCAB, BF16),
             {"torch fp32": lambda: torch.ops.aten._log_softmax_backward_data(padded[:, :VOCAB], logits, -1, torch.float32)}),
        Case("token_logprob fwd + bwd", rows, lambda: gradient(lambda leaf: op.token_logprob(leaf, ids, None, SEGMENTS)),
             {"torch fp32": lambda: gradient(lambda leaf: F.cross_entropy(leaf, ids, reduction="none"))}),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
