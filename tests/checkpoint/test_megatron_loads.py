"""megatron.training's own load_checkpoint loads what the converter wrote, in any layout; the converter reads what its save_checkpoint wrote."""

import pytest
from hf_folders import CONFIGS, assert_same_folder, digests_of, make_hf

from megatron_ext.checkpoint.convert import hf_to_megatron, megatron_to_hf
from megatron_ext.checkpoint.megatron_layout import MegatronLayout
from megatron_ext.parity.layout import TrainLayout
from megatron_ext.train.client import TrainWorld, cpu_flags

pytestmark = pytest.mark.timeout(600)
full = pytest.mark.full
CASES = [
    # model, layout written, layout that loads, more flags
    pytest.param("moe", MegatronLayout(tp=4, ep=2), TrainLayout(2, 2), (), id="moe TP2 x EP2"),
    pytest.param("dense tied", MegatronLayout(), TrainLayout(pp=2), (), id="dense tied PP2"),
    pytest.param("moe tied", MegatronLayout(pp=4), TrainLayout(), (), id="moe tied TP1", marks=full),
    pytest.param("moe", MegatronLayout(), TrainLayout(2, 2), ("--no-consistency",), id="moe TP2 x EP2, stock modules", marks=full),
    pytest.param("dense", MegatronLayout(tp=8), TrainLayout(tp=2, pp=2), ("--no-consistency",), id="dense TP2 x PP2, stock modules", marks=full),
    pytest.param("moe with dense layers", MegatronLayout(tp=2, pp=2), TrainLayout(2, 2, 2), (), id="mixed TP2 x EP2 x PP2", marks=full),
    pytest.param("moe", MegatronLayout(ep=4), TrainLayout(tp=2, ep=2, etp=2, dispatcher="allgather"), (), id="moe TP2 x EP2 x ETP2", marks=full),
]  # fmt: skip


@pytest.mark.parametrize(("name", "written", "loading", "flags"), CASES)
def test_load_and_save(tmp_path, folders, name, written, loading, flags):
    hf, checkpoint, saved = folders[name], tmp_path / "converted", tmp_path / "saved"
    hf_to_megatron(hf, checkpoint, written)
    other = make_hf(tmp_path / "other", CONFIGS[name], seed=1)
    with TrainWorld(loading.world_size, cpu_flags(hf, *flags, **loading.arguments()), tmp_path / "train.log", 300) as world:
        world.call("load_hf", path=str(other))
        assert world.call("digest")["digest"] != digests_of(hf)
        world.call("load_checkpoint", path=str(checkpoint))
        assert world.call("digest")["digest"] == digests_of(hf)
        world.call("save_checkpoint", path=str(saved))
        world.call("export_hf", path=str(tmp_path / "exported"))
    assert_same_folder(hf, tmp_path / "exported")
    megatron_to_hf(saved, tmp_path / "back", like=hf, verify=True)
    assert_same_folder(hf, tmp_path / "back")
