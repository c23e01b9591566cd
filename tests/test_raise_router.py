"""Routers become ``moec.route`` where numbers say so: every family, plain spellings, and what must be left alone."""

import json
import re
from dataclasses import replace

import pytest
import routers
import torch
import torch.nn.functional as F
from capture_models import Model
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_spellings import DenseEinsum, IndexCopy
from routers import BIASED, FIT, UNFIT, E, H, K, Routed, Stack, computed, expected, program, routed, spec, specs
from test_zoo import FAMILIES, TINY
from torch import Tensor, nn

import moec
from moec import hf
from moec.capture import capture
from moec.compiler import compile_program, normalize, raise_moe
from moec.passes import manager, raise_router
from moec.passes.raise_router.fit import compare, fit, observe
from moec.passes.raise_router.region import Locator, Region
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import GROUP_SCORES, SCORES, RouteSpec

ROUTER_OPS = {"aten.topk", "aten.sort", "aten.argsort", "aten.max", "aten.argmax", "aten.gather", "aten.scatter"}
ROUTE = torch.ops.moec.route.default


def grouped(routers: dict, size: int) -> list:
    """Several routers a model, because capture takes longer than a fit."""
    chosen = [tuple(routers)[i : i + size] for i in range(0, len(routers), size)]
    return [pytest.param(c, id="+".join(getattr(f, "__name__", f) for f in c)) for c in chosen]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    largest = max(float(b.double().norm()) for b in want)
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b.double()).norm()) <= 1e-12 * max(float(b.double().norm()), 1e-2 * largest)


def regions(before: Program) -> list[Region]:
    """The longest region of every block."""
    locator, found = Locator(before), []
    for permute in before.graph.find_nodes(op="call_function", target=torch.ops.moec.permute.default):
        ids, weights, _ = raise_router._operands(permute)
        found.append(next(locator.regions(ids, weights, permute.args[2])))
    return found


# -- plain spellings


@pytest.mark.parametrize("chosen", grouped(FIT, 7))
def test_plain_spellings_are_raised(chosen) -> None:
    torch.manual_seed(0)
    module = Stack(*(Routed(router) for router in chosen))
    after = routed(program(module))
    assert [json.loads(s) for s in specs(after)] == [FIT[router] for router in chosen] and not after.why_not
    routes = after.graph.find_nodes(op="call_function", target=ROUTE)
    assert [r.args[1] is not None for r in routes] == [router in BIASED for router in chosen]
    assert not ROUTER_OPS & set(after.op_counts())  # what nobody uses any more is gone
    x = torch.randn(4, 9, H)
    same(computed(after, module, x), expected(module, x))


@pytest.mark.parametrize("chosen", grouped(UNFIT, 6))
def test_what_no_spec_computes_stays_and_says_why(chosen) -> None:
    torch.manual_seed(0)
    trained = (routers.learned_scale, routers.bias_in_weights)
    module = Stack(*(Routed(router, trained=router in trained) for router in chosen))
    before = program(module)
    after = routed(before)
    assert after.op_counts() == before.op_counts()
    assert len(after.why_not) == len(chosen)
    for i, (router, reason) in enumerate(zip(chosen, after.why_not, strict=True)):
        text = f"layers.{i}: the router stays as the model computes it: .*{UNFIT[router]}.*"
        assert re.fullmatch(text, reason), reason
    x = torch.randn(4, 9, H)
    same(computed(after, module, x), expected(module, x))


