#!/usr/bin/env bash
# Makes the environment of this checkout: .venv with Python 3.12, the pinned packages, this package, the operators.
# Safe to call any number of times, also at once: what is done already is skipped. About 7 GB of disk.
set -euo pipefail
exec </dev/null

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
cd "$root"

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

# A Python 3.12 that really runs (pyenv leaves a python3.12 that only prints an error) and can make environments.
runs() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
    local candidate
    local pyenv_root="${PYENV_ROOT:-$(pyenv root 2>/dev/null || echo "${HOME:-}/.pyenv")}"
    for candidate in python3.12 "$pyenv_root"/versions/3.12*/bin/python python3 \
                     "$(uv python find --no-project 3.12 2>/dev/null || true)"; do
        if [[ -n "$candidate" ]] && runs "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    if [[ -e "$venv" ]] && runs "$venv/bin/python"; then
        return
    fi
    local python
    if python="$(find_python)"; then
        say "making .venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    elif command -v uv >/dev/null; then
        say "making .venv with uv and its own Python 3.12"
        uv venv --clear --seed --python 3.12 "$venv"
    else
        die "Python 3.12 with venv and ensurepip is needed and was not found (looked for python3.12, pyenv's versions, python3, uv).
        Install one of them, for example: apt-get install python3.12 python3.12-venv, or: pyenv install 3.12, or uv."
    fi
}

# What the packages were installed from; they are installed again when this changes.
packages_key() { { cat requirements.txt setup.py; "$venv/bin/python" -VV; echo "$root"; } | sha256sum; }

install_packages() {
    local key stamp="$venv/setup.stamp"
    key="$(packages_key)"
    if [[ "$(cat "$stamp" 2>/dev/null)" == "$key" ]]; then
        return
    fi
    say "installing $(grep -c == requirements.txt) pinned packages (minutes; about 3 GB to download the first time)"
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --no-compile --no-deps -r requirements.txt
    say "installing megatron_ext itself (editable)"
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --no-deps --no-build-isolation -e .
    say "first import of the engines (checks the environment, and byte-compiles what they use)"
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -W ignore -c \
        'import torch, transformers, megatron.training.training, vllm.entrypoints.llm, vllm.v1.worker.cpu_worker' \
        >"$venv/first_import.log" 2>&1 || { tail -n 20 "$venv/first_import.log" >&2; die "the installed engines cannot be imported"; }
    echo "$key" >"$stamp"
}

command -v g++ >/dev/null || die "g++ is needed to build the operators and was not found; for example: apt-get install g++"
exec 9>"$root/.venv.lock"
flock --nonblock 9 || { say "another set-up of this checkout is running; waiting for it"; flock 9; }
make_venv
install_packages
say "operators (what changed is compiled)"
"$venv/bin/python" -m ascendc_kernels.build
say "ready: $venv"
