"""swiglu and its gradient: the bits of reference/activation.py on every implementation; refusals; registration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference import activation

op = torch.ops.megatron_ext
SHAPES = [(1, 2), (17, 66), (200, 96), (3, 1536), (2, 8200), (300, 14)]  # of gate_up: one to many tiles, in rows and in columns


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    for rows, width in ((300, 64), (2, 4100)):
        op.swiglu(normal(rows, 2 * width))
        op.swiglu_backward(normal(rows, width), normal(rows, 2 * width))


def gates_and_ups(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Gates over the range in which a sigmoid changes, some beyond it."""
    x = normal(*shape, dtype=dtype, scale=20)
    return torch.where(normal(*shape, dtype=dtype, seed=5) > 1.5, revealing(*shape, dtype=dtype, seed=1), x)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(implementation, dtype, shape):
    gate_up, da = gates_and_ups(*shape, dtype=dtype), revealing(shape[0], shape[1] // 2, dtype=dtype, seed=2)
    assert_same_bits(op.swiglu(gate_up), activation.swiglu(gate_up), "a")
    assert_same_bits(op.swiglu_backward(da, gate_up), activation.swiglu_backward(da, gate_up), "dgate_up")


def test_special_values(implementation, dtype):
    inf = float("inf")
    values = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 88.0, -88.0, 1e4, -1e4, inf, -inf], dtype=dtype)
    gates, ups = (x.flatten() for x in torch.meshgrid(values, values, indexing="ij"))
    gate_up = torch.cat([gates, ups])
    ours, expected = (torch.nan_to_num(f(gate_up), nan=7.0) for f in (op.swiglu, activation.swiglu))
    assert_same_bits(ours, expected)


def test_strides_and_offsets_do_not_show(implementation, dtype):
    whole = gates_and_ups(6, 5, 200, dtype=dtype)
    for gate_up in (whole[..., 3:89], whole[:, 2:4, :64], whole[:, 1], whole[::2, :, 8:10], whole.transpose(0, 1), whole[:1].expand(3, 5, 200), whole[0, 0]):
        da = normal(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=dtype, seed=3)
        assert_same_bits(op.swiglu(gate_up), activation.swiglu(gate_up), f"strides {gate_up.stride()}")
        assert_same_bits(op.swiglu_backward(da, gate_up), activation.swiglu_backward(da, gate_up), f"gradient, strides {gate_up.stride()}")
    da = normal(43, 5, dtype=dtype).T
    assert_same_bits(op.swiglu_backward(da, whole[0, :, 3:89]), activation.swiglu_backward(da, whole[0, :, 3:89]), "a transposed gradient")


def test_a_row_does_not_depend_on_its_neighbours(implementation, dtype):
    gate_up = gates_and_ups(70, 96, dtype=dtype)
    assert_same_bits(op.swiglu(gate_up), torch.cat([op.swiglu(row[None]) for row in gate_up]))


def test_threads_do_not_show(threaded, dtype):
    gate_up, da = gates_and_ups(301, 1024, dtype=dtype), normal(301, 512, dtype=dtype)
    results = threaded(lambda: (op.swiglu(gate_up), op.swiglu_backward(da, gate_up)))
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 400), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 2**31))
def test_generated(rows, width, dtype, seed):
    gate_up, da = normal(rows, 2 * width, dtype=dtype, seed=seed, scale=10), normal(rows, width, dtype=dtype, seed=seed + 1)
    leaf = gate_up.clone().requires_grad_()
    a = op.swiglu(leaf)
    a.backward(da)
    assert_same_bits(a, activation.swiglu(gate_up))
    assert_same_bits(leaf.grad, activation.swiglu_backward(da, gate_up))


def exact_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def test_the_gradient_is_that_of_the_formula():
    """The formula by gradcheck in float64, and our gradient against the formula's, within the rounding of bf16."""
    assert torch.autograd.gradcheck(exact_swiglu, (normal(5, 24, dtype=torch.float64).requires_grad_(),))
    gate_up, da = normal(5, 24), normal(5, 12, seed=1)
    leaf, exact_leaf = gate_up.clone().requires_grad_(), gate_up.double().requires_grad_()
    op.swiglu(leaf).backward(da)
    exact_swiglu(exact_leaf).backward(da.double())
    assert torch.allclose(leaf.grad.double(), exact_leaf.grad, rtol=2**-7, atol=2**-8)


def test_no_rows_give_no_rows():
    assert op.swiglu(normal(0, 8)).shape == (0, 4)
    assert op.swiglu_backward(normal(0, 4), normal(0, 8)).shape == (0, 8)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda x: op.swiglu(x.float()), TypeError, "gate_up must be bfloat16 or float16, found Float"),
    (lambda x: op.swiglu(x[:, 1:]), ValueError, r"gate_up must be \[..., 2I\], gates first; found shape \[3, 7\]"),
    (lambda x: op.swiglu(x[0, 0]), ValueError, "gate_up must be"),
    (lambda x: op.swiglu_backward(x, x), ValueError, r"da has shape \[3, 8\], gate_up has shape \[3, 8\]"),
    (lambda x: op.swiglu_backward(x[:, :4].half(), x), TypeError, "da must be BFloat16, found Half"),
])  # fmt: skip
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call(normal(3, 8))


def test_a_second_gradient_is_refused():
    leaf = normal(3, 8).requires_grad_()
    (grad,) = torch.autograd.grad(op.swiglu(leaf).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


def test_registration():
    torch.library.opcheck(op.swiglu.default, (normal(3, 4, 8).requires_grad_(),))
    torch.library.opcheck(op.swiglu_backward.default, (normal(3, 4), normal(3, 8)))