class Plain:
    """A spec, written as plain torch operations."""

    def __init__(self, spec: RouteSpec, biased: bool) -> None:
        self.spec, self.biased = spec, biased

    def __call__(self, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = self.spec
        kinds = {"softmax_pre": lambda z: z.softmax(-1), "softmax_post": lambda z: z, "sigmoid": torch.sigmoid}
        scores = kinds.get(s.score, lambda z: F.softplus(z).sqrt())(z)
        by = scores + b if self.biased else scores
        if s.groups > 1:
            grouped = by.unflatten(-1, (s.groups, -1))
            best = {"max": 1, "top2": 2, "topk": s.top_k // s.kept_groups}[s.group_score]
            kept = grouped.topk(best).values.sum(-1).topk(s.kept_groups).indices
            mask = F.one_hot(kept, s.groups).sum(-2).bool()
            by = torch.where(mask.unsqueeze(-1), grouped, float("-inf")).flatten(-2)
        ids = by.topk(s.top_k).indices
        w = scores.gather(-1, ids)
        if s.score == "softmax_post":
            w = w.softmax(-1)
        if s.normalize and s.top_k > 1:
            w = w / (w.sum(-1, keepdim=True) + 1e-20)
        return w * s.scaling, ids


@st.composite
def meant(draw) -> tuple[RouteSpec, bool]:
    """A spec and whether it is biased."""
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    while True:
        fields = {
            "num_experts": groups * draw(st.integers(2, 5)), "top_k": draw(st.integers(1, 6)),
            "score": draw(st.sampled_from(SCORES)), "normalize": draw(st.booleans()),
            "scaling": draw(st.sampled_from([1.0, 2.5, 1 / 3])), "groups": groups,
            "kept_groups": draw(st.integers(1, groups)), "group_score": draw(st.sampled_from(GROUP_SCORES)),
        }  # fmt: skip
        try:
            return RouteSpec(**fields), draw(st.booleans())
        except MoecError:
            continue


def recovers(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(st.lists(meant(), min_size=6, max_size=6), st.integers(0, 2**16))
    def run(all_meant, seed) -> None:
        torch.manual_seed(seed)
        module = Stack(*(Routed(Plain(s, biased), experts=s.num_experts) for s, biased in all_meant))
        after = routed(program(module))
        assert len(specs(after)) == len(all_meant), (after.why_not, all_meant)
        x = torch.randn(4, 9, H)
        same(computed(after, module, x), expected(module, x))

    run()


def test_every_spec_is_recovered() -> None:
    recovers(2)


@pytest.mark.nightly
def test_every_spec_is_recovered_at_length() -> None:
    recovers(60)


# -- the fit


def test_a_wrong_fit_is_refused_by_the_comparison() -> None:
    """Each field of the right spec, and the bias, matters to what is compared."""
    chosen = [routers.grouped_top2, routers.biased, routers.topk_softmax]
    for region, router in zip(regions(program(Stack(*map(Routed, chosen)))), chosen, strict=True):
        found, seen = fit(region), observe(region)
        right = found.spec
        assert all(compare(right, found.bias, s).fits for s in seen)
        wrong = [(replace(right, scaling=right.scaling * (1 + 1e-9)), found.bias)]
        wrong += [(replace(right, score=s), found.bias) for s in SCORES if s != right.score]
        if right.score == "sigmoid":
            wrong += [(replace(right, normalize=not right.normalize), found.bias), (right, None)]
        if right.groups > 1:
            other = [{"group_score": "max"}, {"groups": 2, "kept_groups": 1}, {"groups": 1, "kept_groups": 1}]
            wrong += [(replace(right, **fields), found.bias) for fields in other]
        for bad, bias in wrong:
            worst = max(compare(bad, bias, s) for s in seen)
            assert not worst.fits, (router.__name__, bad.text(), bias, worst)


def test_one_number_changed_in_the_nodes_is_another_router() -> None:
    """Damage in the region: the fit follows it, or refuses."""
    before = program(Routed(routers.grouped_top2))
    found: list[str] = []
    for op, change in {
        "aten.topk": lambda n: n.update_arg(1, n.args[1] - 1),
        "aten.masked_fill": lambda n: n.update_arg(2, 0.0),
        "aten.sigmoid": lambda n: setattr(n, "target", torch.ops.aten.tanh.default),
        "aten.add": lambda n: setattr(n, "target", torch.ops.aten.sub.Tensor),
    }.items():
        damaged = before.fork()
        for a, b in zip(before.graph.nodes, damaged.graph.nodes, strict=True):
            b.meta = dict(a.meta)
        change(next(n for n in damaged.graph.nodes if n.op == "call_function" and op_name(n) == op))
        after = routed_unverified(damaged)
        found.append(specs(after)[0] if specs(after) else after.why_not[0])
    right = specs(routed(before))[0]
    assert right not in found
    assert json.loads(found[0]) == {k: v for k, v in FIT[routers.grouped_top2].items() if k != "group_score"}
    assert all("the router stays" in f for f in found[1:])


def routed_unverified(before: Program) -> Program:
    return raise_router.raise_router.run(before, Plan().resolve(1))


def test_equal_routers_are_fitted_once(monkeypatch) -> None:
    fitted: list[Region] = []
    monkeypatch.setattr(raise_router, "fit", lambda region: fitted.append(region) or fit(region))
    blocks = [Routed(routers.grouped_max) for _ in range(4)]
    after = routed(program(Stack(*blocks, Routed(routers.switch))))
    assert len(specs(after)) == 5 and len(fitted) == 2


def test_many_experts() -> None:
    """DeepSeek-V3's 256 experts in 8 groups."""
    plain = Plain(RouteSpec(256, 8, "sigmoid", True, 2.5, 8, 4, "top2"), True)
    (region,) = regions(program(Routed(plain, experts=256)))
    assert fit(region).spec == plain.spec


# -- what is around a router


class Watched(nn.Module):
    """Ids, weights and logits are used outside of the block too: outputs, and an auxiliary loss of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Routed(routers.normalized)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, H)
        z = self.block.gate(flat)
        w, ids = routers.normalized(z, None)
        rows, counts, row_of = torch.ops.moec.permute(flat, ids, E)
        rows = torch.ops.moec.grouped_mm(rows, self.block.experts.view(-1, H, H), counts)
        y = torch.ops.moec.unpermute(rows, w, row_of)
        share = F.one_hot(ids, E).double().mean((0, 1))
        loss = E * (share * z.softmax(-1).mean(0)).sum()
        return y.reshape(x.shape), loss, z, ids


def test_what_others_use_stays_exact() -> None:
    torch.manual_seed(0)
    module = Watched()
    after = routed(program(module))
    assert specs(after) == [json.dumps(spec(normalize=True))]
    assert after.op_counts()["aten.topk"] == 1
    x = torch.randn(4, 9, H)
    same(computed(after, module, x), expected(module, x))


class Pairs(nn.Module):
    """Every pair is a row of its own, and what a row becomes depends on which of its token's choices it is."""

    def __init__(self, sort: bool) -> None:
        super().__init__()
        self.block, self.sort = Routed(routers.softmax_topk), sort
        self.places = nn.Parameter(torch.randn(K))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        w, ids = self.block.gate(flat).softmax(-1).topk(K, sorted=self.sort)
        rows, counts, row_of = torch.ops.moec.permute(flat.repeat_interleave(K, 0), ids.reshape(-1, 1), E)
        rows = torch.ops.moec.grouped_mm(rows, self.block.experts.view(-1, H, H), counts)
        y = torch.ops.moec.unpermute(rows, w.reshape(-1, 1), row_of)
        return (y.view(-1, K, H) * self.places[:, None]).sum(1).reshape(x.shape)


def test_pairs_keep_their_order() -> None:
    torch.manual_seed(0)
    module, x = Pairs(sort=True), torch.randn(4, 9, H)
    after = routed(program(module))
    assert specs(after) == [json.dumps(spec())]
    same(computed(after, module, x), expected(module, x))
    after = routed(program(Pairs(sort=False)))
    assert not specs(after) and "in another order" in after.why_not[0]


class Half(Routed):
    """The model's dtype is bfloat16; scores are float32."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, H)
        w, ids = F.softmax(self.gate(flat), -1, dtype=torch.float32).topk(K)
        rows, counts, row_of = torch.ops.moec.permute(flat, ids, E)
        rows = torch.ops.moec.grouped_mm(rows, self.experts.view(-1, H, H), counts)
        return torch.ops.moec.unpermute(rows, w.to(x.dtype), row_of).reshape(x.shape)


def test_weights_keep_the_dtype_of_the_model() -> None:
    after = routed(program(Half(None).bfloat16(), torch.bfloat16))
    (unpermute,) = after.graph.find_nodes(op="call_function", target=torch.ops.moec.unpermute.default)
    weights = unpermute.args[1]
    assert op_name(weights) == "aten._to_copy" and weights.meta["val"].dtype == torch.bfloat16
    assert weights.args[0].args[0].target is ROUTE and weights.args[0].meta["val"].dtype == torch.float32


class Crowded(DenseEinsum):
    """No spec: what scores less than half of a token's best is left out."""

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = self.gate(flat).softmax(-1).topk(self.k)
        return w * (w > 0.5 * w[:, :1]), ids


@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2), pytest.param(Plan(tp=2, ep=2), marks=pytest.mark.nightly)])
def test_unfit_routers_are_exact_under_expert_parallelism(plan) -> None:
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(2)
    inputs = {n: torch.randint(0, 20, (6, 4), generator=g) for n in ("ids", "labels")}
    model, declined = Model(Crowded(), IndexCopy()), []
    report = moec.check(model, plan, example_kwargs=inputs, world_size=2)
    assert report.ok, str(report)
    compiled = compile_program(model, replace(plan, fuse=False), 2, (), inputs, training=True)
    declined = [w for w in compiled.why_not if "router" in w]
    assert len(specs(compiled)) == 1
    assert len(declined) == 1 and declined[0].startswith("layers.0: the router stays as the model computes it: ")


