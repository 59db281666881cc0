"""Token copies, and their combination by the expert tree. Legend: R expert rows (token copies), T tokens, H hidden, E experts."""

import torch

from megatron_ext.reference.sums import ordered_sum, row_sum


def permute(x_TH: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
    """[R, H]: the row of every copy's token. Its gradient is `combine_rows` with weights of 1."""
    return x_TH[token_ids_R]


def unpermute(rows_RH: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Row r goes to index[r], a permutation. Its gradient is `permute` by the same index."""
    out = torch.empty_like(rows_RH)
    out[index_R] = rows_RH
    return out


def expert_tree(leaves: dict[int, torch.Tensor], first: int, last: int, experts_per_segment: int) -> torch.Tensor | None:
    """Sum of the leaves of experts [first, last): ascending inside a segment, binary tree across; None if there is no leaf."""
    if last - first > experts_per_segment:
        middle = (first + last) // 2
        left = expert_tree(leaves, first, middle, experts_per_segment)
        right = expert_tree(leaves, middle, last, experts_per_segment)
        return right if left is None else left if right is None else left + right
    total = None
    for expert in range(first, last):
        if expert in leaves:
            total = leaves[expert] if total is None else total + leaves[expert]
    return total


def combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments, expert_range):
    """fp32 [T, H]: partial root of the subtree `expert_range`. A token without a leaf there gives +0."""
    products = weights_R[:, None].float() * y_RH.float()
    per_token: list[dict[int, torch.Tensor]] = [{} for _ in range(num_tokens)]
    for row, (token, expert) in enumerate(zip(token_ids_R.tolist(), expert_ids_R.tolist(), strict=True)):
        per_token[token][expert] = products[row]
    out = torch.zeros(num_tokens, y_RH.shape[1])
    for token, leaves in enumerate(per_token):
        root = expert_tree(leaves, *expert_range, num_experts // segments)
        if root is not None:
            out[token] = root
    return out


def combine_finish(parts_PTH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Joins the EP ranks' subtrees. +0 at the root makes a skipped leaf and an added +0 the same (signed zeros)."""
    return (ordered_sum(parts_PTH) + 0.0).to(dtype)


def combine_rows(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments):
    """[T, H] in the model dtype: the whole tree, finished."""
    root = combine(y_RH, weights_R, token_ids_R, expert_ids_R, num_tokens, num_experts, segments, (0, num_experts))
    return combine_finish(root[None], y_RH.dtype)


def combine_backward(dout_TH, y_RH, weights_R, token_ids_R):
    """dy [R, H] in the model dtype and fp32 dweights [R], for fp32 dout of either form."""
    rows = dout_TH[token_ids_R]
    return (rows * weights_R[:, None]).to(y_RH.dtype), row_sum(rows * y_RH.float())
