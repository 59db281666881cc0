"""The contract and the order: what cannot be ordered is refused before anything starts."""

import dataclasses

import pytest

from megatron_ext.contract import Contract, ContractError, check_same_digest
from megatron_ext.parity.layout import LayoutError, RolloutLayout, TrainLayout
from megatron_ext.reduction_order import OrderError, ReductionOrder


def test_json_round_trip():
    contract = Contract(ReductionOrder(segments=4, mmad_order="groups16"), "reference", consistency=False)
    assert Contract.from_json(contract.to_json()) == contract


@pytest.mark.parametrize("change", [{"segments": 4}, {"kv_tile": 64}, {"mmad_order": "groups16"}, {"max_expert_segments": 2}])
def test_every_field_of_the_order_changes_the_digest(change):
    assert Contract(ReductionOrder(**change)).digest() != Contract().digest()


def test_every_field_of_the_order_is_in_the_digest():
    changed = {"segments", "kv_tile", "mmad_order", "max_expert_segments"}
    one_value = {"gradient_order", "subnormals"}  # any other value is refused
    assert {field.name for field in dataclasses.fields(ReductionOrder)} == changed | one_value
    assert Contract(consistency=False).digest() != Contract().digest()


def test_backends_share_a_digest():
    assert Contract(kernel_backend="reference").digest() == Contract(kernel_backend="ascendc").digest()


def test_different_contracts_are_named():
    with pytest.raises(ContractError, match="different contracts .*rollout worker 1: "):
        check_same_digest({"driver": "a" * 64, "rollout worker 1": "b" * 64})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"order": {"segment": 8}}', '{"order": {}, "surprise": 1}'])
def test_malformed_contracts_are_refused(text):
    with pytest.raises(ContractError, match="not a contract"):
        Contract.from_json(text)


@pytest.mark.parametrize(("fields", "message"), [
    ({"segments": 6}, "power of two"), ({"kv_tile": 192}, r"kv_tile must be one of \(64, 128\), found 192"), ({"mmad_order": "random"}, "mmad_order must be one of"),
    ({"gradient_order": "global"}, "gradient_order must be one of"), ({"subnormals": "flush"}, "subnormals must be 'keep'"),
    ({"max_expert_segments": 3}, "power of two"),
])  # fmt: skip
def test_bad_orders_are_refused(fields, message):
    with pytest.raises(OrderError, match=message):
        ReductionOrder(**fields)


def test_layout_rules():
    order = ReductionOrder()
    assert [order.local_segments(tp) for tp in (1, 2, 4, 8)] == [8, 4, 2, 1]
    for tp in (3, 16):
        with pytest.raises(OrderError, match=f"tensor parallel size {tp}"):
            order.local_segments(tp)
    assert [order.expert_segments(e) for e in (12, 16, 60, 128, 160, 384)] == [4, 16, 4, 128, 32, 128]
    with pytest.raises(OrderError, match="expert parallel size 8 does not divide the 4 expert segments of 60 experts"):
        order.check_expert_parallel(60, 8)
    with pytest.raises(OrderError, match="K=1000 is not a multiple of 16 x segments = 128"):
        order.check_contraction(1000)
    assert [order.padded_vocab(v) for v in (1000, 1024, 151936)] == [1024, 1024, 151936]


@pytest.mark.parametrize(("layout", "ranks", "name"), [
    (TrainLayout(), 1, "TP1 (alltoall)"), (TrainLayout(tp=2), 2, "TP2xETP2+SP (alltoall)"), (TrainLayout(ep=2), 2, "EP2 (alltoall)"),
    (TrainLayout(tp=2, ep=2), 2, "TP2xEP2+SP (alltoall)"), (TrainLayout(pp=2, dispatcher="allgather"), 2, "PP2 (allgather)"),
    (TrainLayout(tp=2, ep=2, dp=2), 4, "TP2xEP2xDP2+SP (alltoall)"), (TrainLayout(tp=2, ep=4), 4, "TP2xEP4+SP (alltoall)"),
])  # fmt: skip
def test_train_layouts(layout, ranks, name):
    assert (layout.world_size, str(layout)) == (ranks, name)


def test_layouts_that_do_not_fit_are_refused():
    with pytest.raises(LayoutError, match="ep x etp = 4 does not divide tp x dp = 2"):
        TrainLayout(tp=2, ep=4, dp=1).world_size
    assert str(RolloutLayout(2, True)) == "TP2+EP"
