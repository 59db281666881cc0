"""Options of a run: our argparse group, and the frozen configuration that it makes. Megatron's own flags pass through."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.contract import KERNEL_BACKENDS, Contract
from megatron_ext.ops import PolicyObjective
from megatron_ext.ops.loss import AGGREGATIONS, IMPORTANCE_LEVELS
from megatron_ext.parity.layout import RolloutLayout, TrainLayout
from megatron_ext.probe.report import order_fields
from megatron_ext.reduction_order import MMAD_ORDERS, ReductionOrder
from megatron_ext.rl.gate import POLICIES
from megatron_ext.tokenizer import fingerprint

# Megatron flags that the run derives from its own options, and the option to use instead.
_DERIVED = {
    "--tensor-model-parallel-size": "--train-tp", "--pipeline-model-parallel-size": "--train-pp", "--expert-model-parallel-size": "--train-ep",
    "--expert-tensor-parallel-size": "--train-etp", "--moe-token-dispatcher-type": "--dispatcher", "--sequence-parallel": "--no-sequence-parallel",
    "--train-iters": "--steps", "--train-samples": "--steps", "--global-batch-size": "--prompts-per-step and --samples-per-prompt",
    "--save": "--out", "--load": "--resume", "--save-interval": "--checkpoint-interval",
}  # fmt: skip


class ConfigError(ValueError):
    """Options that do not go together. Says which, and what to do."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that the loop reads. Paths as given; see `add_arguments` for each option."""

    hf: str
    tokenizer: str | None
    out: Path
    prompts: str
    heldout: str | None
    rewards: tuple[str, ...]
    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    max_prompt_len: int
    max_response_len: int
    temperature: float
    seed: int
    objective: PolicyObjective
    aggregation: str
    advantage_by_std: bool
    updates_per_step: int
    train: TrainLayout
    rollout: RolloutLayout
    rollout_engines: int
    micro_batch_size: int
    pack: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    contract: Contract
    logdiff_policy: str
    verify_old_logprob: int
    eval_interval: int
    eval_temperature: float
    checkpoint_interval: int
    keep_checkpoints: int
    save_hf: bool
    resume: str | None
    overwrite: bool
    tensorboard: bool
    wandb_project: str | None
    sync_dir: str | None
    timeout_s: float
    megatron_flags: tuple[str, ...]

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    def identity(self) -> dict[str, Any]:
        """The options that decide what a step computes. Layout of the rollout, intervals and logging are free on resume."""
        names = (
            "prompts_per_step", "samples_per_prompt", "max_prompt_len", "max_response_len", "temperature", "seed", "aggregation",
            "advantage_by_std", "updates_per_step",
        )  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return {
            **found, "rewards": list(self.rewards), "prompts_sha256": _sha256(self.prompts), "objective": vars(self.objective),
            "contract_digest": self.contract.digest(), "megatron_flags": list(self.megatron_flags),
            "tokenizer_sha256": fingerprint(self.tokenizer) if self.tokenizer else None,
        }  # fmt: skip


def _sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options of a run. Everything else on the command line goes to Megatron's parser, which refuses what it does not know."""
    _add_data(parser.add_argument_group("data and rewards"))
    _add_algorithm(parser.add_argument_group("algorithm"))
    _add_engines(parser.add_argument_group("engines"))
    _add_run(parser.add_argument_group("run"))
    return parser


def _add_data(group) -> None:
    group.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder of the model to start from")
    group.add_argument("--tokenizer", metavar="PATH", help="Hugging Face folder or SentencePiece *.model (default: that of --hf)")
    group.add_argument("--prompts", required=True, metavar="FILE",
                       help='JSONL: {"prompt": text} or {"prompt_token_ids": [...]}, and whatever the rewards read ("answer", ...)')
    group.add_argument("--heldout", metavar="FILE", help="JSONL of prompts to evaluate on; never trained on")
    group.add_argument("--reward", action="append", required=True, metavar="MODULE:FUNCTION[=WEIGHT]", dest="rewards",
                       help="reward function by import path (or FILE.py:FUNCTION); may be given several times")
    group.add_argument("--max-prompt-len", type=int, default=1024, help="longer prompts are refused")
    group.add_argument("--max-response-len", type=int, default=1024, help="responses are cut at this many tokens")  # fmt: skip


