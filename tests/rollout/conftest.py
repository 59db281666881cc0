"""Models of the rollout tests, made once per session."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_model(folder: Path, *options: str) -> str:
    command = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), str(folder), *options]
    subprocess.run(command, check=True, timeout=240, cwd=ROOT)
    return str(folder)


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="session")
def other_moe_model(tmp_path_factory) -> str:
    """The same shapes, other weights."""
    return make_model(tmp_path_factory.mktemp("other_moe"), "--seed", "7")


@pytest.fixture(scope="session")
def tied_dense_model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("dense"), "--dense", "--tied", "--layers", "2")
