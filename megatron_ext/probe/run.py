"""`tools/npu_probe.py`: asks a device every question, prints the verdicts, writes them as JSON."""

from __future__ import annotations

import argparse
import pathlib
import sys

from ascendc_kernels.build import BuildError
from megatron_ext.probe import cube, flags, vector
from megatron_ext.probe.device import DEVICES, Device, use_model
from megatron_ext.probe.question import CONSEQUENCES, Question
from megatron_ext.probe.report import FAILED, HOLDS, VIOLATED, ProbeError, Report, Verdict
from megatron_ext.reduction_order import MMAD_ORDERS, ReductionOrder

QUESTIONS = (*cube.QUESTIONS, *vector.QUESTIONS, *flags.QUESTIONS)


def verdict_of(question: Question, device: Device) -> Verdict:
    """An experiment that raises has failed: nothing is known then."""
    try:
        answer = question.ask(device)
    except RuntimeError as error:
        return Verdict(question.name, question.assumption, question.matters, FAILED, str(error).splitlines()[0])
    return Verdict(question.name, question.assumption, question.matters, HOLDS if answer.holds else VIOLATED, answer.detail, answer.value)


def probe(device: Device, questions: tuple[Question, ...] = QUESTIONS) -> Report:
    return Report(device.description, device.software(), tuple(verdict_of(question, device) for question in questions))


def table(report: Report) -> str:
    """One line per assumption; what was seen, and what follows, below those that do not hold."""
    lines = [f"device: {report.device}", ""]
    for verdict in report.verdicts:
        lines.append(f"{verdict.verdict:9} {verdict.matters:10} {verdict.name:18} {verdict.assumption}")
        if verdict.detail:
            lines.append(f"{'':20} {verdict.detail}")
        if verdict.verdict != HOLDS:
            lines.append(f"{'':20} {CONSEQUENCES[verdict.matters]}")
    fields = ", ".join(f"{name}={value!r}" for name, value in report.contract().items())
    held = sum(verdict.verdict == HOLDS for verdict in report.verdicts)
    lines += ["", f"{held} of {len(report.verdicts)} assumptions hold. Contract: {fields}"]
    lines.append("This device cannot keep the contract." if report.obstacles() else "This device can keep the contract.")
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="npu_probe", description="Asks a device what its documentation leaves open. Exit status 1 if it cannot keep the contract."
    )
    parser.add_argument("--device", choices=DEVICES, default="npu", help="model: the host model, on any machine (default: npu)")
    parser.add_argument("--model-mmad-order", choices=MMAD_ORDERS, default=ReductionOrder().mmad_order,
                        help="order in which the host model adds, which the probe has to find")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="where to write the verdicts, for --npu-probe of a run")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        if args.device == "model":
            use_model()
        report = probe(Device(args.device, args.model_mmad_order))
    except (ProbeError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(report))
    if args.json:
        pathlib.Path(args.json).write_text(report.to_json())
    return 1 if report.obstacles() else 0
