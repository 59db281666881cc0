"""Real engines: a request's tokens and logprob bits do not depend on batch, chunks, cache, preemption, TP or EP."""

import numpy as np
import pytest

from megatron_ext.contract import Contract
from megatron_ext.rollout.engine import Rollout, RolloutEngine, SamplingSpec, is_running
from megatron_ext.rollout.settings import RolloutError

pytestmark = [pytest.mark.timeout(420), pytest.mark.full]  # tests/parity/test_zero.py runs the same engines by default

TEMPERATURE, TOKENS = 0.8, 32
LENGTHS = (5, 130, 17, 400, 257, 64, 128, 33)  # within, at and beyond a KV tile of 128; several prefill chunks of 96
LIMITS = dict(max_model_len=512, max_num_seqs=8)
GROWING, GROWTH = 8, 112  # sequences that all grow together, beyond what a cache of TIGHT_CACHE_BLOCKS pages of 16 can hold
TIGHT_CACHE_BLOCKS = 48


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(3, 1000, length).tolist() for length in LENGTHS]


def sample(engine: RolloutEngine, chosen=range(len(LENGTHS))) -> list[Rollout]:
    everything = prompts()
    spec = SamplingSpec(TEMPERATURE, TOKENS, seeds=[100 + index for index in chosen], ignore_eos=True)
    return engine.generate([everything[index] for index in chosen], spec)


def grow(engine: RolloutEngine) -> list[Rollout]:
    """Short prompts, long continuations: the cache fills up while every sequence is decoding."""
    starts = [prompt[:16] for prompt in prompts() if len(prompt) >= 16] + [[7, 8, 9]]
    spec = SamplingSpec(TEMPERATURE, GROWTH, seeds=list(range(GROWING)), ignore_eos=True)
    return engine.generate(starts, spec)


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.token_ids == b.token_ids, f"sequence {index}: other tokens"
        bits_a, bits_b = a.logprobs.view(np.int32), b.logprobs.view(np.int32)
        wrong = (bits_a != bits_b).nonzero()[0]
        assert not wrong.size, f"sequence {index} token {wrong[0]}: {a.logprobs[wrong[0]]!r} != {b.logprobs[wrong[0]]!r}"


@pytest.fixture(scope="module")
def references(moe_model) -> tuple[list[Rollout], list[Rollout]]:
    """One engine, TP 1, whole prefills, no cache: what every other engine must repeat, for sample() and for grow()."""
    whole = dict(max_num_batched_tokens=2048, enable_prefix_caching=False)
    with RolloutEngine(moe_model, 1, False, Contract(), **whole, **LIMITS) as engine:
        together = sample(engine)
        alone = [sample(engine, [index])[0] for index in range(len(LENGTHS))]
        assert_same(alone, together)
        grown = grow(engine)
        assert engine.stats()["prefix_hits"] == engine.stats()["preemptions"] == 0
        engine.assert_hit()
    return together, grown


@pytest.fixture(scope="module")
def reference(references) -> list[Rollout]:
    return references[0]


@pytest.fixture(scope="module")
def expert_parallel(moe_model):
    """TP 2 with EP 2, prefills in chunks of 96 among decodes, small pages, a cache too small for the batch."""
    tight = dict(max_num_batched_tokens=96, block_size=16, num_gpu_blocks_override=TIGHT_CACHE_BLOCKS)
    with RolloutEngine(moe_model, 2, True, Contract(), **tight, **LIMITS) as engine:
        yield engine


@pytest.fixture(scope="module")
def tensor_parallel(moe_model):
    """TP 2 without EP, three sequences at a time."""
    with RolloutEngine(moe_model, 2, False, Contract(), max_num_batched_tokens=256, max_model_len=512, max_num_seqs=3) as engine:
        yield engine


def test_expert_parallel_with_chunked_prefills(expert_parallel, reference):
    assert_same(sample(expert_parallel), reference)
    expert_parallel.assert_hit()


def test_preempted_requests(expert_parallel, references):
    before = expert_parallel.stats()["preemptions"]
    grown = grow(expert_parallel)
    assert expert_parallel.stats()["preemptions"] > before
    assert_same(grown, references[1])


def test_tensor_parallel(tensor_parallel, reference):
    assert_same(sample(tensor_parallel), reference)
    tensor_parallel.assert_hit()


