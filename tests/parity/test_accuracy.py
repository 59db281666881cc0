"""The consistent path computes the right model: against transformers in fp32, no further off than transformers in bf16."""

import random

import numpy as np
import pytest
import torch
from models import make_model

from megatron_ext.contract import Contract
from megatron_ext.parity import session
from megatron_ext.parity.layout import TrainLayout

pytestmark = pytest.mark.timeout(600)
LENGTHS, PROMPT = (20, 150, 300), 4


def sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 1000) for _ in range(length)] for length in LENGTHS]


def transformers_logprobs(model) -> np.ndarray:
    found = []
    with torch.no_grad():
        for ids in sequences():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
            found += [logprobs[i - 1, ids[i]].item() for i in range(PROMPT, len(ids))]
    return np.array(found)


def test_error_against_fp32_is_below_that_of_bf16_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    exact = transformers_logprobs(model)
    stock_error = np.abs(transformers_logprobs(model.to(torch.bfloat16)) - exact).mean()
    settings = session.TrainSettings()
    with session.training(folder, TrainLayout(), Contract(), settings, tmp_path / "train.log") as world:
        requests = [{"tokens": ids, "prompt_len": PROMPT} for ids in sequences()]
        ours = np.concatenate(world.call("logprobs", sequences=requests)["logprobs"]).astype(np.float64)
    error = np.abs(ours - exact).mean()
    print(f"mean |error| against fp32: ours {error:.4f}, transformers bf16 {stock_error:.4f}, ratio {error / stock_error:.2f}")
    assert error < stock_error
