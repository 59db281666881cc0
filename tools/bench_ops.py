#!/usr/bin/env python
"""Every operator beside what a user has today, as ratios from one run.

    python tools/bench_ops.py [--rows 1 16 128 2048] [--threads N] [--only NAME ...] [--json FILE]

Ours and its peers are timed in turn, so that a busy machine slows all of them; a ratio above 1 means that ours is faster. Peers:
torch in bf16 and fp32, and vLLM's own CPU kernels where it has the operator. GFLOP/s and the share of the fp32 multiply-add peak, which is
measured in the same run, are given for contractions. Widths are those of Qwen3-30B-A3B.
"""

import argparse
import ctypes
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_ext import ops
from megatron_ext.ops import native
from megatron_ext.reduction_order import ReductionOrder

HIDDEN, OUT, EXPERT_WIDTH, HEADS, HEAD_DIM, VOCAB = 2048, 2048, 768, 32, 128, 151936
BF16 = torch.bfloat16
VOCAB_ROWS = 128  # more rows of fp32 logits would take more than 100 MB
INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16")


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator at one number of rows. flops: of a contraction, else 0."""

    name: str
    rows: int
    ours: Callable[[], object]
    peers: dict[str, Callable[[], object]]
    flops: float = 0.0


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def linear_cases(rows: int) -> list[Case]:
    x, w, dy = normal(rows, HIDDEN), normal(OUT, HIDDEN), normal(rows, OUT)
    x32, w32, dy32, grad = x.float(), w.float(), dy.float(), torch.zeros(OUT, HIDDEN)
    flops = 2.0 * rows * HIDDEN * OUT
    return [
        Case("linear", rows, lambda: ops.linear(x, w), {"torch bf16": lambda: F.linear(x, w), "torch fp32": lambda: F.linear(x32, w32)}, flops),
        Case("linear dgrad", rows, lambda: ops.dgrad_fp32(dy, w), {"torch bf16": lambda: dy @ w, "torch fp32": lambda: dy32 @ w32}, flops),
        Case("linear wgrad", rows, lambda: ops.wgrad_(grad, dy, x), {"torch bf16": lambda: dy.T @ x, "torch fp32": lambda: dy32.T @ x32}, flops),
    ]  # fmt: skip


def row_cases(rows: int) -> list[Case]:
    x, residual, w, out = normal(rows, HIDDEN), normal(rows, HIDDEN), normal(HIDDEN), torch.empty(rows, HIDDEN, dtype=BF16)
    gate_up, activated = normal(rows, 2 * EXPERT_WIDTH), torch.empty(rows, EXPERT_WIDTH, dtype=BF16)
    q, positions = normal(rows, HEADS, HEAD_DIM), torch.arange(rows)
    cos, sin = ops.rope_tables(positions, HEAD_DIM, 1e6, BF16)
    parts = torch.randn(8, rows, HIDDEN)
    kernels = vllm_kernels()
    cache = torch.cat([cos, sin], dim=-1)
    vllm = {
        "rms_norm": lambda: kernels.rms_norm(out, x, w, 1e-6),
        "add + rms_norm": lambda: kernels.fused_add_rms_norm(x.clone(), residual.clone(), w, 1e-6),
        "swiglu": lambda: kernels.silu_and_mul(activated, gate_up),
        "rotary": lambda: kernels.rotary_embedding(positions, q.view(rows, -1), None, HEAD_DIM, cache, True),
    } if kernels else {}  # fmt: skip
    cases = [
        Case("rms_norm", rows, lambda: ops.rms_norm(x, w, 1e-6), {"torch bf16": lambda: F.rms_norm(x, (HIDDEN,), w, 1e-6)}),
        Case("add + rms_norm", rows, lambda: ops.add_rms_norm(x, residual, w, 1e-6),
             {"torch bf16": lambda: F.rms_norm(x + residual, (HIDDEN,), w, 1e-6)}),
        Case("swiglu", rows, lambda: ops.swiglu(gate_up), {"torch bf16": lambda: F.silu(gate_up[:, :EXPERT_WIDTH]) * gate_up[:, EXPERT_WIDTH:]}),
        Case("rotary", rows, lambda: ops.apply_rope(q, cos, sin), {"torch bf16": lambda: rotate_half(q, cos, sin)}),
        Case("ordered sum of 8", rows, lambda: ops.ordered_sum(parts, BF16), {"torch fp32": lambda: parts.sum(0).to(BF16)}),
    ]  # fmt: skip
    return [dataclasses.replace(case, peers={**case.peers, **({"vLLM": vllm[case.name]} if case.name in vllm else {})}) for case in cases]


def vocabulary_cases(rows: int) -> list[Case]:
    if rows > VOCAB_ROWS:
        return []
    logits, ids = torch.randn(rows, VOCAB), torch.randint(VOCAB, (rows,))
    return [
        Case("token logprob", rows, lambda: ops.token_logprob(logits, ids), {"torch fp32": lambda: -F.cross_entropy(logits, ids, reduction="none")}),
        Case("log_softmax", rows, lambda: ops.log_softmax(logits), {"torch fp32": lambda: logits.log_softmax(-1)}),
    ]


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def vllm_kernels():
    """vLLM's compiled CPU operators, or None if this build has none. vLLM picks the build for the instruction set."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C if hasattr(torch.ops._C, "rms_norm") else None