# -- Hugging Face's

SIGMOID = {"score": "sigmoid", "normalize": True}
HF: dict[str, tuple[dict, dict]] = {
    "mixtral": ({}, {"top_k": 2, "normalize": True}),
    "qwen2_moe": ({"mlp_only_layers": []}, {"top_k": 4}),
    "qwen3_moe": ({"norm_topk_prob": True}, {"top_k": 4, "normalize": True}),
    "olmoe": ({}, {"top_k": 4}),
    "deepseek_v2": (
        {
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
            "routed_scaling_factor": 16.0,
        },
        {"top_k": 3, "scaling": 16.0, "groups": 4, "kept_groups": 2},
    ),
    "deepseek_v3": ({}, {"top_k": 4, **SIGMOID, "scaling": 2.5, "groups": 4, "kept_groups": 2, "group_score": "top2"}),
    "gpt_oss": ({}, {"top_k": 4, "score": "softmax_post"}),
    "glm4_moe": ({"routed_scaling_factor": 1.5}, {"top_k": 4, **SIGMOID, "scaling": 1.5}),
    "qwen3_next": ({}, {"top_k": 4, "normalize": True}),
    "qwen3_vl_moe": ({}, {"top_k": 4, "normalize": True}),
}
"""Family -> fields of its config, and the spec of its routers beside 8 experts."""


