"""The sharding pass: how conversions are typed and joined, where the layout puts parameters, what it refuses."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from spmd import Batch, Model, Shape, build, captured, compile_stages, compiled, off, oracle
from test_rules import deal, gradient_types, meaning
from torch import fx, nn

from moec.capture import capture
from moec.check import check
from moec.passes.shard.convert import Converter, _steps
from moec.passes.shard.layout import infer
from moec.passes.shard.rule import Rule
from moec.passes.shard.solve import Operand, solve
from moec.passes.shard.views import view_factors
from moec.placement import I, P, R, S, Type
from moec.plan import Plan
from moec.program import op_name
from moec.runtime.collectives import collective, is_wait
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh
from moec.runtime.world import LockstepWorld

MESH = Mesh.of(dp=2, tp=2)
DP, TP = MESH.names
AXIS_TYPES = (I, R, P, S(0), S(1))


# -- conversions -----------------------------------------------------------------------------------------------------


def convert_graph(types, *targets, shape=(4, 8)) -> tuple[fx.GraphModule, list[fx.Node], Converter]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(shape), types=types, grad=True, where="some.module")
    converter = Converter(graph, MESH)
    outs = [converter(x, t) for t in targets]
    graph.output(tuple(outs))
    return fx.GraphModule(nn.Module(), graph), outs, converter


@pytest.mark.parametrize("source", list(itertools.product(AXIS_TYPES, repeat=2)), ids=lambda p: "-".join(map(str, p)))
def test_every_conversion_keeps_value_and_gradient(source) -> None:
    """From every pair of types on two axes to every other.  R -> I is none: who reads R owes a sum, and says so."""
    gen = torch.Generator().manual_seed(0)
    value = torch.randint(-9, 9, (4, 8), generator=gen).double()
    ct = torch.randint(-9, 9, (4, 8), generator=gen).double()
    types = dict(zip((DP, TP), source, strict=True))
    for pair in itertools.product(AXIS_TYPES, repeat=2):
        if (R, I) in zip(source, pair, strict=True):
            continue
        target = dict(zip((DP, TP), pair, strict=True))
        module, (out,), _ = convert_graph(types, target)
        assert out.meta["types"] == target and out.meta["where"] == "some.module"
        locals_ = [x.requires_grad_() for x in deal(value, types, gen)]
        got = [o[0] for o in LockstepWorld(MESH).run(module, [[x] for x in locals_])]
        assert torch.equal(meaning([g.detach() for g in got], target), value), (types, target)
        torch.autograd.backward([g * 1 for g in got], deal(ct, gradient_types(target), gen))
        assert torch.equal(meaning([x.grad for x in locals_], gradient_types(types)), ct), (types, target)


def test_conversions_are_made_once_and_joined() -> None:
    types, target = {DP: P, TP: P}, {DP: I, TP: I}
    module, outs, _ = convert_graph(types, target, target, {DP: I, TP: P})
    assert outs[0] is outs[1]
    reductions = [n for n in module.graph.nodes if n.op == "call_function" and collective(n.target)]
    assert [n.args[-2:] for n in reductions] == [(4, f"{DP},{TP}"), (2, DP)]
    assert all(is_wait(next(iter(n.users)).target) for n in reductions)


def test_a_later_conversion_starts_from_an_earlier_one() -> None:
    module, _, _ = convert_graph({DP: P, TP: S(0)}, {DP: I, TP: S(0)}, {DP: I, TP: I})
    kinds = [collective(n.target).kind for n in module.graph.nodes if n.op == "call_function" and collective(n.target)]
    assert kinds == ["p_to_i", "s_to_i"]


@pytest.mark.parametrize(
    ("types", "target", "steps"),
    [
        ({DP: S(0), TP: S(0)}, {DP: I, TP: I}, [([TP, DP], (S(0), I))]),
        ({DP: S(0), TP: S(1)}, {DP: I, TP: S(1)}, [([DP], (S(0), I))]),
        # The inner shard of a dim is in the way of the outer one, and is redone last.
        ({DP: I, TP: S(0)}, {DP: S(0), TP: S(0)}, [([TP], (S(0), I)), ([DP, TP], (I, S(0)))]),
        ({DP: S(0), TP: I}, {DP: S(0), TP: S(0)}, [([TP], (I, S(0)))]),
        ({DP: I, TP: S(0)}, {DP: I, TP: S(1)}, [([TP], (S(0), S(1)))]),
        ({DP: P, TP: R}, {DP: S(0), TP: S(0)}, [([DP], (P, S(0))), ([TP], (R, S(0)))]),
    ],
)
def test_steps(types, target, steps) -> None:
    assert _steps(types, target, I) == steps


def test_values_without_a_gradient_are_not_converted_between_i_and_r() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(4), types={DP: R, TP: R}, grad=False)
    assert Converter(graph, MESH)(x, {DP: I, TP: I}) is x


PACKED = [I, S(0), S(0, 2), S(1), S(1, 4)]


@pytest.mark.parametrize("source", list(itertools.product(PACKED, repeat=2)), ids=lambda p: "-".join(map(str, p)))
def test_packed_dims_are_converted_block_by_block(source) -> None:
    """Two axes may cut one dim in different parts: then the one of fewer parts cuts first, whichever is major."""
    gen = torch.Generator().manual_seed(0)
    value = torch.randint(-9, 9, (8, 16), generator=gen).double()
    types = dict(zip((DP, TP), source, strict=True))
    for pair in itertools.product(PACKED, repeat=2):
        target = dict(zip((DP, TP), pair, strict=True))
        module, (out,), _ = convert_graph(types, target, shape=(8, 16))
        assert out.meta["types"] == target
        locals_ = [x.requires_grad_() for x in deal(value, types, gen)]
        got = [o[0] for o in LockstepWorld(MESH).run(module, [[x] for x in locals_])]
        assert torch.equal(meaning([g.detach() for g in got], target), value), (types, target)
        torch.autograd.backward([g * 1 for g in got], deal(value, gradient_types(target), gen))
        assert torch.equal(meaning([x.grad for x in locals_], gradient_types(types)), value), (types, target)


@pytest.mark.parametrize("target", [{DP: S(0), TP: S(0)}, {DP: P, TP: S(1)}], ids=str)
def test_sizes_that_degrees_do_not_divide_are_refused(target) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(6, 5), types={DP: I, TP: I}, grad=True, where="some.module")
    with pytest.raises(MoecError, match=r"some\.module.*(do not divide|cannot be dealt)"):
        Converter(graph, MESH)(x, target)


# -- the algebra -----------------------------------------------------------------------------------------------------

LINEAR = Rule((("t", "k"), ("n", "k"), ("n",)), (("t", "n"),), added=frozenset({2}))
MUL = Rule((("a",), ("a",)), (("a",),), carries="multilinear")


@pytest.mark.parametrize(
    ("rule", "ops", "targets", "result"),
    [
        (LINEAR, (I, S(0), S(0)), [R, S(0), S(0)], S(1)),  # column
        (LINEAR, (S(1), S(1), I), [S(1), S(1), P], P),  # row: the bias counts once
        (LINEAR, (S(0), I, I), [S(0), R, R], S(0)),  # data parallel: weights become R
        (LINEAR, (I, I, I), [I, I, I], I),
        (LINEAR, (P, I, I), [I, I, I], I),
        (LINEAR, (R, I, I), [R, R, R], R),
        (MUL, (P, R), [P, R], P),  # stays pending
        (MUL, (P, P), [I, I], I),
        (MUL, (P, S(0)), [S(0), S(0)], S(0)),
    ],
    ids=str,
)
def test_solve(rule, ops, targets, result) -> None:
    got = solve(rule, [Operand(t, False) for t in ops])
    assert got == (targets, [result])


def test_operands_without_a_gradient_are_neutral() -> None:
    assert solve(MUL, [Operand(I, False), Operand(R, True)]) == ([I, R], [I])
    assert solve(MUL, [Operand(R, True), Operand(R, True)]) == ([R, R], [R])


def test_view_factors() -> None:
    assert view_factors((2, 3, 4), (6, 4)) == (("g0", "minor0_1", "g1"), ("g0", "g1"))
    assert view_factors((6, 4), (2, 3, 4)) == (("g0", "g1"), ("g0", None, "g1"))
    assert view_factors((6, 1, 4), (6, 4)) == (("g0", None, "g1"), ("g0", "g1"))


# -- layout ----------------------------------------------------------------------------------------------------------


def placed(shape: Shape, plan: Plan) -> dict[str, dict[str, Type]]:
    program = compile_stages(captured(shape), plan)[1][1]
    layout = infer(program, plan)
    return {s.name: layout.dims.get(ph, {}) for ph, s in program.params.items()}


COLUMN, ROW = {"tp": S(0)}, {"tp": S(1)}


@pytest.mark.parametrize("biased", [False, True])
def test_auto_layout(biased) -> None:
    where = placed(Shape(biased=biased), Plan(1, 2, 1, 2))
    attention, moe = "layers.0.attention.", "layers.0.moe."
    for name in "qkv":
        assert where[f"{attention}{name}.weight"] == COLUMN
    assert where[f"{attention}o.weight"] == ROW
    assert where[f"{moe}gate_up"] == {"ep": S(0), "etp": S(1, parts=2)}
    assert where[f"{moe}down"] == {"ep": S(0), "etp": S(2)}
    whole = ["embed.weight", "norm.weight", "layers.0.norm1.weight", f"{moe}router.weight", f"{attention}q_norm.weight"]
    if biased:
        for name in "qkv":
            assert where[f"{attention}{name}.bias"] == COLUMN
        assert where[f"{moe}gate_up_bias"] == {"ep": S(0), "etp": S(1, parts=2)}
        assert where[f"{moe}down_bias"] == {"ep": S(0)}
        assert where[f"{moe}shared_up.weight"] == where[f"{moe}shared_up.bias"] == COLUMN
        assert where[f"{moe}shared_down.weight"] == ROW
        whole += [f"{attention}o.bias", f"{moe}router.bias", f"{moe}shared_down.bias", f"{moe}shared_gate.weight"]
    for name in whole:
        assert where[name] == {}, name


def test_every_placement_has_a_reason() -> None:
    program = compiled(Shape(biased=True), (1, 4, 1, 4))[-1][1]
    reasons = program.layout_reasons
    assert (
        "column" in reasons["layers.0.attention.q.weight"] and "attention.o" in reasons["layers.0.attention.q.weight"]
    )
    assert "row" in reasons["layers.0.attention.o.weight"]
    assert "whole" in reasons["layers.0.moe.router.weight"]


def test_a_norm_on_sharded_heads_is_converted_over_tp() -> None:
    """q_norm is whole, and acts on this rank's heads: its gradient is a sum over tp."""
    program = compiled(Shape(), (1, 4, 1, 4))[-1][1]
    (q_norm,) = (ph for ph, s in program.params.items() if s.name.endswith("q_norm.weight"))
    assert program.grad_reductions[q_norm] == "tp_etp"
    (norm,) = (ph for ph, s in program.params.items() if s.name.endswith("norm1.weight"))
    assert norm not in program.grad_reductions


