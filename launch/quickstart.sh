#!/usr/bin/env bash
# The whole claim on one machine: a tiny Qwen3-MoE learns a small task by GRPO; Megatron TP2 x EP2 against vLLM TP2 with EP, logdiff
# exactly 0 at every sampled token of every step.
#
#     bash launch/quickstart.sh [--steps N] [--no-consistency] [--out DIR] [options of python -m megatron_ext.rl]
#
# --no-consistency runs the engines' stock numeric paths, for contrast. Writes summary.json, metrics.jsonl and metrics.png into --out
# (runs/quickstart), in the place of an earlier run.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"
unset PYTHONDONTWRITEBYTECODE # many processes start, and each would compile every module again
exec "$root/.venv/bin/python" -m megatron_ext.rl.quickstart "$@"
