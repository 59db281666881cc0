"""Our flags inside Megatron's parser, and the refusal of options that cannot be kept consistent."""

import sys

import pytest

from megatron_ext.contract import ENVIRONMENT_VARIABLE, Contract, ContractError
from megatron_ext.probe.report import HOLDS, ProbeError, Report, Verdict
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.train.arguments import UnsupportedOption, add_arguments, check_supported, contract_from_args, set_padded_vocab
from megatron_ext.train.client import layout_flags, optimizer_flags
from megatron_ext.checkpoint.hf_config import flags_from_hf
from megatron_ext.platform.cpu import MEGATRON_FLAGS

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 4096, "vocab_size": 1000, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def parse(monkeypatch):
    from megatron.training.arguments import parse_args

    def run(*more, world=1, model=MODEL, **layout):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        flags = [*flags_from_hf(model), *layout_flags(**layout), *optimizer_flags(), *MEGATRON_FLAGS, *more]
        monkeypatch.setattr(sys, "argv", ["worker", *flags])
        return parse_args(add_arguments)

    return run


def problems(args):
    with pytest.raises(UnsupportedOption) as error:
        check_supported(args, contract_from_args(args).order)
    return error.value.problems


def test_help_shows_our_group(monkeypatch, capsys):
    from megatron.training.arguments import parse_args

    monkeypatch.setattr(sys, "argv", ["worker", "--help"])
    with pytest.raises(SystemExit):
        parse_args(add_arguments)
    shown = capsys.readouterr().out
    for flag in ("--no-consistency", "--kernel-backend", "--mmad-order", "--reduction-segments", "--gradient-order", "--kv-tile"):
        assert flag in shown


def test_flags_make_the_contract(parse):
    args = parse("--mmad-order", "groups16", "--reduction-segments", "4", "--kernel-backend", "reference", "--no-consistency")
    expected = Contract(ReductionOrder(mmad_order="groups16", segments=4), "reference", consistency=False)
    assert contract_from_args(args) == expected


def test_another_contract_in_the_environment_is_refused(parse, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, Contract(ReductionOrder(mmad_order="groups16")).to_json())
    with pytest.raises(ContractError, match="command line"):
        contract_from_args(parse())


@pytest.mark.parametrize(
    "world, layout",
    [(1, {}), (2, {"tp": 2}), (2, {"ep": 2}), (2, {"tp": 2, "ep": 2, "etp": 1}), (2, {"pp": 2}), (4, {"tp": 2, "ep": 2, "etp": 1}),
     (4, {"tp": 2, "ep": 2, "etp": 2, "dispatcher": "allgather"})],
)  # fmt: skip
def test_supported_layouts(parse, world, layout):
    args = parse(world=world, **layout)
    check_supported(args, contract_from_args(args).order)


@pytest.mark.parametrize(
    "options, layout, named",
    [
        (["--hidden-dropout", "0.1"], {}, "--hidden-dropout"),
        (["--moe-expert-capacity-factor", "1.0"], {}, "--moe-expert-capacity-factor"),
        (["--moe-aux-loss-coeff", "0.01"], {}, "--moe-aux-loss-coeff"),
        (["--moe-z-loss-coeff", "0.01"], {}, "--moe-z-loss-coeff"),
        (["--moe-router-dtype", "fp64"], {}, "--moe-router-dtype"),
        (["--moe-grouped-gemm"], {}, "--moe-grouped-gemm"),
        (["--moe-shared-expert-intermediate-size", "64"], {}, "--moe-shared-expert-intermediate-size"),
        (["--moe-token-dispatcher-type", "flex"], {}, "--moe-token-dispatcher-type"),
        (["--transformer-impl", "transformer_engine"], {}, "--transformer-impl"),
        (["--fp8-format", "hybrid"], {}, "--fp8-format"),
        (["--context-parallel-size", "2"], {}, "--context-parallel-size"),
        (["--use-distributed-optimizer"], {}, "--use-distributed-optimizer"),
        (["--overlap-grad-reduce"], {}, "--overlap-grad-reduce"),
        (["--recompute-granularity", "full"], {}, "--recompute-granularity"),
        (["--num-virtual-stages-per-pipeline-rank", "2"], {}, "--num-virtual-stages-per-pipeline-rank"),
        (["--window-size", "128,0"], {}, "--window-size"),
        (["--fp16"], {}, "--bf16 or --fp16"),
        ([], {"tp": 8}, "--num-query-groups 4"),
        ([], {"tp": 2, "sequence_parallel": False}, "--sequence-parallel"),
        ([], {"tp": 2, "etp": 1}, "--expert-tensor-parallel-size 1"),
        (["--num-experts", "12"], {"ep": 8}, "expert parallel size 8"),
        (["--moe-ffn-hidden-size", "96"], {}, "--moe-ffn-hidden-size=96"),
        (["--moe-router-num-groups", "4", "--moe-router-group-topk", "2"], {}, "--moe-router-group-topk"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_unsupported_options_are_named(parse, options, layout, named):
    world = layout.get("tp", 1) * layout.get("ep", 1)
    assert any(named in problem for problem in problems(parse(*options, world=world, **layout)))


def test_three_data_parallel_ranks_are_refused(parse):
    assert any("data parallel size 3" in problem for problem in problems(parse(world=3)))


def test_padded_vocabulary_does_not_depend_on_tp(parse):
    for tp in (1, 2, 4):
        args = parse(world=tp, tp=tp)
        set_padded_vocab(args, contract_from_args(args))
        assert args.padded_vocab_size == 1024


def test_stock_vocabulary_is_padded_as_megatron_does(parse):
    args = parse("--no-consistency", world=4, tp=4, model={**MODEL, "vocab_size": 1025})
    set_padded_vocab(args, contract_from_args(args))
    assert args.padded_vocab_size == 1536


def test_another_padded_vocabulary_is_refused(parse):
    args = parse("--padded-vocab-size", "2048")
    with pytest.raises(UnsupportedOption, match="--padded-vocab-size is 2048"):
        set_padded_vocab(args, contract_from_args(args))


def test_the_probe_of_a_device_decides_the_order(parse, tmp_path):
    found = (("mmad_order", "groups16"), ("mmad_subnormals", "keep"), ("vector_subnormals", "keep"))
    probe = tmp_path / "probe.json"
    probe.write_text(Report("a device", {}, tuple(Verdict(name, "", "promise", HOLDS, "", value) for name, value in found)).to_json())
    assert contract_from_args(parse("--npu-probe", str(probe))).order == ReductionOrder(mmad_order="groups16")
    assert contract_from_args(parse()).order == ReductionOrder()
    with pytest.raises(ProbeError, match="leave --mmad-order out"):
        contract_from_args(parse("--npu-probe", str(probe), "--mmad-order", "sequential"))
