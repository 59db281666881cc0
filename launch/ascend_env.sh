# Sourced by the Ascend scripts, after common.sh: the environment that determinism needs, exported before any process group exists
# (HCCL and LCCL read it when they start; Ray does not forward it), and the checks of what a run on NPUs cannot do without.
export HCCL_DETERMINISTIC=strict        # collectives reduce in a fixed order (ours only move bytes; Megatron's start-up uses some of HCCL's)
export LCCL_DETERMINISTIC=1             # the same for LCCL, which HCCL_OP_EXPANSION_MODE=AIV brings in
export CLOSE_MATMUL_K_SHIFT=1           # matmul starts its contraction at k = 0 on every core
export ATB_MATMUL_SHUFFLE_K_ENABLE=0    # the same for ATB's matmul
export ATB_LLM_LCOC_ENABLE=0            # no matmul fused with communication
export VLLM_ASCEND_ENABLE_NZ=0          # weights stay in ND: weight sync and digests read them as they are
export PYTHONHASHSEED=0
export CUDA_DEVICE_MAX_CONNECTIONS=1    # Megatron asserts it for TP > 1

# require_npus: ends the script unless a run on NPUs can start. With DRY_RUN=1 only what the variables say is checked.
require_npus() {
    [[ "${NNODES:-1}" == 1 ]] || die "NNODES=$NNODES: runs over several hosts are not built (docs/rl.md); run on one"
    [[ -z "${DRY_RUN:-}" ]] || return 0
    [[ -f "$root/megatron_ext/platform/npu.py" ]] || die "megatron_ext has no NPU platform yet (megatron_ext/platform/npu.py); use launch/train_cpu.sh"
    "$python" -c 'import torch_npu' 2>/dev/null || die "torch_npu cannot be imported by $python; install torch_npu, vllm-ascend and MindSpeed there"
}
