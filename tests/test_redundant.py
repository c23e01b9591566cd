"""The pass that removes redundant collectives: what it removes, that values, gradients and types stay, and what it must
leave."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_rules import deal, gradient_types, meaning
from torch import fx, nn
from torch.utils import _pytree as pytree

from moec.passes import redundant as module_under_test
from moec.passes.redundant import redundant
from moec.passes.shard.convert import Converter
from moec.passes.verify import check_structure, check_types
from moec.placement import I, P, R, S, Type, Types
from moec.plan import Plan
from moec.program import InputSpec, OutputSpec, Program
from moec.runtime.collectives import TABLE, collective, is_wait
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh
from moec.runtime.world import LockstepWorld

MESH = Mesh.of(dp=2, tp=2)
DP, TP = MESH.names
PLAN = Plan(2, 2, 1, 1)
VALUE = torch.randint(-9, 9, (4, 8), generator=torch.Generator().manual_seed(0)).double()


def on(tp: Type, dp: Type = I) -> Types:
    return {DP: dp, TP: tp}


def program_of(source: Types, *ways: list[Types], grad: bool = True) -> Program:
    """x converted along each way, every step by a converter that has seen nothing: the ends are the outputs (as P + 0
    where they are pending sums, doubled so that they are read by an op)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=torch.empty(4, 8), types=source, grad=grad, where="test")
    ends = []
    for way in ways:
        value = x
        for target in way:
            value = Converter(graph, MESH)(value, target)
        twice = graph.call_function(torch.ops.aten.neg.default, (value,))
        twice.meta.update({k: value.meta[k] for k in ("val", "types", "grad", "where")})
        ends.append(twice)
    graph.output(tuple(ends))
    inputs = {"x": InputSpec("x", "x", None, 2, torch.float64)}
    outputs = [OutputSpec(f"y{i}", i) for i in range(len(ends))]
    made = Program(fx.GraphModule(nn.Module(), graph), {}, inputs, outputs, pytree.tree_structure(0), mesh=MESH)
    made.facts.add("sharded")
    return made


def cleaned(program: Program) -> Program:
    after = redundant.run(program.fork(), PLAN)
    check_structure(after)
    if not any(t.kind == "P" for n in after.graph.nodes for t in n.meta.get("types", {}).values()):
        check_types(after)
    return after


def kinds(program: Program) -> list[str]:
    return [c.kind for n in program.graph.nodes if n.op == "call_function" and (c := collective(n.target))]


def means(program: Program, source: Types) -> list[torch.Tensor]:
    """What the outputs mean, and the gradient of x for given ones of the outputs."""
    gen = torch.Generator().manual_seed(1)
    xs = [x.requires_grad_() for x in deal(VALUE, source, gen)]
    outs = LockstepWorld(MESH).run(program.module, [[x] for x in xs])
    ends = next(iter(reversed(program.graph.nodes))).args[0]
    found, roots, cotangents = [], [], []
    for i, end in enumerate(ends):
        t = end.meta["types"]
        found.append(meaning([o[i].detach() for o in outs], t))
        roots += [o[i] for o in outs]
        cotangents += deal(torch.randint(-9, 9, (4, 8), generator=gen).double(), gradient_types(t), gen)
    torch.autograd.backward(roots, cotangents)
    return [*found, meaning([x.grad for x in xs], gradient_types(source))]


def holds(before: Program, after: Program, source: Types) -> None:
    check_types(after)
    same(before, after, source)


