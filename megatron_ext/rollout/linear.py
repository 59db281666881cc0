"""Linear layers of vLLM over `ops.linear`: the order of K depends on the logical index only, never on TP or on the batch."""

from __future__ import annotations

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.rollout.settings import RolloutError

_MODULE = "vllm.model_executor.layers.linear"


class OrderedLinearMethod(LinearMethodBase):
    """Multiplies by the layer's weight and leaves that weight in place.

    The stock method may repack a weight for oneDNN and delete it, after which neither weight sync nor digests see it.
    """

    def create_weights(self, layer, *args, **kwargs):
        raise RolloutError(f"{layer.prefix}: weights are made by vLLM's own method before this one takes over")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as loaded."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, K] -> [T, N] in the model dtype, all of K on this rank."""
        if bias is not None:
            raise RolloutError(f"{layer.prefix}: a bias has no place in the order contract; use a model without biases")
        return ops.linear(x, layer.weight.data)


class OrderedLinear:
    """What every ordered linear checks and sets once vLLM has built it. A mix-in before a class of vLLM."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.quant_config is not None:
            raise RolloutError(f"{self.prefix}: quantised ({self.quant_config.get_name()}); give an unquantised model")
        if self.bias is not None:
            raise RolloutError(f"{self.prefix}: a bias has no place in the order contract; use a model without biases")
        self.quant_method = OrderedLinearMethod()

    def _returned(self, output: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """The return form vLLM's models unpack: (output, bias to add later)."""
        return (output, None) if self.return_bias else output


class _OrderedColumn(OrderedLinear):
    """All of K is here, N is cut by TP: no sum crosses ranks."""

    target: str

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """input_ [T, K] -> [T, N / TP], or [T, N] with gather_output."""
        hit(self.target)
        output = self.quant_method.apply(self, input_)
        if self.gather_output and self.tp_size > 1:
            output = collectives.all_gather_concat(output, get_tp_group().device_group, dim=-1)
        return self._returned(output)


class OrderedColumnParallelLinear(_OrderedColumn, ColumnParallelLinear):
    """Column-parallel linear."""

    target = f"{_MODULE}:ColumnParallelLinear"


class OrderedMergedColumnParallelLinear(_OrderedColumn, MergedColumnParallelLinear):
    """Gate and up projection, stored [gate | up] on each rank."""

    target = f"{_MODULE}:MergedColumnParallelLinear"


class OrderedQKVParallelLinear(_OrderedColumn, QKVParallelLinear):
    """Query, key and value projection, stored [q | k | v] on each rank; KV heads are replicated where TP exceeds them."""

    target = f"{_MODULE}:QKVParallelLinear"


class OrderedRowParallelLinear(OrderedLinear, RowParallelLinear):
    """K is cut by TP: each rank computes the root of its subtree in fp32, the ranks' roots meet in one tree, one rounding."""

    target = f"{_MODULE}:RowParallelLinear"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not self.reduce_results or not self.input_is_parallel:
            raise RolloutError(
                f"{self.prefix}: reduce_results={self.reduce_results}, input_is_parallel={self.input_is_parallel}; a partial "
                "sum rounded to the model dtype cannot be put into the order again. Only complete row-parallel layers are supported"
            )
        self.local_segments = ops.active_order().local_segments(self.tp_size)

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """input_ [T, K / TP] -> [T, N], complete on every rank."""
        hit(self.target)
        if self.tp_size == 1:
            return self._returned(self.quant_method.apply(self, input_))
        partial = ops.linear_fp32(input_, self.weight.data, segments=self.local_segments)
        return self._returned(collectives.ordered_all_reduce(partial, get_tp_group().device_group, input_.dtype))


class OrderedReplicatedLinear(OrderedLinear, ReplicatedLinear):
    """Every rank holds all of the weight."""

    target = f"{_MODULE}:ReplicatedLinear"

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        """x [T, K] -> [T, N]."""
        hit(self.target)
        return self._returned(self.quant_method.apply(self, x))
