"""Builds the operators for this CPU: `python -m ascendc_kernels.build`.

One library of kernels per variant, "avx2" and "portable", of identical bits (the loader picks by the CPU's flags), each with the Ascend C
kernels on the host model and their native twins; and one library that registers the operators with torch. The sources of an operator are
the files of its folder: <op>_kernel.cpp (Ascend C), <op>_native.cpp (CPU twin), <op>_binding.cpp (torch). ninja rebuilds what changed,
headers included. Raises BuildError without a compiler. build.sh builds for a device too.
"""

from __future__ import annotations

import fcntl
import io
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence

import ninja
import torch
from ninja.ninja_syntax import Writer

from megatron_ext.reduction_order import FRACTAL, ROW_SUM_BLOCK

ROOT = pathlib.Path(__file__).parent
BUILD_DIR = ROOT / "build"
PREBUILT = BUILD_DIR / "prebuilt"  # written by setup.py into a wheel
MODEL_DIR, NATIVE_DIR, INCLUDE_DIR = ROOT / "host_model", ROOT / "native", ROOT / "include"
TORCH_DIR = pathlib.Path(torch.__file__).parent

# The numbers that fix an order come from reduction_order; the kernels have none of their own.
ORDER_FLAGS = (f"-DMEGATRON_EXT_FRACTAL={FRACTAL}", f"-DMEGATRON_EXT_ROW_SUM_BLOCK={ROW_SUM_BLOCK}")
# -ffp-contract=off: a fused multiply-add stands only where it is written. -fno-trapping-math promises that nobody looks at floating-point
# exception flags; without it comparisons keep loops from vectorising. It changes no value.
ARITHMETIC_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMMON_FLAGS = ("-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", *ARITHMETIC_FLAGS, *ORDER_FLAGS)
# -fno-strict-aliasing: a buffer of the model holds whatever type was written last (LocalTensor::ReinterpretCast), as on a device.
MODEL_FLAGS = ("-fno-strict-aliasing",)
KERNEL_FLAGS = ("-std=c++17", f"-I{INCLUDE_DIR}", f"-I{MODEL_DIR}", f"-I{NATIVE_DIR}")
VARIANT_FLAGS = {"portable": (), "avx2": ("-mavx2", "-mfma", "-mf16c")} if platform.machine() == "x86_64" else {"portable": ()}
# fast: what operators use. checked: every access, limit and hazard of the host model is checked; for tests.
FLAVOUR_FLAGS = {"fast": ("-O3",), "checked": ("-O1", "-DASCENDC_HOST_CHECKED")}


def variants_of(flavour: str) -> tuple[str, ...]:
    """The checked flavour has no vector code of its own, so one variant of it is enough."""
    return tuple(VARIANT_FLAGS) if flavour == "fast" else ("portable",)


class BuildError(RuntimeError):
    """The operators could not be built."""


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise BuildError(f"no C++ compiler: {os.environ.get('CXX', 'g++')!r} was not found; install g++ 11 or later (for example apt-get install g++), or name one by CXX")
    return found