def same(a: Program, b: Program, source: Types) -> None:
    for x, y in zip(means(a, source), means(b, source), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("source", "ways", "left"),
    [
        # Equal conversions are one, an I -> R too: its gradients are summed before the one reduction.
        (on(I), [[on(R)], [on(R)]], ["i_to_r"]),
        (on(P), [[on(I)], [on(I)], [on(P)]], ["p_to_i"]),
        # What is undone at once.
        (on(S(0)), [[on(R), on(S(0))]], []),
        (on(S(0)), [[on(I), on(S(0))]], []),
        (on(I), [[on(S(1)), on(I)]], []),
        (on(R), [[on(S(0)), on(R)]], []),
        (on(S(0)), [[on(S(1)), on(S(0))]], []),
        (on(S(0)), [[on(P), on(S(0))]], []),
        # What goes straight and moves less.
        (on(P), [[on(I), on(S(0))]], ["p_to_s"]),
        (on(P), [[on(R), on(S(1))]], ["p_to_s"]),
        (on(S(0)), [[on(I), on(R)]], ["s_to_r"]),
        (on(S(0)), [[on(I), on(S(1))]], ["s_to_s"]),
        (on(I), [[on(R), on(S(0))]], ["i_to_s"]),
        (on(S(0)), [[on(S(1)), on(R), on(S(1)), on(I)]], ["s_to_i"]),
        # What stays: another dim or group is no way back, and what somebody reads is made.
        (on(P), [[on(I)], [on(I), on(S(0))]], ["p_to_i", "i_to_s"]),
        (on(I, I), [[on(S(0), I), on(S(0), S(1))]], ["i_to_s", "i_to_s"]),
        (on(S(0)), [[on(R)], [on(I)]], ["s_to_r", "s_to_i"]),
        (on(P), [[on(I), on(R)]], ["p_to_i", "i_to_r"]),
    ],
    ids=str,
)
def test_what_goes_and_what_stays(source, ways, left) -> None:
    before = program_of(source, *ways)
    after = cleaned(before)
    assert kinds(after) == left
    same(before, after, source)


def moved(program: Program) -> float:
    return sum(module_under_test._moved(TABLE[k], 2) for k in kinds(program))


@given(st.data())
def test_whatever_is_converted_how_often_the_meaning_stays(data) -> None:
    """Drawn chains of conversions on two axes: equal outputs and gradients, no more communication, types follow."""
    types = st.sampled_from([I, R, P, S(0), S(1)])

    def step(now: Types) -> Types:  # R -> I is none
        return {a: data.draw(types.filter(lambda t, a=a: (now[a], t) != (R, I)), label=a) for a in (DP, TP)}

    source = {DP: data.draw(types), TP: data.draw(types)}
    ways: list[list[Types]] = []
    for _ in range(data.draw(st.integers(1, 3), label="ways")):
        way, now = [], source
        for _ in range(data.draw(st.integers(1, 4), label="steps")):
            now = step(now)
            way.append(now)
        ways.append(way)
    before = program_of(source, *ways)
    after = cleaned(before)
    same(before, after, source)
    assert moved(after) < moved(before) or not Counter(kinds(after)) - Counter(kinds(before))
    again = cleaned(after)
    assert kinds(again) == kinds(after)


def test_without_a_gradient_i_and_r_are_one_type() -> None:
    before = program_of(on(S(0)), [on(R), on(S(0))], grad=False)
    assert kinds(cleaned(before)) == []


def test_waits_follow_their_starts() -> None:
    after = cleaned(program_of(on(P), [on(I), on(S(0))], [on(I), on(S(0))]))
    starts = [n for n in after.graph.nodes if n.op == "call_function" and collective(n.target)]
    assert [[is_wait(u.target) for u in n.users] for n in starts] == [[True]]


@pytest.mark.parametrize(
    ("part", "broken", "source", "ways"),
    [
        # Dims that are not looked at: a slice of another dim is taken for the way back.
        ("_ends", lambda n, c: ((c.source, 0), (c.dest, 0)), on(S(0)), [[on(R), on(S(1))]]),
        # Another gradient than that of the two.
        ("_straight", lambda *_: "s_to_i", on(S(0)), [[on(I), on(R)]]),
        # Another sum.
        ("_straight", lambda *_: "s_to_r", on(P), [[on(I), on(S(0))]]),
    ],
)
def test_a_wrong_pass_is_caught(monkeypatch, part, broken, source, ways) -> None:
    before = program_of(source, *ways)
    monkeypatch.setattr(module_under_test, part, broken)
    after = redundant.run(before.fork(), PLAN)
    with pytest.raises((AssertionError, MoecError)):
        holds(before, after, source)
