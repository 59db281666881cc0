"""The first layers of a checkpoint, of either kind, at their true widths."""

import pytest
from hf_folders import MOE, tensors_of

from megatron_ext.checkpoint.convert import hf_to_megatron
from megatron_ext.checkpoint.folder import open_checkpoint
from megatron_ext.checkpoint.megatron_layout import MegatronLayout
from megatron_ext.checkpoint.slice import first_layers_config, write_first_layers
from megatron_ext.checkpoint.tensors import CheckpointError
from megatron_ext.parity.bits import assert_same_bits


@pytest.mark.parametrize("kind", ["hf", "megatron"])
@pytest.mark.parametrize("name", ["moe with dense layers", "dense tied"])
def test_first_layers(tmp_path, folders, kind, name):
    source = folders[name]
    if kind == "megatron":
        source = tmp_path / "megatron"
        hf_to_megatron(folders[name], source, MegatronLayout(tp=2))
    cut = tmp_path / "cut"
    cut.mkdir()
    write_first_layers(open_checkpoint(source), 2, cut)
    whole, found = tensors_of(folders[name]), tensors_of(cut)
    assert set(found) == {key for key in whole if not key.startswith(("model.layers.2.", "model.layers.3."))}
    for key in found:
        assert_same_bits(found[key], whole[key], key)
    assert open_checkpoint(cut).shape.layers == 2 and (cut / "tokenizer.json").exists()


def test_configuration():
    cut = first_layers_config({**MOE, "mlp_only_layers": [1, 3], "layer_types": ["full_attention"] * 4}, 3)
    assert cut["num_hidden_layers"] == 3 and cut["mlp_only_layers"] == [1] and cut["layer_types"] == ["full_attention"] * 3
    with pytest.raises(CheckpointError, match="--layers 5: expected 1 to 4"):
        first_layers_config(MOE, 5)
