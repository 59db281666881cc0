"""A Megatron process world that serves requests.

    torchrun --nproc-per-node N -m megatron_ext.train.worker --worker-socket PATH <Megatron's flags> <our flags>

Rank 0 listens on a Unix socket (multiprocessing.connection): a request is a dict with "command" and its arguments, the answer
a dict. Every command runs on all ranks. An exception on any rank is answered as {"error": text} and ends the world: after one
the ranks are no longer in step. `client.TrainWorld` starts such a world and talks to it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext import patches
from megatron_ext.contract import check_same_digest
from megatron_ext.train.wiring import parse_arguments, start_megatron


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def add_worker_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("megatron_ext worker")
    group.add_argument("--worker-socket", required=True, help="path of the Unix socket on which rank 0 serves requests")
    return parser


class Worker:
    """The commands, run on every rank. What a command returns on rank 0 is the answer."""

    def __init__(self, args, contract) -> None:
        from megatron_ext.train.engine import TrainEngine  # Megatron must be initialised first

        self.args, self.contract = args, contract
        self.engine = TrainEngine(args, contract.consistency)

    def run(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        handler = getattr(self, f"do_{command}", None)
        if handler is None:
            known = sorted(name.removeprefix("do_") for name in dir(self) if name.startswith("do_"))
            raise ValueError(f"unknown command {command!r}; expected one of {known}")
        started = time.monotonic()
        answer = handler(**arguments) or {}
        return {**answer, "seconds": time.monotonic() - started}

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

    def do_train_step(self, sequences: list[dict], advantages: list[float], **options) -> dict[str, Any]:
        return self.engine.train_step(_token_sequences(sequences, advantages), **options)

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


def _token_sequences(sequences: list[dict], advantages: list[float] | None = None):
    from megatron_ext.train.batch import TokenSequence

    advantages = [0.0] * len(sequences) if advantages is None else advantages
    if len(advantages) != len(sequences):
        raise ValueError(f"expected one advantage per sequence, found {len(advantages)} for {len(sequences)} sequences")
    return [
        TokenSequence(index, tuple(sequence["tokens"]), sequence["prompt_len"], advantage)
        for index, (sequence, advantage) in enumerate(zip(sequences, advantages, strict=True))
    ]


class Client:
    """Rank 0's end of the connection; on the other ranks it says nothing and hears what rank 0 hears."""

    def __init__(self, socket_path: str, rank: int) -> None:
        self._connection: Connection | None = None
        self._failure_file = Path(f"{socket_path}.failure.{rank}")
        if rank == 0:
            with Listener(socket_path, family="AF_UNIX") as listener:
                self._connection = listener.accept()

    def answer(self, answer: dict[str, Any]) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the client is gone; the next receive ends the world
                self._connection.send(answer)

    def report_failure(self) -> None:
        """Tells the client about the exception being handled: by a file, and on rank 0 also by an answer."""
        text = f"rank {os.environ['RANK']}: {traceback.format_exc()}"
        with contextlib.suppress(OSError):  # the client has gone and taken its folder along
            self._failure_file.write_text(text)
        self.answer({"error": text})

    def receive(self) -> dict[str, Any]:
        """The next request, the same on every rank; "shutdown" if the client is gone."""
        box = [self._receive() if self._connection is not None else None]
        dist.broadcast_object_list(box, src=0)
        return dict(box[0])

    def _receive(self) -> dict[str, Any]:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return {"command": "shutdown"}


def serve(worker: Worker, client: Client) -> None:
    """Answers requests until "shutdown"."""
    while (request := client.receive())["command"] != "shutdown":
        client.answer(worker.run(request.pop("command"), request))


def die_with_parent() -> None:
    """Asks Linux to end this process when torchrun is gone: killed, it could not end its workers itself."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse_arguments(add_worker_arguments)
    die_with_parent()
    known, _ = add_worker_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args()
    client = Client(known.worker_socket, int(os.environ["RANK"]))
    try:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        args, contract, report = start_megatron(add_worker_arguments)
        worker = Worker(args, contract)
        client.answer({"ready": True, "patches": str(report)})
        serve(worker, client)
    except Exception:  # an exit has said why in the log
        client.report_failure()
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
