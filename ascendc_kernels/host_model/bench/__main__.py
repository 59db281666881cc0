"""Times the fast flavour of the host model: `python -m ascendc_kernels.host_model.bench [--variant portable] [--only NAME]`.

Nanoseconds per element of every vector instruction on a tile in L1 and on one in L2, Mmad, and the cost of a launch. Smallest of many
rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib

from ascendc_kernels import library
from ascendc_kernels.host_model import build

HERE = pathlib.Path(__file__).parent
TILES = (2048, 12288)  # floats per operand
MMAD_SHAPES = ((128, 256, 128), (128, 128, 256), (16, 256, 128), (16, 64, 512))  # m, k, n
LAUNCHES = {"empty kernel": 0, "4 buffers, 2048 floats in and out": 1, "two vector cores wait for a flag of the cube core": 2}


def load(variant: str) -> ctypes.CDLL:
    handle = ctypes.CDLL(str(build.build([HERE / "bench.cpp"], HERE / "build", "fast", variant)))
    library.case_name.restype = ctypes.c_char_p
    for function in (library.case_bytes, library.case_ns, library.mmad_ns, library.launch_ns):
        function.restype = ctypes.c_double
    return library


def print_cases(library: ctypes.CDLL, only: str, passes: int) -> None:
    print(f"{'instruction':34}" + "".join(f"{f'{count} floats: ns/element':>28}{'GB/s':>8}" for count in TILES))
    for index in range(library.case_count()):
        name = library.case_name(index).decode()
        if only not in name:
            continue
        times = [min(library.case_ns(index, count) for _ in range(passes)) / count for count in TILES]
        print(f"{name:34}" + "".join(f"{ns:28.4f}{library.case_bytes(index) / ns:8.1f}" for ns in times), flush=True)


def print_mmad(library: ctypes.CDLL, passes: int) -> None:
    print(f"\n{'Mmad, bf16 (m x k x n)':34}{'sequential: us':>16}{'GFLOP/s':>9}{'groups16: us':>16}{'GFLOP/s':>9}")
    for m, k, n in MMAD_SHAPES:
        times = [min(library.mmad_ns(m, k, n, order) for _ in range(passes)) for order in (0, 1)]
        print(f"{f'{m} x {k} x {n}':34}" + "".join(f"{ns / 1000:16.1f}{2 * m * k * n / ns:9.1f}" for ns in times))


def print_launches(library: ctypes.CDLL, passes: int) -> None:
    print(f"\n{'launch (blocks on threads)':52}{'1 on 1: us':>12}{'2 on 1':>9}{'2 on 2':>9}{'8 on 2':>9}")
    for name, kind in LAUNCHES.items():
        cases = ((1, 1), (2, 1), (2, 2), (8, 2))
        times = [min(library.launch_ns(kind, blocks, threads) for _ in range(passes)) for blocks, threads in cases]
        print(f"{name:52}{times[0] / 1000:12.2f}" + "".join(f"{ns / 1000:9.2f}" for ns in times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=("avx2", "portable"), default=library.runnable_variants()[0])
    parser.add_argument("--only", default="", help="part of an instruction's name")
    parser.add_argument("--passes", type=int, default=3, help="measurements of which the smallest counts")
    arguments = parser.parse_args()
    library = load(arguments.variant)
    print_cases(library, arguments.only, arguments.passes)
    if not arguments.only:
        print_mmad(library, arguments.passes)
        print_launches(library, arguments.passes)


if __name__ == "__main__":
    main()
