"""Vocabulary-parallel embedding and output head of vLLM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megatron_ext import collectives
from megatron_ext.patches import hit
from megatron_ext.rollout.settings import RolloutError

_MODULE = "vllm.model_executor.layers.vocab_parallel_embedding"


class OrderedEmbeddingMethod(QuantizeMethodBase):
    """Holds a vocabulary-parallel weight as it was loaded; the layers themselves read it."""

    def create_weights(self, layer, *args, **kwargs):
        raise RolloutError(f"{layer.prefix}: weights are made by vLLM's own method before this one takes over")

    def apply(self, layer, *args, **kwargs):
        raise RolloutError(f"{layer.prefix}: logits come from the logits processor, in fp32")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as loaded; the stock method may repack them for oneDNN."""

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Lets `layer` use the very parameter of the embedding."""
        layer.weight = embed_tokens.weight
        return layer


class _OrderedVocabulary:
    """What both layers check and set once vLLM has built them. A mix-in before a class of vLLM."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.num_added_embeddings:
            raise RolloutError(f"{self.prefix}: {self.num_added_embeddings} added (LoRA) embeddings; merge the adapter")
        if getattr(self, "bias", None) is not None:
            raise RolloutError(f"{self.prefix}: a bias has no place in the order contract; use a model without biases")
        self.quant_method = OrderedEmbeddingMethod()


class OrderedVocabParallelEmbedding(_OrderedVocabulary, VocabParallelEmbedding):
    """Looks up a row on the one rank that holds it; the exact sum over ranks has one non-zero term."""

    target = f"{_MODULE}:VocabParallelEmbedding"

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """input_ int [T] -> [T, H]."""
        hit(self.target)
        if self.tp_size == 1:
            return F.embedding(input_.long(), self.weight.data)
        start, end = self.shard_indices.org_vocab_start_index, self.shard_indices.org_vocab_end_index
        elsewhere = (input_ < start) | (input_ >= end)
        rows = F.embedding((input_.long() - start).masked_fill(elsewhere, 0), self.weight.data)
        return collectives.select_nonzero_rows_sum(rows.masked_fill(elsewhere.unsqueeze(-1), 0), get_tp_group().device_group)


class OrderedParallelLMHead(_OrderedVocabulary, ParallelLMHead):
    """Holder of the head's weight; `OrderedLogitsProcessor` multiplies by it."""

    target = f"{_MODULE}:ParallelLMHead"
