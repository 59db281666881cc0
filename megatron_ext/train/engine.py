"""A running Megatron model: log-probabilities, policy-gradient steps, weights, checkpoints. Every method is collective."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
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
from megatron_ext.ops.loss import AGGREGATIONS
from megatron_ext.train import microbatch, weights
from megatron_ext.train.batch import MicroBatch, TokenSequence, make_microbatches
from megatron_ext.train.finite import NonFinite, check_weights
from megatron_ext.train.gradients import finalize_model_grads
from megatron_ext.train.logprob import TokenLogprobs, VocabShard, check_logits
from megatron_ext.train.loss import LossSum, loss_count, loss_terms
from megatron_ext.train.model import model_provider


class UnsupportedRequest(ValueError):
    """A request that the engine's mode does not serve."""


class TrainEngine:
    """Model, optimizer and schedule built by megatron.training; `consistency` picks our modules or the stock ones.

    args.weights_only: neither optimizer nor gradient buffers, and no training steps. on_progress: called on every rank with (micro-batches begun, micro-batches in all).
    """

    def __init__(self, args, consistency: bool, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        self.args, self.consistency, self._on_progress = args, consistency, on_progress
        if args.weights_only:
            self.model, self.optimizer, self.scheduler = training.get_model(model_provider, wrap_with_ddp=False), None, None
        else:
            self.model, self.optimizer, self.scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, model_provider)
        self.module = unwrap_model(self.model[0])
        self.config = get_model_config(self.model[0])
        if self.optimizer is not None:
            self.config.grad_scale_func = self.optimizer.scale_loss
            self.config.finalize_model_grads_func = finalize_model_grads if consistency else _stock_finalize()
        self.iteration = 0 if args.weights_only else args.iteration
        self._hf_dir: str | None = None
        self._reference: list[torch.Tensor] | None = None

    # Log-probabilities

    def logprobs(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        with_grad: bool = False,
        micro_batch_size: int = 1,
        pack: bool = True,
        reference: bool = False,
    ) -> list[np.ndarray] | None:
        """fp32 log-probabilities of the response tokens of each sequence, on rank 0 (None elsewhere).

        with_grad: build the graph as a training step would, in training mode; otherwise evaluation mode without gradients.
        reference: by the weights that `remember_reference` kept.
        """
        batches = self._microbatches(sequences, temperature, micro_batch_size, pack)
        for chunk in self.model:
            chunk.train(with_grad)
        weights_in_force = self._reference_weights() if reference else contextlib.nullcontext()
        with weights_in_force, contextlib.nullcontext() if with_grad else torch.no_grad():
            forward_step = partial(_forward_step, self, _Progress(len(batches), self._on_progress), _collect)
            stored = self._run(batches, forward_step, forward_only=True, collect_non_loss_data=True)
        mine = {}
        if mpu.is_pipeline_last_stage():
            for batch, logprobs in zip(batches, stored, strict=True):
                mine.update(_by_sequence(batch, logprobs))
        return _gather(mine, len(sequences))

    def remember_reference(self) -> None:
        """Keeps a copy of this rank's weights as they are: the reference policy of a KL term."""
        self._reference = [parameter.detach().clone() for parameter in self.module.parameters()]

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self._reference is None:
            raise UnsupportedRequest("no reference policy: call remember_reference with its weights loaded")
        self._swap_reference()
        try:
            yield
        finally:
            self._swap_reference()

    @torch.no_grad()
    def _swap_reference(self) -> None:
        for parameter, other in zip(self.module.parameters(), self._reference, strict=True):
            mine = parameter.detach().clone()
            parameter.copy_(other)
            other.copy_(mine)

    # Training

    def train_step(
        self,
        sequences: Sequence[TokenSequence],
        temperature: float = 1.0,
        micro_batch_size: int = 1,
        pack: bool = True,
        objective: ops.PolicyObjective | None = None,
        aggregation: str = "token-mean",
    ) -> dict[str, Any]:
        """One step through Megatron's optimizer. objective None: the plain gradient of -(advantage x logprob).

        Returns loss (over the whole batch, rounded once), grad_norm, lr (the one used), skipped, iteration, and on rank 0 logprobs:
        those of the step's own forward pass, per sequence.
        """
        if self.optimizer is None:
            raise UnsupportedRequest("train_step: this world was started with --weights-only; start one without it")
        if aggregation not in AGGREGATIONS:
            raise UnsupportedRequest(f"aggregation: expected one of {AGGREGATIONS}, found {aggregation!r}")
        batches = self._microbatches(sequences, temperature, micro_batch_size, pack)
        self._set_num_microbatches(len(batches), micro_batch_size)
        for chunk in self.model:
            chunk.train()
        record, lr = _StepRecord(), self.optimizer.param_groups[0]["lr"]
        loss_func = partial(_loss, record, objective, aggregation)
        _, skipped, _, _, _, grad_norm, _, _ = training.train_step(
            partial(_forward_step, self, _Progress(len(batches), self._on_progress), loss_func),
            RerunDataIterator(iter(batches)),
            self.model,
            self.optimizer,
            self.scheduler,
            self.config,
            get_forward_backward_func(),
            iteration=self.iteration,
        )
        self.iteration += 1
        answer = {"loss": record.total(), "grad_norm": grad_norm, "lr": lr, "skipped": bool(skipped), "iteration": self.iteration}
        return {**answer, "logprobs": _gather(record.logprobs, len(sequences))}

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
        if self.optimizer is not None:
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


