"""MoE router. Logits in fp32 from model-dtype inputs; ties go to the lower expert index. Legend: T tokens, E experts, k slots."""

import torch

from megatron_ext.reference.elementary import exp
from megatron_ext.reference.sums import row_sum


def scores(logits_TE: torch.Tensor, score_function: str) -> torch.Tensor:
    if score_function == "sigmoid":
        return 1.0 / (exp(-logits_TE) + 1.0)
    e = exp(logits_TE - logits_TE.amax(dim=1, keepdim=True))
    return e / row_sum(e)[:, None]


def top_k(values_TE: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [T, k] by descending value, ties by lower index (a stable sort)."""
    return torch.sort(values_TE, dim=1, descending=True, stable=True).indices[:, :k].contiguous()


def keep_groups(values_TE: torch.Tensor, num_groups: int, topk_groups: int, group_top: int) -> torch.Tensor:
    """-inf outside the `topk_groups` groups with the largest sum of their `group_top` best values."""
    grouped = values_TE.unflatten(1, (num_groups, -1))
    best = torch.sort(grouped, dim=2, descending=True, stable=True).values[:, :, :group_top]
    group_score = best[..., 0]
    for i in range(1, group_top):
        group_score = group_score + best[..., i]
    kept = torch.zeros_like(group_score, dtype=torch.bool)
    kept.scatter_(1, top_k(group_score, topk_groups), True)
    return torch.where(kept[:, :, None], grouped, float("-inf")).flatten(1)


def slot_sum(x_Tk: torch.Tensor) -> torch.Tensor:
    """[T, 1]: slots added one after another, in slot order."""
    total = torch.zeros_like(x_Tk[:, :1])
    for slot in range(x_Tk.shape[1]):
        total = total + x_Tk[:, slot : slot + 1]
    return total


def route(logits_TE, k, score_function, renormalize, scale, correction_bias, num_groups, topk_groups):
    """fp32 weights [T, k] and int64 expert ids [T, k]. The correction bias chooses experts and never enters a weight."""
    s = scores(logits_TE, score_function)
    choice = s if correction_bias is None else s + correction_bias.float()
    if num_groups is not None:
        choice = keep_groups(choice, num_groups, topk_groups, 2 if correction_bias is not None else 1)
    ids = top_k(choice, k)
    weights = s.gather(1, ids)
    if renormalize:
        weights = weights / slot_sum(weights)
    return weights * torch.tensor(scale, dtype=torch.float32), ids


def route_backward(dweights_Tk, logits_TE, ids_Tk, score_function, renormalize, scale):
    """fp32 dlogits [T, E]."""
    s = scores(logits_TE, score_function)
    chosen = s.gather(1, ids_Tk)
    d = dweights_Tk * torch.tensor(scale, dtype=torch.float32)
    if renormalize:
        total = slot_sum(chosen)
        d = (d - slot_sum(d * (chosen / total))) / total
    ds = torch.zeros_like(s).scatter_(1, ids_Tk, d)
    if score_function == "sigmoid":
        return ds * (s * (1.0 - s))
    return s * (ds - row_sum(ds * s)[:, None])
