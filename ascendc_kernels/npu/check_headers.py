"""Checks that every kernel compiles against the declarations of the public Ascend C headers: names, overloads, parameter types.

    python -m ascendc_kernels.npu.check_headers --devkit DIR

DIR is a checkout of the open asc-devkit (its licence limits its use; nothing of it is kept here). g++ parses the headers without their
implementations, which need the device compiler. This shows that the calls exist as declared for NPU architecture 2201; it says nothing
about what they do, and it is no substitute for a build with bisheng.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from ascendc_kernels import build

CHECK_DIR = pathlib.Path(__file__).parent / "header_check"
NPU_ARCHITECTURE = 2201
IMPLEMENTATION = re.compile(r'^\s*#include ".*_intf_impl\.h"', re.MULTILINE)


def copy_declarations(devkit: pathlib.Path, scratch: pathlib.Path) -> None:
    """The headers, without the includes that pull in device code. Raises SystemExit if this is no devkit."""
    if not (devkit / "include" / "basic_api").is_dir():
        sys.exit(f"error: {devkit} holds no include/basic_api; expected a checkout of asc-devkit")
    for folder in ("include", "impl"):
        shutil.copytree(devkit / folder, scratch / folder)
    for header in (scratch / "include" / "basic_api").rglob("*.h"):
        text = header.read_text()
        if IMPLEMENTATION.search(text):
            header.write_text(IMPLEMENTATION.sub("", text))


def command(source: pathlib.Path, scratch: pathlib.Path) -> list[str]:
    folders = [CHECK_DIR, build.INCLUDE_DIR, scratch / "include" / "basic_api", scratch / "include", scratch / "impl" / "basic_api",
               scratch / "impl", scratch]  # fmt: skip
    # The headers use compiler builtins before their declaration, which -fpermissive lets pass until they are instantiated.
    flags = ["-std=c++17", "-fsyntax-only", "-fpermissive", "-w", f"-D__NPU_ARCH__={NPU_ARCHITECTURE}", *build.ORDER_FLAGS]
    return [build.compiler(), *flags, "-include", str(CHECK_DIR / "compiler_builtins.h"), *(f"-I{folder}" for folder in folders), str(source)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devkit", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        copy_declarations(args.devkit, scratch)
        for source in build.operator_sources("kernel"):
            result = subprocess.run(command(source, scratch), capture_output=True, text=True)
            failed += result.returncode != 0
            print(f"{source.relative_to(build.ROOT)}: {'ok' if result.returncode == 0 else 'FAILED'}")
            if result.returncode:
                print("\n".join(line for line in result.stderr.splitlines() if "error" in line)[:4000])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
