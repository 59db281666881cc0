"""From a command line to a running Megatron with the active patch rows bound. The one order of start-up steps."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import megatron_ext
from megatron_ext.contract import Contract
from megatron_ext.patches import Report
from megatron_ext.train.arguments import (
    UnsupportedOption,
    add_arguments,
    check_supported,
    contract_from_args,
    expert_tensor_parallel_size,
    set_padded_vocab,
)

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse_arguments(more_arguments: AddArguments) -> argparse.Namespace:
    """The command line by Megatron's parser with our flags and `more_arguments`. Ends the process for --help."""
    from megatron.training.arguments import parse_args

    return parse_args(lambda parser: add_arguments(more_arguments(parser)))


def start_megatron(more_arguments: AddArguments, device: str = "cpu") -> tuple[argparse.Namespace, Contract, Report]:
    """Parses and checks the command line, enables the patches, initialises Megatron. Returns (args, contract, report).

    The order matters: options are refused before anything starts; patches are bound before Megatron validates its
    arguments (it asks for the GPU) and long before a model is built.
    """
    from megatron.core.enums import ModelType  # noqa: F401  (imports Megatron before the patches look for who holds what)
    from megatron.training import arguments, global_vars, initialize, training  # noqa: F401

    args = parse_arguments(more_arguments)
    contract = contract_from_args(args)
    _check_start(args, contract)
    set_padded_vocab(args, contract)
    if device == "cpu":
        from megatron_ext.platform import cpu

        cpu.enter()
    import_model()
    report = megatron_ext.enable("train", contract, facts(args, device))
    arguments.validate_args(args)
    global_vars.set_global_variables(args, build_tokenizer=False)
    initialize.initialize_megatron(allow_no_cuda=device == "cpu")
    return args, contract, report


def import_model() -> None:
    """Loads our model modules, so that the patches see them too."""
    from megatron_ext.train import model  # noqa: F401


def _check_start(args: argparse.Namespace, contract: Contract) -> None:
    if contract.consistency:
        check_supported(args, contract.order)
    if args.yaml_cfg is not None or args.use_checkpoint_args:
        raise UnsupportedOption(["--yaml-cfg and --use-checkpoint-args change options after they were checked; write the flags out"])


def facts(args: argparse.Namespace, device: str) -> dict[str, object]:
    """What decides which patch rows are active in this process."""
    from megatron_ext.train.model import moe_layers

    stages = args.pipeline_model_parallel_size
    stage = args.rank // (args.world_size // stages)
    per_stage = args.num_layers // stages
    here = moe_layers(args)[stage * per_stage : (stage + 1) * per_stage]
    return {
        "device": device,
        "tp": args.tensor_model_parallel_size,
        "pp": stages,
        "ep": args.expert_model_parallel_size,
        "etp": expert_tensor_parallel_size(args),
        "sequence_parallel": args.sequence_parallel,
        "dispatcher": args.moe_token_dispatcher_type,
        "experts": sum(here),  # layers of this stage that have them
        "dense_layers": len(here) - sum(here),
        "first_stage": stage == 0,
        "last_stage": stage == stages - 1,
    }
