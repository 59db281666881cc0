#!/usr/bin/env bash
# An RL run: GRPO, DAPO's clip-higher or GSPO by options, see `bash launch/grpo.sh --help`. Sets the environment up if needed.
#
#     bash launch/grpo.sh --hf DIR --prompts FILE.jsonl --reward MODULE:FUNCTION --steps N --out DIR \
#         --train-tp 2 --train-ep 2 --rollout-tp 2 --rollout-ep --lr 1e-6 [--resume]
#
# Options can stand in a file: bash launch/grpo.sh @configs/grpo_quickstart.args --hf ... Megatron's own flags pass through.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/launch/setup.sh"
unset PYTHONDONTWRITEBYTECODE # many processes start, and each would compile every module again
exec "$root/.venv/bin/python" -m megatron_ext.rl "$@"
