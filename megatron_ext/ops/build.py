"""Builds the native kernels with g++: `python -m megatron_ext.ops.build`.

Two libraries of identical bits, one for AVX2 and one for any x86-64 or other CPU; the loader picks by the CPU's flags.
A stamp of the sources and flags makes a second call a no-op. Raises BuildError without a compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess

from megatron_ext.reduction_order import FRACTAL, ROW_SUM_BLOCK

SOURCE_DIR = pathlib.Path(__file__).parent / "native"
BUILD_DIR = SOURCE_DIR / "build"
# The numbers that fix an order come from reduction_order; the kernels have none of their own.
ORDER_FLAGS = (f"-DMEGATRON_EXT_FRACTAL={FRACTAL}", f"-DMEGATRON_EXT_ROW_SUM_BLOCK={ROW_SUM_BLOCK}")
COMMON_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", *ORDER_FLAGS)
VARIANT_FLAGS = {"portable": (), "avx2": ("-mavx2", "-mfma")} if platform.machine() == "x86_64" else {"portable": ()}


class BuildError(RuntimeError):
    """The native kernels could not be built."""


def sources() -> list[pathlib.Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def stamp(variant: str) -> str:
    """Hash of everything that decides the library's content."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, VARIANT_FLAGS[variant])).encode())
    for path in [*sources(), *sorted(SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def library_path(variant: str) -> pathlib.Path:
    return BUILD_DIR / f"kernels-{variant}-{stamp(variant)}.so"


def compile_variant(variant: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("no C++ compiler: g++ (or the one named by CXX) was not found; install g++ 9 or later")
    target = library_path(variant)
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler, *COMMON_FLAGS, *VARIANT_FLAGS[variant], *map(str, sources()), "-o", str(unfinished)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\nfailed with exit status {result.returncode}:\n{result.stderr[-4000:]}")
    for old in BUILD_DIR.glob(f"kernels-{variant}-*.so"):
        old.unlink()
    unfinished.rename(target)


def build() -> dict[str, pathlib.Path]:
    """Builds what is missing; returns {variant: library}. Safe when several processes call it at once."""
    BUILD_DIR.mkdir(exist_ok=True)
    with open(BUILD_DIR / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for variant in VARIANT_FLAGS:
            if not library_path(variant).exists():
                compile_variant(variant)
    return {variant: library_path(variant) for variant in VARIANT_FLAGS}


if __name__ == "__main__":
    for name, path in build().items():
        print(f"{name}: {path.relative_to(SOURCE_DIR.parent.parent.parent)}")
