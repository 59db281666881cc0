"""`tools/check_parity.py`: one checkpoint, both real engines, every sampled token compared bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import tempfile

from megatron_ext.checkpoint.folder import open_hf, open_megatron
from megatron_ext.checkpoint.hf_config import read_hf_config
from megatron_ext.checkpoint.meter import progress
from megatron_ext.checkpoint.slice import first_layers, write_first_layers
from megatron_ext.contract import KERNEL_BACKENDS, Contract
from megatron_ext.parity import prompts as prompt_source
from megatron_ext.parity import session, show
from megatron_ext.parity.layout import RolloutLayout, TrainLayout
from megatron_ext.probe.report import order_fields
from megatron_ext.reduction_order import MMAD_ORDERS, ReductionOrder
from megatron_ext.rollout.engine import SamplingSpec

DEFAULT_LENGTHS = (1, 7, 128, 129, 300, 45, 64, 200)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="check_parity", description="Samples with vLLM, recomputes with Megatron, compares logprob bits. Exit status 1 on any difference."
    )
    model = parser.add_argument_group("model")
    kind = model.add_mutually_exclusive_group(required=True)
    kind.add_argument("--hf", metavar="DIR", help="Hugging Face folder: config.json, safetensors, tokenizer")
    kind.add_argument("--megatron", metavar="DIR", help="Megatron checkpoint: training loads it as it is, the rollout what convert_checkpoint makes of it")
    model.add_argument("--like", metavar="DIR", help="Hugging Face folder with config.json and tokenizer, for a Megatron checkpoint that carries none")
    model.add_argument("--layers", type=int, metavar="N", help="only the first N layers, at their true widths: a slice of a large checkpoint")
    layout = parser.add_argument_group("layouts (independent of each other)")
    layout.add_argument("--train-tp", type=int, default=1)
    layout.add_argument("--train-ep", type=int, default=1)
    layout.add_argument("--train-pp", type=int, default=1)
    layout.add_argument("--train-dp", type=int, help="replicas; default: the fewest that hold the experts")
    layout.add_argument("--train-etp", type=int, help="expert tensor parallel; default: 1 with --train-ep > 1, else TP")
    layout.add_argument("--no-sequence-parallel", action="store_true", help="train TP > 1 without sequence parallelism (dense models)")
    layout.add_argument("--dispatcher", choices=("alltoall", "allgather"), default="alltoall")
    layout.add_argument("--rollout-tp", type=int, default=1)
    layout.add_argument("--rollout-ep", action="store_true", help="spread the rollout's experts over its TP ranks")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--prompts", metavar="FILE", help='.jsonl of {"prompt": ...} or {"prompt_token_ids": [...]}, or .txt, one a line')
    sampling.add_argument("--tokenizer", metavar="PATH", help="Hugging Face folder or SentencePiece *.model (default: that of the model)")
    sampling.add_argument("--random-prompts", type=int, nargs="+", metavar="LENGTH", help="prompts of random tokens of these lengths; needs no tokenizer")
    sampling.add_argument("--max-tokens", type=int, default=32)
    sampling.add_argument("--temperature", type=float, default=1.0)
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--samples", type=int, default=1, help="responses per prompt")
    engines = parser.add_argument_group("engines")
    engines.add_argument("--micro-batch-size", type=int, default=4)
    engines.add_argument("--no-pack", action="store_true", help="recompute padded sequences side by side instead of packed ones")
    engines.add_argument("--max-num-seqs", type=int, default=64)
    engines.add_argument("--max-num-batched-tokens", type=int, default=512, help="prefill chunk size of the rollout")
    engines.add_argument("--kernel-backend", choices=KERNEL_BACKENDS, default="ascendc")
    engines.add_argument("--mmad-order", choices=MMAD_ORDERS, help=f"default: {ReductionOrder().mmad_order}, or as --npu-probe found it")
    engines.add_argument("--npu-probe", metavar="FILE", help="verdicts of tools/npu_probe.py: how this device adds and treats subnormals")
    engines.add_argument("--no-consistency", action="store_true", help="the stock numeric paths, for contrast")
    engines.add_argument("--timeout", type=float, default=900.0, help="seconds after which a silent training world is given up")
    parser.add_argument("--json", metavar="FILE", help="where to write the result (default: none)")
    parser.add_argument("--log-dir", metavar="DIR", help="where to keep the training world's log (default: a temporary folder)")
    parser.add_argument("--work-dir", metavar="DIR", help="where slices and converted weights lie while they are needed (default: a temporary folder)")
    return parser.parse_args(argv)


def make_model(args: argparse.Namespace, work: pathlib.Path) -> session.Model:
    """What both engines load: the folders given, or a slice, or a conversion, made in `work`."""
    if args.hf and args.layers is None:
        return session.Model(args.hf)
    checkpoint = open_hf(args.hf) if args.hf else open_megatron(args.megatron, args.like)
    made = pathlib.Path(tempfile.mkdtemp(prefix="model_", dir=work))
    layers = checkpoint.shape.layers if args.layers is None else args.layers
    with progress(show.console, f"writing {layers} layers", sum(spec.nbytes for spec in first_layers(checkpoint, layers)[1].specs.values())) as on_bytes:
        write_first_layers(checkpoint, layers, made, on_bytes)
    return session.Model(str(made), args.megatron if args.layers is None else None)


def train_layout(args: argparse.Namespace) -> TrainLayout:
    sequence_parallel = False if args.no_sequence_parallel else None
    return TrainLayout(args.train_tp, args.train_ep, args.train_pp, args.train_dp, args.train_etp, sequence_parallel, args.dispatcher)


def make_contract(args: argparse.Namespace) -> Contract:
    return Contract(ReductionOrder(**order_fields(args.npu_probe, args.mmad_order)), args.kernel_backend, consistency=not args.no_consistency)


def make_prompts(args: argparse.Namespace, hf_dir: str) -> list[list[int]]:
    vocab_size = read_hf_config(hf_dir)["vocab_size"]
    if args.prompts:
        found = prompt_source.read_prompts(args.prompts, args.tokenizer or hf_dir, vocab_size)
    elif args.random_prompts:
        found = prompt_source.random_prompts(vocab_size, args.random_prompts, args.seed)
    else:
        found = prompt_source.made_prompts(args.tokenizer or hf_dir, list(DEFAULT_LENGTHS))
    return [prompt for prompt in found for _ in range(args.samples)]


def run(args: argparse.Namespace, log_dir: pathlib.Path, work: pathlib.Path) -> dict:
    """Samples, recomputes, compares. Raises before the first token if the two sides do not fit each other."""
    contract, phases = make_contract(args), session.Phases()
    layouts = (train_layout(args), RolloutLayout(args.rollout_tp, args.rollout_ep))
    settings = session.TrainSettings(args.micro_batch_size, not args.no_pack and contract.consistency, timeout_s=args.timeout, weights_only=True)
    layouts[0].world_size  # an impossible layout is refused before anything starts
    model = make_model(args, work)
    prompts = make_prompts(args, model.hf)
    spec = SamplingSpec(args.temperature, args.max_tokens, [args.seed * 1_000_003 + i for i in range(len(prompts))])
    with show.phase(phases, "start_rollout", f"starting vLLM {layouts[1]}"):
        engine = session.start_rollout(model.hf, layouts[1], contract, max_num_seqs=args.max_num_seqs,
                                       max_num_batched_tokens=args.max_num_batched_tokens)  # fmt: skip
    with engine:
        with contextlib.ExitStack() as stack:
            with show.phase(phases, "start_train", f"starting Megatron {layouts[0]}, {layouts[0].world_size} ranks"):
                world = stack.enter_context(session.training(model, layouts[0], contract, settings, str(log_dir / "train.log")))
            digest = session.check_contracts(contract, world, engine.report())
            tensors = session.check_weights(world, engine) if contract.consistency else None
            with show.phase(phases, "rollout", f"sampling {len(prompts)} x {args.max_tokens} tokens"):
                rollouts = engine.generate(prompts, spec)
            with show.phase(phases, "recompute", "recomputing in training form"):
                train = session.recompute(world, rollouts, args.temperature, settings)
            verdict = session.judge(rollouts, train)
            check_rows_hit(world, engine)
    show.console.print(show.verdict_table([(f"{layouts[0]} / {layouts[1]}", verdict)]))
    return {
        "hf": args.hf, "megatron": args.megatron, "layers": args.layers, "train_layout": str(layouts[0]), "rollout_layout": str(layouts[1]), **verdict.to_dict(), "exact": verdict.exact,
        "contract_digest": digest, "consistency": contract.consistency, "logical_tensors_equal": tensors, "temperature": args.temperature,
        "seconds": phases.seconds, "versions": session.versions(),
    }  # fmt: skip


def check_rows_hit(world, engine) -> None:
    """Raises PatchError if an active adapter was never used in some process of either side."""
    engine.assert_hit()
    world.call("assert_hit")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="check_parity_") as temporary:
        log_dir = pathlib.Path(args.log_dir or temporary)
        log_dir.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(args.work_dir or temporary)
        work.mkdir(parents=True, exist_ok=True)
        result = run(args, log_dir, work)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["exact"] else 1
