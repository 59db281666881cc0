"""After loading, every module must be an adapter or pure structure."""

import pytest
import torch

from megatron_ext import ops
from megatron_ext.patches.table_rollout import ROLLOUT_ROWS
from megatron_ext.reduction_order import ReductionOrder
from megatron_ext.rollout.settings import RolloutError
from megatron_ext.rollout.wiring import assert_hit, check_model, demanded_rows


def test_a_stock_module_is_named():
    model = torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.Linear(2, 2)])])
    with pytest.raises(RolloutError, match=r"0\.0 \(torch\.nn\.modules\.linear\.Linear\)"):
        check_model(model)


def test_an_unknown_model_is_named():
    class Unknown(torch.nn.Module):
        pass

    with pytest.raises(RolloutError, match="the model .*Unknown"):
        check_model(Unknown())


def test_adapters_of_a_model_must_have_been_used():
    target = next(row.target for row in ROLLOUT_ROWS if row.seam == "register_oot")
    rows = [{"target": target, "active": True, "must_hit": False, "hits": 0}]
    assert_hit(demanded_rows(rows, present=set()), "worker 0")
    with pytest.raises(Exception, match=f"{target} was never used in worker 0"):
        assert_hit(demanded_rows(rows, present={target}), "worker 0")


def test_every_subclass_that_vllm_looks_up_by_name_has_a_row():
    """vLLM looks up out-of-tree layers by class name: replacing a base class leaves its subclasses stock."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.models import qwen3, qwen3_moe

    used = {
        value.__name__
        for module in (qwen3, qwen3_moe)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, LinearBase)
    }
    assert used <= {row.target.rpartition(":")[2] for row in ROLLOUT_ROWS}


def test_pages_are_views_of_the_cache():
    from megatron_ext.rollout.attention import _pages

    ops.configure(ReductionOrder(), "ascendc")
    blocks, page, heads, width = 3, 16, 2, 32
    memory = torch.zeros(blocks, page, heads, 2 * width, dtype=torch.bfloat16)
    cache = memory.permute(0, 2, 1, 3)  # vLLM's logical order for the layout LBNHC
    k_pages, v_pages = _pages(cache)
    assert k_pages.shape == v_pages.shape == (blocks, page, heads, width)
    k, v = (torch.full((1, heads, width), value, dtype=torch.bfloat16) for value in (1.0, 2.0))
    ops.write_kv_cache(k, v, k_pages, v_pages, torch.tensor([page + 5]))
    assert k_pages[1, 5].eq(1).all() and v_pages[1, 5].eq(2).all()
    assert int(memory.count_nonzero()) == 2 * heads * width
    cache[1].zero_()  # vLLM zeroes whole pages through its own view
    assert not memory.count_nonzero()
