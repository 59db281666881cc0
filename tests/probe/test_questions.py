"""Every question of the probe: yes from the host model, no from one that deviates in the point that is asked for."""

import pytest

from megatron_ext.probe import cube
from megatron_ext.probe.question import CONSEQUENCES
from megatron_ext.probe.report import HOLDS, VIOLATED
from megatron_ext.probe.run import QUESTIONS, probe, verdict_of
from megatron_ext.reduction_order import MMAD_ORDERS

QUESTION = {question.name: question for question in QUESTIONS}
# deviation of the model (host_model/deviation.h): the questions that must notice it.
NOTICED_BY = {
    "mmad_descending": ["mmad_order"],
    "mmad_restarts": ["mmad_calls"],
    "mmad_rows_differ": ["mmad_rows"],
    "mmad_columns_differ": ["mmad_columns"],
    "mmad_few_rows_differ": ["mmad_lone_row"],
    "mmad_by_core": ["mmad_cores"],
    "mmad_beyond_k": ["mmad_beyond_k"],
    "mmad_takes_a_lone_row": ["mmad_gemv"],
    "mmad_flushes": ["mmad_subnormals"],
    "vector_flushes": ["vector_subnormals"],
    "exp_other_bits": ["exp_bits", "ln_bits", "sqrt_bits", "div_bits"],
    "exp_by_lane": ["vector_lanes"],
    "exp_by_core": ["vector_cores"],
    "sum_ascending": ["sum_tree", "sum_of_repeats"],
    "sum_repeats_descending": ["sum_of_repeats"],
    "sum_starts_with_a_repeat": ["sum_of_zeros"],
    "masked_lanes_enter": ["masked_lanes"],
    "adds_loses_the_sign": ["copies_keep_zeros"],
    "max_drops_nan": ["maximum_of_nan"],
    "max_prefers_positive_zero": ["maximum_of_zeros"],
    "cast_saturates": ["overflow_to_half"],
    "copies_are_late": ["flags"],
    "cross_core_flags_ignored": ["cross_core_flags"],
    "sync_all_ignored": ["sync_all"],
}
CASES = [(deviation, name) for deviation, names in NOTICED_BY.items() for name in names]


@pytest.mark.parametrize("mmad_order", MMAD_ORDERS)
def test_the_model_is_what_it_says(model, mmad_order):
    report = probe(model(mmad_order))
    assert [(verdict.name, verdict.verdict, verdict.detail) for verdict in report.verdicts if verdict.verdict != HOLDS] == []
    assert report.contract() == {"mmad_order": mmad_order, "subnormals": "keep"}
    assert report.obstacles() == []


@pytest.mark.parametrize(("deviation", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_a_deviation_is_noticed(deviating, deviation, name):
    assert verdict_of(QUESTION[name], deviating("none")).verdict == HOLDS
    found = verdict_of(QUESTION[name], deviating(deviation))
    assert found.verdict != HOLDS, found
    assert found.detail


def test_every_question_can_be_answered_with_no(deviating_library):
    deviations = set(deviating_library[1].ascendc_host_deviations().decode().split()) - {"none"}
    assert set(NOTICED_BY) == deviations
    assert {name for _, name in CASES} == set(QUESTION)


def test_an_order_that_the_contract_lacks_is_named(deviating):
    found = verdict_of(QUESTION["mmad_order"], deviating("mmad_descending"))
    assert (found.verdict, found.value) == (VIOLATED, "descending")


def test_every_known_order_has_bits_of_its_own():
    """Or a finding would be named by another order. One case of the question is enough to tell two orders apart."""
    cases = [cube.operands(16, 32, k, dtype) for dtype in cube.DTYPES for k in (16, 48, 256)]
    orders = dict(cube.known_orders())
    results = {name: [product(a.float(), b.float().T) for a, b in cases] for name, product in orders.items()}
    same = {"groups of 16, a tree inside": "groups16", "groups of 2, a chain inside": "groups of 2, a tree inside"}
    for one in results:
        for other in results:
            equal = all(x.equal(y) for x, y in zip(results[one], results[other], strict=True))
            assert equal == (one == other or same.get(one) == other or same.get(other) == one), (one, other)


def test_questions_are_well_formed():
    assert len(QUESTION) == len(QUESTIONS)
    assert {question.matters for question in QUESTIONS} == set(CONSEQUENCES)
