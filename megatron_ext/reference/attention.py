"""Attention with an online softmax over key tiles anchored at position 0 of each sequence.

Legend: n query rows of one head, L keys of one sequence, D head size, B tile width. One sequence and one head at a time.
"""

import dataclasses

import torch

from megatron_ext.reference.elementary import exp, log
from megatron_ext.reference.sums import contract, row_sum

NEGATIVE_INFINITY = float("-inf")


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], x.shape[1])])


def visible_range(positions_n: torch.Tensor, keys: int, causal: bool, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [first, last) that a row sees. causal: up to its own position. window: at most so many, its own included."""
    last = positions_n + 1 if causal else torch.full_like(positions_n, keys)
    first = torch.zeros_like(last) if window is None else (last - window).clamp_min(0)
    return first, last


def score_tile(q_nD: torch.Tensor, k_BD: torch.Tensor, scale: float, mmad_order: str) -> torch.Tensor:
    """fp32 [n, B]: the contraction, then the scale, each rounded."""
    return contract(q_nD, k_BD.T, mmad_order) * torch.tensor(scale, dtype=torch.float32)


@dataclasses.dataclass
class SoftmaxState:
    """What a row has seen so far: maximum m and sum l [n], output before the division o [n, D]. All fp32."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor

    @staticmethod
    def empty(n: int, d: int) -> "SoftmaxState":
        return SoftmaxState(torch.full((n,), NEGATIVE_INFINITY), torch.zeros(n), torch.zeros(n, d))

    def keep(self, new: "SoftmaxState", active_n: torch.Tensor) -> None:
        self.m, self.l = torch.where(active_n, new.m, self.m), torch.where(active_n, new.l, self.l)
        self.o = torch.where(active_n[:, None], new.o, self.o)


def add_tile(state: SoftmaxState, q_nD, k_BD, v_BD, visible_nB, scale: float, dtype: torch.dtype, mmad_order: str) -> SoftmaxState:
    s = torch.where(visible_nB, score_tile(q_nD, k_BD, scale, mmad_order), NEGATIVE_INFINITY)
    m = torch.maximum(state.m, s.amax(dim=1))
    p = torch.where(visible_nB, exp(s - m[:, None]), 0.0)
    alpha = exp(state.m - m)
    o = state.o * alpha[:, None] + contract(p.to(dtype).float(), v_BD, mmad_order)
    return SoftmaxState(m, state.l * alpha + row_sum(p), o)


def merge(left: SoftmaxState, right: SoftmaxState) -> SoftmaxState:
    """Both splits scaled to the common maximum, then added. Merging into an empty state changes no bit."""
    m = torch.maximum(left.m, right.m)
    alpha, beta = exp(left.m - m), exp(right.m - m)
    return SoftmaxState(m, left.l * alpha + right.l * beta, left.o * alpha[:, None] + right.o * beta[:, None])


def attention(q_nD, k_LD, v_LD, first_position: int, scale: float, kv_tile: int, mmad_order: str, causal=True, window=None, kv_split=None):
    """Query row i stands at position first_position + i. Returns o [n, D] in the model dtype and the fp32 log-sum-exp [n].

    kv_split: keys of a split (a multiple of kv_tile). Splits start at position 0; each has a softmax of its own, and they are merged in
    order. A row takes part in the tiles and splits that hold a key it sees, and in no other.
    """
    dtype, (n, d) = q_nD.dtype, q_nD.shape
    q_nD, k_LD, v_LD = q_nD.float(), k_LD.float(), v_LD.float()
    keys = first_position + n if causal else k_LD.shape[0]
    first, last = visible_range(torch.arange(first_position, first_position + n), keys, causal, window)
    total, split = SoftmaxState.empty(n, d), SoftmaxState.empty(n, d)
    for start in range(0, keys, kv_tile):
        k_BD, v_BD = (pad_rows(x[start : start + kv_tile], kv_tile) for x in (k_LD, v_LD))
        at = torch.arange(start, start + kv_tile)[None, :]
        visible = (at >= first[:, None]) & (at < last[:, None])
        split.keep(add_tile(split, q_nD, k_BD, v_BD, visible, scale, dtype, mmad_order), visible.any(dim=1))
        end = start + kv_tile
        if end >= keys or (kv_split is not None and end % kv_split == 0):
            total.keep(merge(total, split), split.m != NEGATIVE_INFINITY)
            split = SoftmaxState.empty(n, d)
    return (total.o / total.l[:, None]).to(dtype), total.m + log(total.l)


def attention_backward(do_nD, q_nD, k_LD, v_LD, o_nD, lse_n, scale: float, kv_tile: int, mmad_order: str, causal=True, window=None):
    """Whole sequence, one query head. Returns dq, dk, dv in fp32: dq by ascending key tile, dk and dv by ascending query tile."""
    dtype, (n, d) = q_nD.dtype, q_nD.shape
    do, q, k, v = (x.float() for x in (do_nD, q_nD, k_LD, v_LD))
    delta_n = row_sum(do * o_nD.float())
    dq, dk, dv = torch.zeros(n, d), torch.zeros(n, d), torch.zeros(n, d)
    first, last = visible_range(torch.arange(n), n, causal, window)
    for i in range(0, n, kv_tile):
        rows = slice(i, min(i + kv_tile, n))
        for j in range(0, n, kv_tile):
            keys = slice(j, min(j + kv_tile, n))
            at = torch.arange(n)[keys][None, :]
            visible = (at >= first[rows, None]) & (at < last[rows, None])
            if not visible.any():
                continue
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
