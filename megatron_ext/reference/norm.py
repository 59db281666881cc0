"""RMSNorm. Rounded to the model dtype before the weight multiply; the residual sum is rounded before it is normalised."""

import torch

from megatron_ext.reference.elementary import sqrt
from megatron_ext.reference.sums import row_sum


def inverse_rms(x_TH: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 [T, 1]."""
    x = x_TH.float()
    return (1.0 / sqrt(row_sum(x * x) / x.shape[-1] + eps))[:, None]


def rms_norm(x_TH: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    normed = (x_TH.float() * inverse_rms(x_TH, eps)).to(x_TH.dtype)
    return (normed.float() * w_H.float()).to(x_TH.dtype)


def rms_norm_backward_(dw_H: torch.Tensor, dy_TH: torch.Tensor, x_TH: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns dx (model dtype); adds the weight gradient into the fp32 accumulator dw, row after row."""
    rstd = inverse_rms(x_TH, eps)
    xhat = x_TH.float() * rstd
    dxhat = dy_TH.float() * w_H.float()
    mean = (row_sum(dxhat * xhat) / x_TH.shape[-1])[:, None]
    for row in dy_TH.float() * xhat.to(x_TH.dtype).float():
        dw_H += row
    return ((dxhat - xhat * mean) * rstd).to(x_TH.dtype)
