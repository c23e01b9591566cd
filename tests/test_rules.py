"""Every line of the table of factor rules, against the unsharded op: values and gradients, under drawn placements.

For each op: draw shapes and a type for every operand on every axis, let the sharding pass type the op and insert its
conversions, run that on a lockstep world of 2 × 2 ranks, and compare with the op on whole tensors.  A result of type t
must *mean* the whole result; with cotangents dealt by the gradient types, every operand's gradient must mean the whole
one.
"""

from __future__ import annotations

import operator
from math import prod

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rule_cases import CASES, Draw
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from moec import shards
from moec.passes.shard import Sharder
from moec.passes.shard.rule import differentiable
from moec.passes.shard.rules import _CREATION, _RULES
from moec.passes.verify.types import BY_THE_TABLE, check_types
from moec.placement import I, P, R, S, Type, Types
from moec.plan import Plan
from moec.program import InputSpec, Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import FakeTensorMode
from moec.runtime.world import LockstepWorld

MESH = Mesh.of(dp=2, tp=2, ep=1, etp=1)
AXES = MESH.names
GRADIENT: dict[str, Type] = {"I": I, "R": P, "P": R}
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # to shrink a failure takes a minute, and the draws are short
UNDEFINED = {"aten.empty", "aten.empty_like", "aten.new_empty"}
"""Results without a value: only the shape counts."""
REFUSALS = ("do not divide", "cannot be dealt", "which no collective does", "parts, but it is sharded")
WHOLE: set[str] = set()
"""Ops that need whole operands."""
_INTEGERS = """__and__ __or__ __xor__ all any argmax argmin argsort bincount bitwise_and bitwise_not bitwise_or
bitwise_xor eq floor_divide ge gt histc isfinite isinf isnan isneginf le logical_and logical_not logical_or logical_xor
lt ne one_hot"""
_CONSTANTS = ("detach", "empty_like", "full_like", "ones_like", "zeros_like", *_CREATION)
NO_GRADIENT = {f"aten.{n}" for n in (*_INTEGERS.split(), *_CONSTANTS)} | {"moec.tally"}
"""Ops whose results have no gradient; of every other one some example must compare gradients."""


# -- what types mean, for several axes at once -----------------------------------------------------------------------


def cutting_order(types: Types) -> list[str]:
    """Axes in the order in which they cut: fewer parts first, then major to minor."""
    return sorted(AXES, key=lambda a: types[a].parts)


def deal(value: Tensor, types: Types, gen: torch.Generator) -> list[Tensor]:
    """Local values, by rank, whose meaning is ``value``; pending sums are dealt in random integer parts."""

    def split(v: Tensor, axes: list[str], at: dict[str, int], cut: dict[int, list]) -> dict[int, Tensor]:
        if not axes:
            return {next(r for r in range(MESH.world) if MESH.coords(r) == at): v.clone()}
        axis, t, n = axes[0], types[axes[0]], MESH.axis(axes[0]).size
        cut = {d: list(c) for d, c in cut.items()}
        if t.kind == "P":
            noise = [torch.randint(-4, 4, v.shape, generator=gen).to(v.dtype) for _ in range(n - 1)]
            parts = [*noise, v - sum(noise)]
        elif t.kind == "S":
            blocks = _blocks(t, cut)
            parts = [torch.cat([b.chunk(n, t.dim)[i] for b in v.chunk(blocks, t.dim)], t.dim) for i in range(n)]
            cut.setdefault(t.dim, []).append((t.parts, n))
        else:
            parts = [v] * n
        return {r: x for i, p in enumerate(parts) for r, x in split(p, axes[1:], {**at, axis: i}, cut).items()}

    found = split(value, cutting_order(types), {}, {})
    return [found[r] for r in range(MESH.world)]


def _blocks(t: Type, cut: dict[int, list]) -> int:
    """Blocks of a dim that are here when ``t`` cuts it: axes that cut it in fewer parts dealt out the rest."""
    return t.parts // prod(n for p, n in cut.get(t.dim, []) if p < t.parts)


