"""Sampling of tokens, and a step of beam search. Logits are fp32. Legend: T tokens, V vocabulary, B requests, W beams, k kept beams.

A token is a function of its row, its seed and its position: the same whatever else is in the batch, and on every backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_ext.ops.backend import active_order, kernels
from megatron_ext.ops.checks import check, check_float32
from megatron_ext.ops.logprob import Temperature, side_by_side, temperatures

NOTHING = -1  # in the place of a token: there is none


def sample(
    logits_TV: torch.Tensor,
    seeds_T: torch.Tensor,
    positions_T: torch.Tensor,
    temperature: Temperature = None,
    top_k_T: torch.Tensor | None = None,
    top_p_T: torch.Tensor | None = None,
    min_p_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [T, V] -> (tokens, last), int64 [T] each: drawn from softmax(logits / temperature). Seeds and positions are int64 [T].

    Philox4x32-10 with the seed as key and the position as counter; the draw goes down the tree of the exponent sum (docs/order.md).
    Filters keep a prefix of the tokens by descending logit, ties by lower id: top_k int64, 0 keeps all; top_p fp32 in (0, 1]; min_p fp32 in
    [0, 1]. `last` is the last token of the prefix, for `support_mask`: V without a filter. A logit of -inf is never drawn; a row with NaN or
    +inf, or without a finite logit, has the token NOTHING. Not differentiable.
    """
    check_float32("sample", logits=logits_TV)
    _check_rows(logits_TV, "seeds", seeds_T, torch.int64)
    _check_rows(logits_TV, "positions", positions_T, torch.int64)
    _check_filter(logits_TV, "top_k", top_k_T, torch.int64, "at least 0", lambda k: k >= 0)
    _check_filter(logits_TV, "top_p", top_p_T, torch.float32, "above 0 and at most 1", lambda p: (p > 0) & (p <= 1))
    _check_filter(logits_TV, "min_p", min_p_T, torch.float32, "0 to 1", lambda p: (p >= 0) & (p <= 1))
    values, segments = temperatures("sample", temperature), active_order().segments
    return kernels().sample(side_by_side(logits_TV), seeds_T, positions_T, values, top_k_T, top_p_T, min_p_T, segments)


def support_mask(logits_TV: torch.Tensor, last_T: torch.Tensor) -> torch.Tensor:
    """bool [T, V]: what `sample` could have drawn. last_T: as `sample` gives it."""
    check_float32("support_mask", logits=logits_TV)
    return kernels().support_mask(side_by_side(logits_TV), last_T)


def beam_step(scores_BW: torch.Tensor, logprobs_BWV: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 [B, W], fp32 [B, W, V] -> (scores fp32, parents int64, tokens int64), [B, k] each: the best continuations, the best one first.

    A score is score + logprob, rounded; ties go to the lower beam, then to the lower token. Where fewer than `kept` exist: -inf, NOTHING, NOTHING.
    """
    check_float32("beam_step", scores=scores_BW, logprobs=logprobs_BWV)
    check("beam_step", logprobs_BWV.dim() == 3 and scores_BW.shape == logprobs_BWV.shape[:2],
          f"scores must have shape [B, W] and logprobs [B, W, V], found {list(scores_BW.shape)} and {list(logprobs_BWV.shape)}")  # fmt: skip
    continuations = logprobs_BWV.shape[1] * logprobs_BWV.shape[2]
    check("beam_step", 0 < kept <= continuations, f"kept={kept} of {continuations} continuations")
    return kernels().beam_step(scores_BW, logprobs_BWV, kept)


def _check_rows(logits_TV: torch.Tensor, name: str, values_T: torch.Tensor, dtype: torch.dtype) -> None:
    check("sample", values_T.dtype == dtype and values_T.shape == logits_TV.shape[:1],
          f"{name} must be {dtype} [{len(logits_TV)}], one for each row of logits, found {values_T.dtype} {list(values_T.shape)}")  # fmt: skip


def _check_filter(logits_TV, name: str, values_T: torch.Tensor | None, dtype: torch.dtype, wanted: str, allowed: Callable) -> None:
    if values_T is not None:
        _check_rows(logits_TV, name, values_T, dtype)
        check("sample", bool(allowed(values_T).all()), f"{name} must be {wanted}, found {values_T.tolist()}")
