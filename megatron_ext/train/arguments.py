"""Our command-line flags inside Megatron's parser, the contract they make, and the refusal of what cannot be kept consistent."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.contract import KERNEL_BACKENDS, Contract, ContractError, check_same_digest
from megatron_ext.probe.report import order_fields
from megatron_ext.reduction_order import GRADIENT_ORDERS, KV_TILES, MMAD_ORDERS, OrderError, ReductionOrder, is_power_of_two


class UnsupportedOption(ValueError):
    """A Megatron option, or a combination with the layout, that the consistent path does not keep. Lists every one found."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(["the consistent training path cannot run with these options:", *(f"  - {p}" for p in problems)]))


class _PlainHelp(argparse.HelpFormatter):
    """Prints a help text as it stands where it cannot be expanded: Megatron 0.19.2 has one with a bare per cent sign."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (KeyError, TypeError, ValueError):
            return action.help


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's `extra_args_provider`."""
    parser.formatter_class = _PlainHelp
    order = ReductionOrder()
    group = parser.add_argument_group("megatron_ext", "train-inference consistency")
    group.add_argument("--no-consistency", action="store_false", dest="consistency",
                       help="run Megatron's stock numeric modules; only what the device needs is adapted")
    group.add_argument("--kernel-backend", choices=KERNEL_BACKENDS, default="ascendc",
                       help="ascendc: the operators of ascendc_kernels; reference: the executable specification (slow). Same bits")
    group.add_argument("--mmad-order", choices=MMAD_ORDERS,
                       help=f"order of additions inside one segment of a contraction (default: {order.mmad_order}, or as --npu-probe found it)")
    group.add_argument("--npu-probe", metavar="FILE", help="verdicts of tools/npu_probe.py: how this device adds and treats subnormals")
    group.add_argument("--reduction-segments", type=int, default=order.segments,
                       help="equal pieces of every contraction that tensor parallelism may cut; the largest possible TP")
    group.add_argument("--kv-tile", type=int, choices=KV_TILES, default=order.kv_tile, help="keys per online-softmax step")
    group.add_argument("--gradient-order", choices=GRADIENT_ORDERS, default=order.gradient_order,
                       help="fixed-dp: gradients are summed in an order that is fixed for one DP and EP")
    return parser  # fmt: skip


def contract_from_args(args: argparse.Namespace) -> Contract:
    """The run's contract. Raises ContractError if the launching process exported another one, ProbeError if --npu-probe rules it out."""
    order = ReductionOrder(
        segments=args.reduction_segments,
        kv_tile=args.kv_tile,
        gradient_order=args.gradient_order,
        **order_fields(args.npu_probe, args.mmad_order),
    )
    contract = Contract(order=order, kernel_backend=args.kernel_backend, consistency=args.consistency)
    exported = Contract.from_environment()
    if exported is not None:
        check_same_digest({"command line": contract.digest(), "environment": exported.digest()})
    return contract


def set_padded_vocab(args: argparse.Namespace, contract: Contract) -> None:
    """Sets args.padded_vocab_size: by the order, the same for every TP; with stock numerics, as Megatron pads."""
    if not args.vocab_size:
        raise ContractError("--vocab-size is needed: the number of real tokens, which padded columns are told from")
    if not contract.consistency:
        from megatron.training.vocab_utils import calculate_padded_vocab_size

        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
        )
        return
    padded = contract.order.padded_vocab(args.vocab_size)
    if args.padded_vocab_size not in (None, padded):
        raise UnsupportedOption([
            f"--padded-vocab-size is {args.padded_vocab_size}, the order pads {args.vocab_size} tokens to {padded}; leave it out"
        ])  # fmt: skip
    args.padded_vocab_size = padded


@dataclass(frozen=True)
class Requirement:
    """An argument and the values with which the consistent path works."""

    name: str
    allowed: tuple[Any, ...]
    why: str
    flag: str = field(default="")

    def problem(self, args: argparse.Namespace) -> str | None:
        if not hasattr(args, self.name):
            return f"{self.name}: Megatron's parser does not know it any more; see what became of it, then correct REQUIREMENTS"
        found = getattr(args, self.name)
        if any(found == value for value in self.allowed):
            return None
        flag = self.flag or "--" + self.name.replace("_", "-")
        wanted = " or ".join(repr(value) for value in self.allowed)
        return f"{flag}: expected {wanted}, found {found!r} ({self.why})"