def meaning(parts: list[Tensor], types: Types) -> Tensor:
    """The value that local values stand for; copies must be equal."""
    held = {tuple(MESH.coords(r)[a] for a in AXES): x for r, x in enumerate(parts)}
    left = list(AXES)
    for axis in reversed(cutting_order(types)):
        t, where = types[axis], left.index(axis)
        left.remove(axis)
        runs: dict[tuple[int, ...], list[Tensor]] = {}
        for at, x in sorted(held.items(), key=lambda h: h[0]):
            runs.setdefault(at[:where] + at[where + 1 :], []).append(x)
        if t.kind == "P":
            held = {at: torch.stack(run).sum(0) for at, run in runs.items()}
        elif t.kind == "S":
            cut: dict[int, list] = {}
            for a in left:
                if types[a].kind == "S":
                    cut.setdefault(types[a].dim, []).append((types[a].parts, MESH.axis(a).size))
            n = _blocks(t, cut)
            held = {
                at: torch.cat([x.chunk(n, t.dim)[b] for b in range(n) for x in run], t.dim) for at, run in runs.items()
            }
        else:
            for run in runs.values():
                for x in run[1:]:
                    torch.testing.assert_close(
                        x, run[0], rtol=1e-12, atol=1e-12, msg=lambda m: f"copies differ on {axis}: {m}"
                    )
            held = {at: run[0] for at, run in runs.items()}
    return held[()]


def gradient_types(types: Types) -> Types:
    return {a: GRADIENT.get(t.kind, t) for a, t in types.items()}


# -- drawing placements ----------------------------------------------------------------------------------------------


def draw_types(data: st.DataObject, x: Tensor, grad: bool) -> Types:
    kinds = [I, R, P] if grad else [R]
    types: Types = {}
    cut: dict[int, list[tuple[int, int]]] = {}
    for axis in AXES:
        n = MESH.axis(axis).size
        options = list(kinds)
        for d, s in enumerate(x.shape):
            options += [t for t in [S(d)] * 3 + [S(d, 2), S(d, 4)] if _fits(s, [*cut.get(d, []), (t.parts, n)])]
        t = data.draw(st.sampled_from(options), label=f"{axis} of {tuple(x.shape)}")
        if t.kind == "S":
            cut.setdefault(t.dim, []).append((t.parts, n))
        types[axis] = t
    return types


def _fits(size: int, cut: list[tuple[int, int]]) -> bool:
    """Can a dim be cut by axes of these (parts, ranks)?  Finer blocks lie within what coarser cuts leave."""
    ways = 1
    for parts, n in sorted(cut):
        if parts % ways and ways % parts:
            return False
        ways = max(ways, parts) * n
    return size % ways == 0


# -- building, sharding, running -------------------------------------------------------------------------------------


def build(op, args, kwargs, whole) -> tuple[Program, list[Tensor]]:
    """A program of one op: placeholders for its tensors, one output a result.  ``whole``: its results."""
    graph, mode, found = fx.Graph(), FakeTensorMode(), []

    def placeholder(x):
        if not isinstance(x, Tensor):
            return x
        known = next((n for n, y in zip(graph.nodes, found, strict=True) if y is x), None)
        if known is not None:
            return known
        node = graph.placeholder(f"x{len(found)}")
        node.meta.update(val=mode.from_tensor(x), where="test.module")
        found.append(x)
        return node

    args, kwargs = pytree.tree_map(placeholder, (args, kwargs))
    if not found:  # an op that makes something from nothing
        placeholder(torch.zeros(()))
    node = graph.call_function(op, args, kwargs)
    fakes = pytree.tree_map(mode.from_tensor, whole)
    node.meta.update(val=tuple(fakes) if isinstance(fakes, (tuple, list)) else fakes, where="test.module")
    results = [node]
    if isinstance(whole, (tuple, list)):
        results = [graph.call_function(operator.getitem, (node, i)) for i in range(len(whole))]
        for r, v in zip(results, fakes, strict=True):
            r.meta.update(val=v, where="test.module")
    graph.output(tuple(results))
    inputs = {f"x{i}": InputSpec(f"x{i}", f"x{i}", None, x.ndim, x.dtype) for i, x in enumerate(found)}
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Program(module, {}, inputs, [], pytree.tree_structure(0), mesh=MESH), found


def shard_op(program: Program, types: list[Types], grads: list[bool]) -> list[fx.Node]:
    """Type the one op as the pass does; returns the results."""
    sharder = Sharder(program, Plan(2, 2, 1, 1))
    for node, t, g in zip(program.placeholders(), types, grads, strict=True):
        node.meta.update(types=t, grad=g)
    for node in list(program.graph.nodes):
        if node.op == "call_function" and "types" not in node.meta:
            with program.graph.inserting_before(node):
                # Of the experts' ops the table speaks only where rows are not ragged; the pass has more for them.
                name = op_name(node)
                sharder._general(node, name) if name.startswith("moec.") else sharder._visit(node)
    program.graph.eliminate_dead_code()
    program.graph.lint()
    program.module.recompile()
    return list(next(iter(reversed(program.graph.nodes))).args[0])


