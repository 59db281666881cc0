"""`launch/quickstart.sh`: the whole claim on one machine.

A small random Qwen3-MoE; Megatron TP2 x EP2 with sequence parallelism recomputes what vLLM TP2 with EP samples; one optimizer
step; the weights go to the rollout; and again. Writes summary.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys

from megatron_ext.contract import Contract
from megatron_ext.parity import logdiff, prompts, session, show
from megatron_ext.parity.check import check_rows_hit
from megatron_ext.parity.layout import RolloutLayout, TrainLayout
from megatron_ext.rollout.engine import Rollout, SamplingSpec

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN, ROLLOUT = TrainLayout(tp=2, ep=2), RolloutLayout(tp=2, expert_parallel=True)
# Lengths around the key tile (128) and the prefill chunk (256), and a few that need several of each.
PROMPT_LENGTHS = (1, 5, 17, 64, 127, 128, 129, 255, 256, 257, 300, 400) * 4
MAX_TOKENS = 48
CHUNK = 256


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-consistency", action="store_true", help="the engines' stock numeric paths, for contrast")
    parser.add_argument("--out", default="runs/quickstart", metavar="DIR", help="model, logs and summary.json go here")
    return parser.parse_args(argv)


def make_model(folder: pathlib.Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "make_tiny_model.py"), str(folder)], check=True)


def advantages(rollouts: list[Rollout]) -> list[float]:
    """A reward with some spread (share of distinct tokens), standardised: enough for one real policy-gradient step."""
    rewards = [len(set(r.token_ids)) / len(r.token_ids) for r in rollouts]
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def sample_and_compare(world, engine, prompt_ids, step: int, phases: session.Phases, settings) -> tuple[list[Rollout], logdiff.Verdict]:
    spec = SamplingSpec(1.0, MAX_TOKENS, [step * len(prompt_ids) + i for i in range(len(prompt_ids))], ignore_eos=True)
    with show.phase(phases, "rollout", f"step {step}: vLLM samples {len(prompt_ids)} x {MAX_TOKENS} tokens"):
        rollouts = engine.generate(prompt_ids, spec)
    with show.phase(phases, "recompute", f"step {step}: Megatron recomputes their logprobs"):
        train = session.recompute(world, rollouts, spec.temperature, settings)
    verdict = session.judge(rollouts, train)
    show.console.print(f"step {step}: {verdict.mismatched_tokens} of {verdict.tokens} tokens differ, max |logdiff| {verdict.logdiff_max:.3g}")
    return rollouts, verdict


def run(args: argparse.Namespace) -> dict:
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    contract, phases = Contract(consistency=not args.no_consistency), session.Phases()
    settings = session.TrainSettings(pack=contract.consistency)  # Megatron's stock local attention takes no packed sequences
    hf_dir = out / "model"
    with show.phase(phases, "make_model", "making a small random Qwen3-MoE and training its tokenizer"):
        make_model(hf_dir)
    prompt_ids = prompts.made_prompts(str(hf_dir), list(PROMPT_LENGTHS))
    with show.phase(phases, "start_rollout", f"starting vLLM {ROLLOUT}"):
        engine = session.start_rollout(str(hf_dir), ROLLOUT, contract, max_num_batched_tokens=CHUNK, max_num_seqs=len(prompt_ids))
    with engine:
        with contextlib.ExitStack() as stack:
            with show.phase(phases, "start_train", f"starting Megatron {TRAIN}, {TRAIN.world_size} ranks"):
                world = stack.enter_context(session.training(str(hf_dir), TRAIN, contract, settings, str(out / "train.log")))
            digest = session.check_contracts(contract, world, engine.report())
            rollouts, before = sample_and_compare(world, engine, prompt_ids, 0, phases, settings)
            with show.phase(phases, "train_step", "one optimizer step"):
                step = session.train_step(world, rollouts, advantages(rollouts), 1.0, settings)
            with show.phase(phases, "weight_sync", "weights to the rollout"):
                session.sync_weights(world, engine, out / "step1")
                if contract.consistency:
                    session.check_weights(world, engine)
            _, after = sample_and_compare(world, engine, prompt_ids, 1, phases, settings)
            check_rows_hit(world, engine)
            stats = engine.stats()
    return summarise(contract, digest, before, after, step, stats, phases)


def summarise(contract, digest, before, after, step, stats, phases) -> dict:
    show.console.print(show.verdict_table([("before the step", before), ("after the step", after)]))
    total = logdiff.merge([before, after])
    return {
        "steps": 1, "tokens": total.tokens, "logdiff_max": total.logdiff_max, "logdiff_mean_abs": total.logdiff_mean_abs,
        "mismatched_tokens": total.mismatched_tokens, "before_step": before.to_dict(), "after_step": after.to_dict(),
        "consistency": contract.consistency, "contract_digest": digest, "train_layout": str(TRAIN), "rollout_layout": str(ROLLOUT),
        "train_step": step, "rollout_stats": stats, "seconds": phases.seconds, "versions": session.versions(),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    summary = run(args)
    path = pathlib.Path(args.out) / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    show.console.print(f"logdiff_max {summary['logdiff_max']:.6g}, mismatched_tokens {summary['mismatched_tokens']} of {summary['tokens']}; {path}")
    return 0 if summary["mismatched_tokens"] == 0 or args.no_consistency else 1


if __name__ == "__main__":
    sys.exit(main())
