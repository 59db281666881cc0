"""tools/check_parity.py, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hf_folders import MOE, make_hf

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
    (("--layers", "1"), "architectures"),
    (("--megatron", "absent"), "not allowed with argument --hf"),
])  # fmt: skip
def test_check_parity_refuses_before_anything_starts(tmp_path, options, message):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 10}')
    result = run("tools/check_parity.py", "--hf", model, *options)
    assert result.returncode not in (0, None) and message in result.stderr


@pytest.mark.full
def test_check_parity_on_a_slice_and_on_a_megatron_checkpoint(tmp_path):
    """Two layers of four, and a converted checkpoint that Megatron loads by itself."""
    model, verdict = make_hf(tmp_path / "model", {**MOE, "max_position_embeddings": 1024}), tmp_path / "verdict.json"
    common = ("--random-prompts", 5, 130, 300, "--max-tokens", 8, "--json", verdict, "--train-tp", 2, "--train-ep", 2)
    result = run("tools/check_parity.py", "--hf", model, "--layers", 2, *common)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert json.loads(verdict.read_text())["logical_tensors_equal"] == 3 + 2 * (8 + 1 + 3 * 8)
    assert run("tools/convert_checkpoint.py", "to-megatron", "--hf", model, "--out", tmp_path / "megatron", "--tp", 4).returncode == 0
    result = run("tools/check_parity.py", "--megatron", tmp_path / "megatron", *common, "--rollout-tp", 2, "--rollout-ep")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    found = json.loads(verdict.read_text())
    assert found["exact"] and found["tokens"] == 3 * 8 and found["logical_tensors_equal"] == 3 + 4 * (8 + 1 + 3 * 8)
