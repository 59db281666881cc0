#!/usr/bin/env python
"""Every operator beside what a user has today, as ratios from one run.

    python tools/bench_ops.py [--rows 1 16 128 2048] [--threads N] [--only NAME ...] [--json FILE]

Ours and its peers are timed in turn, so that a busy machine slows all of them; a ratio above 1 means that ours is faster. Peers: torch in bf16
and fp32, and vLLM's own CPU kernels where it has the operator. GFLOP/s and the share of the fp32 multiply-add peak, which is measured in the
same run, are given for contractions. Widths are those of Qwen3-30B-A3B. The cases are those of ascendc_kernels/*/bench_*.py.
"""

import importlib
import sys

from ascendc_kernels import build
from ascendc_kernels.bench import harness


def benches() -> list:
    """`cases` of every operator's bench, in the order of their folders."""
    files = sorted(build.ROOT.glob("*/bench_*.py"))
    return [importlib.import_module(f"ascendc_kernels.{file.parent.name}.{file.stem}").cases for file in files]


if __name__ == "__main__":
    sys.exit(harness.main(__doc__, benches()))