def measure(case: Case, seconds: float) -> dict:
    """Median seconds of ours and of every peer, timed in turn."""
    runs = {"ours": case.ours, **case.peers}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    deadline = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < deadline or len(times["ours"]) < 3:
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    ratios = {name: medians[name] / medians["ours"] for name in case.peers}
    return {"op": case.name, "rows": case.rows, "seconds": medians, "ratios": ratios, "gflops": case.flops / medians["ours"] / 1e9}


def fma_peak(threads: int) -> float | None:
    """fp32 GFLOP/s of independent multiply-adds on `threads` threads; None without AVX2 and FMA or without a compiler."""
    if not {"avx2", "fma"} <= cpu_flags():
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "fma_peak.so"
        source = pathlib.Path(__file__).with_name("fma_peak.cpp")
        subprocess.run(["g++", "-O2", "-mavx2", "-mfma", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        chains = ctypes.CDLL(str(library)).fma_chains
    chains.restype, rounds = ctypes.c_float, 20_000_000
    workers = [threading.Thread(target=chains, args=(ctypes.c_int64(rounds),)) for _ in range(threads)]  # ctypes lets go of the lock
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return threads * rounds * 12 * 8 * 2 / (time.perf_counter() - started) / 1e9


def cpu_flags() -> set[str]:
    info = pathlib.Path("/proc/cpuinfo")
    lines = [line for line in info.read_text().splitlines() if line.startswith("flags")] if info.exists() else []
    return set(lines[0].split()) if lines else set()


def show(result: dict, peak: float | None) -> str:
    ratios = "  ".join(f"{ratio:6.2f}x {name}" for name, ratio in result["ratios"].items())
    share = f", {100 * result['gflops'] / peak:.0f} % of peak" if peak else ""
    rate = f"  {result['gflops']:.1f} GFLOP/s{share}" if result["gflops"] else ""
    return f"{result['op']:18s} {result['rows']:5d} rows {1e6 * result['seconds']['ours']:10.1f} us   {ratios}{rate}"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="per operator and peer")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="operators whose name starts with one of these")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    ops.configure(ReductionOrder(), "ascendc")
    machine = {
        "threads": args.threads, "instruction_sets": [name for name in INSTRUCTION_SETS if name in cpu_flags()], "ours": native.cpu_variant(),
        "torch": torch.__version__, "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(), "mkldnn": torch.backends.mkldnn.is_available(),
        "fma_peak_gflops": fma_peak(args.threads),
    }  # fmt: skip
    print(json.dumps(machine))
    results = []
    for rows in args.rows:
        for case in [*linear_cases(rows), *row_cases(rows), *vocabulary_cases(rows)]:
            if args.only is None or case.name.startswith(tuple(args.only)):
                results.append(measure(case, args.seconds))
                print(show(results[-1], machine["fma_peak_gflops"]), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
