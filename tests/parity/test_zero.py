"""The promise: logdiff is exactly 0 between real vLLM and real Megatron, every training layout against every rollout layout.

Engines start once per layout. What each rollout engine sampled (scenarios.py) is recomputed by each Megatron world and compared
bit for bit; sequences that several engines sampled alike are recomputed once.
"""

import pytest
import scenarios
from models import make_model

from megatron_ext import weight_digest as digest
from megatron_ext.contract import Contract
from megatron_ext.parity import logdiff, session
from megatron_ext.parity.layout import RolloutLayout, TrainLayout
from megatron_ext.reduction_order import ReductionOrder

pytestmark = pytest.mark.timeout(900)

ROLLOUTS = (RolloutLayout(1), RolloutLayout(2), RolloutLayout(2, expert_parallel=True))
TRAINS = (
    TrainLayout(),
    TrainLayout(tp=2),  # experts by expert tensor parallelism
    TrainLayout(tp=2, ep=2),
    TrainLayout(pp=2),
    TrainLayout(tp=2, ep=2, dp=2),
)
MORE_TRAINS = (
    TrainLayout(ep=2),
    TrainLayout(ep=2, dispatcher="allgather"),
    TrainLayout(tp=2, ep=2, dispatcher="allgather"),
    TrainLayout(tp=2, dispatcher="allgather"),
    TrainLayout(tp=2, pp=2),
    TrainLayout(tp=4),
    TrainLayout(tp=2, ep=4),
    TrainLayout(tp=4, ep=4),
)
TIED_TRAINS = (TrainLayout(tp=2, ep=2), pytest.param(TrainLayout(pp=2), marks=pytest.mark.full))  # both stages hold the tied weight


class Recordings:
    """What the engines of one model and contract sampled, and the digests of their weights."""

    def __init__(self, contract: Contract, first: str, second: str, layouts) -> None:
        self.contract, self.folders = contract, {"first": first, "second": second}
        self.by_layout, self.digests = {}, {}
        for layout in layouts:
            with session.start_rollout(first, layout, contract, **scenarios.LIMITS) as engine:
                self.digests[layout, "first"] = engine.digest()
                self.by_layout[layout] = scenarios.record(engine, second)
                self.digests[layout, "second"] = engine.digest()
                engine.report()

    def of(self, weights: str):
        """(layout, recording) pairs."""
        return [(layout, r) for layout, recordings in self.by_layout.items() for r in recordings if r.weights == weights]


@pytest.fixture(scope="session")
def moe(tmp_path_factory) -> Recordings:
    folder = tmp_path_factory.mktemp("moe")
    return Recordings(Contract(), make_model(folder / "first"), make_model(folder / "second", "--seed", "7"), ROLLOUTS)


def recompute_distinct(world, recordings, settings) -> dict:
    """{(tokens, prompt length, temperature): training logprobs}, each distinct sequence computed once."""
    found = {}
    for temperature in sorted({r.temperature for _, r in recordings}):
        distinct = {key(o, temperature): o for _, r in recordings if r.temperature == temperature for o in r.rollouts}
        logprobs = session.recompute(world, list(distinct.values()), temperature, settings)
        found.update(zip(distinct, logprobs, strict=True))
    return found


def key(rollout, temperature: float) -> tuple:
    return (*rollout.prompt_ids, *rollout.token_ids), len(rollout.prompt_ids), temperature


def assert_zero(recorded: Recordings, layout: TrainLayout, log_path, settings) -> int:
    """Compares every recording with this training layout, before and after the weight change; returns the number of tokens."""
    tokens = 0
    with session.training(recorded.folders["first"], layout, recorded.contract, settings, log_path) as world:
        for weights in ("first", "second"):
            if weights == "second":
                world.call("load_hf", path=recorded.folders["second"])
            ours = world.call("digest")["digest"]
            train = recompute_distinct(world, recorded.of(weights), settings)
            for rollout_layout, recording in recorded.of(weights):
                digest.check_equal(ours, recorded.digests[rollout_layout, weights])
                verdict = session.judge(recording.rollouts, [train[key(o, recording.temperature)] for o in recording.rollouts])
                assert verdict.exact, f"train {layout}, rollout {rollout_layout}, {recording.name}: {verdict}"
                tokens += verdict.tokens
        world.call("assert_hit")
        world.call("report")
    return tokens


