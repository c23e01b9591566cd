"""Plan(precision=Precision(compute="bf16")): what is computed in which dtype, what travels, what rounding costs.

In float64 a cast does nothing, so what the pass does to the graph is exact there; in its own dtypes the program stays
within stated bounds of the model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from spmd import Batch, Shape, build, captured, compile_stages, off, oracle
from torch import fx, nn

import moec
from moec import shards, simulate
from moec.check import BF16
from moec.overlap import Overlap
from moec.passes.cast_bf16 import cast_bf16
from moec.passes.dtype_rules import class_of
from moec.passes.step import make_step
from moec.plan import Plan
from moec.precision import Precision
from moec.program import Program, op_name
from moec.runtime.collectives import collective
from moec.runtime.world import LockstepWorld

LOW, HIGH = torch.bfloat16, torch.float32
SHAPE = Shape(biased=True)
BF16_COMPUTE = Precision(compute="bf16")
PLANS = {
    "one rank": Plan(dp=1),
    "tp, ep, sequence parallel": Plan(dp=2, tp=2, ep=2, sequence_parallel=True),
    "fsdp, ep": Plan(dp=4, ep=2, fsdp=True),
    "hsdp, etp": Plan(dp=4, tp=2, etp=2, fsdp=2),
}


@cache
def stages(name: str, precision: Precision | None = BF16_COMPUTE) -> dict[str, Program]:
    plan = PLANS[name]
    return dict(compile_stages(captured(SHAPE), Plan(**{**plan.to_dict(), "precision": precision})))


def truth(name: str, seed: int = 1):
    dp = PLANS[name].dp
    return oracle(build(SHAPE, seed, 2.0), Batch(dp, 4, seed, dp, frozenset(range(dp - 1))))


def by_where(program: Program, op: str, where: str) -> list[fx.Node]:
    return [n for n in program.graph.nodes if op_name(n) == op and where in n.meta.get("where", "")]


def dtypes_of(nodes) -> set[torch.dtype]:
    return {n.meta["val"].dtype for n in nodes}


@pytest.mark.parametrize("name", PLANS)
def test_exact_in_float64_and_near_in_bf16(name):
    found, want = stages(name), truth(name)
    for stage in ("cast_bf16", list(found)[-1]):
        assert off(want.compare(stage, found[stage])) <= 1e-12, stage
    rounding = want.rounding(found["lower"])
    assert rounding.ok, rounding
    # A program that rounds nothing would be nearer than 2^-8 / 100.
    assert rounding.gradients > 1e-4, "nothing was rounded"
    assert rounding.bounds == BF16


# ------------------------------------------------------------------------------------------------ what computes in what


def test_products_are_narrow_and_what_loses_by_it_is_not():
    program = stages("tp, ep, sequence parallel")["cast_bf16"]
    assert dtypes_of(by_where(program, "aten.linear", "attention")) == {LOW}
    assert dtypes_of(by_where(program, "aten.linear", "head")) == {LOW}
    assert dtypes_of(by_where(program, "aten.linear", "shared_")) == {LOW}
    assert dtypes_of(by_where(program, "moec.grouped_mm", "")) == {LOW}
    assert dtypes_of(by_where(program, "aten.scaled_dot_product_attention", "")) == {LOW}
    assert dtypes_of(by_where(program, "aten.embedding", "embed")) == {LOW}
    assert dtypes_of(by_where(program, "aten.linear", "router")) == {HIGH}
    for op in ("aten.pow", "aten.mean", "aten.rsqrt", "aten.cross_entropy_loss"):
        nodes = by_where(program, op, "")
        assert nodes, op
        assert dtypes_of(nodes) == {HIGH}, op
        assert all(op_dtype(n.args[0]) == HIGH for n in nodes), op
    route = by_where(program, "moec.route", "")[0]
    assert {v.dtype for v in route.meta["val"]} == {HIGH, torch.int64}
    for unpermute in by_where(program, "moec.unpermute", ""):  # which adds in fp32 whatever its rows are
        rows, weights = unpermute.args[:2]
        assert (op_dtype(rows), op_dtype(weights)) == (LOW, HIGH)
    assert program.graph.output_node().args[0][0].meta["val"].dtype == HIGH  # the loss
    assert {s.dtype for s in program.params.values()} == {HIGH}


def op_dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


def test_every_node_has_a_class_and_reads_what_the_class_asks_for():
    """The final word on operands: no product reads fp32, no statistic bf16, whatever led there."""
    for name in PLANS:
        program = stages(name)["cast_bf16"]
        for node in program.graph.nodes:
            kind, reason = class_of(node) if node.op == "call_function" else ("", "")
            floats = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
            floats = [n for n in floats if op_dtype(n).is_floating_point]
            if node.meta.get("precision") in ("a router", "a recurrence"):
                kind = "high"
            if kind in ("low", "high"):
                assert {op_dtype(n) for n in floats} <= {LOW if kind == "low" else HIGH}, (node.format_node(), reason)


def test_experts_are_fused_and_the_loss_reads_narrow_logits():
    program = stages("tp, ep, sequence parallel")["lower"]
    experts = [n for n in program.graph.nodes if op_name(n).startswith("moec.experts")]
    assert experts
    assert op_dtype(experts[0].args[0]) == LOW
    (loss,) = [n for n in program.graph.nodes if op_name(n) == "moec.cross_entropy"]
    assert op_dtype(loss.args[0]) == LOW


class Normed(nn.Module):
    """Norms that export leaves as one op each, between products: nothing else near them is wide."""

    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.second = nn.LayerNorm(8), nn.RMSNorm(8)

    def forward(self, x):
        y = self.linear(x)
        return (self.last(self.first(y) + self.second(y)) ** 2).mean()


def test_a_norm_in_one_op_is_wide():
    plan = Plan(precision=BF16_COMPUTE)
    program = moec.compile_program(Normed(), plan, 1, (torch.randn(4, 8),), {}, training=True)
    (linear,) = by_where(program, "aten.linear", "linear")
    assert op_dtype(linear) == LOW
    for op in ("aten.layer_norm", "aten.rms_norm"):
        (norm,) = by_where(program, op, "")
        floats = [n for n in norm.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        assert dtypes_of([norm, *floats]) == {HIGH}, op


def test_a_bf16_model_is_left_as_it_is():
    program = captured(SHAPE).fork()
    program.params = {k: s for k, s in program.params.items() if s.buffer}
    before = program.render()
    after = cast_bf16.run(program, Plan(precision=Precision(compute="bf16")))
    assert after.render() == before
    assert any("no fp32 parameters" in w for w in after.why_not)


# ---------------------------------------------------------------------------------------------------- what travels


def test_activations_and_gathered_parameters_travel_in_half_the_bytes():
    for name in ("tp, ep, sequence parallel", "fsdp, ep"):
        wide, narrow = (moec.explain(stages(name, p)["lower"]) for p in (None, BF16_COMPUTE))
        for kind in ("s_to_r", "p_to_s", "all_to_all"):
            moved = [
                sum(c.bytes for c in e.collectives if (c.kind, c.phase, c.traffic) == (kind, "forward", "activation"))
                for e in (wide, narrow)
            ]
            assert moved[1] * 2 == moved[0], (name, kind)
    gathered = [
        sum(c.bytes for c in e.collectives if c.phase == "forward" and c.traffic == "parameter") for e in (wide, narrow)
    ]
    vectors = sum(s.shape[0] for s in stages(name)["lower"].params.values() if len(s.shape) == 1) * 4
    routers = [s.shape for s in stages(name)["lower"].params.values() if "router.weight" in s.name]
    assert gathered[1] <= (gathered[0] + vectors + sum(4 * a * b for a, b in routers)) / 2
    reduced = [
        sum(c.bytes for c in e.collectives if c.phase == "backward" and c.kind == "p_to_s" and c.traffic == "parameter")
        for e in (wide, narrow)
    ]
    assert reduced[0] == reduced[1]  # gradients are as wide as ever


class Dtypes(LockstepWorld):
    """Notes the dtype of what parameters' gradients are when they are summed over ranks."""

    def __init__(self, mesh) -> None:
        super().__init__(mesh)
        self.seen: list[tuple[str, str, torch.dtype]] = []

    def _across(self, entry, key, node, xs, run, phase="forward", rows=None):
        self.seen.append((entry.kind, phase, xs[0].dtype))
        return super()._across(entry, key, node, xs, run, phase, rows)


