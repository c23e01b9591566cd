"""``moec::pack`` and ``moec::unpack``: values, gradients, registration; together with a gather they give whole
parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError
from moec.runtime.ops.pack import flatten_shapes

ops = torch.ops.moec


@st.composite
def tensors(draw):
    """A number of ranks, and whole tensors with the dim that the ranks share."""
    size, found = draw(st.integers(1, 4)), []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        dim = draw(st.integers(0, len(shape) - 1))
        shape[dim] *= size
        found.append((torch.randn(shape, dtype=torch.float64), dim))
    return size, found


@given(tensors())
def test_shards_of_all_ranks_side_by_side_are_the_whole_tensors(drawn):
    size, found = drawn
    wholes, dims = [x for x, _ in found], [d for _, d in found]
    local = [[x.chunk(size, d)[r] for x, d in found] for r in range(size)]
    gathered = torch.cat([ops.pack(mine, 1, dims) for mine in local])
    shapes = flatten_shapes([x.shape for x in wholes])
    for got, want in zip(ops.unpack(gathered, size, dims, shapes), wholes, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(ops.pack(wholes, size, dims), gathered)


@given(tensors())
def test_gradients(drawn):
    size, found = drawn
    wholes, dims = [x.requires_grad_() for x, _ in found], [d for _, d in found]
    shapes = flatten_shapes([x.shape for x in wholes])
    flat = ops.pack(wholes, size, dims)
    back = ops.unpack(flat, size, dims, shapes)
    cotangents = [torch.randn_like(x) for x in wholes]
    torch.autograd.backward(back, cotangents)
    assert all(torch.equal(x.grad, g) for x, g in zip(wholes, cotangents, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype):
    xs = [torch.randn(4, 3, dtype=dtype, requires_grad=True), torch.randn(2, 6, dtype=dtype, requires_grad=True)]
    torch.library.opcheck(ops.pack.default, (xs, 2, [0, 1]))
    flat = torch.randn(24, dtype=dtype, requires_grad=True)
    torch.library.opcheck(ops.unpack.default, (flat, 2, [0, 1], [2, 4, 3, 2, 2, 6]))


def test_a_result_that_is_not_used_gives_zeros():
    flat = torch.randn(24, requires_grad=True)
    first, _ = ops.unpack(flat, 2, [0, 1], [2, 4, 3, 2, 2, 6])
    first.sum().backward()
    assert flat.grad.tolist() == [1.0] * 6 + [0.0] * 6 + [1.0] * 6 + [0.0] * 6


def test_uneven_parts_are_refused():
    with pytest.raises(MoecError, match=r"dim 0 of shape \(3, 2\) is not 2 equal parts"):
        ops.pack([torch.ones(3, 2)], 2, [0])
