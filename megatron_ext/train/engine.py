"""A running Megatron model: log-probabilities, policy-gradient steps, weights, checkpoints. Every method is collective."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import checkpointing, training

from megatron_ext import ops
from megatron_ext.train import microbatch, weights
from megatron_ext.train.batch import MicroBatch, TokenSequence, make_microbatches
from megatron_ext.train.gradients import finalize_model_grads
from megatron_ext.train.logprob import TokenLogprobs, VocabShard
from megatron_ext.train.loss import PolicyGradientSum
from megatron_ext.train.model import model_provider


class UnsupportedRequest(ValueError):
    """A request that the engine's mode does not serve."""


class TrainEngine:
    """Model, optimizer and schedule built by megatron.training; `consistency` picks our modules or the stock ones."""

    def __init__(self, args, consistency: bool) -> None:
        self.args, self.consistency = args, consistency
        self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, model_provider)
        self.module = unwrap_model(self.model[0])
        self.config = get_model_config(self.model[0])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads if consistency else _stock_finalize()
        self.iteration = args.iteration
        self._hf_dir: str | None = None
        self._sequence_losses: dict[int, float] = {}

    # Log-probabilities

    def logprobs(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        with_grad: bool = False,
        micro_batch_size: int = 1,
        pack: bool = True,
    ) -> list[np.ndarray] | None:
        """fp32 log-probabilities of the response tokens of each sequence, on rank 0 (None elsewhere).

        with_grad: build the graph as a training step would, in training mode; otherwise evaluation mode without gradients.
        """
        batches = self._microbatches(sequences, temperature, micro_batch_size, pack)
        for chunk in self.model:
            chunk.train(with_grad)
        with contextlib.nullcontext() if with_grad else torch.no_grad():
            stored = self._run(batches, partial(_forward_step, self, collect=True), forward_only=True, collect_non_loss_data=True)
        return self._gather(batches, stored, len(sequences))

    def _gather(self, batches: list[MicroBatch], stored: list[torch.Tensor], count: int) -> list[np.ndarray] | None:
        mine: dict[int, np.ndarray] = {}
        if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
            for batch, logprobs in zip(batches, stored, strict=True):
                mine.update({index: part.numpy() for index, part in batch.split(logprobs.detach()).items()})
        everywhere = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everywhere, dst=0)
        if everywhere is None:
            return None
        found = {index: values for part in everywhere for index, values in part.items()}
        return [found[index] for index in range(count)]

    # Training

    def train_step(
        self, sequences: Sequence[TokenSequence], temperature: float = 1.0, micro_batch_size: int = 1, pack: bool = True
    ) -> dict[str, Any]:
        """One policy-gradient step: the gradient of -sum(advantage x logprob) / tokens through Megatron's optimizer."""
        batches = self._microbatches(sequences, temperature, micro_batch_size, pack)
        self._set_num_microbatches(len(batches), micro_batch_size)
        for chunk in self.model:
            chunk.train()
        self._sequence_losses = {}
        _, skipped, _, _, _, grad_norm, _, _ = training.train_step(
            partial(_forward_step, self, collect=False),
            RerunDataIterator(iter(batches)),
            self.model,
            self.optimizer,
            self.scheduler,
            self.config,
            get_forward_backward_func(),
            iteration=self.iteration,
        )
        self.iteration += 1
        loss = self._total_loss() / sum(sequence.response_len for sequence in sequences)
        return {"loss": loss, "grad_norm": grad_norm, "skipped": bool(skipped), "iteration": self.iteration}

    def _total_loss(self) -> float:
        """Sum over all sequences, rounded once: it shows neither micro-batches nor data-parallel ranks."""
        everywhere: list[dict[int, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, self._sequence_losses)
        return math.fsum({index: loss for part in everywhere for index, loss in part.items()}.values())

    def _set_num_microbatches(self, count: int, micro_batch_size: int) -> None:
        ranks = mpu.get_data_parallel_world_size()
        reconfigure_num_microbatches_calculator(
            rank=self.args.rank,
            rampup_batch_size=None,
            global_batch_size=count * micro_batch_size * ranks,
            micro_batch_size=micro_batch_size,
            data_parallel_size=ranks,
        )

    # Weights and checkpoints

    def load_hf(self, path: str | Path) -> None:
        """Weights of a Hugging Face folder into the model and the optimizer's fp32 copies."""
        weights.load_hf(self.module, self.args.vocab_size, path)
        self.optimizer.reload_model_params()
        self._hf_dir = str(path)

    def export_hf(self, path: str | Path) -> None:
        """A complete Hugging Face folder; configuration and tokenizer come from the folder that was loaded."""
        weights.export_hf(self.module, self.args.vocab_size, path, like=self._hf_dir)

    def digest(self) -> dict[str, str]:
        """{Hugging Face name: digest}, equal on all ranks."""
        return weights.digest_hf(self.module, self.args.vocab_size)

    def save_checkpoint(self, path: str | Path) -> None:
        """Megatron's distributed checkpoint of model, optimizer and schedule."""
        self.args.save = str(path)
        checkpointing.save_checkpoint(self.iteration, self.model, self.optimizer, self.scheduler, 0)

    def load_checkpoint(self, path: str | Path) -> None:
        """A checkpoint of any TP and PP. Megatron keeps expert parameters in an optimizer of their own only for EP > 1, so
        optimizer state does not pass between EP 1 and EP > 1; weights do (export_hf, load_hf)."""
        self.args.load = str(path)
        self.iteration, _ = checkpointing.load_checkpoint(self.model, self.optimizer, self.scheduler, strict=True)

    # Micro-batches through Megatron's schedule

    def _microbatches(self, sequences, temperature: float, micro_batch_size: int, pack: bool) -> list[MicroBatch]:
        if pack and not self.consistency:
            raise UnsupportedRequest("pack: Megatron's stock local attention takes no packed sequences; ask with pack=False")
        tp = mpu.get_tensor_model_parallel_world_size() if self.config.sequence_parallel else 1
        rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        return make_microbatches(sequences, micro_batch_size, rank, ranks, pack, temperature, multiple_of=tp)

    def _run(self, batches: list[MicroBatch], forward_step, **options) -> list:
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=len(batches),
            seq_length=self.args.seq_length,
            micro_batch_size=len(batches[0].sequences),
            **options,
        )


