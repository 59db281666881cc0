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
exec .venv/bin/python -m pytest -c tests/pytest.ini --rootdir . "${selection[@]}" "$@"
