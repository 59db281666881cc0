"""What the tests of the loop share."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import ops
from megatron_ext.ops import backend
from megatron_ext.reduction_order import ReductionOrder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def native_ops():
    """The operators, outside of an engine."""
    ops.configure(ReductionOrder(), "ascendc")
    yield
    backend._active = None


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """The task of the quickstart: model, train.jsonl, heldout.jsonl."""
    folder = tmp_path_factory.mktemp("task")
    subprocess.run([sys.executable, ROOT / "tools" / "make_rl_task.py", folder], check=True, timeout=300, stdin=subprocess.DEVNULL)
    return folder
