"""moec::route and moec::drop against dense one-hot algebra in float64, token by token in plain Python.

Legend: T tokens, E experts, K choices per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import DROPS, GROUP_SCORES, SCORES, RouteSpec

ops = torch.ops.moec


# -- the oracle


@dataclass
class Routed:
    """What is weighted by what, as dense maps, and the choices of each token in order (None: padded or dropped)."""

    weights_TE: Tensor
    choices: list[list[int | None]]


def oracle(logits_TE: Tensor, bias_E: Tensor | None, valid: list[bool], spec: RouteSpec) -> Routed:
    """Differentiable: selection by Python's stable sort, weights by one-hot algebra on all experts."""
    T, E = logits_TE.shape
    K = spec.top_k
    scores_TE = {
        "softmax_pre": lambda z: (z - z.logsumexp(1, keepdim=True)).exp(),
        "softmax_post": lambda z: z,
        "sigmoid": lambda z: 1 / (1 + (-z).exp()),
        "sqrtsoftplus": lambda z: (z.exp() + 1).log().sqrt(),
    }[spec.score](logits_TE)
    by = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    choices: list[list[int | None]] = [best(by[t].tolist(), spec) for t in range(T)]
    hot_TE = torch.zeros(T, E, dtype=torch.float64)
    for t in range(T):
        hot_TE[t, choices[t]] = 1
    if spec.score == "softmax_post":
        e_TE = (scores_TE - scores_TE.amax(1, keepdim=True).detach()).exp() * hot_TE
        w_TE = e_TE / e_TE.sum(1, keepdim=True)
    else:
        w_TE = scores_TE * hot_TE
    if spec.normalize and K > 1:
        w_TE = w_TE / (w_TE.sum(1, keepdim=True) + 1e-20)
    w_TE = w_TE * spec.scaling
    kept_TE = hot_TE * torch.tensor(valid, dtype=torch.float64).reshape(T, 1)
    if spec.capacity_factor is not None:
        run = T // spec.shards
        C = min(run, max(spec.min_capacity, math.ceil(run * K / E * spec.capacity_factor)))
        for first in range(0, T, max(run, 1)):
            for e in range(E):
                queue = [t for t in range(first, first + run) if kept_TE[t, e]]
                if spec.drop == "probs":
                    queue.sort(key=lambda t, e=e: -float(w_TE[t, e]))
                for t in queue[C:]:
                    kept_TE[t, e] = 0
    choices = [[e if kept_TE[t, e] else None for e in row] for t, row in enumerate(choices)]
    return Routed(w_TE * kept_TE, choices)