def test_tied_weights_are_one_parameter_reduced_once() -> None:
    program = dict(compiled(Shape(), (4, 1, 1, 1)))["shard"]
    (embed,) = (ph for ph, s in program.params.items() if "embed" in s.name)
    assert program.params[embed].aliases == ("head.weight",)
    node = next(n for n in program.placeholders() if n.name == embed)
    assert [collective(u.target).kind for u in node.users] == ["i_to_r"]
    assert len(next(iter(node.users)).users) == 2


def test_q_k_v_share_one_conversion() -> None:
    program = dict(compiled(Shape(), (1, 4, 1, 4)))["shard"]
    linears = (n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "aten.linear")
    x = next(n for n in linears if n.meta["where"] == "layers.0.attention.q").args[0]
    assert collective(x.target).kind == "i_to_r"
    assert len(x.users) == 3


def collectives_of(layout, degrees=(1, 2, 1, 1)) -> list[str]:
    program = compile_stages(captured(Shape()), Plan(*degrees, layout=layout))[-1][1]
    return [n.meta["where"] for n in program.graph.nodes if n.op == "call_function" and collective(n.target)]


@pytest.mark.parametrize(
    "layout",
    [
        {"*.attention.*": "replicate"},
        {"*.router": "column"},
        {"layers.0.attention.q": "replicate"},
        {"*.moe.*": "replicate", "*.attention.o": "column"},
        {"embed": "row"},
    ],
    ids=str,
)
def test_a_layout_of_the_users_is_obeyed_and_exact(layout) -> None:
    plan = Plan(2, 2, 1, 1, layout=layout)
    program = compile_stages(captured(Shape()), plan)[-1][1]
    pattern, style = next(iter(layout.items()))
    named = {s.name: s for s in program.params.values() if s.name.startswith(pattern.strip("*").strip("."))}
    for spec in named.values():
        assert (style == "replicate") == all(t == I for t in spec.types.values())
    assert f"plan: {style}" in " ".join(program.layout_reasons.values())
    truth = oracle(build(Shape(), 2), Batch(2, 5, 0, 2))
    assert off(truth.compare("lower", program)) < 1e-12