def _add_algorithm(group) -> None:
    objective = PolicyObjective()
    group.add_argument("--steps", type=int, required=True, help="rollout-and-update steps of the whole run, resumed parts included")
    group.add_argument("--prompts-per-step", type=int, default=16)
    group.add_argument("--samples-per-prompt", type=int, default=8, help="size of a group")
    group.add_argument("--temperature", type=float, default=1.0, help="of the rollout; logprobs are those of the sampled distribution")
    group.add_argument("--updates-per-step", type=int, default=1,
                       help="optimizer steps per rollout; from 2 on, a forward pass for the old logprobs of all samples is made first")
    group.add_argument("--clip-ratio-low", type=float, default=objective.clip_low)
    group.add_argument("--clip-ratio-high", type=float, default=objective.clip_high, help="above --clip-ratio-low: clip-higher of DAPO")
    group.add_argument("--importance-level", choices=IMPORTANCE_LEVELS, default=objective.importance_level,
                       help="token: PPO, GRPO, DAPO; sequence: GSPO (with --loss-agg-mode seq-mean-token-mean)")
    group.add_argument("--loss-agg-mode", choices=AGGREGATIONS, default="token-mean", dest="aggregation",
                       help="seq-mean-token-mean: GRPO as published; token-mean: DAPO")
    group.add_argument("--no-norm-adv-by-std", action="store_false", dest="advantage_by_std", help="advantages as in Dr. GRPO")
    group.add_argument("--kl-loss-coef", type=float, default=0.0, help="above 0: KL to the starting policy, in the loss")  # fmt: skip


def _add_engines(group) -> None:
    group.add_argument("--train-tp", type=int, default=1)
    group.add_argument("--train-ep", type=int, default=1)
    group.add_argument("--train-pp", type=int, default=1)
    group.add_argument("--train-dp", type=int, help="default: the fewest that hold the experts")
    group.add_argument("--train-etp", type=int, help="expert tensor parallel size; default: 1 with EP, else TP")
    group.add_argument("--dispatcher", choices=("alltoall", "allgather"), default="alltoall")
    group.add_argument("--no-sequence-parallel", action="store_true", help="dense models only")
    group.add_argument("--micro-batch-size", type=int, default=8, help="sequences")
    group.add_argument("--no-pack", action="store_false", dest="pack", help="pad the sequences of a micro-batch instead of packing them")
    group.add_argument("--rollout-tp", type=int, default=1)
    group.add_argument("--rollout-ep", action=argparse.BooleanOptionalAction, default=False, help="spread the experts over the TP ranks")
    group.add_argument("--rollout-engines", type=int, default=1, help="equal engines; requests are spread over them")
    group.add_argument("--max-num-seqs", type=int, default=128, help="requests that an engine runs at once")
    group.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens of an engine step; longer prompts come in chunks")
    group.add_argument("--kv-cache-mib", type=int, default=256, help="per engine rank")
    group.add_argument("--kernel-backend", choices=KERNEL_BACKENDS, default="ascendc")
    group.add_argument("--mmad-order", choices=MMAD_ORDERS, help=f"default: {ReductionOrder().mmad_order}, or as --npu-probe found it")
    group.add_argument("--npu-probe", metavar="FILE", help="verdicts of tools/npu_probe.py: how this device adds and treats subnormals")
    group.add_argument("--no-consistency", action="store_true", help="the engines' stock numeric paths, for contrast: recomputes old logprobs")
    group.add_argument("--sync-dir", metavar="DIR", help="folder that both sides reach, for weights under way (default: shared memory)")
    group.add_argument("--timeout", type=float, default=1800.0, help="seconds of silence after which an engine is given up")  # fmt: skip


def _add_run(group) -> None:
    group.add_argument("--out", required=True, metavar="DIR", help="metrics, logs, checkpoints, summary.json, metrics.png")
    group.add_argument("--seed", type=int, default=0, help="of prompts and tokens")
    group.add_argument("--logdiff-policy", choices=POLICIES, help="when a sampled token's logprobs differ (default: stop; warn with --no-consistency)")
    group.add_argument("--verify-old-logprob", type=int, nargs="?", const=1, default=0, metavar="N",
                       help="every N steps (1 if N is left out), run the separate old-logprob pass all the same and require equality")
    group.add_argument("--eval-interval", type=int, default=0, metavar="N", help="held-out evaluation every N steps; always before and after")
    group.add_argument("--eval-temperature", type=float, default=0.0, help="0: greedy")
    group.add_argument("--checkpoint-interval", type=int, default=0, metavar="N", help="checkpoint every N steps; always after the last if N > 0")
    group.add_argument("--keep-checkpoints", type=int, default=0, metavar="K", help="keep the newest K; 0: all")
    group.add_argument("--save-hf", action="store_true", help="write the final weights to OUT/hf as a Hugging Face folder")
    group.add_argument("--resume", nargs="?", const="latest", metavar="DIR", help="go on from the latest checkpoint of --out, or from DIR")
    group.add_argument("--overwrite", action="store_true", help="start over in an --out that holds a run")
    group.add_argument("--no-tensorboard", action="store_false", dest="tensorboard")
    group.add_argument("--wandb-project", metavar="NAME", help="also log to Weights & Biases (package wandb)")  # fmt: skip


