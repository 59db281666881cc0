"""Whether subnormals are kept, from results that show it."""

from __future__ import annotations

from megatron_ext.probe.question import Answer


def combined(results: dict[str, tuple[float, float]]) -> Answer:
    """results: {what: (found, expected)}. The value is "keep", "flush" (all give zero) or "mixed"."""
    kinds = {what: "keep" if found == expected else "flush" if found == 0.0 else "mixed" for what, (found, expected) in results.items()}
    values = set(kinds.values())
    value = values.pop() if len(values) == 1 else "mixed"
    lost = [f"{what} gives {found!r} for {expected!r}" for what, (found, expected) in results.items() if kinds[what] != "keep"]
    return Answer(value == "keep", "; ".join(lost), value)