def _stock_finalize():
    from megatron.core.distributed import finalize_model_grads as stock

    return stock


def _forward_step(engine: TrainEngine, batches: Iterator[MicroBatch], model, collect: bool = False):
    """Megatron's forward_step_func: the model's output and what the schedule then calls on the last stage."""
    batch = next(batches)
    forward = consistent_forward if engine.consistency else stock_forward
    output = forward(engine, model, batch)
    return output, _collect if collect else partial(_loss, engine, batch)


def _collect(logprobs_P: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
    return logprobs_P


def _loss(engine: TrainEngine, batch: MicroBatch, logprobs_P: torch.Tensor):
    """(loss sum, number of tokens, values for Megatron's own report)."""
    advantages_P = batch.advantages()
    loss = PolicyGradientSum.apply(logprobs_P, advantages_P, batch.prediction.cu_P)
    for index, terms in batch.split(-advantages_P * logprobs_P.detach()).items():
        engine._sequence_losses[index] = float(ops.token_sum(terms, torch.tensor([0, len(terms)])))
    tokens = torch.tensor(batch.num_tokens, dtype=torch.int)
    return loss, tokens, {"loss": torch.stack([loss.detach(), tokens.float()])}


def consistent_forward(engine: TrainEngine, model, batch: MicroBatch) -> torch.Tensor:
    """fp32 log-probabilities [P] on the last stage, hidden states on the others."""
    packed = None
    if batch.packed:
        cu, longest = batch.layout.cu_seqlens, int(batch.layout.cu_seqlens.diff().max())
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)
    with microbatch.active(batch.layout):
        return model(
            batch.ids,
            None,
            None,
            packed_seq_params=packed,
            output_processor=_logprob_head,
            output_processor_context=(engine.args.vocab_size, batch),
        )


def _logprob_head(hidden_states, output_layer, output_weight, config, context, **unused) -> torch.Tensor:
    """Megatron's output_processor: the output layer's weight, through our log-probabilities."""
    vocab_size, batch = context
    weight = output_layer.weight if output_weight is None else output_weight
    shard = VocabShard.of(output_layer.tp_group, weight.shape[0], vocab_size)
    return TokenLogprobs.apply(hidden_states, weight, shard, batch.prediction, config.sequence_parallel, batch.layout)


def stock_forward(engine: TrainEngine, model, batch: MicroBatch) -> torch.Tensor:
    """The same from Megatron's own modules: logits of every position, divided by the temperature, its own cross entropy."""
    positions = torch.arange(batch.layout.seq).repeat(len(batch.sequences), 1)
    output = model(batch.ids, positions, None)
    if not mpu.is_pipeline_last_stage():
        return output
    labels = torch.zeros_like(batch.ids)
    labels.view(-1)[batch.prediction.rows_P] = batch.prediction.targets_P
    logits = output.float() / batch.prediction.temperature
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels, tp_group=mpu.get_tensor_model_parallel_group())
    return -losses.reshape(-1)[batch.prediction.rows_P]

