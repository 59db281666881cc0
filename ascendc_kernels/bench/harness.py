"""Timing of operators beside their peers, in one run. An operator's bench_<op>.py gives `cases(rows)`; tools/bench_ops.py runs all of them.

Ours and its peers are timed in turn, so that a busy machine slows all of them. Widths are those of Qwen3-30B-A3B.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import pathlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import torch

from ascendc_kernels import build, library
from ascendc_kernels.build import compiler

HIDDEN, EXPERT_WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 768, 32, 4, 128, 151936
BF16 = torch.bfloat16
INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16")
FMA_CHAINS, FMA_LANES, FMA_ROUNDS = 12, 8, 20_000_000


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator at one number of rows. peers: by what a user has today. flops: of a contraction, else 0."""

    name: str
    rows: int
    ours: Callable[[], object]
    peers: dict[str, Callable[[], object]]
    flops: float = 0.0


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@functools.cache
def vllm_kernels():
    """vLLM's compiled CPU operators, or None if this build has none. vLLM picks the build for the instruction set."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return torch.ops._C if hasattr(torch.ops._C, "rms_norm") else None


def vllm_peer(name: str, call: Callable[[object], object]) -> dict[str, Callable[[], object]]:
    """{"vLLM": ...} if vLLM has the kernel, else {}. call: takes vLLM's operators."""
    kernels = vllm_kernels()
    return {"vLLM": lambda: call(kernels)} if kernels is not None and hasattr(kernels, name) else {}


def measure(case: Case, seconds: float) -> dict:
    """Median seconds of ours and of every peer, timed in turn."""
    runs = {"ours": case.ours, **case.peers}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    deadline = time.perf_counter() + seconds * len(runs)
    order = list(runs)
    while time.perf_counter() < deadline or len(times["ours"]) < 2 * len(runs):
        order.append(order.pop(0))  # each comes first in turn: who comes second finds the operands in a cache
        for name in order:
            started = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - started)
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    ratios = {name: medians[name] / medians["ours"] for name in case.peers}
    return {"op": case.name, "rows": case.rows, "seconds": medians, "ratios": ratios, "gflops": case.flops / medians["ours"] / 1e9}


def fma_peak(threads: int) -> float | None:
    """fp32 GFLOP/s of independent multiply-adds on `threads` threads; None without AVX2 and FMA."""
    if library.runnable_variants()[0] != "avx2":
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = pathlib.Path(folder) / "fma_peak.so"
        source = pathlib.Path(__file__).with_name("fma_peak.cpp")
        subprocess.run([compiler(), "-O2", *build.VARIANT_FLAGS["avx2"], "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
        chains = ctypes.CDLL(str(target)).fma_chains
    chains.restype = ctypes.c_float

    def seconds() -> float:
        workers = [threading.Thread(target=chains, args=(ctypes.c_int64(FMA_ROUNDS),)) for _ in range(threads)]  # ctypes lets go of the lock
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - started

    return threads * FMA_ROUNDS * FMA_CHAINS * FMA_LANES * 2 / min(seconds() for _ in range(5)) / 1e9


def cpu_flags() -> set[str]:
    info = pathlib.Path("/proc/cpuinfo")
    lines = [line for line in info.read_text().splitlines() if line.startswith("flags")] if info.exists() else []
    return set(lines[0].split()) if lines else set()


def machine(threads: int) -> dict:
    return {
        "threads": threads, "instruction_sets": [name for name in INSTRUCTION_SETS if name in cpu_flags()],
        "ours": library.chosen(library.VARIANT_VARIABLE, library.runnable_variants()), "path": library.chosen(library.PATH_VARIABLE, library.PATHS),
        "torch": torch.__version__, "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(), "mkldnn": torch.backends.mkldnn.is_available(),
        "fma_peak_gflops": fma_peak(threads),
    }  # fmt: skip


def show(result: dict, peak: float | None) -> str:
    ratios = "  ".join(f"{ratio:6.2f}x {name}" for name, ratio in result["ratios"].items())
    share = f", {100 * result['gflops'] / peak:.0f} % of peak" if peak else ""
    rate = f"  {result['gflops']:.1f} GFLOP/s{share}" if result["gflops"] else ""
    return f"{result['op']:22s} {result['rows']:5d} rows {1e6 * result['seconds']['ours']:10.1f} us   {ratios}{rate}"


def main(description: str, makers: Sequence[Callable[[int], list[Case]]], argv: list[str] | None = None) -> int:
    """Command line of a bench: measures the cases of all makers at each number of rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 2048])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="per operator and peer")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="operators whose name starts with one of these")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    library.load()
    facts = machine(args.threads)
    print(json.dumps(facts))
    results = []
    for rows in args.rows:
        for case in (case for maker in makers for case in maker(rows)):
            if args.only is None or case.name.startswith(tuple(args.only)):
                results.append(measure(case, args.seconds))
                print(show(results[-1], facts["fma_peak_gflops"]), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")
    return 0
