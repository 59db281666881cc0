#!/usr/bin/env bash
# An RL run of Qwen3-4B on one Ascend node. Not yet runnable: it ends with what is missing until megatron_ext has its NPU platform.
#
#     HF=DIR PROMPTS=FILE.jsonl REWARD=MODULE:FUNCTION OUT=DIR STEPS=N bash launch/ascend_4b.sh [options of python -m megatron_ext.rl]
#
# HF            Hugging Face folder of Qwen3-4B (another model is refused when weights load)
# PROMPTS       JSON lines: {"prompt": text} or {"prompt_token_ids": [...]}, and what the reward reads
# REWARD        reward function, MODULE:FUNCTION or FILE.py:FUNCTION
# OUT           where metrics, logs, checkpoints and the final weights go
# STEPS         rollout-and-update steps
# ALGORITHM     grpo (default), gspo or dapo: options from configs/ALGORITHM.args
# TRAIN_TP, TRAIN_EP, TRAIN_PP    Megatron's sizes (8, 1, 1)
# ROLLOUT_TP    vLLM's tensor parallel size (8)
# NNODES        hosts; only 1 is built
# DRY_RUN=1     print the command and start nothing
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/launch/ascend_env.sh"
need HF "Hugging Face folder of Qwen3-4B"
need PROMPTS "JSON lines with prompts"
need REWARD "reward function, MODULE:FUNCTION"
need OUT "folder for what the run leaves"
need STEPS "number of steps"
require_npus
launch "$python" -m megatron_ext.rl "@$root/configs/${ALGORITHM:-grpo}.args" "@$root/configs/qwen3_4b.args" --hf "$HF" --prompts "$PROMPTS" \
    --reward "$REWARD" --out "$OUT" --steps "$STEPS" --train-tp "${TRAIN_TP:-8}" --train-ep "${TRAIN_EP:-1}" --train-pp "${TRAIN_PP:-1}" \
    --rollout-tp "${ROLLOUT_TP:-8}" --save-hf "$@"
