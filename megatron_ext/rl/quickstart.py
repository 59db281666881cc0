"""`launch/quickstart.sh`: the whole claim on one machine, as a reinforcement-learning run that learns.

A tiny Qwen3-MoE with a short supervised start learns a fixed mapping over a small vocabulary by GRPO: vLLM samples (TP2 with EP), Megatron
trains (TP2 x EP2, sequence parallel), weights go over at every step, and at every sampled token logdiff must be exactly 0.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

from megatron_ext.rl import main as command_line

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS_FILE = ROOT / "configs" / "grpo_quickstart.args"


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--steps", type=int, metavar="N", help=f"default: as in configs/{OPTIONS_FILE.name}")
    parser.add_argument("--no-consistency", action="store_true", help="the engines' stock numeric paths, for contrast")
    parser.add_argument("--out", default="runs/quickstart", metavar="DIR", help="task, model, metrics, logs and summary.json go here")
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    args, more = parse_arguments(argv)
    out = pathlib.Path(args.out).resolve()
    task = out / "task"
    print("making a small task, and a tiny Qwen3-MoE with a short supervised start ...", flush=True)
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_rl_task.py"), str(task)], check=True)
    options = [f"@{OPTIONS_FILE}", "--hf", str(task / "model"), "--prompts", str(task / "train.jsonl"), "--heldout", str(task / "heldout.jsonl"),
               "--out", str(out), *more]  # fmt: skip
    options += [] if "--resume" in more else ["--overwrite"]
    options += ["--steps", str(args.steps)] if args.steps is not None else []
    if args.no_consistency:
        options += ["--no-consistency", "--verify-old-logprob", "0"]
    return command_line.main(options)


if __name__ == "__main__":
    sys.exit(main())
