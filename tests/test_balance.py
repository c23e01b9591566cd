"""balance and inject: against formulas written out in float64, and on simulated ranks.

Legend: B batch, S sequence, T = B*S tokens, H hidden, E experts, K choices per token.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import SCORES

ops = torch.ops.moec


def probabilities(z: Tensor, kind: str) -> Tensor:
    if kind.startswith("softmax"):
        return z.exp() / z.exp().sum(-1, keepdim=True)
    s = 1 / (1 + (-z).exp()) if kind == "sigmoid" else (1 + z.exp()).log().sqrt()
    return s / s.sum(-1, keepdim=True)


def best(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: -row[e])[:k]


@given(
    st.sampled_from(SCORES), st.sampled_from([(), (1,), (3,)]), st.sampled_from([0, 1, 5]),
    st.sampled_from([(1, 1), (4, 2), (3, 3)]), st.booleans(), st.integers(0, 999),
)  # fmt: skip
def test_balance(kind, lead, T, EK, padded, seed):
    (E, K), gen = EK, torch.Generator().manual_seed(seed)
    z = torch.randint(-3, 4, (*lead, T, E), generator=gen).double().requires_grad_()
    valid = torch.rand(*lead, T, generator=gen) < 0.6 if padded else None
    probs, counts = ops.balance(z, valid, K, kind)
    own = z.detach().clone().requires_grad_()
    p = probabilities(own, kind) * (1.0 if valid is None else valid[..., None].double())
    torch.testing.assert_close(probs, p.sum(-2), rtol=1e-13, atol=1e-15)
    hot = torch.zeros_like(own.detach()).view(-1, E)
    for t, row in enumerate(own.detach().view(-1, E).tolist()):  # each score grows with its logit
        hot[t, best(row, K)] = 1.0 if valid is None else float(valid.view(-1)[t])
    assert torch.equal(counts, hot.view(*lead, T, E).sum(-2).long())
    g = torch.randn(probs.shape, generator=gen, dtype=torch.float64)
    probs.backward(g)
    p.sum(-2).backward(g)
    torch.testing.assert_close(z.grad, own.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", SCORES)
def test_gradcheck(kind):
    z = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    valid = torch.rand(2, 5) < 0.7
    assert torch.autograd.gradcheck(lambda z: ops.balance(z, valid, 2, kind)[0], (z,))


def test_padding_may_hold_anything():
    z = torch.randn(3, 4)
    z[1] = torch.nan
    z.requires_grad_()
    probs, counts = ops.balance(z, torch.tensor([True, False, True]), 2, "sigmoid")
    assert counts.sum() == 4 and probs.isfinite().all()
    probs.sum().backward()
    assert z.grad.isfinite().all()


def test_inject():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.tensor(2.0, requires_grad=True)
    y = ops.inject(x, w * w)
    assert torch.equal(y, x) and y is not x
    (y * 0).sum().backward()  # whatever the gradient is that arrives
    assert w.grad == 4 and not x.grad.any()
    with pytest.raises(MoecError, match=r"shape \(1,\) is no scalar"):
        ops.inject(x, w[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_opcheck(dtype):
    z, valid = torch.randn(6, 4, dtype=dtype, requires_grad=True), torch.arange(6) < 4
    for kind in SCORES:
        torch.library.opcheck(ops.balance, (z, valid, 2, kind))
    torch.library.opcheck(ops.balance, (z[None].detach(), None, 2, "sigmoid"))
    grad = torch.randn(4, dtype=ops.balance(z, None, 2, "sigmoid")[0].dtype)
    torch.library.opcheck(ops.balance_backward, (grad, z.detach(), valid, "sigmoid"))
    torch.library.opcheck(ops.inject, (z, torch.tensor(1.0, requires_grad=True)))
