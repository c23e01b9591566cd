"""The router's generated kernels, interpreted, against the CPU ops: over drawn specs, ties, padding, odd sizes.

Legend: T tokens, E experts, K choices per token, L = K + 1 (at most E), G groups.

Scores differ by some ulps between devices, so ids are held to what ``moec::route`` promises: the same for the same
scores, and the same wherever what decides lies more than 8 ulps apart.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from interpreter import repaired
from test_route import cases

from moec.runtime.kernels import router, router_backward
from moec.runtime.ops.route import routed_logits
from moec.runtime.ops.scores import score
from moec.runtime.route_spec import RouteSpec

ops = torch.ops.moec
EXAMPLES = settings.default.max_examples // 8


def apart(values: Tensor, what: Tensor) -> Tensor:
    """[T]: whether all neighbours of falling ``values`` differ by more than 8 ulps, or are equal for the same reason:
    of equal ``what``."""
    gap = values[:, :-1] - values[:, 1:]
    ulp = torch.finfo(torch.float32).eps * values[:, :-1].abs()
    return ((gap > 8 * ulp) | (what[:, :-1] == what[:, 1:])).all(1)


def decided(by_TE: Tensor, z_TE: Tensor, spec: RouteSpec) -> Tensor:
    """[T]: whether rounding cannot change which experts are chosen, nor their order."""
    clear_T = torch.ones(len(by_TE), dtype=torch.bool)
    if spec.groups > 1:
        size = spec.num_experts // spec.groups
        summed = {"max": 1, "top2": 2, "topk": spec.top_k // spec.kept_groups}[spec.group_score]
        group_TG = by_TE.view(-1, spec.groups, size).topk(summed, 2)[0].sum(2).sort(1, descending=True)[0]
        clear_T &= apart(group_TG, group_TG)
    order_TL = by_TE.sort(dim=1, descending=True, stable=True)[1][:, : spec.top_k + 1]
    return clear_T & apart(by_TE.gather(1, order_TL), z_TE.gather(1, order_TL))


@settings(max_examples=EXAMPLES)
@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.booleans(),
       st.sampled_from([None, None, "random", "round_robin"]))  # fmt: skip
def test_router_is_the_cpu_op(case, dtype, masked, balanced, force):
    spec, z, bias, valid = case
    if force and spec.capacity_factor is None:
        spec = RouteSpec.parse(spec.text()[:-1] + f', "force": "{force}", "seed": 5}}')
    T, E = z.shape
    z, bias = z.to(dtype), None if bias is None else bias.float()
    token = torch.arange(T) * 12345678901 if spec.force else None
    counted = (torch.rand(T, generator=torch.Generator().manual_seed(T)) < 0.5) if masked else valid
    args = (z, bias, valid, token, counted, spec.text(), balanced)
    weights, ids, tally, probs, counts = ops.route_counted(*args)
    with repaired():
        got = router.counted(*args)
        plain = router.route(z, bias, valid, token, spec.text())
    assert [(x.dtype, x.shape) for x in got] == [(x.dtype, x.shape) for x in (weights, ids, tally, probs, counts)]
    assert torch.equal(plain[0], got[0]) and torch.equal(plain[1], got[1])

    routed = routed_logits(z, token, spec)
    by = score(routed, spec.score) + (0 if bias is None else bias)
    same = decided(by, routed if bias is None else by, spec) | (spec.force == "round_robin")
    if spec.capacity_factor is not None:  # one that differs would drop others
        same = torch.full_like(same, bool(same.all()))
    assert torch.equal(got[1][same], ids[same])
    torch.testing.assert_close(got[0][same], weights[same], rtol=2e-5, atol=1e-6)

    again = ops.tally(got[1], None, z, counted, E, spec.score)  # counts are those of its own ids
    assert torch.equal(got[2][:-1], again[:-1])
    torch.testing.assert_close(got[2][-1], tally[-1], rtol=1e-5, atol=1e-5)
    if balanced:
        torch.testing.assert_close(got[3], probs, rtol=1e-5, atol=1e-6)
        p = score(z.float(), spec.score)
        if decided(p, z.float(), RouteSpec(E, spec.top_k, "sigmoid")).all():
            assert torch.equal(got[4], counts)
        assert got[4].sum() == counts.sum()

    gen = torch.Generator().manual_seed(1)
    grad, grad_E = torch.randn(weights.shape, generator=gen), torch.randn(probs.shape, generator=gen)
    if not same.all():
        return  # of a choice that another device makes otherwise, another gradient
    back = (grad, grad_E, z, bias, valid, token, counted, ids, spec.text(), balanced)
    want = ops.route_counted_backward(*back)
    with repaired():
        found = router_backward.counted_backward(*back)
        alone = router_backward.backward(grad, z, bias, valid, token, ids, spec.text())
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    assert found.dtype == dtype
    torch.testing.assert_close(found, want, **tolerance)
    torch.testing.assert_close(alone, ops.route_backward(grad, z, bias, valid, token, ids, spec.text()), **tolerance)


def test_padding_that_counts_was_dropped():
    z, spec = torch.randn(5, 6), RouteSpec(6, 2, "sigmoid").text()
    valid = torch.tensor([True, False, True, False, True])
    args = (z, None, valid, None, torch.tensor([True, True, True, False, False]), spec, True)
    with repaired():
        got = router.counted(*args)
    want = ops.route_counted(*args)
    assert torch.equal(got[2][:-1], want[2][:-1]) and torch.equal(got[4], want[4])
    assert got[2][:6].sum() == 4 and got[2][6] == 2 and got[2][7] == 3 and got[4].sum() == 6


def test_experts_that_score_alike_are_taken_from_the_lowest():
    for E, K in ((5, 3), (130, 7)):
        with repaired():
            _, ids = router.route(torch.zeros(3, E), None, None, None, RouteSpec(E, K).text())
        assert ids.tolist() == [list(range(K))] * 3


def test_scores_that_are_no_numbers_stay_inside():
    z = torch.tensor([[torch.nan] * 6, [-torch.inf] * 6, [0.0, torch.nan, 1.0, 2.0, -torch.inf, 3.0]])
    spec = RouteSpec(6, 3, "softmax_post").text()
    with repaired():
        _, ids = router.route(z, None, None, None, spec)
    assert ids.tolist() == ops.route(z, None, None, None, spec)[1].tolist() == [[0, 1, 2], [0, 1, 2], [1, 5, 3]]


@pytest.mark.nightly
def test_a_router_of_160_experts_in_8_groups():
    spec = RouteSpec(160, 6, "sigmoid", True, 16.0, groups=8, kept_groups=3, group_score="top2")
    z, bias = torch.randn(70, 160), torch.randn(160) * 0.1  # three programs, the last one not full
    args = (z, bias, None, None, None, spec.text(), True)
    want = ops.route_counted(*args)
    with repaired():
        got = router.counted(*args)
    by = z.sigmoid() + bias
    same = decided(by, by, spec)
    assert same.float().mean() > 0.9 and torch.equal(got[1][same], want[1][same])
    torch.testing.assert_close(got[0][same], want[0][same], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[3], want[3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def test_traffic(dtype):
    """Every byte that goes in or out goes once; partial sums are the rest."""
    T, E, K = 256, 64, 8
    spec = RouteSpec(E, K, normalize=True).text()
    z = torch.randn(T, E).to(dtype)
    with repaired() as forward:
        out = router.counted(z, None, None, None, None, spec, True)
    assert sum(forward.unique_bytes()) <= 1.1 * sum(x.nbytes for x in (z, *out))
    grad, grad_E = torch.randn(T, K), torch.randn(E)
    with repaired() as backward:
        grad_z = router_backward.counted_backward(grad, grad_E, z, None, None, None, None, out[1], spec, True)
    assert sum(backward.unique_bytes()) <= 1.1 * sum(x.nbytes for x in (z, grad, grad_E, out[1], grad_z))
    assert backward.unique_bytes(z).loaded == z.nbytes  # the recorder sees them