class Blocks(nn.Module):
    """The MoE blocks of several families, one after another."""

    def __init__(self, families) -> None:
        super().__init__()
        models = [hf.build(f, 2, **TINY, **(FAMILIES[f] | HF[f][0])) for f in families]
        self.layers = nn.ModuleList(_last_block(m) for m in models)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + F.rms_norm(y[0] if isinstance(y, tuple) else y, x.shape[-1:])
        return x


def _last_block(model: nn.Module) -> nn.Module:
    return next(m for n, m in reversed([*model.named_modules()]) if n.endswith("layers.1.mlp"))


@pytest.mark.parametrize("families", grouped(HF, 5))
def test_the_router_of_a_family(families) -> None:
    captured = capture(Blocks(families), (torch.randn(2, 5, TINY["hidden_size"]),), {}, training=True)
    after = manager.run(captured, Plan().resolve(1), (normalize, raise_moe, raise_router.raise_router))
    assert not after.why_not
    assert [json.loads(s) for s in specs(after)] == [{"num_experts": 8} | HF[f][1] for f in families]
    biased = [r.args[1] is not None for r in after.graph.find_nodes(op="call_function", target=ROUTE)]
    assert biased == [f in ("deepseek_v3", "glm4_moe") for f in families]
    assert not ROUTER_OPS & set(after.op_counts())