class _Progress:
    """Counts the micro-batches of one pass."""

    def __init__(self, total: int, report: Callable[[int, int], None]) -> None:
        self._done, self._total, self._report = 0, total, report

    def __call__(self) -> None:
        self._done += 1
        self._report(self._done, self._total)


class _StepRecord:
    """What the forward passes of one step leave behind, on the last pipeline stage."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.logprobs: dict[int, np.ndarray] = {}
        self.count = 0

    def total(self) -> float:
        """Loss of the whole batch, the same on every rank. Rounded once: it shows neither micro-batches nor data-parallel ranks."""
        everywhere: list[tuple[dict[int, float], int]] = [({}, 0)] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self.losses, self.count if mpu.get_tensor_model_parallel_rank() == 0 else 0))
        losses = {index: loss for part, _ in everywhere for index, loss in part.items()}
        return math.fsum(losses.values()) / max(1, sum(count for _, count in everywhere))


def _forward_step(engine: TrainEngine, progress: _Progress, then, batches: Iterator[MicroBatch], model):
    """Megatron's forward_step_func: the model's output, and `then`, which the schedule calls with it on the last stage."""
    batch = next(batches)
    progress()
    forward = consistent_forward if engine.consistency else stock_forward
    try:
        return forward(engine, model, batch), partial(then, batch)
    except NonFinite:
        check_weights(engine.module.named_parameters())  # where they are the cause, they are the better name for it
        raise


def _collect(batch: MicroBatch, logprobs_P: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
    return logprobs_P


def _loss(record: _StepRecord, objective, aggregation: str, batch: MicroBatch, logprobs_P: torch.Tensor):
    """(loss sum, what it will be divided by, values for Megatron's own report)."""
    terms_P, slope_P = loss_terms(logprobs_P, batch, objective, aggregation)
    loss = LossSum.apply(logprobs_P, terms_P, slope_P, batch.prediction.cu_P)
    count = loss_count(batch, aggregation)
    record.count += count
    record.logprobs.update(_by_sequence(batch, logprobs_P))
    record.losses.update({i: float(ops.token_sum(part, torch.tensor([0, len(part)]))) for i, part in batch.split(terms_P).items()})
    return loss, torch.tensor(count, dtype=torch.int), {"loss": torch.stack([loss.detach(), torch.tensor(float(count))])}


def _by_sequence(batch: MicroBatch, values_P: torch.Tensor) -> dict[int, np.ndarray]:
    return {index: part.numpy().copy() for index, part in batch.split(values_P.detach()).items()}


def _gather(mine: dict[int, np.ndarray], count: int) -> list[np.ndarray] | None:
    """Per sequence what the ranks of the last stage hold, on rank 0. Tensor-parallel ranks hold the same."""
    mine = mine if mpu.get_tensor_model_parallel_rank() == 0 else {}
    everywhere = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everywhere, dst=0)
    if everywhere is None:
        return None
    found = {index: values for part in everywhere for index, values in part.items()}
    return [found[index] for index in range(count)]


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
    check_logits(logits.flatten(0, 1)[batch.prediction.rows_P], batch.prediction)
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits, labels, tp_group=mpu.get_tensor_model_parallel_group())
    return -losses.reshape(-1)[batch.prediction.rows_P]