_OFF = (False, None)
_ORDERED = "its sums have no fixed order"
_ABSENT = "no adapter covers it"
_OVERLAP = "gradients are summed in a fixed order after the backward pass, not while it runs"

REQUIREMENTS = (
    # precision
    Requirement("fp8", (None,), _ABSENT, "--fp8-format"),
    Requirement("fp4", (None,), _ABSENT, "--fp4-format"),
    Requirement("fp32_residual_connection", _OFF, "the residual is rounded to the model type before every norm"),
    Requirement("fp16_lm_cross_entropy", _OFF, "logits stay in fp32"),
    Requirement("grad_reduce_in_bf16", _OFF, "gradients are accumulated and summed in fp32"),
    # model
    Requirement("transformer_impl", ("local",), "the layer spec is built from local modules"),
    Requirement("normalization", ("RMSNorm",), _ABSENT),
    Requirement("swiglu", (True,), _ABSENT),
    Requirement("add_bias_linear", (False,), _ABSENT, "--disable-bias-linear"),
    Requirement("add_qkv_bias", _OFF, _ABSENT),
    Requirement("attention_output_gate", _OFF, _ABSENT),
    Requirement("layernorm_zero_centered_gamma", _OFF, _ABSENT, "--apply-layernorm-1p"),
    Requirement("apply_residual_connection_post_layernorm", _OFF, _ABSENT),
    Requirement("fused_residual_rmsnorm", _OFF, _ABSENT),
    Requirement("hidden_dropout", (0.0,), "dropout differs from the rollout by design"),
    Requirement("attention_dropout", (0.0,), "dropout differs from the rollout by design"),
    Requirement("position_embedding_type", ("rope",), _ABSENT),
    Requirement("rotary_interleaved", _OFF, _ABSENT),
    Requirement("use_rope_scaling", _OFF, _ABSENT),
    Requirement("rotary_seq_len_interpolation_factor", (None,), _ABSENT),
    Requirement("no_rope_freq", (None,), _ABSENT),
    Requirement("mrope_section", (None,), _ABSENT),
    Requirement("multi_latent_attention", _OFF, _ABSENT),
    Requirement("experimental_attention_variant", (None,), _ABSENT),
    Requirement("window_size", (None,), "attention is causal over the whole sequence"),
    Requirement("softmax_type", ("vanilla",), _ABSENT),
    Requirement("apply_query_key_layer_scaling", _OFF, _ABSENT),
    Requirement("qk_l2_norm", _OFF, _ABSENT),
    Requirement("qk_clip", _OFF, _ABSENT),
    Requirement("log_max_attention_logit", _OFF, "the attention kernel does not report it"),
    Requirement("mtp_num_layers", (None,), _ABSENT),
    Requirement("use_mup", _OFF, _ABSENT),
    Requirement("squared_relu", _OFF, _ABSENT),
    Requirement("quick_geglu", _OFF, _ABSENT),
    Requirement("activation_func_clamp_value", (None,), _ABSENT),
    Requirement("glu_linear_offset", (0.0,), _ABSENT),
    Requirement("is_hybrid_model", _OFF, _ABSENT),
    Requirement("hybrid_layer_pattern", (None,), _ABSENT),
    Requirement("heterogeneous_layers_config_path", (None,), _ABSENT),
    Requirement("spec", (None,), "the layer spec is ours"),
    # execution
    Requirement("context_parallel_size", (1,), _ABSENT),
    Requirement("num_virtual_stages_per_pipeline_rank", (None,), _ABSENT),
    Requirement("num_layers_per_virtual_pipeline_stage", (None,), _ABSENT),
    Requirement("decoder_first_pipeline_num_layers", (None,), "stages hold equally many layers"),
    Requirement("decoder_last_pipeline_num_layers", (None,), "stages hold equally many layers"),
    Requirement("pipeline_model_parallel_layout", (None,), "stages hold equally many layers"),
    Requirement("account_for_embedding_in_pipeline_split", _OFF, "stages hold equally many layers"),
    Requirement("account_for_loss_in_pipeline_split", _OFF, "stages hold equally many layers"),
    Requirement("use_tp_pp_dp_mapping", _OFF, "pipeline stages are the outermost ranks"),
    Requirement("tensor_parallel_num_weight_shards", (None,), _ABSENT),
    Requirement("expert_tensor_parallel_num_weight_shards", (None,), _ABSENT),
    Requirement("fine_grained_activation_offloading", _OFF, _ABSENT),
    Requirement("cpu_offloading_num_layers", (0,), _ABSENT),
    Requirement("te_precision_config_file", (None,), _ABSENT),
    Requirement("recompute_granularity", (None,), _ABSENT),
    Requirement("recompute_activations", _OFF, _ABSENT),
    Requirement("cuda_graph_impl", ("none",), _ABSENT),
    Requirement("mlp_chunks_for_training", (1,), _ABSENT),
    Requirement("defer_embedding_wgrad_compute", _OFF, _OVERLAP),
    Requirement("delay_wgrad_compute", _OFF, _OVERLAP),
    Requirement("gradient_accumulation_fusion", _OFF, "weight gradients are accumulated by our own kernel", "--no-gradient-accumulation-fusion"),
    Requirement("tp_comm_overlap", _OFF, _ORDERED),
    Requirement("overlap_grad_reduce", _OFF, _OVERLAP),
    Requirement("ddp_average_in_collective", _OFF, "gradients are summed, then divided once by the number of tokens"),
    Requirement("ddp_param_name_patterns_for_fp32_local_accumulation", ([],), "every gradient is accumulated in fp32"),
    Requirement("overlap_param_gather", _OFF, _ABSENT),
    Requirement("overlap_moe_expert_parallel_comm", _OFF, _ABSENT),
    Requirement("use_distributed_optimizer", _OFF, "its gradient shards are reduce-scattered by the backend"),
    Requirement("use_megatron_fsdp", _OFF, _ABSENT),
    Requirement("use_torch_fsdp2", _OFF, _ABSENT),
    Requirement("optimizer", ("adam", "sgd"), _ABSENT),
    Requirement("optimizer_cpu_offload", _OFF, _ABSENT),
    Requirement("use_precision_aware_optimizer", _OFF, _ABSENT),
    Requirement("calculate_per_token_loss", (True,), "the loss is a token sum, scaled once after accumulation"),
    Requirement("skip_train", _OFF, "the engine owns an optimizer"),
    Requirement("perform_rl_step", _OFF, "rollouts come from vLLM"),
    Requirement("batch_invariant_mode", _OFF, "it replaces torch's kernels by another order"),
)  # fmt: skip


