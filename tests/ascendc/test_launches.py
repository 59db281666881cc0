"""What the model keeps between launches - stacks, memories, flags, threads - never shows: after errors, between threads, after fork()."""

import os
import signal
import threading

import pytest
import torch
from host_library import KernelError, library, runnable_variants
from test_cross_core import BLOCKS, expected

KERNELS = ["sync_all", "group_flag", "pair_flag", "mixed_sync_all"]
CHILD_SECONDS = 60


def load(flavour: str = "fast"):
    return library("cross_core.cpp", flavour, runnable_variants()[0] if flavour == "fast" else "portable")


def require_exchange(lib, kernel: str, threads: int) -> None:
    rows = expected(kernel).float()
    gm = torch.full((rows.numel(), 64), -1.0)
    lib.run(kernel, gm, BLOCKS, threads)
    assert torch.equal(gm, rows[:, None].expand(-1, 64))


@pytest.mark.parametrize("flavour, threads", [("checked", 1), ("fast", 1), ("fast", 2), ("fast", 4)])
def test_a_failed_launch_leaves_nothing_behind(flavour, threads):
    lib = load(flavour)
    for _ in range(5):
        with pytest.raises(KernelError, match=r"fails_midway, block 1, vector core 1: TBuf::GetWithOffset .* outside a buffer"):
            lib.run("fails_midway", torch.zeros(2 * BLOCKS, 64), BLOCKS, threads)
        for kernel in KERNELS:
            require_exchange(lib, kernel, threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_launches_from_several_threads_at_once(threads):
    lib, failures = load(), []

    def repeat(first: int) -> None:
        try:
            for i in range(40):
                require_exchange(lib, KERNELS[(first + i) % len(KERNELS)], threads)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=repeat, args=(first,)) for first in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures, failures[0]


def run_in_child(work) -> None:
    """Calls work() in a forked process; it fails if that raises, or hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler in Python would wait for the library to return
        signal.alarm(CHILD_SECONDS)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def exchange_all(lib, threads: int) -> None:
    for kernel in KERNELS:
        require_exchange(lib, kernel, threads)


def test_a_forked_process_has_threads_of_its_own():
    lib = load()
    exchange_all(lib, 3)

    def work() -> None:
        exchange_all(lib, 3)
        run_in_child(lambda: exchange_all(lib, 2))

    run_in_child(work)
    exchange_all(lib, 3)


def test_fork_while_another_thread_launches():
    lib, stop = load(), threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            lib.run("sync_all", torch.empty(6 * BLOCKS, 64), BLOCKS, 2)

    caller = threading.Thread(target=repeat)
    caller.start()
    try:
        for _ in range(20):
            run_in_child(lambda: exchange_all(lib, 2))
    finally:
        stop.set()
        caller.join()
