"""The small models of the quickstart and the tests: loadable, reproducible, and spread enough that a wrong bit shows."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.checkpoint.hf_config import flags_from_hf, read_hf_config

ROOT = Path(__file__).parents[2]
KINDS = {"moe": [], "dense": ["--dense"], "moe-tied": ["--tied", "--seed", "3"], "dense-tied": ["--dense", "--tied"]}


def load_tool():
    spec = importlib.util.spec_from_file_location("make_tiny_model", ROOT / "tools/make_tiny_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def make(folder, *options):
    assert TOOL.main([str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module", params=KINDS)
def model_dir(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp(request.param), *KINDS[request.param])


@pytest.fixture(scope="module")
def model(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def test_tokenizer(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert len(tokenizer) == tokenizer.vocab_size == read_hf_config(model_dir)["vocab_size"] == 1000
    text = "def f(x):\n    return x  # größer ✓"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"


def test_weights_are_bf16_and_complete(model_dir, model):
    weights = load_file(model_dir / "model.safetensors")
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
    tied = read_hf_config(model_dir)["tie_word_embeddings"]
    assert ("lm_head.weight" in weights) != tied
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_choices_are_spread(model):
    """Neither a flat nor a certain distribution over tokens; every expert is used; layers change the residual stream."""
    ids = torch.randint(3, 1000, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        logprobs = out.logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
    assert 3.0 < entropy < 6.0
    sizes = [state.square().mean().sqrt().item() for state in out.hidden_states[:-1]]
    assert all(later > 1.1 * earlier for earlier, later in zip(sizes, sizes[1:]))
    if "num_local_experts" in model.config.to_dict():
        with torch.no_grad():
            router_logits = model(ids, output_router_logits=True).router_logits
        for logits in router_logits:
            assert logits.std() > 1
            assert logits.reshape(-1, 16).topk(4, -1).indices.unique().numel() == 16


def test_reproducible_and_kept(tmp_path):
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    make(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp, "the same options must not make it again"
    make(first, "--seed", "1")
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_flag_file(tmp_path):
    """configs/qwen3_moe_tiny.args is what the adapter derives from the model's config.json."""
    lines = (ROOT / "configs/qwen3_moe_tiny.args").read_text().splitlines()
    flags = [word for line in lines if not line.startswith("#") for word in line.split()]
    assert flags == flags_from_hf(json.loads((make(tmp_path) / "config.json").read_text()))


def test_too_small_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="--vocab is 100, expected at least 259"):
        make(tmp_path, "--vocab", "100")
