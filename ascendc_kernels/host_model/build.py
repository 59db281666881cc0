"""Builds kernel sources together with the host model: one shared library per flavour and variant, of the same sources.

flavour: "fast", or "checked" (bounds, poison, hazards; for tests). variant: "avx2" or "portable", of identical bits.
A library is named by a stamp of everything that decides its content, so a second call is a no-op. Raises BuildError.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

from megatron_ext.ops.build import ORDER_FLAGS, VARIANT_FLAGS, BuildError
from megatron_ext.ops.build import SOURCE_DIR as NATIVE_DIR

STAMP_LENGTH = 16
MODEL_DIR = pathlib.Path(__file__).parent
FLAVOUR_FLAGS = {"fast": (), "checked": ("-DASCENDC_HOST_CHECKED",)}
# -fno-trapping-math promises that nobody looks at floating-point exception flags; without it comparisons keep loops from vectorising.
# It changes no value. -Wno-psabi: vectors cross functions of one library only, so their calling convention is nobody else's.
COMMON_FLAGS = (
    *("-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *ORDER_FLAGS,
)
# Every CPU with AVX2 converts half in hardware.
EXTRA_VARIANT_FLAGS = {"portable": (), "avx2": ("-mf16c",)}
INCLUDE_FLAGS = (f"-I{MODEL_DIR}", f"-I{NATIVE_DIR}")


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise BuildError("no C++ compiler: g++ (or the one named by CXX) was not found; install g++ 9 or later")
    return found


def runnable_variants() -> list[str]:
    """Variants that this CPU can run, the best one first."""
    info = pathlib.Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.exists() else []
    has_avx2 = "avx2" in VARIANT_FLAGS and {"avx2", "fma", "f16c"} <= set(flags)
    return ["avx2", "portable"] if has_avx2 else ["portable"]


def runtime_sources() -> list[pathlib.Path]:
    return sorted(MODEL_DIR.glob("*.cpp"))


def headers() -> list[pathlib.Path]:
    return sorted([*MODEL_DIR.glob("*.h"), *NATIVE_DIR.glob("*.h")])


def stamp(flags: Sequence[str], files: Sequence[pathlib.Path]) -> str:
    digest = hashlib.sha256(repr((*COMMON_FLAGS, *flags)).encode())
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:STAMP_LENGTH]


def run_compiler(arguments: Sequence[str], target: pathlib.Path) -> None:
    """Compiles to a file of its own first: an interrupted build leaves no broken target."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    command = [compiler(), *COMMON_FLAGS, *INCLUDE_FLAGS, *arguments, "-o", str(unfinished)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\nfailed with exit status {result.returncode}:\n{result.stderr[-6000:]}")
    for old in target.parent.glob(f"{target.stem.rpartition('-')[0]}-{'[0-9a-f]' * STAMP_LENGTH}{target.suffix}"):
        old.unlink()
    unfinished.rename(target)


def build_runtime(build_dir: pathlib.Path, optimise: str) -> list[pathlib.Path]:
    """Objects of the scheduler, the queues and the monitor. They hold no arithmetic: one build serves every flavour and variant."""
    flags = (optimise, "-c")
    objects = []
    for source in runtime_sources():
        target = build_dir / f"{source.stem}-{stamp(flags, [source, *headers()])}.o"
        if not target.exists():
            run_compiler([*flags, str(source)], target)
        objects.append(target)
    return objects


def build(
    sources: Sequence[pathlib.Path],
    build_dir: pathlib.Path,
    flavour: str = "fast",
    variant: str = "portable",
    optimise: str = "-O3",
    optimise_runtime: str = "-O2",
    extra_flags: Sequence[str] = (),
) -> pathlib.Path:
    """The library of `sources`. Safe when several processes call it at once."""
    flags = (optimise, "-shared", *FLAVOUR_FLAGS[flavour], *VARIANT_FLAGS[variant], *EXTRA_VARIANT_FLAGS[variant], *extra_flags)
    build_dir.mkdir(parents=True, exist_ok=True)
    name = f"{sources[0].stem}-{flavour}-{variant}"
    target = build_dir / f"{name}-{stamp([*flags, optimise_runtime], [*sources, *runtime_sources(), *headers()])}.so"
    with open(build_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            run_compiler([*flags, *map(str, sources), *map(str, build_runtime(build_dir, optimise_runtime))], target)
    return target
