"""Rotary embedding. One function makes the tables for both engines; products in fp32, one rounding."""

import math

import torch

PI_OVER_2_HI = 1.5707963267341256  # the leading 33 bits of pi/2: n * PI_OVER_2_HI is exact for |n| < 2^20
PI_OVER_2_LO = 6.077100506506192e-11
SIN_TAYLOR = tuple((-1) ** i / math.factorial(2 * i + 1) for i in range(8, 0, -1))
COS_TAYLOR = tuple((-1) ** i / math.factorial(2 * i) for i in range(8, 0, -1))


def horner(coefficients: tuple[float, ...], z: torch.Tensor) -> torch.Tensor:
    p = torch.full_like(z, coefficients[0])
    for coefficient in coefficients[1:]:
        p = p * z + coefficient
    return p * z + 1.0


def sin_cos(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 sine and cosine of fp64 angles below 2^20, from + - * only (libm's vary by CPU)."""
    n = torch.floor(angle * (2 / math.pi) + 0.5)
    r = (angle - n * PI_OVER_2_HI) - n * PI_OVER_2_LO
    sine, cosine = r * horner(SIN_TAYLOR, r * r), horner(COS_TAYLOR, r * r)
    quadrant = n.to(torch.int64) & 3
    swap = (quadrant & 1) == 1
    sin = torch.where(swap, cosine, sine)
    cos = torch.where(swap, sine, cosine)
    return torch.where(quadrant >= 2, -sin, sin), torch.where((quadrant == 1) | (quadrant == 2), -cos, cos)


def inverse_frequencies(rotary_dim: int, base: float) -> torch.Tensor:
    """fp32 [rotary_dim / 2] of base^(-2i/d), each rounded once from fp64."""
    return torch.tensor([1.0 / base ** (2 * i / rotary_dim) for i in range(rotary_dim // 2)], dtype=torch.float64).float()


def rope_tables(positions_T: torch.Tensor, rotary_dim: int, base: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions_T.float()[:, None] * inverse_frequencies(rotary_dim, base)[None, :]
    sin, cos = sin_cos(angles.double())
    return cos.to(torch.float32).to(dtype), sin.to(torch.float32).to(dtype)


def apply_rope(x_ThD: torch.Tensor, cos_Tr: torch.Tensor, sin_Tr: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotates pairs of the first 2r dimensions of every head; the rest passes through. A row of the tables serves all of a token's heads,
    whatever dimensions lie between: x may be Megatron's [s, b, heads, D] with tables [s, r].

    The pairs are (i, r + i), or (2i, 2i + 1) where interleaved.
    """
    r = cos_Tr.shape[-1]
    cos, sin = (table.float().reshape(-1, *(1,) * (x_ThD.dim() - 2), r) for table in (cos_Tr, sin_Tr))
    rotary = x_ThD[..., : 2 * r].float()
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.chunk(2, dim=-1)
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([rotated.to(x_ThD.dtype), x_ThD[..., 2 * r :]], dim=-1)
