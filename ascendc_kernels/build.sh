#!/usr/bin/env bash
# Builds everything for a device: the torch binding and the kernels for CPUs (build.py), and the device kernels (CMakeLists.txt, bisheng).
#
#     source <CANN>/set_env.sh
#     bash ascendc_kernels/build.sh --soc ascend910b|ascend910_93 [--python PYTHON] [--jobs N] [--check]
#
# --python  the interpreter whose torch and torch_npu the operators are for (default: .venv/bin/python if there is one, else python3)
# --jobs    compilers at once (default: one per core)
# --check   only say whether everything that a build needs is there
#
# Exit status 1 with a list of all that is missing, 2 for a wrong command line. The device build has been run on no machine yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$here")"
library="$here/build/npu/megatron_ext_npu.so"
socs=(ascend910b ascend910_93)

refuse() { # a wrong command line
    echo "error: $1" >&2
    echo "usage: build.sh --soc $(IFS='|' && echo "${socs[*]}") [--python PYTHON] [--jobs N] [--check]" >&2
    exit 2
}

parse() {
    soc="" python="" jobs="$(getconf _NPROCESSORS_ONLN)" check_only=false
    while (($#)); do
        case "$1" in
            --soc | --python | --jobs)
                (($# >= 2)) || refuse "$1 needs a value"
                declare -g "${1#--}=$2"
                shift
                ;;
            --check) check_only=true ;;
            *) refuse "unknown argument $1" ;;
        esac
        shift
    done
    [[ -n "$soc" ]] || refuse "--soc is missing"
    [[ " ${socs[*]} " == *" $soc "* ]] || refuse "--soc $soc: expected one of ${socs[*]} (an ascend950 adds in another order, see README.md)"
    [[ "$jobs" =~ ^[1-9][0-9]*$ ]] || refuse "--jobs $jobs: expected a number from 1 on"
    [[ -n "$python" ]] || { [[ -x "$root/.venv/bin/python" ]] && python="$root/.venv/bin/python" || python=python3; }
}

has() { command -v "$1" >/dev/null 2>&1; }

missing() { # one line for everything that a device build needs and this machine lacks
    if [[ -z "${ASCEND_HOME_PATH:-}" ]]; then
        echo "CANN: ASCEND_HOME_PATH is not set; source set_env.sh of the CANN toolkit first"
    elif [[ ! -d "$ASCEND_HOME_PATH" ]]; then
        echo "CANN: ASCEND_HOME_PATH=$ASCEND_HOME_PATH is not a folder; source set_env.sh of the CANN toolkit again"
    fi
    has bisheng || echo "bisheng: the device compiler is not on PATH; it comes with the CANN toolkit, whose set_env.sh adds it"
    has cmake || echo "cmake: not on PATH; version 3.16 or later is needed (pip install cmake, or the system's package)"
    if ! has "$python"; then
        echo "python: $python cannot be run; name an interpreter by --python"
        return
    fi
    local module
    for module in torch torch_npu; do
        "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)" ||
            echo "$module: $python cannot import it; install the torch_npu release for this CANN and the torch it names"
    done
}

check() {
    local problems
    problems="$(missing)"
    [[ -z "$problems" ]] && return
    echo "error: the kernels for $soc cannot be built here:" >&2
    sed 's/^/  - /' <<<"$problems" >&2
    exit 1
}

build() {
    (cd "$root" && "$python" -m ascendc_kernels.build)
    cmake -S "$here" -B "$here/build/npu" -DSOC_VERSION="$soc" -DPython3_EXECUTABLE="$(command -v "$python")"
    cmake --build "$here/build/npu" --parallel "$jobs"
    if [[ ! -f "$library" ]]; then
        echo "error: cmake ended without an error and without $library" >&2
        exit 1
    fi
    echo "built $library for $soc; now ask the device: $python tools/npu_probe.py --json probe.json"
}

parse "$@"
check
if $check_only; then
    echo "everything that a build for $soc needs is there"
else
    build
fi
