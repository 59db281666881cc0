"""The logdiff gate: every sampled token of every step is compared, bit for bit, before the next step begins."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.parity.logdiff import Verdict

POLICIES = ("stop", "warn")


class LogdiffError(RuntimeError):
    """Training and rollout disagree about a sampled token."""


def check(verdict: Verdict, policy: str, step: int, names: Sequence[str], source: str) -> str | None:
    """Nothing if every bit agrees; else raises LogdiffError ("stop") or returns the text ("warn").

    names: what to call each response. source: where the training logprobs come from.
    """
    if verdict.exact:
        return None
    first = verdict.first
    text = (
        f"step {step}: {verdict.mismatched_tokens} of {verdict.tokens} sampled tokens have another logprob in training ({source}) than in the "
        f"rollout: max |logdiff| {verdict.logdiff_max:.3g}, mean {verdict.logdiff_mean_abs:.3g}; the first: {names[first.prompt]}, "
        f"position {first.position}, token {first.token_id}: training {first.train!r}, rollout {first.rollout!r}"
    )
    if policy == "stop":
        raise LogdiffError(
            f"{text}. The weights are equal on both sides (their digests are checked at every sync), so the computation differs: "
            "run tools/check_parity.py on this model and layout. --logdiff-policy warn goes on regardless"
        )
    return text
