"""What happens to gradients after the backward pass: sums over data parallelism, tied embeddings, scaling."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_ext import collectives
from megatron_ext.patches import hit
from megatron_ext.train.embedding import TIED_GRAD
from megatron_ext.train.finite import check_gradients


def finalize_model_grads(model, num_tokens=None, pg_collection=None, force_all_reduce: bool | None = False) -> None:
    """Takes Megatron's function's place in `config.finalize_model_grads_func`.

    Sums every gradient buffer over its data-parallel group by the tree over ranks, joins the two accumulators of a tied
    embedding, then divides once by the number of tokens. Norm and router weights need no sum over TP: their
    accumulators have seen the rows of all TP ranks (`norm`, `router`).
    """
    hit("megatron.core.distributed.finalize_model_grads:finalize_model_grads")
    for chunk in model:
        buckets = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
        if any(group.ddp_config.check_for_nan_in_grad for group in buckets):  # off under a loss scaler, which skips such steps
            check_gradients(chunk.module.named_parameters())
        for bucket_group in buckets:
            _sum_over_data_parallel(bucket_group)
        _join_tied_embedding(chunk)
    if num_tokens is not None:
        scaling = 1.0 / _total_tokens(num_tokens)
        for chunk in model:
            chunk.scale_gradients(scaling)


def _sum_over_data_parallel(bucket_group) -> None:
    if bucket_group.ddp_config.check_for_large_grads:
        bucket_group.check_grads(False, True)
    for bucket in bucket_group.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            raise ValueError(
                f"gradient bucket: expected scaling factor 1.0, found {bucket.gradient_scaling_factor}; use --calculate-per-token-loss"
            )
        _sum_in_place(bucket.grad_data, bucket_group.data_parallel_group)


def _sum_in_place(grad: torch.Tensor, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        grad.copy_(collectives.ordered_all_reduce(grad, group, torch.float32))


def _join_tied_embedding(chunk) -> None:
    """Head plus embedding, each complete over data parallelism first: one addition, whatever the pipeline layout."""
    module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    if not module.share_embeddings_and_output_weights or not (module.pre_process or module.post_process):
        return
    weight = module.shared_embedding_or_output_weight()
    tied_grad = getattr(weight, TIED_GRAD, None)
    if tied_grad is not None:
        _sum_in_place(tied_grad, parallel_state.get_data_parallel_group(with_context_parallel=True))
        weight.main_grad.add_(tied_grad)
        setattr(weight, TIED_GRAD, None)
    embedding_group = parallel_state.get_embedding_group(check_initialized=False)
    if embedding_group is not None:
        _sum_in_place(weight.main_grad, embedding_group)


def _total_tokens(num_tokens: torch.Tensor) -> torch.Tensor:
    """int [] or [1]: tokens of the global batch, at least one. Only the last pipeline stage has counted them. Integers add exactly."""
    dist.broadcast(
        num_tokens, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=parallel_state.get_pipeline_model_parallel_group()
    )
    dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return num_tokens.clamp(min=1)
