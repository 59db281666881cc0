"""A worker world that cannot go on: a clear error in bounded time, and no process left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from processes import assert_gone, descendants

from megatron_ext.train.client import TrainWorld, cpu_flags
from megatron_ext.world import WorkerError

pytestmark = pytest.mark.timeout(300)


def test_refused_options_reach_the_caller(model, tmp_path):
    with pytest.raises(WorkerError, match="--hidden-dropout"), TrainWorld(1, cpu_flags(model, "--hidden-dropout", "0.1"), tmp_path / "log"):
        pass


@pytest.mark.full
def test_wrong_flags_end_with_the_log(model, tmp_path):
    with pytest.raises(WorkerError, match="unrecognized arguments: --no-such-flag"), TrainWorld(1, cpu_flags(model, "--no-such-flag"), tmp_path / "log"):
        pass


def test_start_is_bounded(model, tmp_path):
    others = set(descendants(os.getpid()))  # an earlier engine leaves multiprocessing's resource tracker
    started = time.monotonic()
    with pytest.raises(WorkerError, match="no answer after 3 s|not ready after 3 s"), TrainWorld(1, cpu_flags(model), tmp_path / "log", timeout_s=3):
        pass
    assert time.monotonic() - started < 30
    assert not set(descendants(os.getpid())) - others


def test_a_killed_rank_ends_the_world(model, tmp_path):
    others = set(descendants(os.getpid()))
    with TrainWorld(2, cpu_flags(model, tp=2), tmp_path / "log", timeout_s=200) as world:
        processes = set(descendants(os.getpid())) - others
        ranks = [pid for pid in processes if b"megatron_ext.train.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerError):
            world.call("load_hf", path=model)
        assert time.monotonic() - started < 60
        assert_gone(processes)
