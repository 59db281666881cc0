"""The GPTModel of Qwen3 and Qwen3-MoE, built from local layer specs."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset

from megatron_ext.train import microbatch
from megatron_ext.train.attention import CoreAttention, SelfAttention
from megatron_ext.train.embedding import embed_tokens
from megatron_ext.train.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ext.train.mlp import MLP
from megatron_ext.train.moe import Experts, MoELayer
from megatron_ext.train.norm import RMSNorm, StockRMSNorm, residual_add
from megatron_ext.train.router import TopKRouter


class GPTModel(gpt_model.GPTModel):
    """Megatron's GPTModel whose tokens are embedded in the one order. Its output layer is run by an output_processor."""

    def forward(self, input_ids, position_ids=None, attention_mask=None, decoder_input=None, **kwargs) -> torch.Tensor:
        """int64 ids [b, s] -> what kwargs["output_processor"] returns; hidden states on earlier pipeline stages."""
        if self.pre_process and decoder_input is None:
            tied = self.share_embeddings_and_output_weights and self.post_process
            decoder_input = embed_tokens(
                self.embedding.word_embeddings, input_ids, self.config.sequence_parallel, tied, microbatch.current()
            )
        return super().forward(input_ids, position_ids, attention_mask, decoder_input=decoder_input, **kwargs)


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage=None, config=None, pg_collection=None):
    """One pipeline stage, for megatron.training's `get_model`."""
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    config.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    config.rotary_base, config.rotary_percent = args.rotary_base, args.rotary_percent
    model_class = GPTModel if args.consistency else gpt_model.GPTModel
    return model_class(
        config=config,
        transformer_layer_spec=block_spec(config, moe_layers(args), consistency=args.consistency),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def moe_layers(args) -> list[bool]:
    """For every layer of the model, whether it has experts."""
    if not args.num_experts:
        return [False] * args.num_layers
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(args.num_layers)]
    return [bool(value) for value in frequency]


def block_spec(config, experts_in: list[bool], consistency: bool) -> TransformerBlockSubmodules:
    """Specs of this pipeline stage's layers and the final norm."""
    rank = get_pipeline_model_parallel_rank()
    first = get_transformer_layer_offset(config, None, rank)
    here = experts_in[first : first + get_num_layers_to_build(config, None, rank)]
    build = consistent_layer if consistency else stock_layer
    specs = {moe: ModuleSpec(module=TransformerLayer, submodules=build(config, moe)) for moe in set(here)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[moe] for moe in here], layer_norm=RMSNorm if consistency else StockRMSNorm
    )


def stock_layer(config, moe: bool) -> TransformerLayerSubmodules:
    """Megatron's local layer with only its norm exchanged, which refuses sequence parallelism."""
    stock = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts if moe else None, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    attention = stock.self_attention
    if config.qk_layernorm:
        norms = {"q_layernorm": StockRMSNorm, "k_layernorm": StockRMSNorm}
        attention = dataclasses.replace(attention, submodules=dataclasses.replace(attention.submodules, **norms))
    return dataclasses.replace(stock, self_attention=attention, input_layernorm=StockRMSNorm, pre_mlp_layernorm=StockRMSNorm)


def consistent_layer(config, moe: bool) -> TransformerLayerSubmodules:
    """Megatron's local layer with every numeric module exchanged."""
    stock = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts if moe else None, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    head_norm = partial(RMSNorm, over_heads=True) if config.qk_layernorm else None
    attention = dataclasses.replace(
        stock.self_attention,
        module=SelfAttention,
        submodules=dataclasses.replace(
            stock.self_attention.submodules,
            linear_qkv=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    if moe:
        mlp = partial(MoELayer, submodules=MoESubmodules(experts=Experts, router=TopKRouter))
    else:
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        mlp = partial(MLP.as_mlp_submodule, submodules=submodules)
    return dataclasses.replace(
        stock,
        input_layernorm=RMSNorm,
        self_attention=attention,
        self_attn_bda=residual_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=mlp,
        mlp_bda=residual_add,
    )

