"""logdiff 0 at the widths of the real models: one layer of Qwen3-30B-A3B, and of Qwen3-0.6B with tied embeddings, random weights.

Long and large (gigabytes of weights in every process): marked full. What it took is printed.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.full, pytest.mark.timeout(5400)]
LENGTHS = (1100, 1030, 300, 129)


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module", params=["qwen3_30b_a3b", "qwen3_0.6b"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("true_width") / request.param
    made = run("tools/make_random_model.py", folder, "--config", f"configs/hf/{request.param}.json", "--layers", 1)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("rollout", [("--rollout-tp", 1), ("--rollout-tp", 2, "--rollout-ep")], ids=["rollout TP1", "rollout TP2+EP"])
def test_logdiff_is_zero(model, tmp_path, rollout):
    dense = "0.6b" in model.name
    layout = ["--train-tp", 2] + ([] if dense else ["--train-ep", 2])
    rollout = [option for option in rollout if not (dense and option == "--rollout-ep")]
    verdict, started = tmp_path / "verdict.json", time.monotonic()
    result = run("tools/check_parity.py", "--hf", model, *layout, *rollout, "--random-prompts", *LENGTHS, "--max-tokens", 8, "--micro-batch-size", 1,
                 "--max-num-batched-tokens", 512, "--max-num-seqs", 4, "--timeout", 3000, "--json", verdict)  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    found = json.loads(verdict.read_text())
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1 << 20)
    print(f"{model.name} {found['train_layout']} / {found['rollout_layout']}: {found['tokens']} tokens, {found['mismatched_tokens']} differ, "
          f"{time.monotonic() - started:.0f} s {found['seconds']}, largest process {largest:.1f} GiB")  # fmt: skip
    assert found["exact"] and found["tokens"] == 8 * len(LENGTHS)
