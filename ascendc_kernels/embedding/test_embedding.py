"""embedding and embedding_wgrad_: the bits of torch's lookup and of reference/embedding.py on every implementation; refusals; registration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import normal, revealing

from megatron_ext.parity.bits import assert_same_bits
from megatron_ext.reference.embedding import embedding_wgrad_

op = torch.ops.megatron_ext
SHAPES = [(1, 1, 1), (40, 5, 33), (300, 7, 128), (5, 3, 9000), (2100, 400, 16)]  # tokens, vocabulary, hidden


def exercise() -> None:
    """Every kernel of the folder, over several tiles of every loop."""
    ids = torch.arange(-1, 59) % 7
    op.embedding(ids - 1, normal(7, 5000))
    op.embedding_wgrad_(torch.zeros(7, 5000), ids - 1, normal(60, 5000))
    op.embedding_wgrad_(torch.zeros(7, 16), torch.arange(1100) % 7, normal(1100, 16))


def token_ids(*shape: int, rows: int, seed: int = 0) -> torch.Tensor:
    """One in rows + 1 lies on another rank; so do two whose low 32 bits are those of a row here."""
    ids = torch.randint(-1, rows, shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(ids < 0, -(2**32) * (1 + seed % 3), ids) if seed % 2 else ids


def expected_gradient(start: torch.Tensor, ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    grad = start.clone()
    embedding_wgrad_(grad, ids.flatten(), dy.reshape(-1, dy.shape[-1]))
    return grad


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient(implementation, dtype, shape, seed):
    """Few rows take many tokens each: the order in which these are added shows."""
    tokens, rows, hidden = shape
    ids, dy, start = token_ids(tokens, rows=rows, seed=seed), revealing(tokens, hidden, dtype=dtype), normal(rows, hidden, dtype=torch.float32)
    ours = start.clone()
    op.embedding_wgrad_(ours, ids, dy)
    assert_same_bits(ours, expected_gradient(start, ids, dy))


def test_tokens_are_added_in_order(implementation):
    dy, grad = torch.tensor([1e20, 1.0, -1e20, 2.0]).bfloat16()[:, None].expand(4, 40), torch.zeros(3, 40)
    op.embedding_wgrad_(grad, torch.tensor([1, 1, 1, 1]), dy)
    op.embedding_wgrad_(grad, torch.tensor([2, 0, 2, 2]), dy)
    assert grad[:, 7].tolist() == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_lookup(implementation, dtype, shape, seed):
    tokens, rows, hidden = shape
    ids, weight = token_ids(tokens, rows=rows, seed=seed), normal(rows, hidden, dtype=dtype)
    expected = torch.where(ids[:, None] >= 0, weight[ids.clamp_min(0)], torch.zeros((), dtype=dtype))
    assert_same_bits(op.embedding(ids, weight), expected)


def test_lookup_copies_bits(implementation):
    """NaN payloads included; a row of another rank is +0."""
    weight = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(128, 512)
    ids = torch.arange(127, -2, -1)
    assert_same_bits(op.embedding(ids, weight), torch.cat([weight.flip(0), torch.zeros(1, 512, dtype=torch.bfloat16)]))


def test_shapes_strides_and_types(implementation, dtype):
    ids, whole = token_ids(4, 9, rows=6), normal(4, 9, 80, dtype=dtype)
    weight = normal(6, 48, dtype=dtype)
    for index in (ids, ids.int(), ids.T.contiguous().T, ids[:, ::2], ids[0], ids[0, 0]):
        dy = whole[..., 7:55].expand(4, 9, 48)[tuple(slice(0, n) for n in index.shape)] if index.dim() == 2 else normal(*index.shape, 48, dtype=dtype)
        ours = torch.ones(6, 48)
        op.embedding_wgrad_(ours, index, dy)
        assert_same_bits(ours, expected_gradient(torch.ones(6, 48), index, dy), f"gradient, ids {index.dtype} {index.stride()}")
        local = torch.where(index[..., None] >= 0, weight[index.clamp_min(0).long()], torch.zeros((), dtype=dtype))
        assert_same_bits(op.embedding(index, weight), local, f"lookup, ids {index.dtype} {index.stride()}")
    assert_same_bits(op.embedding(ids[0], weight.T.contiguous().T), op.embedding(ids[0], weight), "a transposed weight")


def test_threads_do_not_show(threaded, dtype):
    ids, dy, weight = token_ids(1500, rows=37), revealing(1500, 300, dtype=dtype), normal(37, 300, dtype=dtype)

    def run():
        grad = torch.zeros(37, 300)
        op.embedding_wgrad_(grad, ids, dy)
        return grad, op.embedding(ids, weight)

    results = threaded(run)
    for threads, found in results.items():
        for i, (a, b) in enumerate(zip(found, results[1], strict=True)):
            assert_same_bits(a, b, f"result {i} with {threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 200), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(0, 2**31))
def test_generated(tokens, rows, hidden, dtype, seed):
    ids, dy = token_ids(tokens, rows=rows, seed=seed), revealing(tokens, hidden, dtype=dtype, seed=seed)
    ours = torch.zeros(rows, hidden)
    op.embedding_wgrad_(ours, ids, dy)
    assert_same_bits(ours, expected_gradient(torch.zeros(rows, hidden), ids, dy))


def exact_lookup(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids[:, None] >= 0, weight[ids.clamp_min(0)], 0.0)


def test_the_gradient_is_that_of_the_formula():
    """The formula by gradcheck in float64, and our gradient against the formula's, within the rounding of fp32."""
    ids, weight = token_ids(12, rows=5), normal(5, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda weight: exact_lookup(weight, ids), (weight,))
    dy, grad = normal(12, 8), torch.zeros(5, 8)
    op.embedding_wgrad_(grad, ids, dy)
    (exact,) = torch.autograd.grad(exact_lookup(weight, ids), weight, dy.double())
    assert torch.allclose(grad.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("call", "error", "text"), [
    (lambda grad, ids, dy: op.embedding_wgrad_(grad, ids + 3, dy), IndexError, "embedding_wgrad_: id 5 of 5 rows; ids of other ranks are negative"),
    (lambda grad, ids, dy: op.embedding(ids + 2**32, dy), IndexError, "embedding: id 4294967298 of 3 rows"),
    (lambda grad, ids, dy: op.embedding_wgrad_(grad, ids.float(), dy), TypeError, "ids must be int64 or int32, found Float"),
    (lambda grad, ids, dy: op.embedding_wgrad_(grad, ids, dy.float()), TypeError, "dy must be bfloat16 or float16, found Float"),
    (lambda grad, ids, dy: op.embedding_wgrad_(grad.bfloat16(), ids, dy), TypeError, "main_grad must be Float, found BFloat16"),
    (lambda grad, ids, dy: op.embedding_wgrad_(grad.T, ids, dy), ValueError, "main_grad must be contiguous"),
    (lambda grad, ids, dy: op.embedding_wgrad_(grad[0], ids, dy), ValueError, r"main_grad must be \[V, H\], found shape \[8\]"),
    (lambda grad, ids, dy: op.embedding_wgrad_(grad, ids, dy[1:]), ValueError, r"dy must be \[\[3\], H = 8\], found shape \[2, 8\]"),
    (lambda grad, ids, dy: op.embedding(ids, grad), TypeError, "weight must be bfloat16 or float16, found Float"),
    (lambda grad, ids, dy: op.embedding(ids, dy[0]), ValueError, r"weight must be \[V, H\], found shape \[8\]"),
])  # fmt: skip
def test_refusals(call, error, text):
    grad = torch.zeros(5, 8)
    with pytest.raises(error, match=text):
        call(grad, torch.arange(3), normal(3, 8))
    assert not grad.any(), "a refused call must leave the accumulator alone"


def test_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match="not implemented"):
        op.embedding(torch.arange(3), normal(3, 8).requires_grad_()).sum().backward()


def test_registration():
    torch.library.opcheck(op.embedding.default, (torch.arange(6).view(2, 3), normal(6, 8)))
    torch.library.opcheck(op.embedding_wgrad_.default, (torch.zeros(6, 8), torch.arange(6).view(2, 3), normal(2, 3, 8)))
