"""The benchmark runs, and says what it compared with. Times are not judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_bench_ops(tmp_path):
    file = tmp_path / "bench.json"
    command = [sys.executable, "tools/bench_ops.py", "--rows", "2", "--seconds", "0.001", "--only", "linear", "rms_norm", "--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr[-2000:]
    told = json.loads(file.read_text())
    assert {"linear", "linear groups16", "rms_norm", "rms_norm fwd + bwd"} <= {entry["op"] for entry in told["results"]}
    assert all(entry["seconds"]["ours"] > 0 and set(entry["ratios"]) >= {"torch bf16"} for entry in told["results"])
    assert {"instruction_sets", "torch_cpu_capability", "fma_peak_gflops"} <= told["machine"].keys()