def settings_for(layout: TrainLayout) -> session.TrainSettings:
    """Both forms of a batch and of a pass are used, over the layouts."""
    return session.TrainSettings(micro_batch_size=1 + layout.tp, pack=layout.pp == 1, with_grad=layout.ep == 1)


@pytest.mark.parametrize("layout", TRAINS, ids=str)
def test_every_layout_against_every_layout(moe, layout, tmp_path):
    assert assert_zero(moe, layout, tmp_path / "train.log", settings_for(layout)) > 3000


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE_TRAINS, ids=str)
def test_more_layouts(moe, layout, tmp_path):
    assert assert_zero(moe, layout, tmp_path / "train.log", settings_for(layout)) > 3000


@pytest.fixture(scope="session")
def tied(tmp_path_factory) -> Recordings:
    folder = tmp_path_factory.mktemp("tied")
    options = ("--tied", "--layers", "2")
    first, second = make_model(folder / "first", *options), make_model(folder / "second", *options, "--seed", "7")
    return Recordings(Contract(), first, second, ROLLOUTS[2:])


@pytest.mark.parametrize("layout", TIED_TRAINS, ids=str)
def test_tied_embeddings(tied, layout, tmp_path):
    assert "lm_head.weight" not in tied.digests[ROLLOUTS[2], "first"]
    assert_zero(tied, layout, tmp_path / "train.log", settings_for(layout))


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Recordings:
    folder = tmp_path_factory.mktemp("dense")
    first, second = make_model(folder / "first", "--dense"), make_model(folder / "second", "--dense", "--seed", "7")
    return Recordings(Contract(), first, second, ROLLOUTS[:2])


@pytest.mark.full
@pytest.mark.parametrize("layout", [TrainLayout(), TrainLayout(tp=2), TrainLayout(tp=2, sequence_parallel=False), TrainLayout(tp=4)], ids=str)
def test_dense_model(dense, layout, tmp_path):
    assert_zero(dense, layout, tmp_path / "train.log", settings_for(layout))


@pytest.fixture(scope="session")
def groups16(tmp_path_factory) -> Recordings:
    folder = tmp_path_factory.mktemp("groups16")
    first, second = make_model(folder / "first", "--layers", "2"), make_model(folder / "second", "--layers", "2", "--seed", "7")
    return Recordings(Contract(ReductionOrder(mmad_order="groups16")), first, second, ROLLOUTS[1:])


@pytest.mark.full
@pytest.mark.parametrize("layout", [TrainLayout(), TrainLayout(tp=2, ep=2)], ids=str)
def test_the_other_mmad_order(groups16, layout, tmp_path):
    assert_zero(groups16, layout, tmp_path / "train.log", settings_for(layout))


def test_other_weights_are_seen(moe, tmp_path):
    """The comparison can fail: recomputing with the other weights differs, and the digest names what differs."""
    with session.training(moe.folders["second"], TrainLayout(), moe.contract, session.TrainSettings(), tmp_path / "train.log") as world:
        layout, recording = moe.of("first")[0]
        with pytest.raises(digest.DigestMismatch, match="model.layers.0"):
            digest.check_equal(world.call("digest")["digest"], moe.digests[layout, "first"])
        verdict = session.judge(recording.rollouts, session.recompute(world, recording.rollouts, 1.0, session.TrainSettings()))
    assert not verdict.exact and verdict.logdiff_max > 0 and verdict.first.prompt == 0


def test_first_differing_token_is_what_logdiff_reports(moe):
    """Two engines' recordings of one scenario agree token for token; a flipped bit is found where it is."""
    recordings = [r for _, r in moe.of("first") if r.name.startswith("prefill")]
    assert len({tuple(map(tuple, (o.token_ids for o in r.rollouts))) for r in recordings}) == 1
    rollouts = recordings[0].rollouts
    changed = [o.logprobs.copy() for o in rollouts]
    changed[3].view("int32")[4] ^= 1
    verdict = logdiff.compare(changed, [o.logprobs for o in rollouts], [o.token_ids for o in rollouts])
    assert (verdict.first.prompt, verdict.first.position) == (3, 4) and verdict.mismatched_tokens == 1
