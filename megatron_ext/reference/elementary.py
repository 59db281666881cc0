"""exp, log and sqrt in fp32 with the same bits on every CPU: exp and log from + - * / only, sqrt correctly rounded.

exp: x = n ln2 + r with |r| <= ln2/2, Taylor series of degree 7, scaled by 2^n in two exact-or-once-rounded steps.
log: x = 2^e m with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh(f / (2 + f)), f = m - 1.
Both follow the Cody-Waite reduction with ln2 split in two fp32 numbers. Every operation is rounded by itself: no fused multiply-add.
"""

import torch

LN2_HI = 0.693359375
LN2_LO = -2.12194440054690583e-4
LOG2_E = 1.44269504088896341
ROUND_SHIFT = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer, ties to even
EXP_TAYLOR = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)
ATANH_SERIES = (2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3)
EXP_MAX, EXP_MIN = 89.0, -104.0
SQRT_HALF_BITS = 0x3F3504F3
TINY = 2.0**-126


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded. torch's fp32 square root is not where it is vectorised: one in six is a last bit off, by place and length.

    The exact root of an fp32 number is never so near to the middle of two that an error in the last bits of fp64 could decide.
    """
    return x.double().sqrt().float()


def power_of_two(n: torch.Tensor) -> torch.Tensor:
    """2^n in fp32 for int32 n in [-126, 127]."""
    return ((n + 127) << 23).view(torch.float32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> fp32, within 1 ulp on normal results; -inf -> 0, inf -> inf, NaN -> NaN."""
    clamped = torch.where(x > EXP_MAX, EXP_MAX, torch.where(x < EXP_MIN, EXP_MIN, x))
    clamped = torch.where(x == x, clamped, 0.0)
    n = clamped * LOG2_E + ROUND_SHIFT - ROUND_SHIFT
    r = (clamped - n * LN2_HI) - n * LN2_LO
    p = torch.full_like(r, EXP_TAYLOR[0])
    for coefficient in EXP_TAYLOR[1:]:
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    n = n.to(torch.int32)
    half = n >> 1
    result = p * power_of_two(half) * power_of_two(n - half)
    return torch.where(x == x, result, x)


def log(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> fp32, within 2 ulp; 0 -> -inf, negative -> NaN, inf -> inf."""
    scaled = torch.where(x < TINY, x * 2.0**24, x)
    bits = scaled.view(torch.int32) - SQRT_HALF_BITS
    e = bits >> 23
    m = ((bits & 0x7FFFFF) + SQRT_HALF_BITS).view(torch.float32)
    e = (e - torch.where(x < TINY, 24, 0).to(torch.int32)).to(torch.float32)
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = torch.full_like(z, ATANH_SERIES[0])
    for coefficient in ATANH_SERIES[1:]:
        p = p * z + coefficient
    result = e * LN2_HI + (e * LN2_LO + (s * (p * z) + s * 2.0))
    result = torch.where(x == float("inf"), x, result)
    result = torch.where(x == 0, float("-inf"), result)
    return torch.where((x == x) & (x >= 0), result, float("nan"))