def from_args(args: argparse.Namespace, megatron_flags: list[str]) -> RunConfig:
    """Raises ConfigError, or the error of the part that refuses, before anything starts."""
    _check_megatron_flags(megatron_flags)
    sequence_parallel = False if args.no_sequence_parallel else None
    order = ReductionOrder(**order_fields(args.npu_probe, args.mmad_order))
    contract = Contract(order, args.kernel_backend, consistency=not args.no_consistency)
    config = RunConfig(
        **{name: getattr(args, name) for name in (
            "hf", "prompts", "heldout", "steps", "prompts_per_step", "samples_per_prompt", "max_prompt_len", "max_response_len", "temperature",
            "seed", "aggregation", "advantage_by_std", "updates_per_step", "rollout_engines", "micro_batch_size", "max_num_seqs",
            "max_num_batched_tokens", "verify_old_logprob", "eval_interval", "eval_temperature", "checkpoint_interval", "keep_checkpoints",
            "save_hf", "resume", "tokenizer", "overwrite", "tensorboard", "wandb_project", "sync_dir",
        )},
        out=Path(args.out).resolve(), rewards=tuple(args.rewards),
        objective=PolicyObjective(args.clip_ratio_low, args.clip_ratio_high, args.kl_loss_coef, args.importance_level),
        train=TrainLayout(args.train_tp, args.train_ep, args.train_pp, args.train_dp, args.train_etp, sequence_parallel, args.dispatcher),
        rollout=RolloutLayout(args.rollout_tp, args.rollout_ep),
        pack=args.pack and contract.consistency,  # Megatron's stock local attention takes no packed sequences
        kv_cache_bytes=args.kv_cache_mib << 20, contract=contract,
        logdiff_policy=args.logdiff_policy or ("stop" if contract.consistency else "warn"),
        timeout_s=args.timeout, megatron_flags=tuple(megatron_flags),
    )  # fmt: skip
    check(config)
    return config


def _check_megatron_flags(flags: list[str]) -> None:
    for flag in flags:
        name = flag.partition("=")[0]
        if name in _DERIVED:
            raise ConfigError(f"{name}: the run sets it itself; use {_DERIVED[name]}")


def check(config: RunConfig) -> None:
    """Raises ConfigError naming every option out of its range or against another."""
    positive = ("steps", "prompts_per_step", "max_prompt_len", "max_response_len", "updates_per_step", "rollout_engines", "micro_batch_size",
                "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes", "timeout_s")  # fmt: skip
    not_negative = ("verify_old_logprob", "eval_interval", "eval_temperature", "checkpoint_interval", "keep_checkpoints")
    problems = [f"{name}: expected > 0, found {getattr(config, name)}" for name in positive if not getattr(config, name) > 0]
    problems += [f"{name}: expected >= 0, found {getattr(config, name)}" for name in not_negative if not getattr(config, name) >= 0]
    if config.samples_per_prompt < 2:
        problems.append(f"--samples-per-prompt {config.samples_per_prompt}: an advantage is relative to its group; expected at least 2")
    if not config.temperature > 1e-5:
        problems.append(f"--temperature {config.temperature}: greedy samples of one prompt are all equal; expected > 0")
    if config.updates_per_step > 0 and config.prompts_per_step % config.updates_per_step:
        problems.append(f"--updates-per-step {config.updates_per_step} does not divide --prompts-per-step {config.prompts_per_step}")
    if config.resume and config.overwrite:
        problems.append("--resume goes on with a run, --overwrite removes it; leave one of them out")
    if config.max_num_batched_tokens < config.max_num_seqs:
        problems.append(f"--max-num-batched-tokens {config.max_num_batched_tokens}: expected at least --max-num-seqs {config.max_num_seqs}")
    if config.eval_interval and not config.heldout:
        problems.append("--eval-interval needs --heldout")
    if config.objective.importance_level == "sequence" and config.aggregation != "seq-mean-token-mean":
        problems.append("--importance-level sequence needs --loss-agg-mode seq-mean-token-mean (GSPO)")
    if config.verify_old_logprob and not config.contract.consistency:
        problems.append("--verify-old-logprob requires equality, which --no-consistency gives up; leave one of them out")
    if config.logdiff_policy == "stop" and not config.contract.consistency:
        problems.append("--logdiff-policy stop would end a --no-consistency run at its first step; use warn")
    config.train.world_size  # raises LayoutError
    if problems:
        raise ConfigError("\n".join(["these options cannot be run:", *(f"  - {problem}" for problem in problems)]))
