"""``moec::pad_rows`` and ``moec::take_rows``: values, gradients, registration."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moec.runtime  # noqa: F401  registers the ops

ops = torch.ops.moec


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 3))
def test_pads_to_a_multiple_and_back(rows, multiple, width):
    x = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    y = ops.pad_rows(x, multiple, -1.0)
    assert y.shape[0] % multiple == 0 and 0 <= y.shape[0] - rows < multiple
    assert torch.equal(y[:rows], x) and bool((y[rows:] == -1).all())
    g = torch.randn_like(y)
    y.backward(g)
    assert torch.equal(x.grad, g[:rows])  # padded rows give no gradient

    z = torch.randn_like(y).requires_grad_()
    ops.take_rows(z, rows).backward(g[:rows])
    assert torch.equal(z.grad[:rows], g[:rows]) and not z.grad[rows:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype):
    x = torch.randn(5, 3, dtype=dtype, requires_grad=True)
    torch.library.opcheck(ops.pad_rows.default, (x, 4, 0.0))
    torch.library.opcheck(ops.take_rows.default, (x, 3))


def test_ids_keep_their_dtype():
    ids = torch.tensor([[3, 1], [0, 2], [1, 1]])
    assert ops.pad_rows(ids, 2, -1.0).tolist() == [[3, 1], [0, 2], [1, 1], [-1, -1]]
