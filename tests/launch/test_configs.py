"""configs/: the flag files are what the public Hugging Face configurations say, and Megatron's parser and the RL loop accept them."""

import argparse
import json
import shlex
from pathlib import Path

import pytest

from megatron_ext.checkpoint.hf_config import flags_from_hf
from megatron_ext.rl.main import parse
from megatron_ext.train.arguments import add_arguments, check_supported
from megatron_ext.train.client import layout_flags, optimizer_flags

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = sorted(file.stem for file in (CONFIGS / "hf").glob("*.json"))
# Layouts that the contract has to accept for each model: (TP, EP).
LAYOUTS = {"qwen3_0.6b": (8, 1), "qwen3_4b": (8, 1), "qwen3_8b": (8, 1), "qwen3_30b_a3b": (4, 8), "qwen3_235b_a22b": (4, 16)}
# Published sizes, in billions of parameters (model cards of Qwen/Qwen3-*).
PARAMETERS = {"qwen3_0.6b": 0.6, "qwen3_4b": 4.0, "qwen3_8b": 8.2, "qwen3_30b_a3b": 30.5, "qwen3_235b_a22b": 235.0}
RUN = ["--hf", "model", "--prompts", "p.jsonl", "--reward", "m:f", "--steps", "3", "--out", "run"]


def flags_of(name):
    return shlex.split((CONFIGS / f"{name}.args").read_text(), comments=True)


def megatron_parser():
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.fixture(scope="module")
def parser():
    return megatron_parser()


def hf_config(name):
    return json.loads((CONFIGS / "hf" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_model_flags_say_what_the_hugging_face_fields_say(parser, name):
    mine, derived = vars(parser.parse_args(flags_of(name))), vars(parser.parse_args(flags_from_hf(hf_config(name))))
    assert {key: (mine[key], derived[key]) for key in mine if mine[key] != derived[key]} == {}
    config = hf_config(name)
    expected = {
        "num_layers": config["num_hidden_layers"], "hidden_size": config["hidden_size"], "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"], "num_query_groups": config["num_key_value_heads"], "kv_channels": config["head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"], "rotary_base": config["rope_theta"], "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"], "bf16": config["torch_dtype"] == "bfloat16",
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"], "num_experts": config.get("num_experts"),
        "qk_layernorm": True, "swiglu": config["hidden_act"] == "silu", "add_bias_linear": config["attention_bias"],
    }  # fmt: skip
    if "num_experts" in config:
        expected |= {"moe_ffn_hidden_size": config["moe_intermediate_size"], "moe_router_topk": config["num_experts_per_tok"],
                     "moe_layer_freq": [1] * config["num_hidden_layers"], "moe_router_pre_softmax": not config["norm_topk_prob"]}  # fmt: skip
    assert {key: mine[key] for key in expected} == expected


@pytest.mark.parametrize("name", MODELS)
def test_model_flags_make_a_model_of_the_published_size(name):
    from math import prod

    from megatron_ext.checkpoint.mapping import ModelShape, hf_shapes

    total = sum(prod(shape) for shape in hf_shapes(ModelShape.from_hf(hf_config(name))).values())
    assert total / 1e9 == pytest.approx(PARAMETERS[name], rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_the_contract_covers_the_model(parser, name, monkeypatch):
    from megatron_ext.platform.cpu import MEGATRON_FLAGS
    from megatron_ext.reduction_order import ReductionOrder

    tp, ep = LAYOUTS[name]
    monkeypatch.setenv("WORLD_SIZE", str(max(tp, ep)))
    args = parser.parse_args([*flags_of(name), *layout_flags(tp=tp, ep=ep, etp=1 if ep > 1 else None), *optimizer_flags(), *MEGATRON_FLAGS])
    args.world_size, args.rank = max(tp, ep), 0
    check_supported(args, ReductionOrder())


def test_flags_of_the_tiny_model_are_known_to_the_parser(parser):
    parser.parse_args(flags_of("qwen3_moe_tiny"))


EXPECTED = {
    "grpo": {"importance_level": "token", "clip_high": 0.2, "kl_coef": 0.001}, "gspo": {"importance_level": "sequence", "clip_high": 4e-4, "kl_coef": 0.0},
    "dapo": {"importance_level": "token", "clip_high": 0.28, "kl_coef": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_run_files_are_loadable_and_are_the_algorithm(parser, name):
    config = parse([f"@{CONFIGS / f'{name}.args'}", *RUN])
    assert {key: getattr(config.objective, key) for key in EXPECTED[name]} == EXPECTED[name]
    assert config.aggregation == ("token-mean" if name == "dapo" else "seq-mean-token-mean")
    parser.parse_args(list(config.megatron_flags))


@pytest.mark.parametrize("model", MODELS)
def test_model_and_run_files_go_together(parser, model):
    config = parse([f"@{CONFIGS / 'gspo.args'}", f"@{CONFIGS / f'{model}.args'}", *RUN])
    assert parser.parse_args(list(config.megatron_flags)).num_layers == hf_config(model)["num_hidden_layers"]
