"""Runs a function on several gloo ranks and brings the first error back."""

import datetime
import os
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing


def _rank_main(rank: int, world: int, function, arguments: tuple, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
                                timeout=datetime.timedelta(seconds=120))  # fmt: skip
        function(rank, world, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        with open(f"{folder}/error.{rank}", "w") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)


def run_ranks(world: int, function, *arguments) -> None:
    """function(rank, world, *arguments) on `world` ranks. Raises AssertionError with every rank's traceback."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(_rank_main, (world, function, arguments, folder), nprocs=world, join=False)
        try:
            while not context.join():
                pass
        except torch.multiprocessing.ProcessExitedException as error:
            errors = [open(os.path.join(folder, name)).read() for name in sorted(os.listdir(folder)) if name.startswith("error")]
            raise AssertionError("\n".join(errors) or str(error)) from None