EXPERT_REQUIREMENTS = (
    Requirement("moe_grouped_gemm", _OFF, "it needs TransformerEngine; our experts are grouped anyway"),
    Requirement("moe_token_dispatcher_type", ("alltoall", "allgather"), _ABSENT),
    Requirement("moe_router_dtype", ("fp32",), "router logits are fp32 on both sides"),
    Requirement("moe_router_score_function", ("softmax", "sigmoid"), _ABSENT),
    Requirement("moe_router_load_balancing_type", ("none", ["none"]), "the loss must not depend on which tokens share a batch"),
    Requirement("moe_aux_loss_coeff", (0.0, [0.0]), "the loss must not depend on which tokens share a batch"),
    Requirement("moe_z_loss_coeff", (None,), "the loss must not depend on which tokens share a batch"),
    Requirement("moe_input_jitter_eps", (None,), "it is random"),
    Requirement("moe_router_force_load_balancing", _OFF, "it is random"),
    Requirement("moe_router_force_biased", (None,), "it is random"),
    Requirement("moe_expert_capacity_factor", (None,), "dropped tokens depend on which tokens share a batch"),
    Requirement("moe_pad_expert_input_to_capacity", _OFF, "dropped tokens depend on which tokens share a batch"),
    Requirement("moe_router_padding_for_quantization", _OFF, _ABSENT),
    Requirement("moe_router_fusion", _OFF, _ORDERED),
    Requirement("moe_permute_fusion", _OFF, _ORDERED),
    Requirement("moe_apply_probs_on_input", _OFF, "an expert's output is weighted after fc2"),
    Requirement("moe_shared_expert_intermediate_size", (None,), _ABSENT),
    Requirement("moe_shared_expert_overlap", _OFF, _ABSENT),
    Requirement("moe_latent_size", (None,), _ABSENT),
    Requirement("moe_mlp_glu_interleave_size", (None,), _ABSENT),
    Requirement("moe_enable_routing_replay", _OFF, _ABSENT),
    Requirement("moe_use_upcycling", _OFF, _ABSENT),
    Requirement("moe_expert_rank_capacity_factor", (None,), "dropped tokens depend on which tokens share a batch"),
    Requirement("moe_paged_stash", _OFF, _ABSENT),
    Requirement("moe_layer_recompute", _OFF, _ABSENT),
)  # fmt: skip


