"""Causal attention with an online softmax over key tiles anchored at position 0 of each sequence.

Legend: n query rows of one head, L keys of one sequence, D head size, B tile width. One sequence and one head at a time.
"""

import torch

from megatron_ext.reference.elementary import exp, log
from megatron_ext.reference.sums import contract, row_sum

NEGATIVE_INFINITY = float("-inf")


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], x.shape[1])])


def score_tile(q_nD: torch.Tensor, k_BD: torch.Tensor, scale: float, mmad_order: str) -> torch.Tensor:
    """fp32 [n, B]: the contraction, then the scale, each rounded."""
    return contract(q_nD, k_BD.T, mmad_order) * torch.tensor(scale, dtype=torch.float32)


def attention(q_nD, k_LD, v_LD, first_position: int, scale: float, kv_tile: int, mmad_order: str):
    """Query row i stands at position first_position + i. Returns o [n, D] in the model dtype and the fp32 log-sum-exp [n]."""
    dtype, (n, d) = q_nD.dtype, q_nD.shape
    q_nD, k_LD, v_LD = q_nD.float(), k_LD.float(), v_LD.float()
    positions = torch.arange(first_position, first_position + n)
    m, l, o = torch.full((n,), NEGATIVE_INFINITY), torch.zeros(n), torch.zeros(n, d)
    for start in range(0, first_position + n, kv_tile):
        k_BD, v_BD = (pad_rows(x[start : start + kv_tile], kv_tile) for x in (k_LD, v_LD))
        visible = torch.arange(start, start + kv_tile)[None, :] <= positions[:, None]
        active = positions >= start  # a row stops at its own last tile
        s = torch.where(visible, score_tile(q_nD, k_BD, scale, mmad_order), NEGATIVE_INFINITY)
        m_new = torch.maximum(m, s.amax(dim=1))
        p = torch.where(visible, exp(s - m_new[:, None]), 0.0)
        alpha = exp(m - m_new)
        l_new = l * alpha + row_sum(p)
        o_new = o * alpha[:, None] + contract(p.to(dtype).float(), v_BD, mmad_order)
        m, l = torch.where(active, m_new, m), torch.where(active, l_new, l)
        o = torch.where(active[:, None], o_new, o)
    return (o / l[:, None]).to(dtype), m + log(l)


def attention_backward(do_nD, q_nD, k_LD, v_LD, o_nD, lse_n, scale: float, kv_tile: int, mmad_order: str):
    """Whole sequence, one query head. Returns dq, dk, dv in fp32: dq by ascending key tile, dk and dv by ascending query tile."""
    dtype, (n, d) = q_nD.dtype, q_nD.shape
    do, q, k, v = (x.float() for x in (do_nD, q_nD, k_LD, v_LD))
    delta_n = row_sum(do * o_nD.float())
    dq, dk, dv = torch.zeros(n, d), torch.zeros(n, d), torch.zeros(n, d)
    for i in range(0, n, kv_tile):
        rows = slice(i, min(i + kv_tile, n))
        for j in range(0, i + kv_tile, kv_tile):
            keys = slice(j, min(j + kv_tile, n))
            visible = torch.arange(n)[keys][None, :] <= torch.arange(n)[rows][:, None]
            s = score_tile(q[rows], k[keys], scale, mmad_order)
            p = torch.where(visible, exp(s - lse_n[rows, None]), 0.0)
            dp = contract(do[rows], v[keys].T, mmad_order)
            ds = torch.where(visible, p * (dp - delta_n[rows, None]), 0.0).to(dtype).float()
            p = p.to(dtype).float()
            dq[rows] = contract(ds, k[keys], mmad_order, start_MN=dq[rows])
            dk[keys] = contract(ds.T, q[rows], mmad_order, start_MN=dk[keys])
            dv[keys] = contract(p.T, do[rows], mmad_order, start_MN=dv[keys])
    scale32 = torch.tensor(scale, dtype=torch.float32)
    return dq * scale32, dk * scale32, dv
