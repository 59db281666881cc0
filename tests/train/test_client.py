"""A worker world that cannot go on: a clear error in bounded time, and no process left behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from megatron_ext.train.client import TrainWorld, WorkerError, cpu_flags

pytestmark = pytest.mark.timeout(300)


def children(pid):
    """Living descendants of a process."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] != "Z" and int(fields[1]) == pid:
            child = int(status.parent.name)
            found += [child, *children(child)]
    return found


def assert_gone(pids, within_s=15):
    deadline = time.monotonic() + within_s
    alive = lambda pid: Path(f"/proc/{pid}").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text()  # noqa: E731
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.2)


def test_refused_options_reach_the_caller(model, tmp_path):
    with pytest.raises(WorkerError, match="--hidden-dropout"), TrainWorld(1, cpu_flags(model, "--hidden-dropout", "0.1"), tmp_path / "log"):
        pass


@pytest.mark.full
def test_wrong_flags_end_with_the_log(model, tmp_path):
    with pytest.raises(WorkerError, match="unrecognized arguments: --no-such-flag"), TrainWorld(1, cpu_flags(model, "--no-such-flag"), tmp_path / "log"):
        pass


def test_start_is_bounded(model, tmp_path):
    others = set(children(os.getpid()))  # an earlier engine leaves multiprocessing's resource tracker
    started = time.monotonic()
    with pytest.raises(WorkerError, match="no answer after 3 s|not ready after 3 s"), TrainWorld(1, cpu_flags(model), tmp_path / "log", timeout_s=3):
        pass
    assert time.monotonic() - started < 30
    assert not set(children(os.getpid())) - others


def test_a_killed_rank_ends_the_world(model, tmp_path):
    others = set(children(os.getpid()))
    with TrainWorld(2, cpu_flags(model, tp=2), tmp_path / "log", timeout_s=200) as world:
        processes = set(children(os.getpid())) - others
        ranks = [pid for pid in processes if b"megatron_ext.train.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError):
            world.call("load_hf", path=model)
        assert time.monotonic() - started < 60
        assert_gone(processes)
