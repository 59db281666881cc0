"""What must never pass unseen, on real engines: wrong weights in the rollout, numbers that are none, responses at their limits."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_ext.contract import Contract
from megatron_ext.parity import logdiff
from megatron_ext.rl.data import Prompt
from megatron_ext.rl.gate import LogdiffError
from megatron_ext.rl.live import LiveView
from megatron_ext.rl.main import parse
from megatron_ext.rl.sampling import Response
from megatron_ext.rl.update import Updater
from megatron_ext.rl.weight_sync import WeightSync
from megatron_ext.rollout.client import RolloutPool
from megatron_ext.rollout.engine import SamplingSpec
from megatron_ext.train.client import TrainWorld, cpu_flags
from megatron_ext.weight_digest import DigestMismatch
from megatron_ext.world import WorkerError

pytestmark = pytest.mark.timeout(600)
NAMES = ("model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight", "lm_head.weight")


class Corrupted(WeightSync):
    """A sync whose folder is spoilt on its way."""

    def __init__(self, *sides, spoil) -> None:
        super().__init__(*sides, verify=True)
        self.spoil = spoil

    def export(self) -> None:
        super().export()
        file = self.folder / "model.safetensors"
        tensors = load_file(file)
        self.spoil(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


class Sides:
    """A Megatron world and a rollout engine on the task's model, after an optimizer step and a sync."""

    def __init__(self, model, world, pool):
        self.model, self.world, self.pool = model, world, pool
        world.call("load_hf", path=str(model))
        self.stale = load_file(model / "model.safetensors")
        with WeightSync(world, pool, verify=True) as sync:
            sync()
            self.rollouts = pool.generate(PROMPTS, SamplingSpec(1.0, 4, seeds=range(len(PROMPTS))))
            self.told = world.call("train_step", sequences=sequences(self.rollouts, 1.0), pack=True, micro_batch_size=2)
            sync()


PROMPTS = [[3, 4, 5, 6], [7, 8, 9], [10, 11]]


def sequences(rollouts, advantage):
    """A sequence's label is what errors must call it."""
    return [
        {"tokens": [*r.prompt_ids, *r.token_ids], "prompt_len": len(r.prompt_ids), "advantage": advantage, "old_logprobs": r.logprobs, "label": f"prompt {i}"}
        for i, r in enumerate(rollouts)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def sides(task, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    flags = cpu_flags(task / "model", "--lr", "1e-3")
    with TrainWorld(1, flags, logs / "train.log", 300) as world, RolloutPool(1, Contract(), logs, 300) as pool:
        pool.start(task / "model", max_model_len=64, kv_cache_memory_bytes=64 << 20)
        yield Sides(task / "model", world, pool)


def zeroed(tensors, stale):
    tensors[NAMES[0]].zero_()


def one_bit(tensors, stale):
    tensors[NAMES[0]].view(torch.int16)[3, 5] ^= 1


def old_tensor(tensors, stale):
    tensors[NAMES[0]] = stale[NAMES[0]]


def swapped(tensors, stale):
    tensors[NAMES[0]], tensors[NAMES[1]] = tensors[NAMES[1]], tensors[NAMES[0]]


def swapped_rows(tensors, stale):
    tensors[NAMES[0]] = tensors[NAMES[0]].flip(0).contiguous()


@pytest.mark.parametrize("spoil", [zeroed, one_bit, old_tensor, swapped, swapped_rows])
def test_a_wrong_tensor_is_named(sides, spoil):
    with Corrupted(sides.world, sides.pool, spoil=lambda tensors: spoil(tensors, sides.stale)) as sync:
        with pytest.raises(DigestMismatch, match=NAMES[0].replace(".", r"\.")) as caught:
            sync()
    assert NAMES[2] not in str(caught.value)
    with WeightSync(sides.world, sides.pool, verify=True) as sync:
        assert len(sync()) == 64


@pytest.mark.full
def test_a_missing_tensor_is_named(sides):
    """The engine refuses the folder, so its processes end: a new one is started for what follows."""
    with Corrupted(sides.world, sides.pool, spoil=lambda tensors: tensors.pop(NAMES[0])) as sync:
        with pytest.raises(WorkerError, match=NAMES[0].replace(".", r"\.")):
            sync()
    sides.pool.start(sides.model, max_model_len=64, kv_cache_memory_bytes=64 << 20)
    with WeightSync(sides.world, sides.pool, verify=True) as sync:
        sync()


def test_the_step_itself_shows_the_logprobs(sides):
    """The update's forward pass gives the rollout's logprobs, bit for bit: the old-logprob pass would tell nothing new."""
    verdict = logdiff.compare(sides.told["logprobs"], [r.logprobs for r in sides.rollouts], [r.token_ids for r in sides.rollouts])
    assert verdict.exact


def test_loss_and_gradient_are_right(sides):
    """Against transformers in fp32, whose own bf16 error is about as large."""
    model = AutoModelForCausalLM.from_pretrained(sides.model, dtype=torch.float32)
    loss, count = 0.0, sum(len(r.token_ids) for r in sides.rollouts)
    for rollout in sides.rollouts:
        logits = model(torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])).logits[0, len(rollout.prompt_ids) - 1 : -1]
        loss = loss - logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None]).sum() / count
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    assert sides.told["loss"] == pytest.approx(loss.item(), rel=0.02)
    assert sides.told["grad_norm"] == pytest.approx(norm.item(), rel=0.02)


