#!/usr/bin/env bash
# An RL run on CPU: Megatron and vLLM side by side on this machine, logdiff 0 at every sampled token.
#
#     HF=DIR PROMPTS=FILE.jsonl REWARD=MODULE:FUNCTION OUT=DIR STEPS=N bash launch/train_cpu.sh [options of python -m megatron_ext.rl]
#
# HF            Hugging Face folder of the model to start from (a Megatron checkpoint: tools/convert_checkpoint.py to-hf first)
# PROMPTS       JSON lines: {"prompt": text} or {"prompt_token_ids": [...]}, and what the reward reads
# REWARD        reward function, MODULE:FUNCTION or FILE.py:FUNCTION
# OUT           where metrics, logs, checkpoints and the final weights go
# STEPS         rollout-and-update steps
# ALGORITHM     grpo (default), gspo or dapo: options from configs/ALGORITHM.args
# MODEL         optional, e.g. qwen3_0.6b: configs/MODEL.args as well, so that another model in HF is refused when weights load
# TRAIN_TP, TRAIN_EP, TRAIN_PP    Megatron's sizes (1)
# ROLLOUT_TP    vLLM's tensor parallel size (1); ROLLOUT_EP=1 spreads the experts over it
# DRY_RUN=1     print the command and start nothing
#
# Options at the end of the command line win over all of these; see `bash launch/grpo.sh --help`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need HF "Hugging Face folder of the model"
need PROMPTS "JSON lines with prompts"
need REWARD "reward function, MODULE:FUNCTION"
need OUT "folder for what the run leaves"
need STEPS "number of steps"
files=("@$root/configs/${ALGORITHM:-grpo}.args")
[[ -z "${MODEL:-}" ]] || files+=("@$root/configs/$MODEL.args")
[[ -z "${ROLLOUT_EP:-}" ]] || files+=(--rollout-ep)
launch "$python" -m megatron_ext.rl "${files[@]}" --hf "$HF" --prompts "$PROMPTS" --reward "$REWARD" --out "$OUT" --steps "$STEPS" \
    --train-tp "${TRAIN_TP:-1}" --train-ep "${TRAIN_EP:-1}" --train-pp "${TRAIN_PP:-1}" --rollout-tp "${ROLLOUT_TP:-1}" --save-hf "$@"
