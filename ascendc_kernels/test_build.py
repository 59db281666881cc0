"""build.sh: its command line, its list of what is missing, and the order of its steps, with programs that stand for CANN's; and who calls it."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "build.sh"
FAKE_CMAKE = """#!/bin/sh
echo cmake "$@" >>"$RECORD"
[ "$1" = --build ] && [ -z "$FAILS" ] && mkdir -p "$2" && touch "$2/megatron_ext_npu.so"
exit 0
"""
FAKE_PYTHON = """#!/bin/sh
[ "$1" = -c ] && { case "$2" in *"'$LACKS'"*) exit 1 ;; esac; exit 0; }
echo python "$@" >>"$RECORD"
"""


@pytest.fixture
def machine(tmp_path):
    """machine(*arguments, without=programs, **environment): runs a copy of the script where only stand-ins and the usual tools can be found."""
    kernels, programs, cann = (tmp_path / name for name in ("ascendc_kernels", "bin", "cann"))
    for folder in (kernels, programs, cann):
        folder.mkdir()
    shutil.copy(SCRIPT, kernels)
    for name, text in {"cmake": FAKE_CMAKE, "bisheng": "#!/bin/sh\n", "python3": FAKE_PYTHON}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("bash", "sh", "dirname", "getconf", "sed", "mkdir", "touch"):
        (programs / name).symlink_to(shutil.which(name))

    def run(*arguments, without=(), **environment):
        for name in without:
            (programs / name).unlink()
        environment = {"PATH": str(programs), "RECORD": str(tmp_path / "record"), "LACKS": "nothing", "ASCEND_HOME_PATH": str(cann), **environment}
        return subprocess.run([shutil.which("bash"), str(kernels / "build.sh"), *arguments], env=environment, capture_output=True, text=True)

    run.record = tmp_path / "record"
    run.kernels = kernels
    return run


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "--soc is missing"),
    (("--soc",), "--soc needs a value"),
    (("--soc", "ascend950"), "--soc ascend950: expected one of ascend910b ascend910_93 (an ascend950 adds in another order"),
    (("--soc", "ascend"), "--soc ascend: expected one of"),
    (("--soc", "ascend910b", "--jobs", "0"), "--jobs 0: expected a number from 1 on"),
    (("--soc", "ascend910b", "--fast"), "unknown argument --fast"),
])  # fmt: skip
def test_a_wrong_command_line_is_refused(machine, arguments, message):
    result = machine(*arguments)
    assert result.returncode == 2 and f"error: {message}" in result.stderr and "usage: build.sh --soc ascend910b|ascend910_93" in result.stderr
    assert not machine.record.exists()


@pytest.mark.parametrize(("without", "environment", "message"), [
    ((), {"ASCEND_HOME_PATH": ""}, "CANN: ASCEND_HOME_PATH is not set"),
    ((), {"ASCEND_HOME_PATH": "/nowhere"}, "CANN: ASCEND_HOME_PATH=/nowhere is not a folder"),
    (("bisheng",), {}, "bisheng: the device compiler is not on PATH"),
    (("cmake",), {}, "cmake: not on PATH; version 3.16"),
    (("python3",), {}, "python: python3 cannot be run"),
    ((), {"LACKS": "torch"}, "torch: python3 cannot import it"),
    ((), {"LACKS": "torch_npu"}, "torch_npu: python3 cannot import it"),
])  # fmt: skip
def test_what_is_missing_is_named(machine, without, environment, message):
    result = machine("--soc", "ascend910_93", without=without, **environment)
    assert result.returncode == 1 and "the kernels for ascend910_93 cannot be built here" in result.stderr
    problems = [line for line in result.stderr.splitlines() if line.startswith("  - ")]
    assert len(problems) == 1 and message in problems[0]
    assert not machine.record.exists()


def test_everything_that_is_missing_is_named_at_once(machine):
    result = machine("--soc", "ascend910b", "--check", without=("bisheng", "cmake"), ASCEND_HOME_PATH="", LACKS="torch_npu")
    assert [line.split(":")[0] for line in result.stderr.splitlines()[1:]] == ["  - CANN", "  - bisheng", "  - cmake", "  - torch_npu"]


def test_a_check_builds_nothing(machine):
    result = machine("--soc", "ascend910b", "--check")
    assert (result.returncode, result.stdout) == (0, "everything that a build for ascend910b needs is there\n")
    assert not machine.record.exists()


def test_host_first_then_device(machine):
    result = machine("--soc", "ascend910_93", "--jobs", "3")
    assert result.returncode == 0, result.stderr
    python = pathlib.Path(machine.kernels.parent / "bin" / "python3")
    assert machine.record.read_text().splitlines() == [
        "python -m ascendc_kernels.build",
        f"cmake -S {machine.kernels} -B {machine.kernels}/build/npu -DSOC_VERSION=ascend910_93 -DPython3_EXECUTABLE={python}",
        f"cmake --build {machine.kernels}/build/npu --parallel 3",
    ]
    assert f"built {machine.kernels}/build/npu/megatron_ext_npu.so for ascend910_93" in result.stdout


def test_a_build_without_a_library_is_an_error(machine):
    result = machine("--soc", "ascend910b", FAILS="yes")
    assert result.returncode == 1 and "without an error and without" in result.stderr


@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="CANN is set up here: the script would build")
def test_on_this_machine_the_script_itself_says_what_is_missing():
    result = subprocess.run(["bash", str(SCRIPT), "--soc", "ascend910b"], capture_output=True, text=True)
    assert result.returncode == 1 and "CANN: ASCEND_HOME_PATH is not set" in result.stderr


@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="CANN is set up here: the wheel would be built")
@pytest.mark.parametrize(("soc", "message"), [("ascend910b", "CANN: ASCEND_HOME_PATH is not set"), ("ascend950", "--soc ascend950: expected one of")])
def test_a_wheel_for_a_device_is_never_one_without_its_kernels(tmp_path, soc, message):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    environment = {**os.environ, "MEGATRON_EXT_SOC": soc}
    result = subprocess.run(command, cwd=SCRIPT.parent.parent, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert message in result.stderr and "MEGATRON_EXT_SOC=none makes a wheel for CPUs only" in result.stderr
    assert not list(tmp_path.rglob("*.so"))
