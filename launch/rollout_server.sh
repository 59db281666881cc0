#!/usr/bin/env bash
# vLLM's OpenAI-compatible server under the order contract: its logprobs are, bit for bit, those that Megatron recomputes.
#
#     HF=DIR bash launch/rollout_server.sh [options of vllm serve]
#
# HF                Hugging Face folder: config.json, safetensors, tokenizer
# TP                tensor parallel size (1); EP=1 spreads the experts over it
# HOST, PORT        where to listen (127.0.0.1, 8000)
# MAX_MODEL_LEN     tokens of a prompt and its response (default: what the model allows)
# KV_CACHE_MIB      key/value cache per rank (1024)
# MMAD_ORDER        sequential (default) or groups16: must be that of training (--mmad-order)
# NPU_PROBE         verdicts of tools/npu_probe.py, which decide the order: must be those of training (--npu-probe)
# KERNEL_BACKEND    ascendc (default) or reference
# DRY_RUN=1         print the command and start nothing
#
# Ask for "seed" in every request, "logprobs": 1, and token ids ("return_token_ids": true): train on the ids, never on text.
# The same contract has to be exported where training starts; both sides compare its digest before the first token.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
need HF "Hugging Face folder of the model"
tp="${TP:-1}"
expert_parallel=()
[[ -z "${EP:-}" ]] || expert_parallel=(--enable-expert-parallel)
length=()
[[ -z "${MAX_MODEL_LEN:-}" ]] || length=(--max-model-len "$MAX_MODEL_LEN")
order=()
[[ -z "${MMAD_ORDER:-}" ]] || order+=(--mmad-order "$MMAD_ORDER")
[[ -z "${NPU_PROBE:-}" ]] || order+=(--npu-probe "$NPU_PROBE")
launch "$python" -m megatron_ext.rollout.serve "${order[@]}" --kernel-backend "${KERNEL_BACKEND:-ascendc}" \
    "$HF" --tensor-parallel-size "$tp" "${expert_parallel[@]}" "${length[@]}" --kv-cache-memory-bytes "$((${KV_CACHE_MIB:-1024} << 20))" \
    --host "${HOST:-127.0.0.1}" --port "${PORT:-8000}" "$@"
