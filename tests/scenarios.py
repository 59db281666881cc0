"""What the rollout engines are made to do before training recomputes it. Every scenario leaves a Recording."""

from dataclasses import dataclass

import numpy as np

from megatron_ext.rollout.engine import Rollout, RolloutEngine, SamplingSpec

# Within, at and beyond key tiles of 128; prefill chunks of 96 tokens; pages of 16.
LENGTHS = (1, 5, 17, 95, 97, 127, 128, 129, 257, 400)
TOKENS = 24
GROWING, GROWTH = 8, 112  # sequences that grow together beyond what CACHE_BLOCKS pages of 16 can hold: some are preempted
CACHE_BLOCKS = 48
LIMITS = dict(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=96, block_size=16, num_gpu_blocks_override=CACHE_BLOCKS)


@dataclass
class Recording:
    """name; which weights were loaded ("first" or "second"); the temperature; what was sampled."""

    name: str
    weights: str
    temperature: float
    rollouts: list[Rollout]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 1000, length).tolist() for length in LENGTHS]


def sample(engine: RolloutEngine, name: str, weights: str, temperature: float = 1.0, chosen=range(len(LENGTHS))) -> Recording:
    """Seeds belong to the prompt, so that the same prompt samples the same tokens wherever it runs."""
    everything = prompts()
    spec = SamplingSpec(temperature, TOKENS, seeds=[100 + i for i in chosen], ignore_eos=True)
    return Recording(name, weights, temperature, engine.generate([everything[i] for i in chosen], spec))


def grow(engine: RolloutEngine) -> Recording:
    """Short prompts, long responses: the cache fills up while every sequence decodes."""
    starts = [prompt[:16] for prompt in prompts() if len(prompt) >= 16][:GROWING]
    starts += [[7, 8, 9 + i] for i in range(GROWING - len(starts))]
    spec = SamplingSpec(1.0, GROWTH, seeds=list(range(GROWING)), ignore_eos=True)
    return Recording("preempted", "first", 1.0, engine.generate(starts, spec))


LONG = (8, 9)  # the two longest prompts: together they fit into the cache, so a second run finds them there


def warm(engine: RolloutEngine, name: str, weights: str) -> list[Recording]:
    """The long prompts twice; the second time from the prefix cache."""
    first = sample(engine, f"{name}, cold", weights, chosen=LONG)
    hits = engine.stats()["prefix_hits"]
    second = sample(engine, f"{name}, warm prefix cache", weights, chosen=LONG)
    assert engine.stats()["prefix_hits"] > hits, "the second run of the same prompts found nothing in the prefix cache"
    return [first, second]


def record(engine: RolloutEngine, second_weights: str) -> list[Recording]:
    """Cold, mixed batches and alone, preempted, another temperature, warm, and warm after a weight sync."""
    recordings = [sample(engine, "prefill chunks among decodes", "first")]
    recordings += [sample(engine, f"prompt {i} alone", "first", chosen=[i]) for i in (2, 8)]
    recordings.append(sample(engine, "temperature 0.6", "first", temperature=0.6, chosen=range(2, 6)))
    before = engine.stats()["preemptions"]
    recordings.append(grow(engine))
    assert engine.stats()["preemptions"] > before, "no request was preempted"
    recordings += warm(engine, "before the sync", "first")  # leaves keys of the old weights in the cache
    engine.load_weights(second_weights)
    recordings += warm(engine, "after the sync", "second")
    recordings.append(sample(engine, "after the sync, all", "second"))
    engine.assert_hit()
    return recordings
