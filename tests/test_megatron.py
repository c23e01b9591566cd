"""Megatron-Core's routing, permutation and losses as an external oracle, where it imports on a CPU.

    pip install --no-deps megatron-core==0.16.1

In fp32 (their softmax is, whatever the logits are).  Where we choose otherwise, on purpose:

* Of equal scores we take the lowest index, they what ``torch.topk`` gives: logits here are drawn without ties.
* ``drop="position"`` keeps an expert's first tokens; theirs takes the top-k of a 0/1 map, which on a CPU keeps others.
  Only how many are kept is compared.
* A capacity is never more than the tokens; theirs may be, and then drops nothing either.
* They give dense maps [T, E], we pairs [T, K].
* They need K >= 2 for groups as we do, but always score them by the sum of the best K // kept: ``group_score="topk"``.
* Their balancing loss takes the counts and the number of tokens from the caller; a padding mask of theirs is True at
  padding for scores and z-loss.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_configure_router import balance
from test_route import dense

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.route_spec import RouteSpec

theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
pytestmark = pytest.mark.nightly
ops = torch.ops.moec
T, E = 24, 8
SPECS = (
    RouteSpec(E, 2), RouteSpec(E, 3, scaling=2.5), RouteSpec(E, 2, "softmax_post"), RouteSpec(E, 1, "sigmoid"),
    RouteSpec(E, 3, "sigmoid", normalize=True, scaling=2.5),
    RouteSpec(E, 4, "sigmoid", normalize=True, groups=4, kept_groups=2, group_score="topk"),
    RouteSpec(E, 2, groups=4, kept_groups=2, group_score="topk"),
)  # fmt: skip


def draw(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(T, E, generator=gen).mul_(2).requires_grad_(), torch.randn(E, generator=gen)


def route(z: torch.Tensor, bias: torch.Tensor | None, spec: RouteSpec):
    return theirs.topk_routing_with_score_function(
        z, spec.top_k, use_pre_softmax=spec.score == "softmax_pre", num_groups=spec.groups,
        group_topk=spec.kept_groups if spec.groups > 1 else None, scaling_factor=spec.scaling,
        score_function=spec.score.partition("_")[0], expert_bias=bias,
    )  # fmt: skip


def selected(ids: torch.Tensor) -> torch.Tensor:
    return dense(torch.ones(ids.shape), ids, E).bool()


@settings(max_examples=40)
@given(st.sampled_from(SPECS), st.booleans(), st.integers(0, 9999))
def test_routing(spec, biased, seed):
    z, bias = draw(seed)
    bias = bias if biased and spec.score == "sigmoid" else None
    mine = z.detach().clone().requires_grad_()
    weights, ids = ops.route(mine, bias, None, None, spec.text())
    probs, chosen = route(z, bias, spec)
    assert torch.equal(selected(ids), chosen)
    torch.testing.assert_close(dense(weights, ids, E), probs, rtol=1e-5, atol=1e-6)
    g = torch.randn(T, E, generator=torch.Generator().manual_seed(1))
    dense(weights, ids, E).backward(g)
    probs.backward(g)
    torch.testing.assert_close(mine.grad, z.grad, rtol=1e-4, atol=1e-6)


@settings(max_examples=40)
@given(st.sampled_from(SPECS[:2]), st.sampled_from([0.25, 1.0, 1.5, 9.0]), st.integers(0, 9999))
def test_capacity(spec, factor, seed):
    z = draw(seed)[0].detach()
    limited = RouteSpec(E, spec.top_k, scaling=spec.scaling, capacity_factor=factor)
    weights, ids = ops.route(z, None, None, None, limited.text())
    probs, kept = theirs.apply_router_token_dropping(*route(z, None, spec), spec.top_k, factor)
    assert torch.equal(selected(ids), kept)
    torch.testing.assert_close(dense(weights, ids, E), probs, rtol=1e-5, atol=1e-6)
    first = RouteSpec(E, spec.top_k, capacity_factor=factor, drop="position")
    _, ids = ops.route(z, None, None, None, first.text())
    _, kept = theirs.apply_router_token_dropping(*route(z, None, spec), spec.top_k, factor, "position")
    assert (selected(ids).sum(0) >= kept.sum(0)).all()  # what theirs picks may be tokens of other experts
    assert (selected(ids).sum(0) <= limited.capacity(T)).all()


@settings(max_examples=20)
@given(st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.integers(0, 9999))
def test_losses(kind, padded, seed):
    z, _ = draw(seed)
    valid = torch.rand(T, generator=torch.Generator().manual_seed(seed)) < (0.7 if padded else 2.0)
    chosen, scores = theirs.compute_routing_scores_for_aux_loss(z, 2, kind, padding_mask=~valid)
    probs, counts = ops.balance(z, valid, 2, "softmax_pre" if kind == "softmax" else kind)
    assert torch.equal(counts, chosen.sum(0))
    torch.testing.assert_close(probs, scores.sum(0), rtol=1e-5, atol=1e-6)
    n = int(valid.sum())
    want = theirs.switch_load_balancing_loss_func(scores, chosen.sum(0), n, 2, E, 0.5)
    p_TE = (z.softmax(1) if kind == "softmax" else z.sigmoid() / z.sigmoid().sum(1, keepdim=True))[valid]
    # The formula that the losses of a plan are held against (its constants are those of that file).
    mine = balance(p_TE, counts.double()) * 0.5 * (E / 6)
    torch.testing.assert_close(mine.float(), want, rtol=1e-5, atol=1e-6)
    z_loss = (z[valid].logsumexp(1) ** 2).mean() * 0.1
    torch.testing.assert_close(z_loss, theirs.z_loss_func(z, 0.1, ~valid), rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(st.sampled_from(SPECS[:2]), st.integers(0, 9999))
def test_permutation(spec, seed):
    z = draw(seed)[0].detach()
    x = torch.randn(T, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights, ids = ops.route(z, None, None, None, spec.text())
    probs, chosen = route(z, None, spec)
    rows, counts, row_of = ops.permute(x, ids, E)
    want, _, order = theirs.permute(x, chosen)
    assert torch.equal(rows, want) and torch.equal(counts, chosen.sum(0))
    back = theirs.unpermute(want, order, x.shape, probs.double(), chosen)
    torch.testing.assert_close(ops.unpermute(rows, weights.double(), row_of), back, rtol=1e-5, atol=1e-6)
