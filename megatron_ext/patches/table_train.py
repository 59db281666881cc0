"""Patch rows of the training side: Megatron-core as published, what the consistent path needs of it, and what CPU needs."""

from functools import partial

from megatron_ext.patches.patch import Patch

_MEGATRON = partial(Patch, side="train", distribution="megatron-core", versions=">=0.19.2,<0.20")

# Native seams: Megatron builds what the layer spec names, so nothing is rebound. The rows still pin the source that the
# adapters were written against, and their hits prove that no layer fell back to a stock module.
_spec = partial(_MEGATRON, seam="spec", upstream="layer spec (ModuleSpec)", remove_when="never: this is Megatron's own seam")

TRAIN_ROWS = [
    _spec(
        target="megatron.core.tensor_parallel.layers:ColumnParallelLinear",
        replacement="megatron_ext.train.linear:ColumnParallelLinear",
        why="the input gradient is summed over TP ranks by all-reduce or reduce-scatter; K order is torch's own",
    ),
    _spec(
        target="megatron.core.tensor_parallel.layers:RowParallelLinear",
        replacement="megatron_ext.train.linear:RowParallelLinear",
        why="K is cut by TP and the partial sums are all-reduced: the sum depends on the TP size",
    ),
    _spec(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm",
        replacement="megatron_ext.train.norm:RMSNorm",
        why="the row sum is torch's own, and sequence parallelism is refused",
    ),
    _spec(
        target="megatron.core.transformer.attention:SelfAttention",
        replacement="megatron_ext.train.attention:SelfAttention",
        why="rotary tables and products are rounded in the tensor's type, from a table per batch shape",
    ),
    _spec(
        target="megatron.core.transformer.dot_product_attention:DotProductAttention",
        replacement="megatron_ext.train.attention:CoreAttention",
        why="the softmax order depends on the padded length; packed sequences are refused",
    ),
    _spec(
        target="megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add",
        replacement="megatron_ext.train.norm:residual_add",
        why="the residual sum must be rounded once, before the norm, with no dropout in between",
    ),
    _spec(
        target="megatron.core.transformer.mlp:MLP",
        replacement="megatron_ext.train.mlp:MLP",
        why="SwiGLU by torch's silu changes bits with length and offset",
        active_when="dense_layers > 0",
    ),
    _spec(
        target="megatron.core.transformer.moe.router:TopKRouter",
        replacement="megatron_ext.train.router:TopKRouter",
        why="top-k is sorted only while gradients are enabled, and softmax order is torch's own",
        active_when="experts > 0",
    ),
    _spec(
        target="megatron.core.transformer.moe.experts:SequentialMLP",
        replacement="megatron_ext.train.moe:Experts",
        why="the probability is multiplied before fc2, and fc2 is cut along its contraction under expert TP",
        active_when="experts > 0",
    ),
    _spec(
        target="megatron.core.transformer.moe.moe_layer:MoELayer",
        replacement="megatron_ext.train.moe:MoELayer",
        why="the stock layer hands a dense probability map to its dispatchers; ours hands weights and expert ids",
        active_when="experts > 0",
    ),
    _spec(
        target="megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
        replacement="megatron_ext.train.dispatch:AllToAllDispatcher",
        why="token copies are summed by scatter-add in the model type, in the order of arrival",
        active_when="experts > 0 and dispatcher == 'alltoall'",
    ),
    _spec(
        target="megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher",
        replacement="megatron_ext.train.dispatch:AllGatherDispatcher",
        why="expert outputs are reduce-scattered over TP x EP: the sum depends on the layout",
        active_when="experts > 0 and dispatcher == 'allgather'",
    ),
    _spec(
        target="megatron.core.tensor_parallel.layers:VocabParallelEmbedding",
        replacement="megatron_ext.train.embedding:embed_tokens",
        why="the weight gradient is a scatter-add whose order torch does not promise",
        upstream="decoder_input of GPTModel.forward",
        active_when="first_stage",
    ),
    _spec(
        target="megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
        replacement="megatron_ext.train.logprob:TokenLogprobs",
        why="logits are rounded to the model type, and the exponent sum depends on TP and on padded columns",
        upstream="output_processor of GPTModel.forward",
        active_when="last_stage",
    ),
    _spec(
        target="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        replacement="megatron_ext.train.gradients:finalize_model_grads",
        why="gradients are summed over DP, and over TP for norms, by a backend's own all-reduce. must_hit is off because only a "
        "train_step calls it",
        upstream="config.finalize_model_grads_func",
        must_hit=False,
    ),
    _MEGATRON(
        target="megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
        replacement="megatron_ext.train.grad_norm:grad_norm_fp32",
        seam="rebind",
        why="squares are summed per shard and then all-reduced: the norm depends on TP and PP. must_hit is off because only a "
        "train_step calls it",
        upstream="no seam: MegatronOptimizer.get_grad_norm calls the module's function",
        remove_when="Megatron takes the norm function from the optimizer config",
        must_hit=False,
    ),
]

_cpu = partial(
    Patch,
    side="train",
    seam="rebind",
    active_when="device == 'cpu'",
    consistency_only=False,
    must_hit=False,
    upstream="none: Megatron asks torch.cuda directly",
    remove_when="Megatron asks torch.accelerator",
)
_torch = partial(_cpu, distribution="torch", versions=">=2.13,<2.14")
_cpu_megatron = partial(_cpu, distribution="megatron-core", versions=">=0.19.2,<0.20")
_OPTIONAL = "; must_hit is off because whether it is asked depends on the run's options"


def _cuda(name: str, why: str, keeps_old: tuple[str, ...] = ()) -> Patch:
    target, replacement = f"torch.cuda:{name}", f"megatron_ext.platform.cpu:{name}"
    return _torch(target=target, replacement=replacement, why=why + _OPTIONAL, keeps_old=keeps_old)


CPU_ROWS = [
    _cuda("current_device", "raises without a GPU; Megatron allocates on its answer"),
    _cuda("device_count", "0 without a GPU, and then Megatron builds no parallel groups"),
    _cuda("set_device", "raises without a GPU"),
    _cuda("synchronize", "raises without a GPU"),
    _cuda("manual_seed", "queues work for a GPU that never comes"),
    _cuda("get_rng_state", "raises without a GPU; checkpoints record it"),
    _cuda("set_rng_state", "raises without a GPU; checkpoints restore it"),
    _cuda(
        "Stream",
        "cannot be made without a GPU. ExternalStream, its subclass, wraps queues of other libraries, which a host has none of",
        keeps_old=("torch.cuda.streams:ExternalStream",),
    ),
    _cuda("Event", "cannot be made without a GPU"),
    _cuda("stream", "needs a CUDA stream"),
    _cuda("current_stream", "raises without a GPU"),
    _cpu_megatron(
        target="megatron.training.utils.common_utils:get_device_arch_version",
        replacement="megatron_ext.platform.cpu:get_device_arch_version",
        why="reads the properties of a GPU; argument checks ask for it when TP > 1" + _OPTIONAL,
    ),
    _cpu_megatron(
        target="megatron.core.datasets.utils:compile_helpers",
        replacement="megatron_ext.platform.cpu:compile_helpers",
        why="runs a Makefile that the wheel does not ship and ends rank 0 when it fails" + _OPTIONAL,
    ),
    _cpu_megatron(
        target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        replacement="megatron_ext.platform.cpu:maybe_move_tensor_to_cpu",
        why="leaves host tensors as they are where numpy is asked for" + _OPTIONAL,
    ),
]
