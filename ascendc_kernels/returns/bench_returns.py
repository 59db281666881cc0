"""Advantages and returns of responses of 1,024 tokens beside torch: python -m ascendc_kernels.returns.bench_returns"""

import sys

import torch

from ascendc_kernels.bench.harness import Case, main

TOKENS, GAMMA, LAM = 1024, 0.99, 0.95


def torch_returns(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    running, found = torch.zeros(len(rewards)), []
    for t in reversed(range(TOKENS)):
        running = torch.where(mask[:, t], rewards[:, t] + GAMMA * running, running)
        found.append(running)
    return torch.stack(found[::-1], dim=1) * mask


def torch_gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    advantage, next_value, found = torch.zeros(len(rewards)), torch.zeros(len(rewards)), []
    for t in reversed(range(TOKENS)):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + GAMMA * LAM * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        found.append(advantage)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages * mask, (advantages + values) * mask


def torch_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask).sum() / mask.sum()


def torch_whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mean, count = torch_mean(x, mask), mask.sum()
    variance = torch_mean((x - mean) ** 2, mask) * count / (count - 1)
    return (x - mean) * torch.rsqrt(variance + 1e-8) * mask


def cases(rows: int) -> list[Case]:
    op = torch.ops.megatron_ext
    rewards, values, mask = torch.randn(rows, TOKENS), torch.randn(rows, TOKENS), torch.rand(rows, TOKENS) < 0.9
    return [
        Case("gae", rows, lambda: op.gae(rewards, values, mask, GAMMA, LAM), {"torch": lambda: torch_gae(rewards, values, mask)}),
        Case("discounted_returns", rows, lambda: op.discounted_returns(rewards, mask, GAMMA), {"torch": lambda: torch_returns(rewards, mask)}),
        Case("masked_mean", rows, lambda: op.masked_mean(values, mask), {"torch": lambda: torch_mean(values, mask)}),
        Case("masked_whiten", rows, lambda: op.masked_whiten(values, mask), {"torch": lambda: torch_whiten(values, mask)}),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__, [cases]))
