"""tools/inspect_checkpoint.py: layout, types and digests of both kinds of checkpoint, and what differs between two."""

import json

import pytest
import torch
from hf_folders import DENSE, MOE, digests_of, make_hf

from megatron_ext.checkpoint import inspection
from megatron_ext.checkpoint.convert import hf_to_megatron
from megatron_ext.checkpoint.megatron_layout import MegatronLayout


def inspect(tmp_path, *arguments):
    """(exit status, what --json wrote)"""
    file = tmp_path / "result.json"
    status = inspection.main([*map(str, arguments), "--json", str(file)])
    return status, json.loads(file.read_text())


def test_both_kinds_are_described(tmp_path, folders, capsys):
    hf_to_megatron(folders["moe"], tmp_path / "m", MegatronLayout(tp=2, pp=2, ep=2))
    _, hf = inspect(tmp_path, folders["moe"])
    _, megatron = inspect(tmp_path, tmp_path / "m", "--tensors")
    for key in ("architecture", "layers", "tied embeddings", "tensors", "parameters", "bytes", "parameters by type"):
        assert hf["checkpoint"][key] == megatron["checkpoint"][key]
    assert hf["checkpoint"]["kind"] == "hf" and hf["checkpoint"]["parameters by type"].keys() == {"bfloat16"}
    found = megatron["checkpoint"]
    assert found["kind"] == "megatron" and found["files"] == 4 and found["rows of the padded vocabulary"] == 1024
    assert found["written by a layout of"] == {"TP": 2, "PP": 2, "EP": 2, "ETP": 1} and found["optimizer tensors"] == 0
    assert "model.layers.3.mlp.experts.7.down_proj.weight  bfloat16[128, 128]" in capsys.readouterr().out


def test_digests_are_those_of_the_engines(tmp_path, folders):
    status, result = inspect(tmp_path, folders["moe"], "--digests")
    assert status == 0 and result["digests"] == digests_of(folders["moe"])


def test_kept_digests_reveal_a_change(tmp_path, folders, capsys):
    hf_to_megatron(folders["dense"], tmp_path / "m", verify=True)
    assert inspect(tmp_path, tmp_path / "m", "--digests")[0] == 0 and "all digests are those of digests.json" in capsys.readouterr().out
    file = tmp_path / "m" / "release" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(digest_probe(folders["dense"]))] ^= 1
    file.write_bytes(data)
    assert inspection.main([str(tmp_path / "m"), "--digests"]) == 2
    assert "model.layers.2.self_attn.o_proj.weight: digests.json" in capsys.readouterr().err


def digest_probe(folder):
    """The first bytes of one tensor, to find it in a file."""
    from megatron_ext.checkpoint.folder import open_checkpoint

    return open_checkpoint(folder).tensors.read("model.layers.2.self_attn.o_proj.weight", 0, 1).view(torch.uint8).numpy().tobytes()


def test_equal_checkpoints_of_different_kinds(tmp_path, folders, capsys):
    hf_to_megatron(folders["moe tied"], tmp_path / "m", MegatronLayout(tp=4))
    status, result = inspect(tmp_path, tmp_path / "m", "--against", folders["moe tied"])
    assert status == 0 and result["differences"] == [] and "tensors are equal, bit for bit" in capsys.readouterr().out


def test_differences_are_named_and_measured(tmp_path, folders):
    def change(tensors):
        tensors["model.layers.0.self_attn.v_proj.weight"][3, 5] += 2.0
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()

    other = make_hf(tmp_path / "other", MOE, change=change)
    status, result = inspect(tmp_path, folders["moe"], "--against", other)
    values, types = result["differences"]
    assert status == 1 and values["name"] == "model.layers.0.self_attn.v_proj.weight" and values["elements"] == 1
    assert values["largest"] == pytest.approx(2.0, rel=0.05)
    assert types["name"] == "model.norm.weight" and (types["left"], types["right"]) == ("bfloat16[128]", "float32[128]")


def test_another_model_differs_in_its_flags(tmp_path, folders):
    other = make_hf(tmp_path / "other", {**DENSE, "rms_norm_eps": 1e-5})
    status, result = inspect(tmp_path, folders["dense"], "--against", other)
    assert status == 1 and result["differences"] == [] and "right: --norm-epsilon 1e-05" in result["flags"]
    _, result = inspect(tmp_path, folders["dense"], "--against", folders["dense tied"])
    assert [d["right"] for d in result["differences"] if d["name"] == "lm_head.weight"] == ["absent"]
