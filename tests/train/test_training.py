"""Real Megatron worlds: a training step has the same bits in every layout of one DP and EP; weights and checkpoints pass between layouts."""

import random

import numpy as np
import pytest
from models import make_model

from megatron_ext.train.client import TrainWorld, cpu_flags
from megatron_ext.world import WorkerError

pytestmark = pytest.mark.timeout(600)

LENGTHS = (37, 150, 64, 300, 9, 128)
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, 1.0]


def sequences():
    rng = random.Random(0)
    lengths = zip(LENGTHS, ADVANTAGES, strict=True)
    return [{"tokens": [rng.randrange(1000) for _ in range(n)], "prompt_len": max(1, n // 3), "advantage": a} for n, a in lengths]


def step(world, **options):
    """What a step leaves behind: loss, gradient norm, digest of every weight."""
    told = world.call("train_step", sequences=sequences(), temperature=0.7, **options)
    return {"loss": told["loss"], "grad_norm": told["grad_norm"], "digest": world.call("digest")["digest"]}


def logprobs(world, **options):
    return np.concatenate(world.call("logprobs", sequences=sequences(), temperature=0.7, **options)["logprobs"]).view(np.int32)


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")

    def run(name, nproc, *more, hf=model, **layout):
        return TrainWorld(nproc, cpu_flags(hf, *more, **layout), logs / f"{name}.log", timeout_s=300)

    return run


class Reference:
    """TP1: log-probabilities, two steps, and what was written between them."""

    def __init__(self, world, model, folder):
        self.hf, self.checkpoint = str(folder / "export"), str(folder / "checkpoint")
        world.call("load_hf", path=model)
        self.logprobs = logprobs(world)
        self.variants = [
            logprobs(world, micro_batch_size=size, pack=pack, with_grad=with_grad)
            for size, pack, with_grad in ((2, False, True), (3, True, True), (6, False, False))
        ]
        self.first = step(world)
        world.call("export_hf", path=self.hf)
        world.call("save_checkpoint", path=self.checkpoint)
        self.second = step(world)
        world.call("assert_hit")


@pytest.fixture(scope="module")
def reference(start, model, tmp_path_factory):
    with start("tp1", 1) as world:
        return Reference(world, model, tmp_path_factory.mktemp("reference"))


def test_batches_and_gradients_do_not_show(reference):
    """Micro-batch size, packing or padding, and training mode with gradients leave no trace in a log-probability."""
    for variant in reference.variants:
        assert np.array_equal(variant, reference.logprobs)


LAYOUTS = {
    "tp2ep2": (2, {"tp": 2, "ep": 2, "etp": 1}, {"micro_batch_size": 2, "pack": False}),
}
MORE_LAYOUTS = {
    "pp2": (2, {"pp": 2}, {"micro_batch_size": 3}),
    "tp2etp2": (2, {"tp": 2}, {"micro_batch_size": 2}),
    "tp2ep2 allgather": (2, {"tp": 2, "ep": 2, "etp": 1, "dispatcher": "allgather"}, {}),
    "tp4ep4": (4, {"tp": 4, "ep": 4, "etp": 1}, {"micro_batch_size": 6, "pack": False}),
    "tp2pp2": (4, {"tp": 2, "pp": 2}, {"micro_batch_size": 2}),
}


def check_layout(start, model, reference, name, nproc, layout, options):
    with start(name, nproc, **layout) as world:
        world.call("load_hf", path=model)
        assert np.array_equal(logprobs(world, **options), reference.logprobs)
        assert step(world, **options) == reference.first
        assert step(world, **options) == reference.second
        world.call("assert_hit")
        world.call("report")


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_equal_across_layouts(start, model, reference, name):
    check_layout(start, model, reference, name, *LAYOUTS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_steps_are_equal_across_more_layouts(start, model, reference, name):
    check_layout(start, model, reference, name, *MORE_LAYOUTS[name])


@pytest.mark.full
def test_weights_and_checkpoints_pass_to_another_layout(start, reference):
    """TP1 wrote, TP2 reads: equal weights, and the resumed step is the step that TP1 went on with. Then a lost rank is told."""
    with start("resume", 2, tp=2) as world:
        world.call("load_hf", path=reference.hf)
        assert world.call("digest")["digest"] == reference.first["digest"]
        world.call("load_checkpoint", path=reference.checkpoint)
        assert world.call("digest")["digest"] == reference.first["digest"]
        assert step(world, micro_batch_size=2) == reference.second
        with pytest.raises(WorkerError, match="unknown command 'nonsense'"):
            world.call("nonsense")
        with pytest.raises(WorkerError, match="not running"):
            world.call("info")


@pytest.mark.full
@pytest.mark.parametrize("layouts", [({"ep": 2}, {"ep": 2, "dispatcher": "allgather"}), ({"tp": 2, "ep": 2}, {"tp": 2, "ep": 2, "dispatcher": "allgather"})], ids=str)
def test_dispatchers_and_runs_are_equal_over_data_parallel_ranks(start, model, reference, layouts):
    """With DP 2, gradients differ from DP 1 (in last bits) but not from run to run, nor between the dispatchers."""
    results = []
    for index, layout in enumerate(layouts):
        with start(f"dispatch{index}", 2 * layout.get("tp", 1), **layout) as world:
            world.call("load_hf", path=model)
            assert np.array_equal(logprobs(world, micro_batch_size=2), reference.logprobs)
            results.append([step(world), step(world, micro_batch_size=3)])
    assert results[0] == results[1]


@pytest.mark.full
@pytest.mark.parametrize("options", [("--mmad-order", "groups16"), ("--kernel-backend", "reference"), ("--no-consistency",)], ids=str)
def test_every_mode_trains(start, tmp_path_factory, options):
    """TP1 against TP2 x EP2: equal with each consistent mode, different with stock numerics."""
    hf = make_model(tmp_path_factory.mktemp("small") / "hf", "--layers", "2")
    short = [{**s, "tokens": s["tokens"][:40], "prompt_len": 20} for s in sequences()[1:4]]
    consistent, results = "--no-consistency" not in options, []
    for name, nproc, layout in (("mode tp1", 1, {}), ("mode tp2ep2", 2, {"tp": 2, "ep": 2, "etp": 1})):
        with start(name, nproc, *options, hf=hf, **layout) as world:
            world.call("load_hf", path=hf)
            told = world.call("logprobs", sequences=short, pack=False)["logprobs"]
            after = world.call("train_step", sequences=short, pack=False)
            results.append((np.concatenate(told).tolist(), after["loss"], after["grad_norm"], world.call("digest")["digest"]))
            if not consistent:
                with pytest.raises(WorkerError, match="takes no packed sequences"):
                    world.call("logprobs", sequences=short)
    assert (results[0] == results[1]) == consistent