def test_replicating_attention_takes_its_collectives_away() -> None:
    assert any("attention" in w for w in collectives_of("auto"))
    assert not any("attention" in w for w in collectives_of({"*.attention.*": "replicate"}))


# -- made by the graph itself ----------------------------------------------------------------------------------------


class Made(nn.Module):
    """Tensors that the forward creates with the batch in their shape: masks, positions, expanded parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 12)
        self.start = nn.Parameter(torch.randn(1, 1, 12))
        self.up, self.down = nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, ids):
        b, s = ids.shape
        x = self.embed(ids) + torch.zeros(b, s, 12) + torch.arange(s)[None, :, None] * torch.ones(b, 1, 1)
        x = torch.cat([self.start.expand(b, -1, -1), x], 1)
        keep = torch.ones(b, s + 1, dtype=torch.bool).logical_and(ids.new_ones(b, 1).bool())
        x = x.masked_fill(~keep[..., None], 0.0)
        y = x + self.down(F.relu(self.up(x)))
        return {"loss": y.square().mean(), "y": y}


def test_what_the_graph_creates_is_created_local() -> None:
    report = check(Made(), Plan(2, 2), example_inputs=(torch.randint(0, 16, (4, 5)),), world_size=4)
    assert report.ok, report
    program = capture(Made(), (torch.randint(0, 16, (4, 5)),), {}, training=True)
    sharded = compile_stages(program, Plan(2, 2, 1, 2))[-1][1]
    expands = [n for n in sharded.graph.nodes if n.op == "call_function" and op_name(n) == "aten.expand"]
    assert any(t == S(0) for n in expands for t in n.meta["types"].values())


# -- refusals --------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return {"loss": torch.linalg.det(self.proj(x)).sum()}


def test_an_op_without_a_rule_is_named_with_its_module_and_a_way_out() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, x):
            return self.odd(x)

    program = capture(Wrapped(), (torch.randn(2, 4, 4),), {}, training=True)
    with pytest.raises(MoecError, match=r"no sharding rule for aten\._?linalg_det") as e:
        compile_stages(program, Plan(2, 1, 1, 1))
    assert e.value.where.endswith("odd")
    assert "moec.sharding_rule(\"aten::" in e.value.way_out


def test_degrees_that_do_not_divide_are_all_listed_with_the_nearest_plan() -> None:
    """10 ranks of tp do not divide 12 heads, nor 24 columns; ep=5 does not divide 6 experts."""
    with pytest.raises(MoecError) as e:
        compile_stages(captured(Shape()), Plan(1, 10, 5, 1))
    text = str(e.value)
    assert "tp=10 does not divide the 12 " in text and "layers.0.attention" in text
    assert "ep=5 does not divide the 6 experts" in text and "layers.0.moe" in text
    assert re.search(r"nearest degrees that work: dp=\d+, tp=\d+, ep=\d+, etp=\d+", text)
    degrees = tuple(int(d) for d in re.findall(r"(?:dp|tp|ep|etp)=(\d+)", text.split("nearest")[1]))
    compile_stages(captured(Shape()), Plan(*degrees))


def test_fewer_key_value_heads_than_tp_ranks() -> None:
    """Every rank computes the 6 heads and takes those that its 3 query heads need."""
    shape = Shape(kv_heads=6)
    program = compile_stages(captured(shape), Plan(1, 4, 1, 4))[-1][1]
    assert off(oracle(build(shape, 2), Batch(2, 5)).compare("lower", program)) < 1e-12


def test_the_captured_program_is_left_as_it_was() -> None:
    before = captured(Shape()).render()
    compile_stages(captured(Shape()), Plan(2, 2, 2, 2))
    assert captured(Shape()).render() == before
    assert isinstance(build(Shape()), Model)
