"""Hugging Face -> Megatron -> Hugging Face is byte-identical, whatever the layout; nothing damaged passes, nothing unfinished stays."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hf_folders import CONFIGS, DENSE, MOE, assert_same_folder, digests_of, make_hf, tensors_of

from megatron_ext.checkpoint import convert
from megatron_ext.checkpoint.convert import hf_to_megatron, megatron_to_hf
from megatron_ext.checkpoint.folder import open_checkpoint
from megatron_ext.checkpoint.hf_config import UnsupportedModel
from megatron_ext.checkpoint.megatron_layout import LayoutError, MegatronLayout
from megatron_ext.checkpoint.tensors import CheckpointError
from megatron_ext.parity.bits import assert_same_bits

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "TP1": MegatronLayout(), "TP2 x EP4": MegatronLayout(tp=2, ep=4), "TP2 x PP4 x EP2 x ETP2": MegatronLayout(tp=2, pp=4, ep=2, etp=2),
    "TP4": MegatronLayout(tp=4), "PP2": MegatronLayout(pp=2), "TP8 (more than key heads)": MegatronLayout(tp=8),
}  # fmt: skip
CASES = [
    pytest.param(layout, id=name, marks=[] if index < 3 else pytest.mark.full) for index, (name, layout) in enumerate(LAYOUTS.items())
]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", CASES)
def test_round_trip_is_byte_identical(folders, tmp_path, name, layout):
    if layout.ep > 1 and "num_experts" not in CONFIGS[name]:
        with pytest.raises(LayoutError, match="has no experts"):
            hf_to_megatron(folders[name], tmp_path / "megatron", layout)
        return
    hf_to_megatron(folders[name], tmp_path / "megatron", layout, verify=True)
    files = sorted((tmp_path / "megatron" / "release").glob("*.distcp"))
    assert len(files) == layout.ranks
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", max_file_bytes=1 << 20, verify=True)
    assert_same_folder(folders[name], tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}" and not list(tmp_path.glob("*.partial"))


def test_digests_do_not_depend_on_the_layout(folders, tmp_path):
    for name in ("moe", "dense tied"):
        expected = digests_of(folders[name])
        for tp in (1, 4):
            out = tmp_path / f"{name} {tp}"
            hf_to_megatron(folders[name], out, MegatronLayout(tp=tp))
            assert digests_of(out) == expected


def test_sharded_output_has_an_index(folders, tmp_path):
    hf_to_megatron(folders["moe"], tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "hf", max_file_bytes=100_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    tensors = tensors_of(tmp_path / "hf")
    assert index["weight_map"].keys() == tensors.keys() and len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert_same_folder(folders["moe"], tmp_path / "hf")


def test_vocabulary_padding_is_added_and_removed(folders, tmp_path):
    from megatron_ext.checkpoint.torch_dist import open_metadata

    for padded, expected in ((None, 1024), (1152, 1152)):
        out = tmp_path / str(padded)
        hf_to_megatron(folders["moe"], out, MegatronLayout(tp=2), padded_vocab=padded)
        metadata, _ = open_metadata(out / "release")
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert tuple(metadata.state_dict_metadata[key].size) == (expected, 128)
        assert digests_of(out) == digests_of(folders["moe"])
    with pytest.raises(LayoutError, match="less than the vocabulary"):
        hf_to_megatron(folders["moe"], tmp_path / "x", padded_vocab=1000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_types_are_kept(tmp_path, dtype):
    name = {torch.float16: "float16", torch.float32: "float32"}[dtype]
    folder = make_hf(tmp_path / "hf", {**MOE, "torch_dtype": name}, dtype)
    hf_to_megatron(folder, tmp_path / "m", MegatronLayout(tp=2, ep=2))
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    assert_same_folder(folder, tmp_path / "back")


def test_types_are_cast_on_request(folders, tmp_path):
    hf_to_megatron(folders["moe"], tmp_path / "m", dtype="fp32", verify=True)
    megatron_to_hf(tmp_path / "m", tmp_path / "fp16", dtype="fp16", verify=True)
    expected = {name: tensor.float().half() for name, tensor in tensors_of(folders["moe"]).items()}
    found = tensors_of(tmp_path / "fp16")
    assert json.loads((tmp_path / "m" / "hf" / "config.json").read_text())["dtype"] == "float32"
    config = json.loads((tmp_path / "fp16" / "config.json").read_text())
    assert config["dtype"] == "float16" and "torch_dtype" not in config
    for name in expected:
        assert_same_bits(found[name], expected[name], name)


def test_a_cast_that_overflows_is_named(tmp_path):
    folder = make_hf(tmp_path / "hf", DENSE, change=lambda tensors: tensors["model.norm.weight"].fill_(1e30))
    with pytest.raises(CheckpointError, match="model.norm.weight: 128 values are too large for float16"):
        hf_to_megatron(folder, tmp_path / "m", dtype="fp16")


def test_mixed_types_need_one_type(tmp_path):
    def mixed(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].float()

    folder = make_hf(tmp_path / "hf", DENSE, change=mixed)
    with pytest.raises(CheckpointError, match=r"decoder.layers.1.self_attention.linear_qkv.weight would join.*k_proj.weight is torch.float32"):
        hf_to_megatron(folder, tmp_path / "m")
    hf_to_megatron(folder, tmp_path / "m", dtype="bf16", verify=True)


# What is wrong is refused by name


def drop(name):
    return lambda tensors: tensors.pop(name)


def add(name):
    return lambda tensors: tensors.update({name: torch.zeros(3, dtype=torch.bfloat16)})


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


@pytest.mark.parametrize(("change", "message"), [
    (drop("model.layers.2.mlp.experts.5.up_proj.weight"), r"model.layers.2.mlp.experts.5.up_proj.weight: missing in .*hf"),
    (add("model.layers.0.mlp.shared_expert.gate.weight"), r"shared_expert.gate.weight: unexpected, in .*safetensors"),
    (cut("model.layers.3.self_attn.o_proj.weight"), r"o_proj.weight: expected shape \[128, 128\], found \[127, 128\] in .*safetensors"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    folder = make_hf(tmp_path / "hf", MOE, change=change)
    with pytest.raises(CheckpointError, match=message):
        hf_to_megatron(folder, tmp_path / "m")
    assert not list(tmp_path.glob("m*"))


def truncate(file, by=1000):
    os.truncate(file, file.stat().st_size - by)


def test_damaged_hugging_face_folders_are_named(tmp_path):
    def fresh(name):
        return make_hf(tmp_path / name, MOE, max_file_bytes=200_000)

    folder = fresh("truncated")
    file = sorted(folder.glob("*.safetensors"))[1]
    truncate(file)
    with pytest.raises(CheckpointError, match=rf"{file.name}: not a whole safetensors file"):
        hf_to_megatron(folder, tmp_path / "m")
    folder = fresh("missing")
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name}: missing; the index has .* in it"):
        hf_to_megatron(folder, tmp_path / "m")
    folder = fresh("twice")
    (folder / "again.safetensors").write_bytes(sorted(folder.glob("*.safetensors"))[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"found in two files of .*again.safetensors"):
        hf_to_megatron(folder, tmp_path / "m")


def test_no_pickle_is_loaded_from_hugging_face_folders(tmp_path):
    folder = make_hf(tmp_path / "hf", DENSE)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no \\*.safetensors in .*; expected a Hugging Face folder with safetensors"):
        hf_to_megatron(folder, tmp_path / "m")


def test_unknown_architectures_are_refused(tmp_path):
    folder = make_hf(tmp_path / "hf", DENSE)
    (folder / "config.json").write_text(json.dumps({**DENSE, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        hf_to_megatron(folder, tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({key: value for key, value in DENSE.items() if key != "hidden_size"}))
    with pytest.raises(CheckpointError, match="config.json: lacks the field 'hidden_size'"):
        hf_to_megatron(folder, tmp_path / "m")


def test_a_tied_head_must_be_the_embedding(tmp_path):
    config = {**DENSE, "tie_word_embeddings": True}
    same = make_hf(tmp_path / "same", config, change=lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    hf_to_megatron(same, tmp_path / "m", verify=True)
    other = make_hf(tmp_path / "other", config, change=lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        hf_to_megatron(other, tmp_path / "m2")


@pytest.mark.parametrize(("layout", "message"), [
    (MegatronLayout(pp=3), "pp = 3 does not divide layers = 4"), (MegatronLayout(ep=3), "ep = 3 does not divide experts = 8"),
    (MegatronLayout(tp=3), "tp = 3 does not divide query heads = 8"), (MegatronLayout(ep=2, etp=5), "etp = 5 does not divide expert width = 128"),
])  # fmt: skip
def test_layouts_that_do_not_divide_are_refused(folders, tmp_path, layout, message):
    with pytest.raises(LayoutError, match=message):
        hf_to_megatron(folders["moe"], tmp_path / "m", layout)


def test_damaged_megatron_checkpoints_are_named(folders, tmp_path):
    def fresh(name):
        hf_to_megatron(folders["moe"], tmp_path / name, MegatronLayout(tp=2))
        return tmp_path / name

    out = fresh("truncated")
    truncate(out / "release" / "__1_0.distcp")
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: has \d+ bytes of \d+; it holds"):
        megatron_to_hf(out, tmp_path / "x")
    out = fresh("missing")
    (out / "release" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp: missing"):
        megatron_to_hf(out, tmp_path / "x")
    out = fresh("unfinished")
    (out / "release" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="metadata.json: .*expected a finished Megatron checkpoint"):
        megatron_to_hf(out, tmp_path / "x")
    out = fresh("garbled")
    truncate(out / "release" / ".metadata", by=100)
    with pytest.raises(CheckpointError, match=".metadata: cannot be read"):
        megatron_to_hf(out, tmp_path / "x")
    out = fresh("other model")
    config = json.loads((out / "hf" / "config.json").read_text())
    (out / "hf" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "hidden_size": 256}))
    with pytest.raises(CheckpointError, match=r"(?s)word_embeddings.weight: expected shape \[1001, 256\], found \[1024, 128\]"):
        megatron_to_hf(out, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_verify_finds_a_wrong_byte(folders, tmp_path, monkeypatch):
    from megatron_ext.checkpoint import torch_dist
    from megatron_ext.weight_digest import DigestMismatch

    honest = torch_dist.read_chunk

    def spoilt(source, tensor, chunk, dtype):
        data = honest(source, tensor, chunk, dtype)
        if tensor.name == "decoder.layers.2.self_attention.linear_proj.weight":
            data.view(torch.int16)[0, 0] ^= 1
        return data

    monkeypatch.setattr(torch_dist, "read_chunk", spoilt)
    with pytest.raises(DigestMismatch, match=r"1 logical tensors differ between source and written:\nmodel.layers.2.self_attn.o_proj.weight"):
        hf_to_megatron(folders["moe"], tmp_path / "m", verify=True)
    assert not (tmp_path / "m").exists()


# Whole or nothing


def test_an_existing_folder_is_replaced_only_on_request(folders, tmp_path):
    hf_to_megatron(folders["moe"], tmp_path / "m")
    with pytest.raises(CheckpointError, match="exists already.*--overwrite"):
        hf_to_megatron(folders["dense"], tmp_path / "m")
    hf_to_megatron(folders["dense"], tmp_path / "m", overwrite=True)
    assert digests_of(tmp_path / "m") == digests_of(folders["dense"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


SLOW = """
import sys, time
from megatron_ext.checkpoint import convert, hf_folder, torch_dist