def best(scores: list[float], spec: RouteSpec) -> list[int]:
    E, size = spec.num_experts, spec.num_experts // spec.groups
    members = [range(g * size, (g + 1) * size) for g in range(spec.groups)]
    n = {"max": 1, "top2": 2, "topk": spec.top_k // spec.kept_groups}[spec.group_score]
    groups = sorted(range(spec.groups), key=lambda g: -sum(sorted((scores[e] for e in members[g]), reverse=True)[:n]))
    allowed = {e for g in groups[: spec.kept_groups] for e in members[g]} if spec.groups > 1 else set(range(E))
    return sorted(sorted(allowed), key=lambda e: -scores[e])[: spec.top_k]


def dense(weights_TK: Tensor, ids_TK: Tensor, E: int) -> Tensor:
    out = weights_TK.new_zeros(ids_TK.shape[0], E + 1)
    return out.scatter_add(1, torch.where(ids_TK < 0, E, ids_TK), weights_TK)[:, :E]


# -- drawn routers and logits


@st.composite
def specs(draw) -> RouteSpec:
    groups, size = draw(st.sampled_from([(1, 1), (1, 5), (1, 8), (2, 4), (4, 2), (4, 3), (3, 1)]))
    E, kept = groups * size, draw(st.integers(1, groups))
    K = draw(st.integers(1, kept * size))
    score = draw(st.sampled_from([s for s in SCORES if s != "softmax_post" or K > 1]))
    impossible = {"top2"} if size < 2 else set()
    if kept > K:
        impossible.add("topk")
    shards = draw(st.sampled_from([1, 1, 2]))
    return RouteSpec(
        E, K, score, draw(st.booleans()), draw(st.sampled_from([1.0, 2.5])), groups, kept,
        draw(st.sampled_from([g for g in GROUP_SCORES if groups == 1 or g not in impossible])),
        draw(st.none() | st.sampled_from([0.3, 1.0, 1.25, 50.0])) if shards == 1 else 1.0,
        draw(st.integers(0, 3)), draw(st.sampled_from(DROPS)), "dp_shard" if shards > 1 else "global", shards,
    )  # fmt: skip


@st.composite
def cases(draw):
    """(spec, logits, bias, valid): a skewed router, values that repeat (so that scores tie), padding."""
    spec = draw(specs())
    T = draw(st.sampled_from([0, 1, 2, 7, 12]))
    T += T % spec.shards
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = torch.randn(draw(st.sampled_from([1, 3, 1000])), generator=gen, dtype=torch.float64) * 2
    z = values[torch.randint(0, len(values), (T, spec.num_experts), generator=gen)]
    z[:, 0] += draw(st.sampled_from([0.0, 8.0]))  # every token to one expert
    bias = draw(st.none() | st.sampled_from([0.1, 1.0]))
    bias = None if bias is None else torch.randn(spec.num_experts, generator=gen, dtype=torch.float64) * bias
    valid = (torch.rand(T, generator=gen) < draw(st.sampled_from([0.0, 0.6]))) if draw(st.booleans()) else None
    return spec, z, bias, valid


def as_list(ids_TK: Tensor) -> list[list[int | None]]:
    return [[None if e < 0 else e for e in row] for row in ids_TK.tolist()]


@given(cases())
def test_route_is_the_oracle(case):
    spec, z, bias, valid = case
    z, want_z = z.clone().requires_grad_(), z.clone().requires_grad_()
    weights, ids = ops.route(z, bias, valid, None, spec.text())
    want = oracle(want_z, bias, [True] * len(z) if valid is None else valid.tolist(), spec)
    assert weights.dtype == torch.float64 and ids.dtype == torch.int64
    assert as_list(ids) == want.choices
    assert not weights[ids < 0].any()
    got = dense(weights, ids, spec.num_experts)
    torch.testing.assert_close(got, want.weights_TE, rtol=1e-12, atol=1e-14)
    cotangent = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got.backward(cotangent)
    want.weights_TE.backward(cotangent)
    torch.testing.assert_close(z.grad, want_z.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("more", [{}, {"groups": 4, "kept_groups": 2, "group_score": "top2"}, {"capacity_factor": 1.0}],
                         ids=["plain", "groups", "capacity"])  # fmt: skip
def test_gradcheck(score, normalize, more):
    gen = torch.Generator().manual_seed(3)
    z = torch.randn(5, 8, generator=gen, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, generator=gen, dtype=torch.float64) * 0.3
    valid = torch.tensor([True, True, False, True, True])
    spec = RouteSpec(8, 3, score, normalize, 2.5, **more).text()
    assert torch.autograd.gradcheck(lambda z: ops.route(z, bias, valid, None, spec)[0], (z,))


@pytest.mark.parametrize(("E", "K"), [(1, 1), (6, 6), (384, 9)])
@pytest.mark.parametrize("score", SCORES)
def test_extents(score, E, K):
    if score == "softmax_post" and K == 1:
        return
    spec = RouteSpec(E, K, score, normalize=True)
    z = torch.randn(6, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights, ids = ops.route(z, None, None, None, spec.text())
    want = oracle(z, None, [True] * 6, spec)
    assert as_list(ids) == want.choices
    torch.testing.assert_close(dense(weights, ids, E), want.weights_TE, rtol=1e-12, atol=0)


def test_the_lowest_index_wins():
    """``torch.topk(zeros(8), 3)`` gives 6, 5, 4 on a CPU."""
    for score in SCORES:
        _, ids = ops.route(torch.zeros(2, 8), None, None, None, RouteSpec(8, 3, score).text())
        assert ids.tolist() == [[0, 1, 2]] * 2
    spec = RouteSpec(8, 3, "sigmoid", groups=4, kept_groups=2, group_score="max")
    _, ids = ops.route(torch.zeros(1, 8), torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1]), None, None, spec.text())
    assert ids.tolist() == [[7, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("row", [[-math.inf, 1.0, 2.0, -math.inf], [-math.inf, 1.0, -math.inf, -math.inf],
                                 [1e30, -1e30, -3e4, 1e30], [-100.0, -200.0, -87.0, -1e30]])  # fmt: skip
def test_extreme_logits_stay_finite(dtype, score, normalize, row):
    z = torch.tensor([row], dtype=dtype, requires_grad=True)
    weights, ids = ops.route(z, None, None, None, RouteSpec(4, 2, score, normalize).text())
    assert sorted(row, reverse=True)[:2] == [row[e] for e in ids[0].tolist()]
    limit = {"sqrtsoftplus": 1e16}.get(score, 2.0)
    assert weights.isfinite().all() and (weights >= 0).all() and (weights < limit).all()
    weights.backward(torch.tensor([[1.0, -2.0]], dtype=dtype))
    assert z.grad.isfinite().all()


def test_what_is_padding_does_not_matter():
    """Neither the logits of a padded token nor its weights' gradient reach anything; nan included."""
    z = torch.randn(3, 4)
    z[1] = torch.nan
    z.requires_grad_()
    weights, ids = ops.route(z, None, torch.tensor([True, False, True]), None, RouteSpec(4, 2, normalize=True).text())
    assert ids[1].tolist() == [-1, -1] and weights[1].tolist() == [0, 0]
    weights.sum().backward()
    assert z.grad.isfinite().all() and not z.grad[1].any()


def test_padding_takes_no_place():
    spec = RouteSpec(2, 1, capacity_factor=1.0, drop="position")
    z = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    _, ids = ops.route(z, None, torch.tensor([False, True, True, True]), None, spec.text())
    assert ids.flatten().tolist() == [-1, 0, 0, -1]


def test_all_tokens_dropped():
    z = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    weights, ids = ops.route(z, None, torch.zeros(4, dtype=torch.bool), None, RouteSpec(2, 1).text())
    assert (ids == -1).all() and not weights.any()
    weights.sum().backward()
    assert not z.grad.any()


def test_capacity_is_at_least_one_and_never_more_than_the_tokens():
    spec = RouteSpec(4, 1, capacity_factor=1e-9, min_capacity=0)
    assert [spec.capacity(t) for t in (0, 1, 100)] == [0, 1, 1]
    assert RouteSpec(4, 2, capacity_factor=9.0).capacity(10) == 10
    assert RouteSpec(4, 2, capacity_factor=1.0, min_capacity=7).capacity(10) == 7
    assert RouteSpec(4, 2, capacity_factor=1.1).capacity(10) == 6
    assert RouteSpec(4, 2).capacity(10) is None
    _, ids = ops.route(torch.tensor([[1.0, 0, 0, 0]]).expand(5, 4), None, None, None, spec.text())
    assert ids.flatten().tolist() == [0, -1, -1, -1, -1]


@given(cases())
def test_drop_after_route_is_route(case):
    spec, z, bias, valid = case
    free = RouteSpec(**{**spec.__dict__, "capacity_factor": None, "shards": 1, "level": "global"})
    one, two = z.clone().requires_grad_(), z.clone().requires_grad_()
    whole = ops.route(one, bias, valid, None, spec.text())
    pairs = ops.drop(*ops.route(two, bias, valid, None, free.text()), spec.text())
    assert torch.equal(whole[0], pairs[0]) and torch.equal(whole[1], pairs[1])
    for weights, _ in (whole, pairs):
        (weights * torch.arange(weights.numel()).view_as(weights)).sum().backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_computed_in_fp32(dtype):
    z = torch.randn(50, 16).to(dtype).requires_grad_()
    wide = z.detach().float().requires_grad_()
    spec = RouteSpec(16, 4, "sigmoid", normalize=True).text()
    low, high = ops.route(z, None, None, None, spec), ops.route(wide, None, None, None, spec)
    assert low[0].dtype == torch.float32 and torch.equal(low[0], high[0]) and torch.equal(low[1], high[1])
    g = torch.randn(50, 4)
    low[0].backward(g)
    high[0].backward(g)
    assert z.grad.dtype == dtype and torch.equal(z.grad, wide.grad.to(dtype))


def test_an_expert_outside_of_the_groups_is_out_even_beside_minus_infinity():
    spec = RouteSpec(6, 2, "softmax_post", groups=3, kept_groups=1, group_score="max")
    z = torch.tensor([[0.0, 0.0, 0.0, 0.0, -math.inf, 5.0]])
    assert ops.route(z, None, None, None, spec.text())[1].tolist() == [[5, 4]]


def test_of_equal_weights_the_first_stay():
    """Enough of them that an unstable sort would show."""
    spec = RouteSpec(1, 1, "sigmoid", capacity_factor=0.25)
    _, ids = ops.route(torch.zeros(400, 1), None, None, None, spec.text())
    assert ids.flatten().tolist() == [0] * 100 + [-1] * 300


def test_small_scores_do_not_underflow():
    z = torch.tensor([[-100.0, -160.0]], requires_grad=True)
    weights, _ = ops.route(z, None, None, None, RouteSpec(2, 2, "sqrtsoftplus").text())
    torch.testing.assert_close(weights, (z.detach() / 2).exp(), rtol=1e-6, atol=0)


# -- forced balance


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("E", "K"), [(8, 2), (6, 4), (5, 5)])
def test_round_robin_is_exact(score, E, K):
    spec = RouteSpec(E, K, score, normalize=True, force="round_robin").text()
    token = torch.arange(100, 113)
    weights, ids = ops.route(torch.randn(13, E), None, None, token, spec)
    assert [sorted(row) for row in ids.tolist()] == [sorted((t * K + k) % E for k in range(K)) for t in token.tolist()]
    loads = ids.flatten().bincount(minlength=E)
    assert loads.max() - loads.min() <= 1
    torch.testing.assert_close(weights, torch.full((13, K), 1 / K))


def test_random_routing_depends_on_the_token_alone():
    spec = RouteSpec(16, 2, force="random", seed=7)
    token = torch.tensor([0, 5, 2**31 + 3, 2**40, 5])
    _, ids = ops.route(torch.randn(5, 16), None, None, token, spec.text())
    _, again = ops.route(torch.randn(5, 16), None, None, token.flip(0), spec.text())
    assert torch.equal(ids, again.flip(0)) and torch.equal(ids[1], ids[4])
    far = torch.arange(64) * 2**32  # the upper half of a number counts too
    assert len(ops.route(torch.zeros(64, 16), None, None, far, spec.text())[1].unique(dim=0)) > 30
    many = torch.arange(20000)
    _, ids = ops.route(torch.zeros(20000, 16), None, None, many, spec.text())
    loads = ids.flatten().bincount(minlength=16)
    assert ((loads - 2500).abs() < 200).all()  # 2500 ± 47
    other = RouteSpec(16, 2, force="random", seed=8).text()
    same = (ops.route(torch.zeros(20000, 16), None, None, many, other)[1][:, 0] == ids[:, 0]).double().mean()
    assert 0.05 < same < 0.075  # 1/16: another seed is another draw
    pairs = (ids[1:, 0] == ids[:-1, 0]).double().mean()
    assert 0.05 < pairs < 0.075  # neighbours are independent


@pytest.mark.parametrize("force", ["random", "round_robin"])
def test_forced_gradients_pass_straight_through(force):
    """They are those of the logits that replaced the user's."""
    spec, token = RouteSpec(8, 2, "softmax_pre", True, force=force), torch.arange(6)
    z = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    weights, ids = ops.route(z, None, None, token, spec.text())
    g = torch.randn(6, 2, dtype=torch.float64)
    weights.backward(g)
    forced = torch.zeros(6, 8, dtype=torch.float64)
    if force == "random":
        free = RouteSpec(8, 8, force=force)  # all experts, unnormalised: their log is the logits but for a constant
        p, order = ops.route(z.detach(), None, None, token, free.text())
        forced.scatter_(1, order, p.log())
    forced.requires_grad_()
    w = forced.softmax(1).gather(1, ids)
    (w / w.sum(1, keepdim=True)).backward(g)
    torch.testing.assert_close(z.grad, forced.grad, rtol=1e-12, atol=1e-14)


# -- ops


def test_ten_runs_equal_bits():
    z = torch.randn(300, 32)
    for spec in (RouteSpec(32, 4, normalize=True, capacity_factor=0.8), RouteSpec(32, 4, "sigmoid", True)):
        found = []
        for _ in range(10):
            x = z.clone().requires_grad_()
            weights, ids = ops.route(x, None, None, None, spec.text())
            weights.square().sum().backward()
            found.append((weights.detach(), ids, x.grad))
        assert all(torch.equal(a, b) for run in found[1:] for a, b in zip(run, found[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_opcheck(dtype):
    z = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    bias, valid, token = torch.randn(8), torch.arange(6) < 4, torch.arange(6)
    for spec in (RouteSpec(8, 3, capacity_factor=1.0), RouteSpec(8, 3, "sigmoid", True, force="random")):
        torch.library.opcheck(ops.route, (z, bias, valid, token, spec.text()))
        weights, ids = ops.route(z, bias, valid, token, spec.text())
        rest = (torch.randn_like(weights), z.detach(), bias, valid, token, ids, spec.text())
        torch.library.opcheck(ops.route_backward, rest)
    torch.library.opcheck(ops.route, (z, None, None, None, RouteSpec(8, 3).text()))
    weights = torch.rand(6, 3, dtype=dtype, requires_grad=True)
    torch.library.opcheck(ops.drop, (weights, ids, RouteSpec(8, 3, capacity_factor=0.5).text()))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"score": "softmax"}, "score='softmax' is none of"),
        ({"score": "softmax_post", "top_k": 1}, "the router gets no gradient"),
        ({"top_k": 9}, "top_k=9 of num_experts=8"),
        ({"top_k": 0}, "top_k=0"),
        ({"groups": 3}, "groups=3 does not divide"),
        ({"groups": 4, "kept_groups": 5}, "kept_groups=5 of groups=4"),
        ({"groups": 4, "kept_groups": 1, "top_k": 3}, "top_k=3 of the 2 experts"),
        ({"groups": 8, "kept_groups": 4, "group_score": "top2"}, "'top2' of groups of 1"),
        ({"groups": 4, "kept_groups": 3, "group_score": "topk"}, "2 // 3 = 0 scores"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 is not positive"),
        ({"capacity_factor": math.nan}, "is not positive"),
        ({"min_capacity": -1}, "min_capacity=-1"),
        ({"capacity_factor": 1.0, "shards": 2}, "shards=2 is for a capacity of level='dp_shard'"),
        ({"level": "rank"}, "level='rank'"),
        ({"force": "always"}, "force='always'"),
    ],
)
def test_nonsense_is_refused(fields, why):
    with pytest.raises(MoecError, match=why.replace("(", r"\(")):
        RouteSpec(**{"num_experts": 8, "top_k": 2, **fields})


def test_operands_that_do_not_fit():
    spec, z = RouteSpec(8, 2).text(), torch.randn(3, 8)
    for args, why in (
        ((torch.randn(3, 7), None, None, None, spec), r"logits \(3, 7\) for 8 experts"),
        ((z, torch.randn(7), None, None, spec), r"bias \(7,\)"),
        ((z, None, torch.ones(2, dtype=torch.bool), None, spec), r"valid \(2,\)"),
        ((z, None, None, torch.arange(4), spec), r"token \(4,\)"),
        ((z, None, None, None, RouteSpec(8, 2, force="random").text()), "needs the numbers of the tokens"),
        ((z, None, None, None, RouteSpec(8, 2, capacity_factor=1.0, level="dp_shard", shards=2).text()), "equal runs"),
    ):
        with pytest.raises(MoecError, match=why):
            ops.route(*args)
    with pytest.raises(MoecError, match="for ids"):
        ops.drop(torch.rand(3, 2), torch.zeros(3, 1, dtype=torch.int64), spec)


@given(specs())
def test_text_is_the_spec(spec):
    assert RouteSpec.parse(spec.text()) == spec
