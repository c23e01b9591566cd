"""Fused ops against the ops, or torch's own functions, that they stand for: in float64, and opcheck in three dtypes.

Legend: T tokens, E experts, K choices per token, N rows, H hidden, V classes, b blocks.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_ops_permute import routings
from test_route import cases

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec

ops = torch.ops.moec
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CHECKED = [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.nightly) for d in (torch.float32, torch.float64))]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- route_counted


@given(cases(), st.booleans(), st.booleans())
def test_route_counted_is_route_tally_and_balance(case, masked, balanced):
    spec, z, bias, valid = case
    counted = (torch.rand(len(z), generator=seeded(len(z))) < 0.5) if masked else valid
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    got = ops.route_counted(ours, bias, valid, None, counted, spec.text(), balanced)
    weights, ids = ops.route(theirs, bias, valid, None, spec.text())
    tally = ops.tally(ids, None, theirs.detach(), counted, spec.num_experts, spec.score)
    probs, counts = ops.balance(theirs, counted, spec.top_k, spec.score)
    assert torch.equal(got[0], weights) and torch.equal(got[1], ids)
    torch.testing.assert_close(got[2], tally, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[2][:-1], tally[:-1])
    if balanced:
        torch.testing.assert_close(got[3], probs, rtol=1e-13, atol=1e-14)
        assert torch.equal(got[4], counts)
    else:
        assert got[3].numel() == got[4].numel() == 0
    g, g_E = torch.randn(weights.shape, generator=seeded(1), dtype=z.dtype), torch.arange(len(got[3]), dtype=z.dtype)
    torch.autograd.backward([got[0], got[3]], [g, g_E])
    torch.autograd.backward([weights, probs], [g, g_E if balanced else torch.zeros_like(probs)])
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_route_counted_counts_the_real_logits_of_a_forced_router():
    spec = RouteSpec(6, 2, force="round_robin")
    z, token = torch.randn(5, 6, dtype=torch.float64), torch.arange(5)
    got = ops.route_counted(z, None, None, token, None, spec.text(), True)
    probs, counts = ops.balance(z, None, 2, spec.score)
    torch.testing.assert_close(got[3], probs)
    assert torch.equal(got[4], counts)
    assert torch.equal(got[2], ops.tally(got[1], None, z, None, 6, spec.score))


@pytest.mark.parametrize("dtype", CHECKED)
def test_route_counted_opcheck(dtype):
    spec = RouteSpec(6, 2, "sigmoid", normalize=True, capacity_factor=1.0).text()
    z = torch.randn(5, 6, dtype=dtype, requires_grad=True)
    valid = torch.tensor([True, True, False, True, True])
    args = (z, torch.rand(6), valid, None, valid, spec, True)
    torch.library.opcheck(ops.route_counted.default, args)
    weights, ids, _, probs, _ = (x.detach() for x in ops.route_counted(*args))
    more = (z.detach(), torch.rand(6), valid, None, valid, ids, spec, True)
    torch.library.opcheck(ops.route_counted_backward.default, (weights, probs, *more))


# -- unpermute_add


@given(routings(), st.integers(1, 2), st.sampled_from(DTYPES))
def test_unpermute_add_is_unpermute_and_adds(routing, count, dtype):
    ids, E = routing
    T, K = ids.shape
    rows, _, row_of = ops.permute(torch.zeros(T, 3, dtype=dtype), ids, E)
    rows = torch.randn(rows.shape, dtype=dtype)
    leaves = [rows, torch.rand(T, K), *(torch.randn(T, 3, dtype=dtype) for _ in range(count))]
    ours, theirs = ([x.clone().requires_grad_() for x in leaves] for _ in range(2))
    got = ops.unpermute_add(ours[2:], ours[0], ours[1], row_of)
    want = ops.unpermute(theirs[0], theirs[1], row_of)
    for x in theirs[2:]:
        want = want + x
    assert torch.equal(got, want)  # to the bit
    g = torch.randn(want.shape, dtype=dtype)
    for a, b in zip(torch.autograd.grad(got, ours, g), torch.autograd.grad(want, theirs, g), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", CHECKED)
def test_unpermute_add_opcheck(dtype):
    row_of = torch.tensor([[0, 3], [2, -1], [1, 4]])
    x, rows = (torch.randn(n, 4, dtype=dtype, requires_grad=True) for n in (3, 6))
    weights = torch.rand(3, 2, requires_grad=True)
    torch.library.opcheck(ops.unpermute_add.default, ([x, x.detach() + 1], rows, weights, row_of))


def test_addends_that_do_not_fit_are_refused():
    rows, weights, row_of = torch.zeros(2, 4), torch.ones(2, 1), torch.tensor([[0], [1]])
    for addends in ([], [torch.zeros(3, 4)], [torch.zeros(2, 4, dtype=torch.float64)]):
        with pytest.raises(MoecError, match="addends"):
            ops.unpermute_add(addends, rows, weights, row_of)


# -- permute_aligned


@given(routings(), st.sampled_from([1, 2, 16]), st.sampled_from(["none", "row", "block"]), st.sampled_from([3, 130]))
def test_permute_aligned_is_permute_with_gaps(routing, alignment, quantise, H):
    ids, E = routing
    T, K = ids.shape
    x = torch.randn(T, H, generator=seeded(T)) * torch.logspace(-6, 6, T)[:, None]
    rows, scales, counts, row_of = ops.permute_aligned(x, ids, E, alignment, quantise)
    plain, plain_counts, plain_row_of = ops.permute(x, ids, E)
    assert torch.equal(counts, plain_counts) and torch.equal(row_of < 0, plain_row_of < 0)
    assert rows.shape[0] == (T * K + E * (alignment - 1)) // alignment * alignment
    start, taken = 0, []
    for e in range(E):  # every expert begins at a multiple, its pairs in order
        mine = row_of.reshape(-1)[ids.reshape(-1) == e]
        assert mine.tolist() == list(range(start, start + int(counts[e])))
        taken += mine.tolist()
        start += -(-int(counts[e]) // alignment) * alignment
    assert start <= rows.shape[0]
    empty = [n for n in range(rows.shape[0]) if n not in taken]
    assert not rows.float()[empty].any()
    values = rows.float() if quantise == "none" else dequantised(rows, scales)
    bound = {"none": 0.0, "row": 2**-4, "block": 2**-4}[quantise]  # e4m3: three bits of mantissa
    small = 2.0**-9 * scales.amax(1, keepdim=True)[taken] if scales.numel() else 0.0  # and subnormals
    error = (values[taken] - plain[: len(taken)]).abs()
    assert (error <= plain[: len(taken)].abs() * bound + small).all()
    if quantise == "block":
        assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))  # powers of two
        for q, s in zip(rows.float()[taken], scales[taken], strict=True):
            assert q.abs().max() <= 448 and (q.abs().max() > 112 or s[0] == 1 or H > 128)


def dequantised(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return rows.float() * scales.repeat_interleave(128 if scales.shape[1] > 1 else rows.shape[1], 1)[:, : rows.shape[1]]


def test_scales_at_their_edges():
    x = torch.tensor([[448.0], [449.0], [0.0], [2.0**-140], [3e38]])
    q, scales, _, _ = ops.permute_aligned(x, torch.zeros(5, 1, dtype=torch.int64), 1, 1, "block")
    assert scales[:3, 0].tolist() == [1, 2, 1] and q.float()[0].item() == 448
    assert q.float().isfinite().all() and scales.isfinite().all() and (scales > 0).all()


@pytest.mark.parametrize("dtype", CHECKED)
@pytest.mark.parametrize("quantise", ["none", "block"])
def test_permute_aligned_opcheck(dtype, quantise):
    x = torch.randn(3, 4, dtype=dtype, requires_grad=quantise == "none")
    ids = torch.tensor([[0, 2], [2, -1], [1, 0]])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")  # AOT dispatch compares, which fp8 cannot
    more = ("test_aot_dispatch_dynamic",) if quantise == "none" else ()
    torch.library.opcheck(ops.permute_aligned.default, (x, ids, 3, 4, quantise), test_utils=(*tests, *more))


# -- cross_entropy


@given(st.integers(1, 9), st.sampled_from([1, 2, 7, 130]), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 2),
       st.sampled_from([-100, 0]), st.sampled_from([0.0, 0.4]), st.integers(0, 99))  # fmt: skip
def test_cross_entropy_is_torchs(N, V, smoothing, reduction, ignore, ignored, seed):
    gen = seeded(seed)
    x = torch.randn(N, V, generator=gen, dtype=torch.float64) * 5
    labels = torch.randint(0, V, (N,), generator=gen)
    labels = labels.masked_fill(torch.rand(N, generator=gen) < ignored, ignore)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, lse = ops.cross_entropy(ours, labels, ignore, smoothing, reduction)
    want = F.cross_entropy(theirs, labels, ignore_index=ignore, label_smoothing=smoothing,
                           reduction=("none", "mean", "sum")[reduction])  # fmt: skip
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=1e-13, equal_nan=True)
    torch.testing.assert_close(lse, x.logsumexp(1))
    if not loss.isnan().any():
        g = torch.randn(loss.shape, generator=gen, dtype=torch.float64)
        loss.backward(g)
        want.backward(g)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-13)


def test_cross_entropy_of_bf16_is_that_of_the_upcast():
    x, labels = torch.randn(40, 33).bfloat16(), torch.randint(0, 33, (40,))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, _ = ops.cross_entropy(ours, labels, -100, 0.0, 1)
    want = F.cross_entropy(theirs.float(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    loss.backward()
    want.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2**-8, atol=0)  # rounded once: one bit at most
    assert (ours.grad != theirs.grad).float().mean() < 0.01


def test_ignored_rows_may_hold_anything_and_other_labels_are_refused():
    x = torch.randn(3, 4)
    x[1] = torch.nan
    x.requires_grad_()
    loss, _ = ops.cross_entropy(x, torch.tensor([0, -100, 3]), -100, 0.1, 2)
    loss.backward()
    assert loss.isfinite() and not x.grad[1].any() and x.grad.isfinite().all()
    for label in (4, -1):
        with pytest.raises(MoecError, match="outside of"):
            ops.cross_entropy(x, torch.tensor([0, label, 3]), -100, 0.0, 2)


@pytest.mark.parametrize("dtype", CHECKED)
@pytest.mark.parametrize("reduction", [0, 1])
def test_cross_entropy_opcheck(dtype, reduction):
    x, labels = torch.randn(5, 7, dtype=dtype, requires_grad=True), torch.tensor([3, -100, 0, 6, 1])
    torch.library.opcheck(ops.cross_entropy.default, (x, labels, -100, 0.1, reduction))
    loss, lse = (y.detach() for y in ops.cross_entropy(x, labels, -100, 0.1, reduction))
    args = (torch.ones_like(loss), x.detach(), labels, lse, -100, 0.1, reduction)
    torch.library.opcheck(ops.cross_entropy_backward.default, args)


# -- logsumexp_pick


@given(st.integers(1, 3), st.sampled_from([1, 2, 5]), st.sampled_from([(), (3,), (2, 3)]), st.integers(0, 99))
def test_logsumexp_pick_is_its_three_parts(blocks, width, lead, seed):
    V, gen = blocks * width, seeded(seed)
    x = torch.randn(*lead, V, generator=gen, dtype=torch.float64)
    vocab = torch.arange(7, 7 + V)
    ids = torch.randint(5, 9 + V, (*lead, 1), generator=gen)  # some of other ranks
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = ops.logsumexp_pick(ours, vocab, ids, blocks)
    want = ops.blocked_logsumexp(theirs, blocks), ops.pick(theirs, vocab, ids), theirs.sum(-1)
    g = [torch.randn(y.shape, generator=gen, dtype=y.dtype) for y in want]
    g[0] *= torch.rand(g[0].shape, generator=gen) < 0.7
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    got, want = torch.autograd.grad(got, ours, g), torch.autograd.grad(want, theirs, g)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", CHECKED)
def test_logsumexp_pick_opcheck(dtype):
    x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
    ids = torch.tensor([[[0], [9], [3]], [[7], [1], [-100]]])
    args = (x, torch.arange(8), ids, 2)
    torch.library.opcheck(ops.logsumexp_pick.default, args)
    lse, picked, total = (y.detach() for y in ops.logsumexp_pick(*args))
    args = (lse, picked, total, x.detach(), torch.arange(8), ids, lse)
    torch.library.opcheck(ops.logsumexp_pick_backward.default, args)
