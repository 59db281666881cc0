"""Checkpoints on disk: only whole ones count, and only of this run."""

import json

import pytest

from megatron_ext.rl import checkpoint
from megatron_ext.rl.checkpoint import CheckpointError
from megatron_ext.rl.main import parse
from megatron_ext.rl.trainer import adopt_history


class World:
    """Writes what Megatron would write, or fails as it might; the real one is used in test_loop.py."""

    def __init__(self, fails=False):
        self.fails = fails

    def call(self, command, path):
        assert command == "save_checkpoint"
        (checkpoint.Path(path)).mkdir()
        if self.fails:
            raise OSError("no space left on device")


def test_latest_is_the_newest_whole_one(tmp_path):
    for step in (5, 10, 15):
        checkpoint.save(World(), tmp_path, step, {"seed": 1}, keep=2)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(World(fails=True), tmp_path, 20, {"seed": 1}, keep=2)
    assert [folder.name for folder in checkpoint.all_steps(tmp_path)] == ["step_000010", "step_000015"]
    found = checkpoint.find("latest", tmp_path)
    assert found.step == 15 and found.megatron.is_dir()
    assert checkpoint.find(str(found.folder), tmp_path / "elsewhere") == found


def test_saving_again_replaces(tmp_path):
    checkpoint.save(World(), tmp_path, 5, {"seed": 1}, keep=0)
    checkpoint.save(World(), tmp_path, 5, {"seed": 2}, keep=0)
    assert checkpoint.find("latest", tmp_path).identity == {"seed": 2}


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(CheckpointError, match="no finished checkpoint under .*start without --resume"):
        checkpoint.find("latest", tmp_path)
    with pytest.raises(CheckpointError, match="is no finished checkpoint of this loop"):
        checkpoint.find(str(tmp_path), tmp_path)


def test_another_run_is_refused(tmp_path):
    saved = checkpoint.save(World(), tmp_path, 5, {"seed": 1, "temperature": 1.0}, keep=0)
    assert json.loads((saved.folder / "run.json").read_text())["step"] == 5
    checkpoint.check_identity(saved, {"seed": 1, "temperature": 1.0})
    with pytest.raises(CheckpointError, match=r"seed: 1 in the checkpoint, 2 now\n.*updates: None in the checkpoint, 3 now"):
        checkpoint.check_identity(saved, {"seed": 2, "temperature": 1.0, "updates": 3})


def test_history_comes_along_into_another_folder(tmp_path):
    """Resuming from another run's checkpoint goes on with that run's metrics; those that are there are left alone."""
    saved = checkpoint.save(World(), tmp_path / "first", 5, {}, keep=0)
    for name in ("metrics.jsonl", "timing.jsonl"):
        (tmp_path / "first" / name).write_text("old\n")
    config = parse(["--hf", "m", "--prompts", "p", "--reward", "m:f", "--steps", "9", "--out", str(tmp_path / "second"), "--resume", str(saved.folder)])
    adopt_history(saved, config)
    assert (tmp_path / "second" / "metrics.jsonl").read_text() == (tmp_path / "second" / "timing.jsonl").read_text() == "old\n"
    (tmp_path / "second" / "metrics.jsonl").write_text("own\n")
    adopt_history(saved, config)
    assert (tmp_path / "second" / "metrics.jsonl").read_text() == "own\n"
