#!/usr/bin/env bash
# The whole claim on one machine: a small random Qwen3-MoE, Megatron TP2 x EP2 against vLLM TP2 with EP, logdiff exactly 0,
# one optimizer step, weights synced, and again.
#
#     bash launch/quickstart.sh [--no-consistency] [--out DIR] [options of megatron_ext.parity.quickstart]
#
# --no-consistency runs the engines' stock numeric paths, for contrast. Writes summary.json into --out.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"
unset PYTHONDONTWRITEBYTECODE # many processes start, and each would compile every module again
exec "$root/.venv/bin/python" -m megatron_ext.parity.quickstart "$@"
