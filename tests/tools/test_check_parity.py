"""tools/check_parity.py, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(900)


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=840, stdin=subprocess.DEVNULL)


@pytest.mark.full
def test_check_parity_exits_with_one_on_any_difference(tmp_path):
    model, verdict = tmp_path / "model", tmp_path / "verdict.json"
    assert run("tools/make_tiny_model.py", model, "--layers", "2").returncode == 0
    common = ("tools/check_parity.py", "--hf", model, "--max-tokens", 16, "--json", verdict)
    result = run(*common, "--train-tp", 2, "--rollout-tp", 1, "--no-pack", "--dispatcher", "allgather")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    exact = json.loads(verdict.read_text())
    assert exact["exact"] and exact["tokens"] == 8 * 16 and exact["first"] is None and exact["logical_tensors_equal"] > 100
    result = run(*common, "--no-consistency")
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-3000:]
    stock = json.loads(verdict.read_text())
    assert not stock["exact"] and stock["first"]["token_id"] >= 0 and "DIFFERS" in result.stdout


@pytest.mark.parametrize(("options", "message"), [
    (("--train-tp", "2", "--train-ep", "4", "--train-dp", "1"), "ep x etp = 4 does not divide tp x dp = 2"),
    (("--prompts", "absent.jsonl"), "absent.jsonl"),
])  # fmt: skip
def test_check_parity_refuses_before_anything_starts(tmp_path, options, message):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 10}')
    result = run("tools/check_parity.py", "--hf", model, *options)
    assert result.returncode not in (0, None) and message in result.stderr
