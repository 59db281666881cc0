"""What a rollout refuses: by name, before a process is started."""

import pytest

from megatron_ext.contract import Contract
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.rollout.engine import RolloutEngine, SamplingSpec, bind_threads
from megatron_ext.rollout.settings import RolloutError, check_plugins, check_sampling


def parameters(**options):
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.7, "seed": 1, "max_tokens": 4, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_tokens": 2},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["no"]},
        {"prompt_logprobs": 1},
        {"seed": None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_sampling_parameters_refused_by_name(options):
    with pytest.raises(RolloutError, match=next(iter(options))):
        check_sampling(parameters(**options))


def test_every_refused_parameter_exists_in_vllm():
    """A renamed field would be looked up in vain and never refused."""
    import re

    from vllm import SamplingParams

    from megatron_ext.rollout import settings

    names = re.findall(r'"(\w+)": \(', open(settings.__file__).read())
    assert len(names) > 12
    assert set(names) <= set(SamplingParams.__struct_fields__)


def test_plain_and_greedy_sampling_allowed():
    check_sampling(parameters())
    check_sampling(parameters(temperature=0.0, seed=None))
    check_sampling(parameters(logprobs=5, stop_token_ids=[3], ignore_eos=True))


@pytest.mark.parametrize(
    "options, word",
    [
        ({"enforce_eager": False}, "enforce_eager"),
        ({"quantization": "fp8"}, "quantization|quantised"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"block_size": 96}, "block_size"),
        ({"enable_lora": True}, "LoRA"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}, "speculative"),
        ({"dtype": "float32"}, "dtype"),
        ({"logits_processors": ["vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor"]}, "logits_processors"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_engine_settings_refused_before_a_process_starts(moe_model, options, word):
    with pytest.raises(Exception, match=word):
        RolloutEngine(moe_model, 1, False, Contract(), max_model_len=256, **options)


def test_tensor_parallel_beyond_the_segments_refused(moe_model):
    with pytest.raises(Exception, match="segments"):
        RolloutEngine(moe_model, 4, False, Contract(order=ReductionOrder(segments=2)), max_model_len=256)


def test_settings_of_the_engine_itself_cannot_be_overridden(moe_model):
    with pytest.raises(RolloutError, match="logprobs_mode"):
        RolloutEngine(moe_model, 1, False, Contract(), logprobs_mode="raw_logprobs")


def test_plugin_filter_that_leaves_us_out_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(RolloutError, match="VLLM_PLUGINS"):
        check_plugins()


def test_cores_are_shared_out():
    assert bind_threads([0, 1], 2) == "0|1"
    assert bind_threads([0, 1, 2, 3, 4], 2) == "0,1|2,3"
    assert bind_threads([3], 2) == "3|3"
    assert SamplingSpec().temperature == 1.0
