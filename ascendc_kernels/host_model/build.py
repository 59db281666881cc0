"""Builds test kernels together with the host model: one shared library per flavour and variant, of the same sources.

flavour: "fast", or "checked" (bounds, poison, hazards; for tests). variant: "avx2" or "portable", of identical bits.
A library is named by a stamp of everything that decides its content, so a second call is a no-op. Raises BuildError.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import subprocess
from collections.abc import Sequence

from ascendc_kernels.build import COMMON_FLAGS, INCLUDE_DIR, KERNEL_FLAGS, MODEL_DIR, MODEL_FLAGS, NATIVE_DIR, VARIANT_FLAGS, BuildError, compiler

STAMP_LENGTH = 16
FLAVOUR_FLAGS = {"fast": (), "checked": ("-DASCENDC_HOST_CHECKED",)}


def runtime_sources() -> list[pathlib.Path]:
    return sorted(MODEL_DIR.glob("*.cpp"))


def headers(*folders: pathlib.Path) -> list[pathlib.Path]:
    """Of the model, of what kernels share, and of more folders."""
    return sorted({header for folder in (MODEL_DIR, NATIVE_DIR, INCLUDE_DIR, *folders) for header in folder.glob("*.h")})


def stamp(flags: Sequence[str], files: Sequence[pathlib.Path]) -> str:
    digest = hashlib.sha256(repr((*COMMON_FLAGS, *KERNEL_FLAGS, *MODEL_FLAGS, *flags)).encode())
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:STAMP_LENGTH]


def run_compiler(arguments: Sequence[str], target: pathlib.Path) -> None:
    """Compiles to a file of its own first: an interrupted build leaves no broken target."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    command = [compiler(), *COMMON_FLAGS, *KERNEL_FLAGS, *MODEL_FLAGS, *arguments, "-o", str(unfinished)]
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
    flags = (optimise, "-shared", *FLAVOUR_FLAGS[flavour], *VARIANT_FLAGS[variant], *extra_flags)
    build_dir.mkdir(parents=True, exist_ok=True)
    name = f"{sources[0].stem}-{flavour}-{variant}"
    files = [*sources, *runtime_sources(), *headers(*(source.parent for source in sources))]
    target = build_dir / f"{name}-{stamp([*flags, optimise_runtime], files)}.so"
    with open(build_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            run_compiler([*flags, *map(str, sources), *map(str, build_runtime(build_dir, optimise_runtime))], target)
    return target
