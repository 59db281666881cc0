# Sourced by the launch scripts. Gives them $root, $python, die, need and launch.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"

die() { printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

# need NAME MEANING: the variable NAME must be set.
need() { [[ -n "${!1:-}" ]] || die "$1 is not set: $2"; }

# launch COMMAND...: sets the environment up if needed and becomes COMMAND. With DRY_RUN=1: prints it instead, and starts nothing.
launch() {
    if [[ -n "${DRY_RUN:-}" ]]; then
        printf '%q ' "$@"
        printf '\n'
        return
    fi
    bash "$root/launch/setup.sh"
    unset PYTHONDONTWRITEBYTECODE # many processes start, and each would compile every module again
    exec "$@"
}
