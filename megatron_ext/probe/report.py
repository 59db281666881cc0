"""The probe's verdicts as a JSON file, and the fields of the reduction order that the hardware decides."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from megatron_ext.reduction_order import MMAD_ORDERS, ReductionOrder

FORMAT = 1
HOLDS, VIOLATED, FAILED = "holds", "violated", "failed"


class ProbeError(ValueError):
    """The file is no probe's report, or the device cannot keep the contract."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one assumption. matters: "promise", "reference" or "note" (see question.py). value: what was found, where there is a choice."""

    name: str
    assumption: str
    matters: str
    verdict: str
    detail: str = ""
    value: str | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """device: what was asked, in words. software: versions, by name."""

    device: str
    software: dict[str, str]
    verdicts: tuple[Verdict, ...]

    def value(self, name: str) -> str | None:
        """What was found for an assumption, None if it was not asked or gave nothing."""
        return next((verdict.value for verdict in self.verdicts if verdict.name == name), None)

    def contract(self) -> dict[str, str | None]:
        """mmad_order and subnormals as found: values that ReductionOrder may refuse, None for unknown."""
        kept = {self.value("mmad_subnormals"), self.value("vector_subnormals")}
        return {"mmad_order": self.value("mmad_order"), "subnormals": kept.pop() if len(kept) == 1 else "mixed"}

    def obstacles(self) -> list[str]:
        """Why the promise does not hold on this device, one reason each; empty if it does."""
        return [f"{v.name}: {v.verdict} ({v.assumption}): {v.detail}" for v in self.verdicts if v.matters == "promise" and v.verdict != HOLDS]

    def to_json(self) -> str:
        content = {"format": FORMAT, **dataclasses.asdict(self), "contract": self.contract(), "usable": not self.obstacles()}
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Raises ProbeError for anything but the output of to_json of this format."""
        try:
            content: dict[str, Any] = json.loads(text)
            if content["format"] != FORMAT:
                raise ProbeError(f"a probe's report of format {content['format']}, expected {FORMAT}: run tools/npu_probe.py again")
            return cls(content["device"], content["software"], tuple(Verdict(**verdict) for verdict in content["verdicts"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ProbeError(f"not a report of tools/npu_probe.py: {error!r}") from error


def contract_fields(report: Report) -> dict[str, str]:
    """Keyword arguments of ReductionOrder. Raises ProbeError with every obstacle if the device cannot keep the contract."""
    fields, obstacles = report.contract(), report.obstacles()
    if fields["mmad_order"] not in MMAD_ORDERS:
        obstacles.append(f"mmad_order: expected one of {MMAD_ORDERS}, found {fields['mmad_order']!r}")
    if fields["subnormals"] != ReductionOrder().subnormals:
        obstacles.append(f"subnormals: expected {ReductionOrder().subnormals!r}, found {fields['subnormals']!r}")
    if obstacles:
        raise ProbeError("\n".join([f"{report.device} cannot keep the contract:", *(f"  - {obstacle}" for obstacle in obstacles)]))
    return fields


def order_fields(file: str | None, mmad_order: str | None) -> dict[str, str]:
    """Keyword arguments of ReductionOrder from `--npu-probe FILE` and `--mmad-order`; those that neither gives keep their defaults.

    Raises ProbeError if the file is unusable, or if the device was found to add in another order than the one asked for.
    """
    if file is None:
        return {} if mmad_order is None else {"mmad_order": mmad_order}
    try:
        fields = contract_fields(Report.from_json(pathlib.Path(file).read_text()))
    except (OSError, ProbeError) as error:
        raise ProbeError(f"--npu-probe {file}: {error}") from error
    if mmad_order not in (None, fields["mmad_order"]):
        found = f"the device of --npu-probe {file} adds in the order {fields['mmad_order']!r}"
        raise ProbeError(f"--mmad-order {mmad_order}: {found}; leave --mmad-order out")
    return fields