for kind in (hf_folder.SafetensorsFolder, torch_dist.TorchDistFolder):
    kind.read = (lambda read: lambda *arguments: time.sleep(0.05) or read(*arguments))(kind.read)
sys.exit(convert.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_a_killed_run_leaves_nothing_that_loads(folders, tmp_path, direction):
    hf_to_megatron(folders["moe"], tmp_path / "from")
    source = ["--hf", folders["moe"]] if direction == "to-megatron" else ["--megatron", tmp_path / "from"]
    out = tmp_path / "out"
    run = subprocess.Popen([sys.executable, "-c", SLOW, direction, *map(str, source), "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE)
    partial, deadline = tmp_path / "out.partial", time.monotonic() + 60
    while not any(file.stat().st_size > 50_000 for file in partial.rglob("*") if file.is_file()):
        assert run.poll() is None and time.monotonic() < deadline, run.stderr.read()
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not out.exists() and partial.exists()
    for path in (partial, partial / "release"):
        with pytest.raises(CheckpointError):
            open_checkpoint(path, like=folders["moe"])
    assert convert.main([direction, *map(str, source), "--out", str(out), "--verify"]) == 0
    assert digests_of(out) == digests_of(folders["moe"]) and not partial.exists()


def test_peak_memory_is_a_small_multiple_of_a_layer(tmp_path, capfd):
    config = {**MOE, "hidden_size": 512, "num_hidden_layers": 6, "num_experts": 32, "moe_intermediate_size": 256, "vocab_size": 20_000}
    folder = make_hf(tmp_path / "hf", config, max_file_bytes=64 << 20)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for arguments in (["to-megatron", "--hf", folder], ["to-hf", "--megatron", tmp_path / "m"]):
        out = tmp_path / ("m" if arguments[0] == "to-megatron" else "back")
        assert convert.main([*map(str, arguments), "--out", str(out)]) == 0
        printed = capfd.readouterr().err
        peak, layer = (float(printed.split(key)[1].split(" MB")[0]) for key in ("peak memory ", "a layer of "))
        assert peak < 3 * layer < total / 1e6, printed


def test_errors_end_with_one_line_of_explanation(tmp_path):
    result = subprocess.run([sys.executable, "tools/convert_checkpoint.py", "to-hf", "--megatron", str(tmp_path), "--out", str(tmp_path / "x")],
                            cwd=ROOT, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert result.returncode == 1 and "CheckpointError" in result.stderr and "no Megatron checkpoint" in result.stderr
    assert "Traceback" not in result.stderr