def values(name: str, program: Program) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters in their own dtypes, and inputs."""
    want = truth(name)
    params = {ph: want._full(s).to(s.dtype) for ph, s in program.params.items()}
    inputs = dict(zip(("0", "1"), want.args, strict=True))
    return params, {ph: inputs[s.path] for ph, s in program.inputs.items()}


def test_gradients_are_wide_before_they_are_summed():
    program = stages("fsdp, ep")["lower"]
    world = Dtypes(program.mesh)
    result = simulate.run(program, *values("fsdp, ep", program), {"loss": torch.ones(())}, world)
    low = [n for n in program.graph.nodes if n.op == "call_function" and (c := collective(n.target)) is not None
           and c.kind == "s_to_r_low"]  # fmt: skip
    assert low
    assert [d for kind, phase, d in world.seen if (kind, phase) == ("s_to_r_low", "forward")] == [LOW] * len(low)
    assert {d for kind, phase, d in world.seen if (kind, phase) == ("p_to_s", "backward")} == {HIGH}
    assert {g.dtype for g in result.grads.values() if g is not None} == {HIGH}


def test_scheduled_graphs_gather_narrow_copies_again():
    """Forward and backward as graphs (``Plan.overlap``) give the gradients of the recorded ones."""
    program = stages("fsdp, ep")["lower"]
    mesh, ranks = program.mesh, range(program.mesh.world)
    params, inputs = values("fsdp, ep", program)
    recorded = simulate.run(program, params, inputs, {"loss": torch.ones(())}).grads
    rows = inputs[next(iter(inputs))].shape[0] // mesh.size(mesh.role("dp"))
    shapes = {path: (rows, *x.shape[1:]) for path, x in inputs.items()}
    step = make_step(program, replace(PLANS["fsdp, ep"], overlap=Overlap(schedule=False, bucket_mb=None)), shapes)
    backward = step.backward(frozenset({0}))
    again = [n for n in backward.graph.nodes if op_name(n) == "moec.s_to_r"]
    assert any(op_dtype(n) == LOW for n in again)
    assert not any(op_name(n) == "moec.s_to_r_low" for n in backward.graph.nodes)

    world, locals_ = LockstepWorld(mesh), [simulate._rank_values(program, params, inputs, mesh, r) for r in ranks]
    order = [n.name for n in step.forward.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        results = world.run(step.forward, [[v[name] for name in order] for v in locals_])
        found = [dict(zip(step.saved, r[step.num_outputs :], strict=True), tangent_0=torch.ones(())) for r in results]
        order = [n.name for n in backward.graph.find_nodes(op="placeholder")]
        grads = world.run(backward, [[v[name] for name in order] for v in found])
    for i, name in enumerate(step.params):
        spec = program.params[name]
        parts = [shards.trim(grads[r][i], spec.shape, spec.types, mesh, r) for r in ranks]
        whole = simulate._assemble(parts, spec.types, mesh)[0]
        assert whole.dtype == HIGH
        assert (whole - recorded[name]).norm() <= 1e-2 * recorded[name].norm(), spec.name


# -------------------------------------------------------------------------------------------------------- explain


def test_explain_says_what_computes_in_what():
    explained = moec.explain(stages("fsdp, ep")["lower"])
    data, text = explained.to_dict(), str(explained)
    assert {"where", "op", "dtype", "why", "count"} == set(data["dtypes"][0])
    assert any(d["op"] == "aten.linear" and d["dtype"] == "float32" and d["why"] == "a router" for d in data["dtypes"])
    assert any(d["op"] == "moec.grouped_mm" and d["dtype"] == "bfloat16" for d in data["dtypes"])
    assert "layers.*.norm1" in text
    assert "a statistic" in text
    assert "dtypes" not in str(moec.explain(stages("fsdp, ep", None)["lower"]))


FAMILIES = {
    "deepseek_v3": Plan(dp=2, tp=2, ep=4, fsdp=True),
    "gpt_oss": Plan(dp=2, tp=2, ep=4, sequence_parallel=True),
    "qwen3_next": Plan(dp=2, ep=2),
    "mixtral": Plan(dp=4, ep=4, dispatch="dedup"),
}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    from moec.hf import build as build_hf

    torch.manual_seed(0)
    plan = Plan(**{**FAMILIES[family].to_dict(), "precision": Precision(compute="bf16")})
    report = moec.check(build_hf(family, 2), plan, world_size=plan.dp * plan.tp)
    assert report.ok, str(report)
    assert report.rounding is not None
