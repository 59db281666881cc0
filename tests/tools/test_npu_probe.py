"""tools/npu_probe.py, as a user runs it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.probe.report import order_fields

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "tools/npu_probe.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)


def test_the_probe_finds_the_order_of_the_model(tmp_path):
    file = tmp_path / "probe.json"
    result = run("--device", "model", "--model-mmad-order", "groups16", "--json", file)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mmad_order='groups16', subnormals='keep'" in result.stdout and "violated" not in result.stdout
    assert json.loads(file.read_text())["device"] == "host model, mmad_order=groups16"
    assert order_fields(str(file), None) == {"mmad_order": "groups16", "subnormals": "keep"}


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed: the probe would run")
def test_without_torch_npu_the_error_says_what_is_missing():
    result = run()
    assert result.returncode == 2 and result.stdout == ""
    assert "error: torch_npu is not installed" in result.stderr and "--device model" in result.stderr
