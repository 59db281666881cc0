"""SwiGLU: silu(gate) * up in fp32, one rounding."""

import torch

from megatron_ext.reference.elementary import exp


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (exp(-gate) + 1.0) * up).to(gate_up.dtype)


def swiglu_backward(da: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    da = da.float()
    sigmoid = 1.0 / (exp(-gate) + 1.0)
    silu = gate / (exp(-gate) + 1.0)
    dgate = da * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    return torch.cat([dgate, da * silu], dim=-1).to(gate_up.dtype)
