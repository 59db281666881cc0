"""The loop: sample, score, update behind the logdiff gate, sync the weights, evaluate, write down, save. One step is `Trainer.train_one`."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_ext.checkpoint.hf_config import read_hf_config
from megatron_ext.rl import checkpoint
from megatron_ext.rl.advantages import group_advantages
from megatron_ext.rl.config import ConfigError, RunConfig
from megatron_ext.rl.data import Prompt, PromptStream, read_prompts
from megatron_ext.rl.engines import Engines, stop_token_ids
from megatron_ext.rl.live import LiveView, row_of
from megatron_ext.rl.metrics import (
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    TIMING_FILE,
    MetricsWriter,
    logdiff_metrics,
    reward_metrics,
    sequence_metrics,
    timing_metrics,
    validation_metrics,
)
from megatron_ext.rl.rewards import Rewards, load_rewards
from megatron_ext.rl.sampling import Response, sample, sample_heldout
from megatron_ext.rl.signals import Interrupted, Signals
from megatron_ext.rl.summary import SUMMARY_FILE, write_summary
from megatron_ext.rl.update import Updater
from megatron_ext.tokenizer import load_tokenizer

HF_FOLDER = "hf"


def run(config: RunConfig) -> dict[str, Any]:
    """Runs to the last step, or until a signal; returns what summary.json holds. Whatever stops it is raised, and named in the summary."""
    resumed = checkpoint.find(config.resume, config.out) if config.resume else None
    if resumed is not None:
        checkpoint.check_identity(resumed, config.identity())
        if resumed.step >= config.steps:
            raise ConfigError(f"{resumed.folder} already holds step {resumed.step} of --steps {config.steps}: nothing is left to do; raise --steps")
        adopt_history(resumed, config)
    else:
        make_room(config)
    first = resumed.step + 1 if resumed else 1
    with Signals() as signals, MetricsWriter(config.out, config.tensorboard, config.wandb_project) as writer:
        with LiveView(config.steps, first) as live, Engines(config) as engines:
            trainer = Trainer(config, engines, writer, live, signals)
            try:
                trainer.run(resumed)
            except BaseException as error:
                error.add_note(f"in step {trainer.current} of {config.steps}" if trainer.current else "before the first step")
                trainer.write_summary(f"{type(error).__name__}: {error}")
                raise
        return trainer.write_summary()


def make_room(config: RunConfig) -> None:
    """Removes an earlier run from --out if --overwrite says so. Raises ConfigError if there is one otherwise."""
    found = [config.out / name for name in (METRICS_FILE, TIMING_FILE, TENSORBOARD_FOLDER, checkpoint.FOLDER, SUMMARY_FILE, "logs")]
    found = [path for path in found if path.exists()]
    if found and not config.overwrite:
        raise ConfigError(f"{config.out} holds a run already ({found[0].name}): --resume goes on with it, --overwrite starts over, or choose another --out")
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def adopt_history(resumed: checkpoint.Checkpoint, config: RunConfig) -> None:
    """Copies the metrics of the run that the checkpoint belongs to, if it is not the one in --out."""
    for name in (METRICS_FILE, TIMING_FILE):
        source, target = resumed.folder.parents[1] / name, config.out / name
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def prompts_of(config: RunConfig, path: str) -> list[Prompt]:
    """The prompts of a file. Raises PromptError, or ConfigError if the model has no room for a prompt and its response."""
    model = read_hf_config(config.hf)
    longest, room = config.max_prompt_len + config.max_response_len, model["max_position_embeddings"]
    if longest > room:
        raise ConfigError(f"--max-prompt-len + --max-response-len = {longest}, the model has {room} positions")
    return read_prompts(path, config.tokenizer or config.hf, model["vocab_size"], config.max_prompt_len)


class Trainer:
    """One run. step: the last one whose update is done; current: the one that is running or ran last."""

    def __init__(self, config: RunConfig, engines: Engines, writer: MetricsWriter, live: LiveView, signals: Signals) -> None:
        self.config, self.engines, self.writer, self.live, self.signals = config, engines, writer, live, signals
        prompts = prompts_of(config, config.prompts)
        if len(prompts) < config.prompts_per_step:
            raise ConfigError(f"--prompts-per-step {config.prompts_per_step}: {config.prompts} holds only {len(prompts)}")
        self.stream = PromptStream(prompts, config.seed)
        self.heldout = prompts_of(config, config.heldout) if config.heldout else []
        self.rewards: Rewards = load_rewards(config.rewards)
        self.tokenizer = load_tokenizer(config.tokenizer or config.hf)
        self.stop = stop_token_ids(config.hf)
        self.updater = Updater(config, engines.world, live)
        self.step, self.saved_step, self.current, self.stopped_by = 0, 0, 0, None
        self.contract_digest, self.weights_digest = "", ""
        self.seconds: dict[str, float] = {}
        self._started, self._step_seconds = time.monotonic(), {}
        self._stats: dict[str, int] = {}

    def run(self, resumed: checkpoint.Checkpoint | None) -> None:
        self.step = self.saved_step = self.current = resumed.step if resumed else 0
        self.writer.rewind(self.step)
        try:
            with self.signals.discardable():
                self.contract_digest = self.engines.start(self.live, resumed)
                self.sync_weights()
            if resumed is None and self.heldout:
                self.writer.log(0, self.evaluate(), self.timing(0, whole=False))
                self._step_seconds = {}
            while self.step < self.config.steps:
                self.signals.check()
                self.train_one(self.step + 1)
        except Interrupted as signal:
            self.stopped_by = str(signal)
            self.engines.pool.kill()  # it may be sampling for a step that will not be
            self.live.say(f"{signal}: ending after step {self.step}")
            self.save()
            return
        self.engines.assert_hit()
        if self.config.save_hf:
            with self.phase("save_hf"):
                self.engines.world.call("export_hf", path=str(self.config.out / HF_FOLDER))

    def train_one(self, step: int) -> None:
        """One step. A signal while it samples discards it; later, it is finished first."""
        config, self.current = self.config, step
        started = time.monotonic()
        prompts = self.stream.take(step - 1, config.prompts_per_step)
        with self.timed("gen"), self.signals.discardable(), self.phase("gen", len(prompts) * config.samples_per_prompt, "responses") as phase:
            responses = sample(self.engines.pool, config, prompts, step, self.stop, phase.update)
        with self.timed("reward"):
            scores, totals = self.score(responses, step)
        with self.timed("adv"):
            advantages = group_advantages(totals, config.samples_per_prompt, config.advantage_by_std)
        update = self.updater(responses, advantages, step, self.timed)
        if update.warning:
            self.live.say(f"warning: {update.warning}")
        self.step = step
        self.sync_weights()
        prompt_lens, response_lens = [len(r.prompt.ids) for r in responses], [len(r.logprobs) for r in responses]
        metrics = {
            "training/global_step": step, "training/sampled_tokens": sum(response_lens),
            "training/epoch": self.stream.epoch(step - 1, config.prompts_per_step),
            **sequence_metrics(prompt_lens, response_lens, config.max_prompt_len, config.max_response_len),
            **reward_metrics(scores, totals, [np.full(n, a) for n, a in zip(response_lens, advantages, strict=True)]),
            **logdiff_metrics(update.train_logprobs, [r.logprobs for r in responses]),
            **update.metrics,
            **(self.evaluate() if self.evaluation_is_due(step) else {}),
        }  # fmt: skip
        self._step_seconds["step"] = time.monotonic() - started
        timing = self.timing(sum(prompt_lens) + sum(response_lens))
        self.writer.log(step, metrics, timing)
        self._step_seconds = {}  # a checkpoint's time stands in the line of the next step
        self.live.step(step, row_of(metrics, timing))
        if self.checkpoint_is_due(step):
            self.save()

    # Parts of a step

    def score(self, responses: list[Response], step: int) -> tuple[dict[str, list[float]], list[float]]:
        scores = self.rewards.score([response.for_reward(step, self.tokenizer) for response in responses])
        return scores, self.rewards.total(scores)

    def sync_weights(self) -> None:
        with self.timed("update_weights"), self.phase("update_weights"):
            self.weights_digest = self.engines.sync()

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics per data source: the first reward function is the accuracy, all are reported."""
        with self.timed("testing"), self.phase("testing", len(self.heldout), "responses") as phase:
            responses = sample_heldout(self.engines.pool, self.config, self.heldout, self.stop, phase.update)
            scores, totals = self.score(responses, self.step)
        return validation_metrics([str(r.prompt.record.get("data_source", "heldout")) for r in responses], scores, totals)

    def evaluation_is_due(self, step: int) -> bool:
        every = self.config.eval_interval
        return bool(self.heldout) and (step == self.config.steps or bool(every and step % every == 0))

    def checkpoint_is_due(self, step: int) -> bool:
        every = self.config.checkpoint_interval
        return bool(every) and (step == self.config.steps or step % every == 0)

    def save(self) -> None:
        if self.step == self.saved_step:
            return
        with self.timed("save_checkpoint"), self.phase("save_checkpoint"):
            checkpoint.save(self.engines.world, self.config.out, self.step, self.config.identity(), self.config.keep_checkpoints)
        self.saved_step = self.step

    # Times and reports

    def phase(self, name: str, total: int | None = None, unit: str = ""):
        return self.live.phase(name, total, unit)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds to the times of the step and of the run."""
        started = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - started
            self._step_seconds[name] = self._step_seconds.get(name, 0.0) + spent
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def timing(self, tokens: int, whole: bool = True) -> dict[str, float]:
        """What depends on the machine: times, throughput, and how the rollout engines served the requests."""
        now = self.engines.pool.stats()
        served = {f"perf/rollout_{name}": value - self._stats.get(name, 0) for name, value in now.items()}
        self._stats = now
        if not whole:
            return {**{f"timing_s/{name}": seconds for name, seconds in self._step_seconds.items()}, **served}
        return {**timing_metrics(self._step_seconds, tokens), **served}

    def write_summary(self, error: str | None = None) -> dict[str, Any]:
        """summary.json and metrics.png; what they say of steps comes from metrics.jsonl, so it covers the whole run."""
        outcome = {
            "finished": error is None and self.step == self.config.steps, "stopped_by": error or self.stopped_by,
            "contract_digest": self.contract_digest, "weights_digest": self.weights_digest,
            "seconds": {name: round(value, 2) for name, value in {**self.seconds, "run": time.monotonic() - self._started}.items()},
        }  # fmt: skip
        return write_summary(self.config, outcome)
