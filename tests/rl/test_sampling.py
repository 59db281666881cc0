"""Responses: what reward functions and training see of them, and how requests are spread over engines."""

import json

import numpy as np
import pytest

from megatron_ext.rl.data import Prompt
from megatron_ext.rl.engines import stop_token_ids
from megatron_ext.rl.rewards import load_rewards
from megatron_ext.rl.sampling import Response
from megatron_ext.rollout.client import request_shares, share_cores
from megatron_ext.rollout.engine import Rollout
from megatron_ext.tokenizer import load_tokenizer


def response(tokens, finish_reason="stop"):
    prompt = Prompt(17, (3, 4, 5), "abc", {"prompt": "abc", "answer": "ab"})
    return Response(prompt, 2, Rollout([3, 4, 5], tokens, np.full(len(tokens), -1.0, np.float32), finish_reason, 0, 0))


@pytest.fixture(scope="module")
def tokenizer(task):
    return load_tokenizer(str(task / "model"))


def test_an_empty_response_is_empty_text_and_one_token(tokenizer):
    """The end of the sequence alone: rewards read "", training still learns from the token that ended it."""
    empty = response([tokenizer.eos_token_id])
    sample = empty.for_reward(3, tokenizer)
    assert (sample.response, sample.response_ids, sample.step) == ("", (tokenizer.eos_token_id,), 3)
    assert load_rewards(["megatron_ext.rl.rewards:exact_match"]).score([sample]) == {"exact_match": [0.0]}
    fields = empty.for_training(0.5, empty.logprobs, None)
    assert fields["tokens"] == [3, 4, 5, tokenizer.eos_token_id] and fields["prompt_len"] == 3 and fields["label"] == "prompt 17 sample 2"


def test_a_cut_response_says_so(tokenizer):
    ids = tokenizer.encode("ab", add_special_tokens=False)
    cut = response(ids, "length").for_reward(1, tokenizer)
    assert (cut.response, cut.finish_reason) == ("ab", "length")


def test_stop_tokens(tmp_path, task):
    assert stop_token_ids(str(task / "model")) == (1,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert stop_token_ids(str(tmp_path)) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert stop_token_ids(str(tmp_path)) == (7, 8)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(str(tmp_path)) == ()


def testrequest_shares():
    assert [list(share) for share in request_shares(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(share) for share in request_shares(1, 2)] == [[], [0]]
    assert share_cores([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3]]
    assert share_cores([6, 7], 3) == [[6], [7], [6]]