@pytest.mark.parametrize(("options", "reason", "length"), [
    ({"max_tokens": 3, "ignore_eos": True}, "length", 3),  # cut at the limit
    ({"max_tokens": 1, "ignore_eos": True}, "length", 1),
    ({"max_tokens": 8, "stop_token_ids": range(40)}, "stop", 1),  # empty: the end comes first
])  # fmt: skip
def test_shortest_and_cut_responses(sides, options, reason, length):
    rollouts = sides.pool.generate(PROMPTS, SamplingSpec(1.0, seeds=range(5, 8), **options))
    assert [(r.finish_reason, len(r.token_ids), len(r.logprobs)) for r in rollouts] == [(reason, length, length)] * 3
    train = sides.world.call("logprobs", sequences=sequences(rollouts, 0.0), micro_batch_size=3)["logprobs"]
    assert logdiff.compare(train, [r.logprobs for r in rollouts], [r.token_ids for r in rollouts]).exact


def test_the_gate_stops_an_update(sides, task, tmp_path):
    """One last bit of one rollout logprob: named by the old-logprob pass where that runs, before an update, else by the update's own pass."""
    prompts = [Prompt(40 + i, tuple(ids), "", {}) for i, ids in enumerate(PROMPTS)]
    rollouts = sides.pool.generate(PROMPTS, SamplingSpec(1.0, 4, seeds=range(len(PROMPTS)), ignore_eos=True))
    rollouts[2].logprobs[3] = np.nextafter(rollouts[2].logprobs[3], np.float32(0))
    responses = [Response(prompt, 1, rollout) for prompt, rollout in zip(prompts, rollouts, strict=True)]
    command = ["--hf", str(task / "model"), "--prompts", str(task / "train.jsonl"), "--reward", "m:f", "--steps", "9", "--out", str(tmp_path)]
    for options, source in ((["--verify-old-logprob", "3"], "the old-logprob pass"), ([], "the update's own forward pass")):
        updater = Updater(parse([*command, *options]), sides.world, LiveView(9))
        with pytest.raises(LogdiffError, match=f"step 6: 1 of 12 sampled tokens .*{source}.*the first: prompt 42 sample 1, position 3"):
            updater(responses, [0.0] * 3, 6, lambda name: contextlib.nullcontext())
    updater = Updater(parse([*command, "--logdiff-policy", "warn"]), sides.world, LiveView(9))
    update = updater(responses, [0.0] * 3, 6, lambda name: contextlib.nullcontext())
    assert "12 of 12 sampled tokens" in update.warning and len(update.train_logprobs) == 3  # the update before has moved the weights


def test_reference_policy_is_what_was_remembered(sides):
    """Logprobs of the reference weights do not move with the policy, and the policy's weights come back untouched."""
    world, batch = sides.world, sequences(sides.rollouts, 1.0)
    world.call("remember_reference")
    before, digest = world.call("logprobs", sequences=batch)["logprobs"], world.call("digest")
    world.call("train_step", sequences=batch)
    moved = world.call("digest")["digest"]
    told = world.call("logprobs", sequences=batch, reference=True)["logprobs"]
    assert np.array_equal(np.concatenate(told).view(np.int32), np.concatenate(before).view(np.int32))
    assert world.call("digest")["digest"] == moved != digest["digest"]


def test_nan_weights_in_the_rollout_are_named(sides, tmp_path):
    """By request and position, before a token is drawn. Ends the engine."""
    with pytest.raises(WorkerError, match="non-finite logits: second prompt, response position 0"):
        sides.pool.load_weights(spoilt_folder(sides.model, tmp_path, token=7))
        sides.pool.generate([[3, 4], [3, 7]], SamplingSpec(1.0, 4, seeds=[1, 2], labels=["first prompt", "second prompt"]))


def test_infinite_gradients_are_named(sides):
    """Before they reach the weights. Ends the world."""
    with pytest.raises(WorkerError, match=r"rank 0: (.|\n)*NonFinite: non-finite gradients: .*weight \(\d+ of \d+\)"):
        sides.world.call("train_step", sequences=sequences(sides.rollouts, float("inf")))


def test_nan_weights_in_training_are_named(task, tmp_path):
    """Both what was seen first, the logits, and what caused it."""
    with TrainWorld(1, cpu_flags(task / "model"), tmp_path / "log", 300) as world:
        world.call("load_hf", path=str(spoilt_folder(task / "model", tmp_path, token=7)))
        with pytest.raises(WorkerError, match=r"NonFinite: non-finite weights: .*word_embeddings\.weight \(1 of \d+\)") as caught:
            world.call("logprobs", sequences=[{"tokens": [3, 7, 5], "prompt_len": 1, "label": "prompt 4 sample 2"}])
        assert "non-finite logits: sequence 0 (prompt 4 sample 2), response position" in str(caught.value)


def spoilt_folder(model, tmp_path, token):
    """The model with one embedding value that is no number."""
    folder = tmp_path / "spoilt"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token, 2] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    return folder
