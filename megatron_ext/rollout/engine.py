"""RolloutEngine: a vLLM engine under a contract, with weight sync that is proved and counters that tests can read."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ext.contract import ENVIRONMENT_VARIABLE, Contract, check_same_digest
from megatron_ext.rollout.settings import GREEDY_BELOW, LABEL, LOGPROBS_MODE, RolloutError, check_plugins
from megatron_ext.weight_digest import merge

_WORKER_EXTENSION = "megatron_ext.rollout.worker.WorkerExtension"
_DEFAULT_CACHE_BYTES = 256 << 20
_SHUTDOWN_SECONDS = 30.0
# One engine core in this process and workers in processes of their own: a scheduler process less to start.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": None,  # in whole GiB, and it would override kv_cache_memory_bytes
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample. seeds: one per prompt (unused when greedy, i.e. temperature 0). ignore_eos: always `max_tokens` tokens.
    labels: one per prompt, what errors call it."""

    temperature: float = 1.0
    max_tokens: int = 16
    seeds: Sequence[int] = ()
    labels: Sequence[str] = ()
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Rollout:
    """One sampled sequence. logprobs: float32 [len(token_ids)], of softmax(logits / temperature). cached_tokens: prompt tokens
    whose keys came from the prefix cache. preemptions: how often the request was put off and its keys were computed again."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: np.ndarray = field(repr=False)
    finish_reason: str
    cached_tokens: int
    preemptions: int


class RolloutEngine:
    """vLLM on a Hugging Face folder.

    contract: what both sides of the run hold; consistency=False runs stock numerics, adapted to what CPU needs.
    vllm_kwargs: further arguments of vllm.LLM (max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory_bytes, ...).
    Raises RolloutError (or vLLM's own error, which quotes it) before the first token for anything consistency does not allow.
    Use as a context manager, or call close(): workers are processes.
    """

    def __init__(
        self,
        hf_dir: str,
        tensor_parallel: int = 1,
        expert_parallel: bool = False,
        contract: Contract | None = None,
        **vllm_kwargs,
    ):
        self.contract = contract or Contract()
        check_plugins()
        self._llm, self._pids, self._probe = None, [], None
        self._stats = Counter(preemptions=0, prefix_queries=0, prefix_hits=0)
        settings = _llm_arguments(hf_dir, tensor_parallel, expert_parallel, vllm_kwargs)
        with _environment({**_ENVIRONMENT, **_contract_environment(self.contract, tensor_parallel)}):
            from vllm import LLM, envs

            envs.disable_envs_cache()  # an engine started earlier in this process froze the environment it saw
            self._llm = LLM(**settings)
        try:
            self._check_workers()
        except Exception:
            self.close()
            raise

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], spec: SamplingSpec, progress: Callable[[int, int], None] | None = None
    ) -> list[Rollout]:
        """Samples one continuation per prompt, in order. prompts: token ids. progress: told (finished, all) requests."""
        with self._bound():
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                self._parameters(len(prompts), spec),
                use_tqdm=_progress_bar(progress) if progress else False,
            )
        self._remember_prompt(prompts)
        rollouts = [_to_rollout(output) for output in outputs]
        self._stats.update(
            preemptions=sum(r.preemptions for r in rollouts),
            prefix_queries=sum(len(r.prompt_ids) for r in rollouts),
            prefix_hits=sum(r.cached_tokens for r in rollouts),
        )
        return rollouts

    def load_weights(self, folder: str) -> None:
        """Drains requests, loads a Hugging Face folder on every rank, drops the prefix cache and proves that it is gone.

        An error leaves some weights new and some old: do not sample from this engine before a load has succeeded.
        """
        with self._bound():
            self._drain()
            self._llm.collective_rpc("ordered_load_weights", args=(str(folder),))
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets every cached key. Raises RolloutError if the cache survived (keys of old weights would be used)."""
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM kept its prefix cache: some blocks are still in use. Let every request finish first")
        pool = self._scheduler().kv_cache_manager.block_pool
        if len(pool.cached_block_hash_to_block):
            raise RolloutError("blocks are still listed in the prefix cache after its reset")
        self._prove_reset()

    def digest(self) -> dict[str, str]:
        """{Hugging Face tensor name: hex}. Raises DigestMismatch if ranks hold different replicas or leave a gap."""
        return merge(self._llm.collective_rpc("ordered_regions"))

    def report(self) -> list[dict[str, object]]:
        """One entry per worker process: process, rank, contract_digest, rows (target, seam, active, bound, hits, must_hit, why)."""
        reports = self._llm.collective_rpc("ordered_report")
        check_same_digest({"driver": self.contract.digest(), **{r["process"]: r["contract_digest"] for r in reports}})
        return reports

    def assert_hit(self) -> None:
        """Raises PatchError naming every adapter of the model that some worker never used."""
        from megatron_ext.rollout.wiring import assert_hit

        for entry in self.report():
            assert_hit(entry["rows"], entry["process"])

    def stats(self) -> dict[str, int]:
        """Sums over every rollout of this engine: preemptions, prefix_queries (prompt tokens), prefix_hits (cached ones)."""
        return dict(self._stats)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(self._pids)

    @property
    def is_open(self) -> bool:
        """Whether workers are to be expected."""
        return self._llm is not None

    def close(self) -> None:
        """Stops the workers; raises RolloutError if one would not end (it is killed then)."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        llm.llm_engine.engine_core.shutdown()
        stubborn = _wait_for_end(self._pids, _SHUTDOWN_SECONDS)
        if stubborn:
            raise RolloutError(f"worker processes {stubborn} did not end within {_SHUTDOWN_SECONDS:.0f} s and were killed")

    # Inside

    def _check_workers(self) -> None:
        infos = self._llm.collective_rpc("ordered_info")
        self._pids = [info["pid"] for info in infos]
        missing = [info["rank"] for info in infos if not info["contract_digest"]]
        if missing:
            raise RolloutError(
                f"the plug-in did not run in rollout workers {missing}: the package's entry point is not installed. "
                "Run launch/setup.sh (pip install -e .)"
            )
        digests = {f"rollout worker {info['rank']}": info["contract_digest"] for info in infos}
        check_same_digest({"driver": self.contract.digest(), **digests})

    def _parameters(self, count: int, spec: SamplingSpec) -> list:
        from vllm import SamplingParams

        greedy = spec.temperature < GREEDY_BELOW
        if not greedy and len(spec.seeds) != count:
            raise RolloutError(f"{len(spec.seeds)} seeds for {count} prompts; give one seed per prompt")
        labels = spec.labels or [f"prompt {index}" for index in range(count)]
        return [
            SamplingParams(
                temperature=spec.temperature, max_tokens=spec.max_tokens, seed=None if greedy else spec.seeds[index],
                ignore_eos=spec.ignore_eos, stop_token_ids=list(spec.stop_token_ids), logprobs=0, detokenize=False,
                extra_args={LABEL: labels[index]},
            )
            for index in range(count)
        ]  # fmt: skip

    def _bound(self):
        """The environment that front-end checks read, in force while vLLM works for this engine."""
        return _environment({ENVIRONMENT_VARIABLE: self.contract.to_json()})

    def _drain(self) -> None:
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            engine.step()

    def _scheduler(self):
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _remember_prompt(self, prompts: Sequence[Sequence[int]]) -> None:
        """Keeps a prompt long enough to fill a cache block, to ask for again after a reset."""
        page = self._llm.llm_engine.vllm_config.cache_config.block_size
        self._probe = next((list(prompt) for prompt in prompts if len(prompt) > page), self._probe)

    def _prove_reset(self) -> None:
        """A prompt that was cached before must find nothing now."""
        if self._probe is None:
            return  # no prompt ever filled a block, so none was ever cached
        probe = self._probe
        found = self.generate([probe], SamplingSpec(temperature=0.0, max_tokens=1))[0].cached_tokens
        if found:
            raise RolloutError(f"after the reset, {found} of {len(probe)} tokens of an old prompt still come from the prefix cache")


def _llm_arguments(hf_dir: str, tensor_parallel: int, expert_parallel: bool, extra: dict) -> dict:
    fixed = {
        "model": str(hf_dir), "tensor_parallel_size": tensor_parallel, "enable_expert_parallel": expert_parallel,
        "skip_tokenizer_init": True, "distributed_executor_backend": "mp", "worker_extension_cls": _WORKER_EXTENSION,
        "logprobs_mode": LOGPROBS_MODE, "disable_log_stats": False,
    }  # fmt: skip
    claimed = sorted(set(fixed) & set(extra))
    if claimed:
        raise RolloutError(f"RolloutEngine sets {claimed} itself; leave them out")
    defaults = {
        "enforce_eager": True, "enable_prefix_caching": True, "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": _DEFAULT_CACHE_BYTES,
    }  # fmt: skip
    return {**defaults, **extra, **fixed}


def _contract_environment(contract: Contract, tensor_parallel: int) -> dict[str, str]:
    binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or bind_threads(sorted(os.sched_getaffinity(0)), tensor_parallel)
    return {ENVIRONMENT_VARIABLE: contract.to_json(), "VLLM_CPU_OMP_THREADS_BIND": binding}


def bind_threads(cores: Sequence[int], ranks: int) -> str:
    """vLLM's core list per rank, "0,1|2,3": equal shares of `cores`; ranks share cores only where there are too few."""
    share = max(1, len(cores) // ranks)
    return "|".join(",".join(str(cores[(rank * share + i) % len(cores)]) for i in range(share)) for rank in range(ranks))


@contextlib.contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    """os.environ with `values` (None: unset), put back afterwards. Worker processes inherit it when they are started."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _progress_bar(report: Callable[[int, int], None]):
    """What vLLM takes as a progress bar; this one draws nothing and reports."""
    from tqdm import tqdm

    class Reporting(tqdm):
        def __init__(self, *args, **options) -> None:
            self._reports = options.get("desc") == "Processed prompts"
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n=1):
            shown = super().update(n)
            if self._reports:
                report(self.n, self.total)
            return shown

    return Reporting


def _to_rollout(output) -> Rollout:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = np.array([step[token].logprob for step, token in zip(completion.logprobs, tokens)], dtype=np.float32)
    return Rollout(
        list(output.prompt_token_ids), tokens, logprobs, completion.finish_reason, output.num_cached_tokens or 0,
        output.metrics.num_preemptions,
    )  # fmt: skip


def _wait_for_end(pids: Sequence[int], seconds: float) -> list[int]:
    """Waits for child processes to be gone; kills and returns those that are not."""
    deadline = time.monotonic() + seconds
    alive = [pid for pid in pids if is_running(pid)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        alive = [pid for pid in alive if is_running(pid)]
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    return alive


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
