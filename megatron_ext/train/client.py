"""Starts a Megatron worker world. Imports no engine."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from megatron_ext.checkpoint.hf_config import flags_from_hf, read_hf_config
from megatron_ext.platform.cpu import ENVIRONMENT, MEGATRON_FLAGS
from megatron_ext.world import World


def layout_flags(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    sequence_parallel: bool | None = None,
    dispatcher: str = "alltoall",
    micro_batch_size: int = 1,
) -> list[str]:
    """Megatron's parallelism flags. Sequence parallelism follows TP > 1 unless said otherwise."""
    flags = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp, "--expert-model-parallel-size", ep]
    flags += ["--moe-token-dispatcher-type", dispatcher, "--micro-batch-size", micro_batch_size]
    flags += ["--expert-tensor-parallel-size", etp] if etp is not None else []
    flags += ["--sequence-parallel"] if (tp > 1 if sequence_parallel is None else sequence_parallel) else []
    return [str(flag) for flag in flags]


def optimizer_flags(lr: float = 1e-4, train_iters: int = 1000) -> list[str]:
    """Adam with a constant learning rate."""
    flags = ["--lr", lr, "--train-iters", train_iters, "--lr-decay-style", "constant", "--weight-decay", 0.0, "--clip-grad", 1.0]
    return [str(flag) for flag in flags]


def cpu_flags(hf_dir: str | Path, *more: str, **layout) -> list[str]:
    """All flags of a CPU world for a Hugging Face model: model, layout (see layout_flags), optimizer, device; then `more`."""
    return [*flags_from_hf(read_hf_config(hf_dir)), *layout_flags(**layout), *optimizer_flags(), *MEGATRON_FLAGS, *more]


class TrainWorld(World):
    """`nproc` worker processes under torchrun. args: flags of the worker (`cpu_flags` makes them). Else as World."""

    def __init__(self, nproc: int, args: list[str], log_path: str | Path, timeout_s: float = 600.0, env: dict[str, str] | None = None):
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        super().__init__("the training world", log_path, timeout_s, {**ENVIRONMENT, "OMP_NUM_THREADS": threads, **(env or {})})
        self.nproc, self.args = nproc, list(args)

    def command_line(self, socket_path: Path) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.nproc), "--nnodes", "1",
            "--master-addr", "127.0.0.1", "--master-port", str(_free_port()),
            "-m", "megatron_ext.train.worker", "--worker-socket", str(socket_path), *self.args,
        ]  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
