"""One frozen run contract, from which both engines take their settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os

from megatron_ext.reduction_order import ReductionOrder

ENVIRONMENT_VARIABLE = "MEGATRON_EXT_CONTRACT"
KERNEL_BACKENDS = ("ascendc", "reference")


class ContractError(ValueError):
    """The contract is malformed, or the two sides of a run hold different ones."""


@dataclasses.dataclass(frozen=True)
class Contract:
    """What training and rollout must agree on before the first token.

    order: the reduction order. kernel_backend: "ascendc" (`ascendc_kernels`) or "reference" (executable specification); same bits.
    consistency: False runs the stock numeric paths of both engines and adapts only what CPU needs.
    """

    order: ReductionOrder = dataclasses.field(default_factory=ReductionOrder)
    kernel_backend: str = "ascendc"
    consistency: bool = True

    def __post_init__(self) -> None:
        if self.kernel_backend not in KERNEL_BACKENDS:
            raise ContractError(f"kernel_backend must be one of {KERNEL_BACKENDS}, found {self.kernel_backend!r}")

    def digest(self) -> str:
        """sha256 of what decides bits. The backend is left out on purpose: both give the same bits."""
        text = json.dumps({"order": self.order.digest(), "consistency": self.consistency}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """Raises ContractError on unknown or missing fields."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "order": ReductionOrder(**fields["order"])})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ContractError(f"not a contract: {error}; expected the output of Contract.to_json()") from error

    @classmethod
    def from_environment(cls) -> Contract | None:
        """The contract that the launching process exported, or None."""
        text = os.environ.get(ENVIRONMENT_VARIABLE)
        return cls.from_json(text) if text else None


def check_same_digest(digests: dict[str, str]) -> str:
    """Takes {process name: contract digest}; returns the one digest or raises ContractError naming who differs."""
    if len(set(digests.values())) == 1:
        return next(iter(digests.values()))
    listing = ", ".join(f"{name}: {digest[:16]}" for name, digest in sorted(digests.items()))
    raise ContractError(f"processes hold different contracts ({listing}); start all of them from one Contract")
