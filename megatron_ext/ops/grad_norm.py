"""The 2-norm of gradients in parts that ranks can add without an order."""

from __future__ import annotations

import math

import torch

from megatron_ext.reference import grad_norm


def largest_magnitude(grads: list[torch.Tensor]) -> float:
    """Over all gradients; infinite if any is infinite or no number; 0 without gradients."""
    return grad_norm.largest(grads)


def square_digits(grads: list[torch.Tensor], largest: float) -> torch.Tensor:
    """int64 [2]: the sum of squares of `grads`, none larger than `largest`, cut to 62 binary digits below the largest possible square.

    Digits of several ranks may be added in any order.
    """
    exponent = math.frexp(largest)[1]
    digits = torch.zeros(2, dtype=torch.int64)
    for grad in grads:
        digits += grad_norm.square_digits(grad, exponent)
    return digits


def norm_from_digits(digits: torch.Tensor, largest: float) -> float:
    """The 2-norm whose square_digits, over everything, are `digits`."""
    high, low = digits.tolist()
    return grad_norm.root(high, low, math.frexp(largest)[1])
