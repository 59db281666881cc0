"""Order tests on 4 ranks without engines, bitwise against the reference. Two ranks cannot reveal an order: addition commutes.

Collectives, the vocabulary-parallel logprob, sharded linears (TP 1, 2, 4, with and without sequence parallelism, forward and
gradients), experts fed by four data-parallel ranks (EP 1, 2, 4, both dispatchers, forward and gradients).
"""

import order_bodies
import pytest
from ranks import run_ranks

from megatron_ext.reduction_order import MMAD_ORDERS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mmad_order", [MMAD_ORDERS[0], *(pytest.param(order, marks=pytest.mark.full) for order in MMAD_ORDERS[1:])])
def test_order_on_four_ranks(mmad_order):
    run_ranks(4, order_bodies.check_everything, mmad_order)
