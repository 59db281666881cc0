#!/usr/bin/env bash
# Set-up, then the tests.
#
#     bash tests/run.sh [--full] [pytest arguments]
#
# Without --full the tests marked `full` (more layouts of the same promises) are left out.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"
unset PYTHONDONTWRITEBYTECODE # many processes start, and each would compile every module again

selection=(-m "not full")
if [[ "${1:-}" == "--full" ]]; then
    selection=()
    shift
fi
cd "$root"

# What only a test compares with, apart from the environment under test.
verl=.venv/verl_for_tests
if [[ "$(cat "$verl/setup.stamp" 2>/dev/null)" != "$(sha256sum <tests/requirements_verl.txt)" ]]; then
    rm -rf "$verl"
    .venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-compile --no-deps --target "$verl" -r tests/requirements_verl.txt
    sha256sum <tests/requirements_verl.txt >"$verl/setup.stamp"
fi
exec .venv/bin/python -m pytest -c tests/pytest.ini --rootdir . "${selection[@]}" "$@"