def check_supported(args: argparse.Namespace, order: ReductionOrder) -> None:
    """Raises UnsupportedOption listing every option of a consistent run that its adapters do not keep."""
    requirements = REQUIREMENTS + (EXPERT_REQUIREMENTS if args.num_experts else ())
    problems = [problem for requirement in requirements if (problem := requirement.problem(args)) is not None]
    if args.bf16 == args.fp16:
        problems.append("--bf16 or --fp16: expected exactly one of them; the model type is a 16-bit float")
    if args.fp16 and not args.accumulate_allreduce_grads_in_fp32:
        problems.append("--accumulate-allreduce-grads-in-fp32: needed with --fp16; gradients are accumulated in fp32")
    problems += _layout_problems(args, order)
    if args.num_experts:
        problems += _expert_problems(args, order)
    if problems:
        raise UnsupportedOption(problems)


def expert_tensor_parallel_size(args: argparse.Namespace) -> int:
    """Megatron's default before validate_args fills it in: as many as TP."""
    return args.expert_tensor_parallel_size or args.tensor_model_parallel_size


def _layout_problems(args: argparse.Namespace, order: ReductionOrder) -> list[str]:
    problems = []
    tp = args.tensor_model_parallel_size
    head_dim = args.kv_channels or args.hidden_size // args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups % tp:
        problems.append(
            f"--tensor-model-parallel-size {tp} does not divide --num-query-groups {groups}; "
            "sharing a key/value head between ranks is not supported, choose a smaller TP"
        )
    widths = {
        "--hidden-size": args.hidden_size,
        "query projection (heads x head_dim)": args.num_attention_heads * head_dim,
        "QKV projection": (args.num_attention_heads + 2 * groups) * head_dim,
        "--ffn-hidden-size": args.ffn_hidden_size,
    }
    problems += _order_problems(lambda: order.local_segments(tp))
    for name, width in widths.items():
        if width is None:
            problems.append(f"{name}: expected a number; Megatron's default depends on other flags")
        else:
            problems += _order_problems(lambda name=name, width=width: order.check_contraction(width, name))
    data_parallel = args.world_size // (tp * args.pipeline_model_parallel_size)
    if not is_power_of_two(data_parallel):
        problems.append(f"data parallel size {data_parallel} is not a power of two; gradients are summed by a binary tree over it")
    return problems


def _expert_problems(args: argparse.Namespace, order: ReductionOrder) -> list[str]:
    tp, etp = args.tensor_model_parallel_size, expert_tensor_parallel_size(args)
    problems = _order_problems(lambda: order.check_expert_parallel(args.num_experts, args.expert_model_parallel_size))
    problems += _order_problems(lambda: order.local_segments(etp))
    width = args.moe_ffn_hidden_size
    if width is None:
        problems.append("--moe-ffn-hidden-size: expected a number")
    else:
        problems += _order_problems(lambda: order.check_contraction(width, "--moe-ffn-hidden-size"))
    if tp > 1 and not args.sequence_parallel:
        problems.append("--sequence-parallel: needed with experts and TP > 1; without it every TP rank dispatches the same tokens")
    if args.expert_model_parallel_size * etp % tp:
        problems.append(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} x --expert-tensor-parallel-size {etp}: expected a multiple of "
            f"TP={tp}; one micro-batch's tokens would reach several copies of an expert, and its gradient would depend on TP"
        )
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate:
        problems.append("--moe-router-bias-update-rate: expected 0.0; the correction bias is honoured but not updated")
    if args.moe_router_num_groups:
        group_top = args.moe_router_topk // args.moe_router_group_topk
        expected = 2 if args.moe_router_enable_expert_bias else 1
        if group_top != expected:
            problems.append(
                f"--moe-router-group-topk {args.moe_router_group_topk} with --moe-router-topk {args.moe_router_topk}: groups would be "
                f"ranked by their {group_top} best experts, the rollout ranks them by {expected}"
            )
    return problems


def _order_problems(check) -> list[str]:
    try:
        check()
    except OrderError as error:
        return [str(error)]
    return []
