"""Output logits of vLLM over `ops.linear_fp32`: never rounded to the model dtype."""

from __future__ import annotations

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from megatron_ext import collectives, ops
from megatron_ext.patches import hit
from megatron_ext.rollout.embedding import OrderedParallelLMHead
from megatron_ext.rollout.settings import RolloutError

TARGET = "vllm.model_executor.layers.logits_processor:LogitsProcessor"


class OrderedLogitsProcessor(LogitsProcessor):
    """hidden states -> fp32 logits of the whole vocabulary on every rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.soft_cap is not None or self.scale != 1.0 or self.logits_as_input:
            raise RolloutError(
                f"logits with soft_cap={self.soft_cap}, scale={self.scale}, logits_as_input={self.logits_as_input}; "
                "the training side computes plain logits"
            )

    def forward(
        self,
        lm_head: torch.nn.Module,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor:
        """hidden_states [T, H] model dtype -> logits fp32 [T, V]."""
        hit(TARGET)
        if embedding_bias is not None or skip_gather or not isinstance(lm_head, OrderedParallelLMHead):
            raise RolloutError(
                f"logits with embedding_bias={embedding_bias is not None}, skip_gather={skip_gather}, head "
                f"{type(lm_head).__name__}; expected a plain vocabulary-parallel head"
            )
        hit(lm_head.target)
        logits = ops.linear_fp32(hidden_states, lm_head.weight.data)
        if lm_head.tp_size > 1:
            logits = collectives.all_gather_concat(logits, get_tp_group().device_group, dim=-1)
        return logits[..., : self.org_vocab_size]

    def get_top_tokens(self, *args, **kwargs):
        raise RolloutError("vocabulary-parallel argmax (speculative decoding); unset speculative_config")

    def get_top_k_tokens(self, *args, **kwargs):
        raise RolloutError("vocabulary-parallel top-k (speculative decoding); unset speculative_config")