def check(name: str, data: st.DataObject) -> tuple[bool, bool, bool]:
    """One example of one op.  Returns (was it accepted, was something sharded, was a gradient compared)."""
    draw = Draw(data)
    op, args, kwargs = data.draw(st.sampled_from(CASES[name]), label="case")(draw)
    whole = op(*args, **kwargs)
    program, xs = build(op, args, kwargs, whole)
    grads = [differentiable(x) and id(x) not in draw.constants and data.draw(st.integers(0, 4)) > 0 for x in xs]
    types = [draw_types(data, x, g) for x, g in zip(xs, grads, strict=True)]
    try:
        results = shard_op(program, types, grads)
    except MoecError as e:
        if not any(t in str(e) for t in REFUSALS):
            raise
        return False, False, False
    dialect = name.startswith("moec.") and name not in BY_THE_TABLE
    if not dialect and not any(t.kind == "P" for r in results for t in r.meta["types"].values()):
        check_types(program)

    gen = torch.Generator().manual_seed(7)
    locals_ = [[x.requires_grad_(g) for x in deal(x, t, gen)] for x, t, g in zip(xs, types, grads, strict=True)]
    outs = LockstepWorld(MESH).run(program.module, list(zip(*locals_, strict=True)))
    leaves = [x.clone().requires_grad_(g) for x, g in zip(xs, grads, strict=True)]
    by_id = {id(x): leaf for x, leaf in zip(xs, leaves, strict=True)}
    args, kwargs = pytree.tree_map(lambda a: by_id.get(id(a), a), (args, kwargs))
    again = op(*args, **kwargs)
    wholes = list(again) if isinstance(again, (tuple, list)) else [again]

    roots, cotangents, global_roots, global_cotangents = [], [], [], []
    for i, (node, want) in enumerate(zip(results, wholes, strict=True)):
        mine, t = [o[i] for o in outs], node.meta["types"]
        if name in UNDEFINED:
            assert meaning([torch.zeros_like(x) for x in mine], t).shape == want.shape
            continue
        torch.testing.assert_close(meaning([x.detach() for x in mine], t), want.detach(), rtol=1e-12, atol=1e-12,
                                   msg=lambda m: f"value of {node.name} ({t}): {m}")  # fmt: skip
        assert all(x.requires_grad == mine[0].requires_grad for x in mine)
        if want.requires_grad:
            assert node.meta["grad"], f"{node.name} has a gradient that the pass does not know of"
            ct = torch.randint(-8, 8, want.shape, generator=gen).to(want.dtype)
            roots += mine
            cotangents += deal(ct, gradient_types(t), gen)
            global_roots.append(want)
            global_cotangents.append(ct)
    if roots:
        torch.autograd.backward(roots, cotangents)
        torch.autograd.backward(global_roots, global_cotangents)
        for x, leaf, local, t in zip(range(len(xs)), leaves, locals_, types, strict=True):
            if leaf.grad is not None:
                parts = [torch.zeros_like(v) if v.grad is None else v.grad for v in local]
                torch.testing.assert_close(meaning(parts, gradient_types(t)), leaf.grad, rtol=1e-11, atol=1e-11,
                                           msg=lambda m: f"gradient of operand {x} ({t}): {m}")  # fmt: skip
    sharded = any(t.kind in "SP" for r in results for t in r.meta["types"].values())
    return True, sharded, any(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("name", sorted(_RULES))
def test_rule(name: str) -> None:
    assert name in CASES, f"{name} has a rule and no case in rule_cases.py"
    seen: list[tuple[bool, bool, bool]] = []

    # 12 or 33 examples in the everyday run
    @settings(max_examples=settings.default.max_examples // (8 if len(CASES[name]) == 1 else 3), phases=PHASES)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        seen.append(check(name, data))

    run()
    assert sum(a for a, *_ in seen) * 4 >= len(seen), "most placements were refused"
    if name.removeprefix("aten.") not in _CREATION and name not in WHOLE:
        assert any(s for _, s, _ in seen), "no example had a sharded result"
    assert any(g for *_, g in seen) == (name not in NO_GRADIENT), "which ops have gradients is part of the test"


def test_no_case_without_a_rule() -> None:
    assert CASES.keys() <= _RULES.keys()


def test_meaning_undoes_deal() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (8, 4), generator=gen).double()
    for first in (I, R, P, S(0), S(1), S(0, 2)):
        for second in (I, R, P, S(0), S(1), S(0, 2)):
            if first.kind == second.kind == "S" and first.dim == second.dim and first.parts != second.parts:
                continue
            types = dict(zip(AXES, (first, second), strict=True))
            parts = deal(x, types, gen)
            assert torch.equal(meaning(parts, types), x)
            if "P" not in (first.kind, second.kind):
                assert all(torch.equal(p, shards.cut(x, types, MESH, r)) for r, p in enumerate(parts))
