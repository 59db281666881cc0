"""Both sides of a run, started for one configuration: a Megatron world, the rollout engines, and the weights between them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from megatron_ext.parity import session
from megatron_ext.rl.checkpoint import Checkpoint
from megatron_ext.rl.config import RunConfig
from megatron_ext.rl.live import LiveView
from megatron_ext.rl.weight_sync import WeightSync
from megatron_ext.rollout.client import RolloutPool
from megatron_ext.train.client import TrainWorld, cpu_flags


class Engines:
    """world, pool and sync of a run, as a context manager. What is still running when it is left is ended."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        logs = config.out / "logs"
        self.world = TrainWorld(config.train.world_size, training_flags(config), logs / "train.log", config.timeout_s)
        self.pool = RolloutPool(config.rollout_engines, config.contract, logs, config.timeout_s)
        self.pool.watch = [self.world]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Engines:
        self.sync = self._stack.enter_context(WeightSync(self.world, self.pool, self.config.contract.consistency, self.config.sync_dir))
        self._stack.callback(self.world.close)
        self._stack.callback(self.pool.close)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is not None:  # no time for what they are doing
            self.pool.kill()
            self.world.kill()
        self._stack.close()

    def start(self, live: LiveView, checkpoint: Checkpoint | None) -> str:
        """Starts both sides, loads the weights, and returns the contract digest that every process of both holds."""
        config = self.config
        self.world.start()  # both sides start at once
        with live.phase(f"start of {config.rollout_engines} x vLLM {config.rollout}"):
            self.pool.start(
                config.hf, tensor_parallel=config.rollout.tp, expert_parallel=config.rollout.expert_parallel,
                max_model_len=config.max_prompt_len + config.max_response_len, max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens, kv_cache_memory_bytes=config.kv_cache_bytes,
            )  # fmt: skip
        with live.phase(f"start of Megatron {config.train}, {config.train.world_size} ranks"):
            self.world.wait_ready()
            self.world.call("load_hf", path=config.hf)
            if config.objective.kl_coef:
                self.world.call("remember_reference")
            if checkpoint is not None:
                self.world.call("load_checkpoint", path=str(checkpoint.megatron))
        return session.check_contracts(config.contract, self.world, self.pool.report())

    def assert_hit(self) -> None:
        """Raises an error naming every active adapter that some process of either side never used."""
        self.pool.assert_hit()
        self.world.call("assert_hit")


def training_flags(config: RunConfig) -> list[str]:
    """Megatron's command line: model, layout, device, ours, then what the user passed through."""
    flags = cpu_flags(config.hf, *session.contract_flags(config.contract), micro_batch_size=config.micro_batch_size, **config.train.arguments())
    flags += ["--train-iters", str(config.steps * config.updates_per_step)]
    # A resumed run may have more steps than the one that saved; Megatron would insist on the schedule's old length.
    flags += ["--override-opt-param-scheduler"] if config.resume else []
    return [*flags, *config.megatron_flags]


def stop_token_ids(hf_dir: str) -> tuple[int, ...]:
    """Tokens that end a response: eos_token_id of generation_config.json, else of config.json; none if neither names one."""
    for name in ("generation_config.json", "config.json"):
        file = Path(hf_dir) / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()
