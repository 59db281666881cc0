"""The JSON of the probe, the contract fields in it, and the runs that read it."""

import json

import pytest

from megatron_ext.contract import ENVIRONMENT_VARIABLE, Contract
from megatron_ext.parity import check
from megatron_ext.probe.report import HOLDS, VIOLATED, ProbeError, Report, Verdict, contract_fields, order_fields
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.rl import config as rl_config
from megatron_ext.rollout import serve


def verdict(name: str, value: str | None = None, matters: str = "promise", found: str = HOLDS) -> Verdict:
    return Verdict(name, f"what {name} assumes", matters, found, "what was seen", value)


def report(order="groups16", mmad="keep", vector="keep", more=()) -> Report:
    verdicts = (verdict("mmad_order", order), verdict("mmad_subnormals", mmad), verdict("vector_subnormals", vector), *more)
    return Report("a device", {"torch": "2.13.0"}, verdicts)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(report().to_json())
    return str(path)


def test_json_there_and_back():
    assert Report.from_json(report().to_json()) == report()
    content = json.loads(report().to_json())
    assert content["contract"] == {"mmad_order": "groups16", "subnormals": "keep"} and content["usable"] is True


def test_the_fields_make_a_reduction_order():
    assert ReductionOrder(**contract_fields(report())) == ReductionOrder(mmad_order="groups16")


@pytest.mark.parametrize(("found", "message"), [
    (report(order="descending"), r"mmad_order: expected one of \('sequential', 'groups16'\), found 'descending'"),
    (report(order=None), "found None"),
    (report(mmad="flush", vector="flush"), "subnormals: expected 'keep', found 'flush'"),
    (report(mmad="flush"), "found 'mixed'"),
    (report(more=[verdict("mmad_rows", found=VIOLATED)]), r"mmad_rows: violated \(what mmad_rows assumes\): what was seen"),
])  # fmt: skip
def test_a_device_that_cannot_keep_the_contract_is_refused(found, message):
    with pytest.raises(ProbeError, match=message):
        contract_fields(found)


def test_what_no_promise_needs_is_no_obstacle():
    harmless = [verdict("exp_bits", matters="reference", found=VIOLATED), verdict("masked_lanes", matters="note", found=VIOLATED)]
    assert contract_fields(report(more=harmless)) == {"mmad_order": "groups16", "subnormals": "keep"}


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not a report of tools/npu_probe.py"), ("[]", "not a report"), ('{"format": 1}', "not a report"),
    ('{"format": 0}', "of format 0, expected 1"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ProbeError, match=message):
        order_fields(str(path), None)


def test_an_absent_file_is_refused():
    with pytest.raises(ProbeError, match="--npu-probe absent.json"):
        order_fields("absent.json", None)


def test_flag_and_file(file):
    assert order_fields(None, None) == {}
    assert order_fields(None, "groups16") == {"mmad_order": "groups16"}
    assert order_fields(file, None) == order_fields(file, "groups16") == {"mmad_order": "groups16", "subnormals": "keep"}
    with pytest.raises(ProbeError, match="--mmad-order sequential: the device of --npu-probe .* adds in the order 'groups16'"):
        order_fields(file, "sequential")


def rl_contract(*options: str) -> Contract:
    parser = rl_config.add_arguments(rl_config.argparse.ArgumentParser())
    required = ["--hf", "x", "--prompts", "y", "--steps", "1", "--out", "z", "--reward", "megatron_ext.rl.rewards:exact_match"]
    return rl_config.from_args(*parser.parse_known_args([*required, *options])).contract


def parity_contract(*options: str) -> Contract:
    return check.make_contract(check.parse_arguments(["--hf", "x", *options]))


def server_contract(*options: str) -> Contract:
    args, _ = serve.parse_arguments([*options, "x"])
    return Contract.from_json(serve.server_environment(args)[ENVIRONMENT_VARIABLE])


@pytest.mark.parametrize("contract", [rl_contract, parity_contract, server_contract])
def test_runs_read_the_file(contract, file, tmp_path):
    assert contract().order == ReductionOrder()
    assert contract("--npu-probe", file).order == ReductionOrder(mmad_order="groups16")
    flushing = tmp_path / "flushing.json"
    flushing.write_text(report(mmad="flush", vector="flush").to_json())
    with pytest.raises(ProbeError, match="a device cannot keep the contract"):
        contract("--npu-probe", str(flushing))


