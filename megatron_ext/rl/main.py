"""Command line of the RL loop.

    python -m megatron_ext.rl [@FILE] OPTIONS [Megatron's flags: --lr, --clip-grad, --lr-decay-style, ...]

@FILE reads options from a file, as a shell would: any number per line, # starts a comment. Ends with 0 after the last step, with
128 + the signal's number after SIGTERM or SIGINT (a checkpoint was written; --resume goes on), with 1 after an error.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys

from megatron_ext.checkpoint.hf_config import UnsupportedModel
from megatron_ext.contract import ContractError
from megatron_ext.parity.layout import LayoutError
from megatron_ext.parity.prompts import PromptError
from megatron_ext.probe.report import ProbeError
from megatron_ext.rl import config as configuration
from megatron_ext.rl import trainer
from megatron_ext.rl.checkpoint import CheckpointError
from megatron_ext.rl.gate import LogdiffError
from megatron_ext.rl.rewards import RewardError
from megatron_ext.tokenizer import TokenizerError
from megatron_ext.weight_digest import DigestMismatch
from megatron_ext.world import WorkerError

# Errors whose text says what to do: a traceback through the loop would only bury it.
EXPLAINED = (
    CheckpointError, configuration.ConfigError, ContractError, DigestMismatch, LayoutError, LogdiffError, ProbeError, PromptError, RewardError,
    TokenizerError, UnsupportedModel, WorkerError, FileNotFoundError, ModuleNotFoundError,
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)


def parse(argv: list[str]) -> configuration.RunConfig:
    """The configuration of a command line. Raises ConfigError and the like; ends the process for --help."""
    parser = _Parser(
        prog="python -m megatron_ext.rl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@", allow_abbrev=False,
    )  # fmt: skip
    args, megatron_flags = configuration.add_arguments(parser).parse_known_args(argv)
    return configuration.from_args(args, megatron_flags)


def main(argv: list[str] | None = None) -> int:
    try:
        summary = trainer.run(parse(sys.argv[1:] if argv is None else argv))
    except EXPLAINED as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"{type(error).__name__}{notes}: {error}", file=sys.stderr)
        return 1
    print(closing_line(summary))
    return 0 if summary["finished"] else 128 + signal.Signals[summary["stopped_by"]]


def closing_line(summary: dict) -> str:
    """What a run came to, in one line."""
    if not summary["steps"]:
        return "no step was finished"
    saved = summary["old_logprob_pass"]
    parts = [
        f"{summary['steps']} steps, {summary['tokens']} sampled tokens: logdiff_max {summary['logdiff_max']:.6g}",
        f"mismatched_tokens {summary['mismatched_tokens']}", f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}",
    ]  # fmt: skip
    if summary["heldout_after"] is not None:
        parts.append(f"held-out {summary['heldout_before']:.3f} -> {summary['heldout_after']:.3f}")
    if saved["passes"] and summary["consistency"]:
        parts.append(
            f"old-logprob pass left out in {saved['skipped']} steps, saving {saved['seconds_per_pass']:.2f} s or "
            f"{100 * saved['share_of_a_step_with_it']:.0f} % of a step each (measured in {saved['passes']})"
        )
    return "; ".join(parts)
