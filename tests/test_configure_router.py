"""Plan.router: losses written out by hand in eager mode are the oracle, on one rank and on eight.

Legend: B batch, S sequence, T = B*S tokens, H hidden, V vocabulary, E experts, K choices per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from witness import witness

import moec
from moec.capture import capture
from moec.check import _drawn, _Oracle
from moec.passes import manager
from moec.passes.configure_router import configure_router
from moec.passes.lower import lower
from moec.passes.normalize import normalize
from moec.passes.redundant import redundant
from moec.passes.shard import shard
from moec.passes.statistics import statistics
from moec.program import MoEBlock, ParamSpec, Program, op_name
from moec.router import Router
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec

E, K, H, V = 6, 2, 8, 12
TOLERANCE = 1e-12
PASSES = (normalize, configure_router, statistics, shard, redundant, lower)
EIGHT = moec.Plan(dp=8)
PLANS = {
    "dp8": EIGHT,
    "dp2-tp2": moec.Plan(dp=2, tp=2),
    "dp2-cp2": moec.Plan(dp=2, cp=2),
    "dp2-tp2-sp": moec.Plan(dp=2, tp=2, sequence_parallel=True),
}


class Plain(nn.Module):
    """A router and experts that are one vector each, in a small language model; what ``raise_router`` makes of one."""

    def __init__(self, spec: RouteSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(V, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.gate = nn.Linear(H, E)
        self.experts = nn.Parameter(torch.randn(E, H))

    def forward(self, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x_BSH = self.embed(ids) * attention_mask[..., None].to(self.embed.weight.dtype)
        x_TH = (x_BSH + self.down(F.gelu(self.up(x_BSH)))).reshape(-1, H)
        z_TE = self.gate(x_TH)
        w_TK, ids_TK = self.route(z_TE, attention_mask)
        hot_TKE = F.one_hot(ids_TK.clamp(min=0), E).to(x_TH.dtype)
        y_TH = torch.einsum("tk,tke,eh->th", w_TK.to(x_TH.dtype), hot_TKE, self.experts)
        logits_TV = (x_TH + y_TH) @ self.embed.weight.t()
        return F.cross_entropy(logits_TV, labels.reshape(-1), ignore_index=-100) + self.more(z_TE, attention_mask)

    def route(self, z_TE: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.moec.route(z_TE, None, None, None, self.spec.text())

    def more(self, z_TE: Tensor, mask_BS: Tensor) -> Tensor | float:
        return 0.0


class ByHand(Plain):
    """The same with what a plan asks for: its value is not seen, its gradient is."""

    def __init__(self, spec: RouteSpec, router: Router, buffers: Mapping[str, Tensor]) -> None:
        super().__init__(spec)
        self.router, self.made = router, buffers

    def route(self, z_TE: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        B, S = mask_BS.shape
        token = torch.arange(B * S)
        return torch.ops.moec.route(
            z_TE, self.made.get("expert_bias"), mask_BS.reshape(-1).bool(), token, self.spec.text()
        )

    def value(self, z_TE: Tensor, mask_BS: Tensor) -> Tensor:
        total, valid = z_TE.sum() * 0, mask_BS.reshape(-1).bool()
        if "z" in self.router.losses:
            total = total + self.router.losses["z"] * (z_TE[valid].exp().sum(1).log() ** 2).mean()
        p_TE = z_TE.softmax(1) if self.spec.score.startswith("softmax") else z_TE.sigmoid()
        p_TE = p_TE / p_TE.sum(1, keepdim=True)
        c_TE = F.one_hot(p_TE.topk(K).indices, E).sum(1).double()
        if "micro_batch" in self.router.losses:
            total = total + self.router.losses["micro_batch"] * balance(p_TE[valid], c_TE[valid].sum(0))
        if "global" in self.router.losses:
            since = self.made["aux_counts"].double()
            mean = (since[:E] + c_TE[valid].sum(0)) / (since[E] + 1)
            total = total + self.router.losses["global"] * balance(p_TE[valid], mean)
        if "sequence" in self.router.losses:
            rows = [valid & (torch.arange(len(valid)) // mask_BS.shape[1] == b) for b in range(len(mask_BS))]
            each = [balance(p_TE[r], c_TE[r].sum(0)) for r in rows if r.any()]
            total = total + self.router.losses["sequence"] * torch.stack(each).mean()
        return total

    def more(self, z_TE: Tensor, mask_BS: Tensor) -> Tensor | float:
        total = self.value(z_TE, mask_BS)
        return total - total.detach()


def logits(source: Plain, inputs: dict[str, Tensor]) -> Tensor:
    found: list[Tensor] = []
    hook = source.gate.register_forward_hook(lambda module, x, y: found.append(y.detach()))
    source(**inputs)
    hook.remove()
    return found[0]


def balance(p_TE: Tensor, c_E: Tensor) -> Tensor:
    """E / (K · T · T') Σ c p, T' the tokens that were counted."""
    return E / (K * len(p_TE) * (c_E.sum() / K)) * (c_E * p_TE.sum(0)).sum()


def batch(B: int = 8, S: int = 6) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, V, (B, S), generator=gen) for _ in range(2))
    mask = (torch.rand(B, S, generator=gen) < 0.7).long()
    mask[0] = 0  # a sequence of nothing
    return {"ids": ids, "attention_mask": mask, "labels": labels}


def model(spec: RouteSpec) -> Plain:
    torch.manual_seed(0)
    out = Plain(spec)
    with torch.no_grad():
        out.gate.bias[0] += 1.0
    return out


def by_hand(spec: RouteSpec, router: Router) -> ByHand:
    shapes = {"expert_bias": ((E,), torch.float32), "aux_counts": ((E + 1,), torch.int64)}
    made = {n: _drawn(ParamSpec("", n, *how, False, buffer=True, initial=0.0)) for n, how in shapes.items()}
    if router.expert_bias is None:
        del made["expert_bias"]
    torch.manual_seed(0)
    out = ByHand(spec, router, made)
    out.load_state_dict(model(spec).state_dict())
    return out


@cache
def captured(spec: RouteSpec, training: bool = True) -> Program:
    program = capture(model(spec).train(training), (), batch(), training=training)
    program.facts |= {"raised", "routed"}
    return program


def stages(program: Program, plan: moec.Plan) -> dict[str, Program]:
    world = plan.dp * plan.cp * plan.tp
    found: dict[str, Program] = {}
    program = replace(program.fork(), mesh=plan.mesh(world))
    manager.run(program, plan.resolve(world), PASSES, observe=found.__setitem__)
    return found


def prove(spec: RouteSpec, router: Router, plan: moec.Plan, meant: RouteSpec | None = None) -> None:
    """``meant``: the spec that the hand-written router has, where the plan changes it."""
    found = stages(captured(spec), replace(plan, router=router))
    truth = _Oracle(by_hand(meant or spec, router), (), batch(), None)
    for after in ("configure_router", "statistics", "shard", "lower"):
        report = truth.compare(after, found[after])
        assert report.worst()[1] <= TOLERANCE, f"after {after}: {report.worst()}"
    if router.losses:
        reported = truth._run(found["lower"]).statistics
        got = sum(float(x) for name, x in reported.items() if name.partition(":")[2] in router.losses)
        want = float(truth.module.value(logits(truth.module, batch()), batch()["attention_mask"]))
        assert abs(got - want) <= TOLERANCE * want
    if not plan.sequence_parallel and plan.cp == 1:  # the library has no packed shards
        witness(found["shard"])


SOFTMAX, SIGMOID = RouteSpec(E, K), RouteSpec(E, K, "sigmoid", normalize=True)
ALL = Router(aux_loss={"micro_batch": 0.1, "sequence": 0.2, "global": 0.3}, z_loss=0.01, expert_bias=1e-3)


def by_day(names, *today):
    return [n if n in today else pytest.param(n, marks=pytest.mark.nightly) for n in names]


@pytest.mark.parametrize("plan", by_day(PLANS, "dp8", "dp2-tp2-sp"))
@pytest.mark.parametrize("spec", by_day([SIGMOID, SOFTMAX], SIGMOID), ids=["sigmoid", "softmax"])
def test_losses_and_bias(plan, spec):
    prove(spec, ALL, PLANS[plan])


OVERRIDES = {
    "bias": (Router(expert_bias=1e-3), SIGMOID),
    "capacity": (Router(capacity_factor=0.7, drop="position", min_capacity=2),
                 replace(SIGMOID, capacity_factor=0.7, drop="position", min_capacity=2)),
    "dp_shard": (Router(capacity_factor=0.7, level="dp_shard"),
                 replace(SIGMOID, capacity_factor=0.7, level="dp_shard", shards=2)),
    "random": (Router(force_balance="random", seed=3), replace(SIGMOID, force="random", seed=3)),
    "round_robin": (Router(force_balance="round_robin"), replace(SIGMOID, force="round_robin")),
    "dtype": (Router(dtype="float64", z_loss=0.1), SIGMOID),
}  # fmt: skip


@pytest.mark.parametrize("what", by_day(OVERRIDES, "dp_shard", "random"))
def test_overrides(what):
    router, meant = OVERRIDES[what]
    prove(SIGMOID, router, PLANS["dp2-tp2-sp" if what == "random" else "dp2-tp2"], meant)


def test_nothing_but_padding_is_excluded_by_default():
    prove(SOFTMAX, Router(aux_loss=0.5), moec.Plan(dp=1))


def gradients(program: Program, source: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of one forward and backward on one rank, in float64."""
    return _Oracle(source, (), inputs, None)._run(program).grads


@pytest.mark.parametrize(
    ("router", "invariant"),
    [(Router(aux_loss={"sequence": 0.5}, z_loss=0.1), True), (Router(aux_loss=0.5), False)],
    ids=["sequence and z", "micro_batch"],
)
def test_four_micro_batches(router, invariant):
    """Without padding, the mean over them is the batch for losses that are means of tokens or sequences."""
    inputs = {k: torch.ones_like(v) if k == "attention_mask" else v for k, v in batch().items()}
    source = model(SOFTMAX)
    program = stages(captured(SOFTMAX), moec.Plan(dp=1, router=router))["configure_router"]
    whole = gradients(program, source, inputs)
    parts = [gradients(program, source, {k: v[2 * i : 2 * i + 2] for k, v in inputs.items()}) for i in range(4)]
    off = max(
        float((g - sum(p[n] for p in parts) / 4).norm() / g.norm()) for n, g in whole.items() if g is not None
    )
    assert (off < TOLERANCE) == invariant and (off > 1e-4) != invariant, off


def test_uniform_routing_costs_the_coefficient():
    source = model(SOFTMAX)
    with torch.no_grad():
        source.gate.weight.zero_()
        source.gate.bias.zero_()
    router = Router(aux_loss={"micro_batch": 0.1, "sequence": 0.2, "global": 0.3})
    program = stages(captured(SOFTMAX), moec.Plan(dp=1, router=router))["configure_router"]
    found = _Oracle(source, (), batch(), None)._run(program).statistics
    assert {k: round(float(found[f":{k}"]), 12) for k in ("micro_batch", "sequence", "global")} == router.aux_loss


def test_evaluation_has_no_losses_and_the_same_buffers():
    train, evaluate = (stages(captured(SIGMOID, t), moec.Plan(dp=1, router=ALL))["lower"] for t in (True, False))
    assert {s.name for s in train.params.values()} == {s.name for s in evaluate.params.values()}
    ops = {op_name(n) for n in evaluate.graph.nodes}
    assert "moec.route" in ops and not ops & {"moec.balance", "moec.inject"}
    assert {k for k in train.statistics if "tally" not in k} == {f":{k}" for k in (*ALL.losses, "aux_counts")}


def test_buffers_of_the_module_keep_their_dtype():
    source, program = model(SIGMOID), stages(captured(SIGMOID), moec.Plan(dp=1, router=ALL))["lower"]
    built = moec.ParallelModule(source, program, None, lambda *_: program, (), batch())
    built.expert_bias.copy_(torch.arange(E) + 1e-3)
    built.to(torch.bfloat16)
    assert built.gate.weight.dtype == torch.bfloat16
    assert built.expert_bias.dtype == torch.float32 and built.aux_counts.dtype == torch.int64
    assert torch.equal(built.expert_bias, torch.arange(E) + 1e-3)
    state = moec.full_state_dict(built)
    assert "expert_bias" in state and "aux_counts" not in state
    other = moec.ParallelModule(source, program, None, lambda *_: program, (), batch())
    moec.load_full_state_dict(other, state)
    assert torch.equal(other.expert_bias, built.expert_bias)
    del state["expert_bias"]  # a checkpoint of the user's own model
    moec.load_full_state_dict(other, state)
    meta = moec.ParallelModule(model(SIGMOID).to("meta"), program, None, lambda *_: program, (), batch())
    assert not meta.to_empty(device="cpu").expert_bias.any()


def test_global_counts_run_until_parameters_change():
    """Two forwards, then (an optimizer step) one of its own."""
    router = Router(aux_loss={"global": 0.5})
    source, program = model(SOFTMAX), stages(captured(SOFTMAX), moec.Plan(dp=1, router=router))["lower"]
    built = moec.ParallelModule(source, program, None, lambda *_: program, (), batch())
    first, second = ({k: v[i : i + 4] for k, v in batch().items()} for i in (0, 4))
    since, seen = torch.zeros(E + 1, dtype=torch.int64), []
    for inputs in (first, second, second):
        if len(seen) == 2:
            with torch.no_grad():
                next(built.parameters()).add_(0.0)
            since.zero_()
        built(**inputs)
        seen.append(float(built.accounts.last.sums[":global"]))
        by_self = ByHand(SOFTMAX, router, {"aux_counts": since.clone()})
        by_self.load_state_dict(source.state_dict())
        z_TE = logits(by_self, inputs)
        want = float(by_self.value(z_TE, inputs["attention_mask"]))
        assert abs(seen[-1] - want) < 1e-6 * want
        valid = inputs["attention_mask"].reshape(-1).bool()
        since[:E] += F.one_hot(z_TE.softmax(1).topk(K).indices, E).sum(1)[valid].sum(0)
        since[E] += 1
    assert abs(seen[1] - seen[2]) > 1e-4


def test_gradients_that_are_gone_begin_a_step():
    """Two micro-batches before a backward are one step; an optimizer that no parameter's version shows is seen by
    ``zero_grad``."""
    router = Router(aux_loss={"global": 0.5})
    source, program = model(SOFTMAX), stages(captured(SOFTMAX), moec.Plan(dp=1, router=router))["lower"]
    built = moec.ParallelModule(source, program, None, lambda *_: program, (), batch())
    losses = [built(**batch()) for _ in range(2)]
    assert built.accounts.step.forwards == 2
    for loss in losses:
        loss.backward()
    built(**batch())
    assert built.accounts.step.forwards == 3
    built.zero_grad()
    built(**batch())
    assert built.accounts.step.forwards == 1
    built(**batch())
    assert built.accounts.step.forwards == 2


# -- refusals


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"aux_loss": -0.1}, "aux_loss=-0.1 is not a positive number"),
        ({"aux_loss": {"batch": 0.1}}, "'batch' is none of micro_batch, sequence, global"),
        ({"aux_loss": {}}, "names no loss"),
        ({"aux_loss": {"global": "much"}}, "aux_loss global='much'"),
        ({"z_loss": float("nan")}, "z_loss=nan"),
        ({"expert_bias": True}, "expert_bias=True"),
        ({"capacity_factor": 0}, "capacity_factor=0"),
        ({"drop": "position"}, "drop='position' without a capacity_factor"),
        ({"capacity_factor": 1.0, "drop": "last"}, "drop='last' is none of"),
        ({"capacity_factor": 1.0, "min_capacity": -1}, "min_capacity=-1"),
        ({"level": "node", "capacity_factor": 1.0}, "level='node'"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' is none of"),
        ({"seed": 3}, "seed=3 is for force_balance='random'"),
        ({"force_balance": "even"}, "force_balance='even'"),
        ({"force_balance": "random", "aux_loss": 0.1}, "takes away the choice"),
        ({"force_balance": "round_robin", "expert_bias": 0.1}, "takes away the choice"),
        ({"padding": 1}, "padding=1 is not the path"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(fields, why):
    with pytest.raises(MoecError, match=why):
        Router(**fields)


def test_plan_and_yaml():
    plan = moec.Plan(dp=2, router=ALL)
    assert moec.Plan.from_yaml(plan.to_yaml()) == plan
    with pytest.raises(MoecError, match="unknown field 'auxloss'"):
        moec.Plan.from_yaml("router: {auxloss: 0.1}")
    with pytest.raises(MoecError, match=r"is not a moec\.Router"):
        moec.Plan(router=0.1).validate(1)
    with pytest.raises(MoecError, match="is for dropless routing"):
        moec.Plan(ep=2, dispatch="alltoall", router=Router(capacity_factor=1.0)).validate(2)


class Tokens(nn.Module):
    """A router on tokens [T, H], twice; no input says what a sequence is."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.gate, self.times = nn.Linear(H, E), times

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        total = other.sum() * 0.0
        for _ in range(self.times):
            weights, _ = torch.ops.moec.route(self.gate(x.tanh()), None, None, None, SIGMOID.text())
            total = total + weights.square().sum()
        return total


@pytest.mark.parametrize(
    ("router", "times", "why"),
    [
        (Router(aux_loss={"sequence": 0.1}), 1, "what a sequence is, is not known"),
        (Router(force_balance="random"), 1, "force_balance needs an input"),
        (Router(z_loss=0.1, padding="mask"), 1, "padding='mask' is not an input; inputs are"),
        (Router(z_loss=0.1, padding="other"), 1, "padding='other' has shape"),
        (Router(z_loss=0.1), 2, "its router runs twice"),
    ],
)
def test_what_the_model_lacks_is_said(router, times, why):
    inputs = {"x": torch.randn(7, H), "other": torch.randn(3, 4)}
    program = capture(Tokens(times), (), inputs, training=True)
    program.facts |= {"raised", "routed"}
    with pytest.raises(MoecError, match=why):
        stages(program, moec.Plan(dp=1, router=router))


def test_a_router_that_was_not_raised_is_refused_with_the_reason():
    program = captured(SIGMOID).fork()
    program.blocks = (MoEBlock("layers.0.mlp", E, K, ()),)
    program.why_not = ["layers.0.mlp: the router stays as the model computes it: it tosses coins", "layers.1: else"]
    with pytest.raises(MoecError, match=r"router of layers\.0\.mlp cannot be changed: .* it tosses coins") as e:
        manager.run(program, moec.Plan(dp=1, router=ALL), (normalize, configure_router))
    assert "layers.1" not in str(e.value)
