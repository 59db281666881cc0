"""Both paths compute the right model: fp32 without the contract agrees with transformers; bf16 under it is no further from fp64 than stock bf16."""

import random

import numpy as np
import pytest
import torch
from models import make_model

from megatron_ext.checkpoint.convert import hf_to_megatron
from megatron_ext.checkpoint.megatron_layout import MegatronLayout
from megatron_ext.contract import Contract
from megatron_ext.parity import session
from megatron_ext.parity.layout import TrainLayout

pytestmark = pytest.mark.timeout(900)
LENGTHS, PROMPT = (20, 150, 300), 4
VOCAB = 896  # needs no padding: stock Megatron's softmax counts the padding of a vocabulary


def sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def transformers_logprobs(model) -> np.ndarray:
    found = []
    with torch.no_grad():
        for ids in sequences():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
            found += [logprobs[i - 1, ids[i]].item() for i in range(PROMPT, len(ids))]
    return np.array(found)


def transformers_model(folder, dtype):
    from transformers import AutoModelForCausalLM

    # eager: the other implementations of the experts take no fp64
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")


def megatron_logprobs(model, log, consistency: bool) -> np.ndarray:
    settings = session.TrainSettings(pack=consistency, weights_only=True)
    with session.training(model, TrainLayout(), Contract(consistency=consistency), settings, log) as world:
        requests = [{"tokens": ids, "prompt_len": PROMPT} for ids in sequences()]
        found = world.call("logprobs", sequences=requests, pack=settings.pack)["logprobs"]
    return np.concatenate(found).astype(np.float64)


@pytest.mark.parametrize("options", [
    pytest.param((), id="moe"), pytest.param(("--dense", "--tied"), id="dense tied", marks=pytest.mark.full),
])  # fmt: skip
def test_fp32_without_the_contract_agrees_with_transformers(tmp_path, options):
    """The architecture and the conversion: a converted model, cast to fp32 and loaded by Megatron itself."""
    folder, converted = make_model(tmp_path / "model", "--vocab", str(VOCAB), *options), tmp_path / "megatron"
    hf_to_megatron(folder, converted, MegatronLayout(tp=2), dtype="fp32")
    exact = transformers_logprobs(transformers_model(folder, torch.float32))
    ours = megatron_logprobs(session.Model(str(converted / "hf"), str(converted)), tmp_path / "train.log", consistency=False)
    error = np.abs(ours - exact)
    print(f"fp32, Megatron without the contract against transformers: max {error.max():.2e}, mean {error.mean():.2e}")
    assert error.max() < 1e-3 and error.mean() < 2e-5


def test_bf16_under_the_contract_is_as_close_to_fp64_as_stock_bf16(tmp_path):
    folder = make_model(tmp_path / "model", "--vocab", str(VOCAB))
    exact = transformers_logprobs(transformers_model(folder, torch.float64))
    errors = {"transformers bf16": np.abs(transformers_logprobs(transformers_model(folder, torch.bfloat16)) - exact).mean()}
    for name, consistency in (("stock Megatron bf16", False), ("ours", True)):
        errors[name] = np.abs(megatron_logprobs(folder, tmp_path / f"{name}.log", consistency) - exact).mean()
    for name, error in errors.items():
        print(f"mean |error of a logprob| against fp64: {name} {error:.4f}, ratio of ours {errors['ours'] / error:.2f}")
    # A small random MoE is chaotic: where one rounding flips an expert, some tenths of the error move, on stock engines from one CPU to another.
    assert errors["ours"] <= 1.25 * errors["stock Megatron bf16"]