def binding_flags() -> list[str]:
    """torch's headers warn about themselves, so its folders are system folders."""
    includes = [f"-isystem{TORCH_DIR / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    # -fopenmp: at::parallel_for is sequential without it. Not for linking: the runtime must be the one that torch has loaded.
    return ["-O2", "-std=c++20", "-fopenmp", f"-I{INCLUDE_DIR}", f"-I{ROOT / 'torch'}", abi, *includes]


def operator_sources(kind: str) -> list[pathlib.Path]:
    """Files <op>_<kind>.cpp of all operator folders."""
    return sorted(ROOT.glob(f"*/*_{kind}.cpp"))


def kernel_library(flavour: str, variant: str) -> pathlib.Path:
    return BUILD_DIR / f"kernels_{flavour}_{variant}.so"


def binding_library() -> pathlib.Path:
    return BUILD_DIR / "torch_binding.so"


def device_library() -> pathlib.Path:
    """What CMakeLists.txt builds where CANN and torch_npu are installed."""
    return BUILD_DIR / "npu" / "megatron_ext_npu.so"


class Plan:
    """What to compile and link, as a ninja file."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.writer = Writer(self.text, width=150)
        self.writer.variable("builddir", str(BUILD_DIR))
        command = [compiler(), *COMMON_FLAGS, "$flags", "-MMD", "-MF", "$out.d", "-c", "$in", "-o", "$out"]
        self.writer.rule("compile", " ".join(command), depfile="$out.d", deps="gcc", description="compile $in")
        link = [compiler(), "-shared", "-pthread", "$in", "-o", "$out.tmp", "$flags", "&&", "mv", "$out.tmp", "$out"]
        self.writer.rule("link", " ".join(link), description="link $out")

    def objects(self, folder: str, sources: Iterable[pathlib.Path], flags: Sequence[str], needs: Sequence[str] = ()) -> list[str]:
        targets = []
        for source in sources:
            targets.append(str(BUILD_DIR / folder / f"{source.stem}.o"))
            self.writer.build(targets[-1], "compile", str(source), implicit=list(needs), variables={"flags": " ".join(flags)})
        return targets

    def precompiled(self, folder: str, header: pathlib.Path, flags: Sequence[str]) -> str:
        """A header that `-include` of its name finds in `folder` before the source itself; it saves most of the time of a small file."""
        target = str(BUILD_DIR / folder / f"{header.name}.gch")
        self.writer.build(target, "compile", str(header), variables={"flags": f"{' '.join(flags)} -x c++-header"})
        return target

    def library(self, target: pathlib.Path, objects: list[str], flags: Sequence[str] = ()) -> None:
        self.writer.build(str(target), "link", objects, variables={"flags": " ".join(flags)})

    def add_kernels(self) -> None:
        # The scheduler of the model holds no arithmetic: one build of it serves every flavour and variant.
        runtime = self.objects("runtime", sorted(MODEL_DIR.glob("*.cpp")), ["-O2", *KERNEL_FLAGS])
        for flavour, flavour_flags in FLAVOUR_FLAGS.items():
            for variant in variants_of(flavour):
                folder, flags = f"{flavour}_{variant}", [*KERNEL_FLAGS, *flavour_flags, *VARIANT_FLAGS[variant]]
                kernels = self.objects(folder, operator_sources("kernel"), [*flags, *MODEL_FLAGS])
                natives = self.objects(folder, operator_sources("native"), flags)
                self.library(kernel_library(flavour, variant), [*kernels, *natives, *runtime])

    def add_binding(self) -> None:
        flags = binding_flags()
        header = self.precompiled("torch_headers", ROOT / "torch" / "torch_headers.h", flags)
        sources = [*sorted((ROOT / "torch").glob("*.cpp")), *operator_sources("binding")]
        objects = self.objects("torch", sources, [f"-I{BUILD_DIR / 'torch_headers'}", "-include", "torch_headers.h", *flags], [header])
        libraries = [f"-L{TORCH_DIR / 'lib'}", f"-Wl,-rpath,{TORCH_DIR / 'lib'}", "-lc10", "-ltorch_cpu", "-ldl"]
        self.library(binding_library(), objects, libraries)


def write_plan() -> pathlib.Path:
    plan = Plan()
    plan.add_kernels()
    plan.add_binding()
    path = BUILD_DIR / "build.ninja"
    if not path.exists() or path.read_text() != plan.text.getvalue():
        path.write_text(plan.text.getvalue())
    return path


def run_ninja(targets: Iterable[pathlib.Path], quiet: bool) -> None:
    program = shutil.which("ninja", path=f"{ninja.BIN_DIR}{os.pathsep}{os.environ.get('PATH', '')}")
    command = [program, "-f", str(write_plan()), *(["--quiet"] if quiet else []), f"-j{len(os.sched_getaffinity(0))}", *map(str, targets)]
    result = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT if quiet else None, text=True, cwd=ROOT)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\nfailed with exit status {result.returncode}:\n{(result.stdout or '')[-6000:]}")


def build(flavours: Sequence[str] = ("fast",), quiet: bool = True) -> None:
    """Builds what is out of date. Safe when several processes call it at once. Does nothing in a wheel, which holds the built libraries."""
    if PREBUILT.exists():
        return
    targets = [*(kernel_library(flavour, variant) for flavour in flavours for variant in variants_of(flavour)), binding_library()]
    BUILD_DIR.mkdir(exist_ok=True)
    with open(BUILD_DIR / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_ninja(targets, quiet)


if __name__ == "__main__":
    try:
        build(quiet=False)
    except BuildError as error:
        sys.exit(f"error: {error}")
