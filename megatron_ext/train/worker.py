"""A Megatron process world that serves requests.

    torchrun --nproc-per-node N -m megatron_ext.train.worker --worker-socket PATH <Megatron's flags> <our flags>

Rank 0 listens on a Unix socket, as `megatron_ext.service` says. Every command runs on all ranks. An exception on any rank ends
the world: after one the ranks are no longer in step. `client.TrainWorld` starts such a world and talks to it.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext import patches
from megatron_ext.contract import check_same_digest
from megatron_ext.ops import PolicyObjective
from megatron_ext.service import Channel, Commands, die_with_parent, serve
from megatron_ext.train.wiring import parse_arguments, start_megatron


def add_worker_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("megatron_ext worker")
    group.add_argument("--worker-socket", required=True, help="path of the Unix socket on which rank 0 serves requests")
    group.add_argument("--weights-only", action="store_true", help="no optimizer and no gradient buffers: log-probabilities and weights, no training steps")
    return parser


class Worker(Commands):
    """The commands, run on every rank. What a command returns on rank 0 is the answer."""

    def __init__(self, args, contract, channel: Channel) -> None:
        from megatron_ext.train.engine import TrainEngine  # Megatron must be initialised first

        self.args, self.contract = args, contract
        self.engine = TrainEngine(args, contract.consistency, channel.progress)

    def do_info(self) -> dict[str, Any]:
        args = self.args
        layout = {
            "world": args.world_size,
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "dp": args.data_parallel_size,
            "ep": args.expert_model_parallel_size,
            "etp": args.expert_tensor_parallel_size,
            "sequence_parallel": args.sequence_parallel,
            "dispatcher": args.moe_token_dispatcher_type if args.num_experts else None,
        }
        return {"layout": layout, "consistency": self.contract.consistency, "contract_digest": self.contract.digest()}

    def do_load_hf(self, path: str) -> None:
        self.engine.load_hf(path)

    def do_export_hf(self, path: str) -> None:
        self.engine.export_hf(path)

    def do_digest(self) -> dict[str, Any]:
        return {"digest": self.engine.digest()}

    def do_logprobs(self, sequences: list[dict], **options) -> dict[str, Any]:
        return {"logprobs": self.engine.logprobs(_token_sequences(sequences), **options)}

    def do_remember_reference(self) -> None:
        self.engine.remember_reference()

    def do_train_step(self, sequences: list[dict], objective: dict | None = None, **options) -> dict[str, Any]:
        objective = None if objective is None else PolicyObjective(**objective)
        return self.engine.train_step(_token_sequences(sequences), objective=objective, **options)

    def do_save_checkpoint(self, path: str) -> None:
        self.engine.save_checkpoint(path)

    def do_load_checkpoint(self, path: str) -> None:
        self.engine.load_checkpoint(path)

    def do_report(self) -> dict[str, Any]:
        """Patch hits and contract digest of every rank. Raises if the ranks' contracts differ or a patch row no longer holds."""
        patches.verify()
        mine = {"rank": dist.get_rank(), "contract_digest": self.contract.digest(), "rows": patches.report().rows}
        everywhere: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        check_same_digest({f"train rank {part['rank']}": part["contract_digest"] for part in everywhere})
        return {"ranks": everywhere}

    def do_assert_hit(self) -> None:
        """Raises PatchError if an active row was never used on some rank."""
        patches.report().assert_hit()


def _token_sequences(sequences: list[dict]):
    """TokenSequence for each dict with its fields but the index."""
    from megatron_ext.train.batch import TokenSequence

    return [TokenSequence(index, **{**fields, "tokens": tuple(fields["tokens"])}) for index, fields in enumerate(sequences)]


class RankChannel(Channel):
    """Rank 0's connection; the other ranks say nothing and hear what rank 0 hears."""

    def __init__(self, socket_path: str, rank: int) -> None:
        super().__init__(socket_path, f"rank {rank}", listens=rank == 0)

    def receive(self) -> dict[str, Any]:
        box = [super().receive() if self.connection is not None else None]
        dist.broadcast_object_list(box, src=0)
        return dict(box[0])


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse_arguments(add_worker_arguments)
    die_with_parent()
    known, _ = add_worker_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args()
    channel = RankChannel(known.worker_socket, int(os.environ["RANK"]))
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        args, contract, report = start_megatron(add_worker_arguments)
        worker = Worker(args, contract, channel)
        channel.answer({"ready": True, "patches": str(report)})
        serve(worker, channel)
    except Exception:  # an exit has said why in the log
        channel.report_failure()
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