def test_warm_prefix_cache(tensor_parallel, reference):
    sample(tensor_parallel)
    warm = sample(tensor_parallel)
    assert [r.cached_tokens for r, n in zip(warm, LENGTHS)] == [(n - 1) // 128 * 128 for n in LENGTHS]
    assert tensor_parallel.stats()["prefix_hits"] > 0
    assert_same(warm, reference)


def test_logprobs_are_those_of_the_sampled_distribution(tensor_parallel, reference):
    """Doubling the temperature halves every gap between two tokens' logprobs; greedy decoding reports temperature 1."""
    from vllm import SamplingParams

    def most_likely(temperature: float) -> dict[int, float]:
        parameters = SamplingParams(temperature=temperature, max_tokens=1, seed=3, logprobs=8, detokenize=False)
        with tensor_parallel._bound():
            output = tensor_parallel._llm.generate([{"prompt_token_ids": prompts()[2]}], parameters, use_tqdm=False)[0]
        return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items() if entry.rank <= 8}

    one, two, greedy = most_likely(1.0), most_likely(2.0), most_likely(0.0)
    assert one == greedy and set(one) == set(two)
    first = max(one, key=one.get)
    assert all(abs((one[first] - one[token]) / 2 - (two[first] - two[token])) < 1e-5 for token in one)


def test_requests_that_change_the_distribution_are_refused(tensor_parallel):
    from vllm import SamplingParams

    with tensor_parallel._bound(), pytest.raises(RolloutError, match="top_p"):
        tensor_parallel._llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(top_p=0.5, seed=1), use_tqdm=False)
    with pytest.raises(RolloutError, match="one seed per prompt"):
        tensor_parallel.generate([[1], [2]], SamplingSpec(seeds=[1]))


def test_every_worker_holds_the_contract(expert_parallel):
    entries = expert_parallel.report()
    assert [entry["rank"] for entry in entries] == [0, 1]
    assert {entry["contract_digest"] for entry in entries} == {expert_parallel.contract.digest()}


def test_weight_sync(expert_parallel, tensor_parallel, reference, moe_model, other_moe_model):
    """Other weights, warm cache of the old ones: nothing old is used, every logical tensor is the new one, on both layouts."""
    before = expert_parallel.digest()
    assert before == tensor_parallel.digest() and len(before) > 200
    for engine in (expert_parallel, tensor_parallel):
        engine.load_weights(other_moe_model)
    after = expert_parallel.digest()
    assert after == tensor_parallel.digest()
    assert not set(after.items()) & set(before.items())
    renewed = sample(tensor_parallel)
    assert renewed[3].token_ids != reference[3].token_ids
    assert_same(sample(expert_parallel), renewed)
    expert_parallel.load_weights(moe_model)
    assert expert_parallel.digest() == before
    assert_same(sample(expert_parallel), reference)


def test_incomplete_checkpoint_is_refused(tensor_parallel, moe_model, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(f"{moe_model}/model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Exception, match="experts.3.down_proj"):
        tensor_parallel.load_weights(str(tmp_path))


def test_tied_dense_model(tied_dense_model):
    """TP 1 against TP 2; the tied matrix is one logical tensor, and a sync reaches both its uses."""
    with RolloutEngine(tied_dense_model, 1, False, Contract(), max_num_batched_tokens=512, **LIMITS) as engine:
        expected, digest = sample(engine), engine.digest()
        assert "lm_head.weight" not in digest
        engine.assert_hit()
        pids = engine.worker_pids
    assert not any(is_running(pid) for pid in pids)
    with RolloutEngine(tied_dense_model, 2, False, Contract(), max_num_batched_tokens=64, **LIMITS) as engine:
        engine.load_weights(tied_dense_model)
        assert_same(sample(engine), expected)
        assert engine.digest() == digest


@pytest.mark.full
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp4", "tp4-ep4"])
def test_four_ranks(moe_model, reference, expert_parallel):
    """Two ranks cannot show an order: a + b is b + a."""
    with RolloutEngine(moe_model, 4, expert_parallel, Contract(), max_num_batched_tokens=128, **LIMITS) as engine:
        assert_same(sample(engine), reference)


def test_stock_numerics_with_expert_parallel(moe_model):
    """Without consistency: vLLM's own kernels, which crash under EP (and with seeds in chunked prefills) unless adapted."""
    with RolloutEngine(moe_model, 2, True, Contract(consistency=False), max_num_batched_tokens=96, **LIMITS) as engine:
        first = sample(engine, [0, 2])
        engine.load_weights(moe_model)
        again = sample(engine, [0, 2])
        assert_same(again, first)
        assert all(len(r.token_ids) == TOKENS for r in sample(engine))
        with pytest.raises(Exception, match="consistency"):
            engine.digest()
