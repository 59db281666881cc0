"""Sum of squares without an order: squares are cut to whole multiples of one small number and added as integers.

Integer sums have no order, so neither the layout nor the way in which an optimizer holds its gradients can show.
"""

import math

import torch

FRACTION_BITS = 31  # of each of two integer digits: 2^32 gradients fit into int64 sums


def largest(grads: list[torch.Tensor]) -> float:
    """Largest magnitude; infinity stands for NaN too, which a maximum would lose."""
    values = [float(grad.abs().max()) for grad in grads if grad.numel()]
    return max(values, default=0.0) if all(map(math.isfinite, values)) else math.inf


def square_digits(grad: torch.Tensor, exponent: int) -> torch.Tensor:
    """int64 [2]: sum of (g / 2^exponent)^2, cut to two digits of FRACTION_BITS bits. Every step before the cut is exact in fp64."""
    base = 2.0**FRACTION_BITS
    scaled = grad.detach().double() * 2.0**-exponent
    squares = scaled * scaled * base
    high = squares.to(torch.int64)
    low = ((squares - high.double()) * base).to(torch.int64)
    return torch.stack([high.sum(), low.sum()])


def root(high: int, low: int, exponent: int) -> float:
    """Square root of the sum that the digits stand for."""
    return math.sqrt(math.ldexp((high << FRACTION_BITS) + low, 2 * (exponent - FRACTION_BITS)))
