"""The seams that must be covered, written down apart from the table.

The table says what is patched; this list says what has to be. `apply` refuses when a seam in force has no active row, so a
row cannot be deleted, or switched off by its condition, without an error that names what would run stock. Every row of
the table is named here (a test enforces it), and every numeric seam of the engines is.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_ext.patches.patch import Patch, evaluate_condition


@dataclass(frozen=True)
class Seam:
    """Something that must not run stock: `targets` are the rows which together take it over.

    name: what it is, for messages. breaks: what goes wrong when it runs stock.
    active_when, consistency_only: as in `Patch`.
    """

    name: str
    breaks: str
    targets: tuple[str, ...]
    active_when: str = "always"
    consistency_only: bool = True


def required(side: str) -> tuple[Seam, ...]:
    """The seams of a side."""
    return {"train": TRAIN_SEAMS, "rollout": ROLLOUT_SEAMS}[side]


def uncovered(
    seams: Iterable[Seam], active: Iterable[Patch], facts: Mapping[str, object], consistency: bool
) -> Iterator[str]:
    """One problem for every target of a seam in force that no active row claims."""
    claimed = {row.target for row in active}
    for seam in seams:
        try:
            in_force = (consistency or not seam.consistency_only) and evaluate_condition(seam.active_when, facts)
        except ValueError as error:
            yield f"seam {seam.name!r}: {error}"
            continue
        if in_force:
            yield from (
                f"{target}: no active row covers it, expected one for the seam {seam.name!r} ({seam.breaks}); put the row back "
                f"into the table or correct its active_when"
                for target in seam.targets if target not in claimed
            )  # fmt: skip


_TENSOR = "megatron.core.tensor_parallel.layers"
_TRANSFORMER = "megatron.core.transformer"
_MOE = f"{_TRANSFORMER}.moe"

TRAIN_SEAMS = (
    Seam("embedding backward", "a scatter-add in token order", (f"{_TENSOR}:VocabParallelEmbedding",), "first_stage"),
    Seam("norms: layer, q/k, final", "row sum and weight gradient", (f"{_TRANSFORMER}.torch_norm:WrappedTorchNorm",)),
    Seam("residual sum", "where it is rounded", ("megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",)),
    Seam("column-parallel linears", "K order; sums over TP and tokens in backward", (f"{_TENSOR}:ColumnParallelLinear",)),
    Seam("row-parallel linears", "partial sums over TP", (f"{_TENSOR}:RowParallelLinear",)),
    Seam("rotary embedding; TP > KV heads", "tables, products and dK/dV in bf16", (f"{_TRANSFORMER}.attention:SelfAttention",)),
    Seam("core attention", "softmax order by padded length", (f"{_TRANSFORMER}.dot_product_attention:DotProductAttention",)),
    Seam("dense MLP", "silu by length and offset", (f"{_TRANSFORMER}.mlp:MLP",), "dense_layers"),
    Seam("router", "order of logits, softmax and top-k", (f"{_MOE}.router:TopKRouter",), "experts > 0"),
    Seam("experts", "probability before fc2; K order", (f"{_MOE}.experts:SequentialMLP",), "experts > 0"),
    Seam("MoE layer, shared experts", "order of the combine", (f"{_MOE}.moe_layer:MoELayer",), "experts > 0"),
    Seam(
        "all-to-all dispatch, permute and unpermute", "scatter-add in the model dtype, in order of arrival",
        (f"{_MOE}.token_dispatcher:MoEAlltoAllTokenDispatcher",), "experts > 0 and dispatcher == 'alltoall'",
    ),
    Seam(
        "allgather dispatch", "reduce-scatter over TP x EP",
        (f"{_MOE}.token_dispatcher:MoEAllGatherTokenDispatcher",), "experts > 0 and dispatcher == 'allgather'",
    ),
    Seam(
        "output layer and vocabulary-parallel cross entropy", "bf16 logits; exponent sum over TP and padding",
        ("megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",), "last_stage",
    ),
    Seam(
        "gradient sums over DP, of norms over TP, of tied embeddings", "a backend's own all-reduce",
        ("megatron.core.distributed.finalize_model_grads:finalize_model_grads",),
    ),
    Seam("gradient norm", "squares per shard, then all-reduce", ("megatron.core.optimizer.clip_grads:get_grad_norm_fp32",)),
    Seam(
        "CUDA device on a CPU", "there is no such device",
        tuple(f"torch.cuda:{name}" for name in (
            "current_device", "device_count", "set_device", "synchronize", "manual_seed", "get_rng_state", "set_rng_state",
            "Stream", "Event", "stream", "current_stream",
        )),
        "device == 'cpu'", consistency_only=False,
    ),
    Seam(
        "Megatron's set-up on a CPU", "it asks a GPU, or for a Makefile that the wheel does not ship",
        ("megatron.training.utils.common_utils:get_device_arch_version", "megatron.core.datasets.utils:compile_helpers"),
        "device == 'cpu'", consistency_only=False,
    ),
    Seam(
        "stock dispatchers on a CPU", "host split sizes stay tensors where numpy is asked for",
        (f"{_MOE}.moe_utils:maybe_move_tensor_to_cpu",), "device == 'cpu'", consistency_only=False,
    ),
)  # fmt: skip

_LAYERS = "vllm.model_executor.layers"
_WORKER, _FRONTEND = "role == 'worker'", "role == 'frontend'"

ROLLOUT_SEAMS = (
    Seam("every process of the engine", "a process without the contract runs stock", ("vllm.plugins:load_general_plugins",),
         consistency_only=False),
    Seam("linears (vLLM looks each subclass up by its own name)", "K order by batch; bf16 partial sums over TP",
         tuple(f"{_LAYERS}.linear:{name}" for name in (
             "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear", "ReplicatedLinear",
         )), _WORKER),
    Seam("norms", "residual normalised before it is rounded; row sum", (f"{_LAYERS}.layernorm:RMSNorm",), _WORKER),
    Seam("activation", "silu by length and offset", (f"{_LAYERS}.activation:SiluAndMul",), _WORKER),
    Seam("rotary embedding", "tables made by other functions than Megatron's",
         (f"{_LAYERS}.rotary_embedding.base:RotaryEmbedding",), _WORKER),
    Seam("embedding and head", "sum over TP by the backend; weights repacked",
         tuple(f"{_LAYERS}.vocab_parallel_embedding:{name}" for name in ("VocabParallelEmbedding", "ParallelLMHead")), _WORKER),
    Seam("logits", "rounded to bf16", (f"{_LAYERS}.logits_processor:LogitsProcessor",), _WORKER),
    Seam("router", "logits rounded before top-k", (f"{_LAYERS}.fused_moe.router.gate_linear:GateLinear",), _WORKER),
    Seam("experts", "order of experts; expert map ignored", (f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts",), _WORKER),
    Seam("MoE runner", "a complete result is all-reduced again", (f"{_LAYERS}.fused_moe.runner.moe_runner:MoERunner",), _WORKER),
    Seam("attention", "keys split by batch load", ("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend",), _WORKER),
    Seam("check of the loaded model", "a module without adapter runs stock",
         ("vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",), _WORKER),
    Seam("sampler", "log-softmax order; draws that change with the batch",
         ("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",), _WORKER, consistency_only=False),
    Seam("stock experts under expert parallelism", "the engine crashes",
         ("vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply",), _WORKER, consistency_only=False),
    Seam("sampling parameters", "top-k, penalties and the like change the distribution",
         ("vllm.sampling_params:SamplingParams.verify",), _FRONTEND),
    Seam("engine configuration", "graph mode, speculation, quantisation, LoRA",
         ("vllm.platforms.cpu:CpuPlatform.check_and_update_config",), _FRONTEND),
)  # fmt: skip
