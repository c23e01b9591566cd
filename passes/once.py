"""once: FP8 weights are made once an optimizer step (part of ``lower.bind``).

Legend: nothing but parameters, what is computed of them, and the collectives for their largest magnitudes is moved.

1. A ``moec::quantise`` of a weight is taken if all that it is computed from are parameters, through views, casts, and
   maxima over ranks.
2. These nodes are copied to a graph of their own, which returns numbers and scales of both layouts of all weights.
   Maxima over the same ranks become one collective (``runtime.once.maxima``).
3. The program takes one placeholder more and reads them from it, and so do the forward graphs of ``step``.  Where a
   gradient comes back through the operand's carrier, a carrier of the parameter takes its place: no cast is left that
   only a quantise read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from moec.passes.typed import dtype_of
from moec.program import OncePerStep, Program, op_name
from moec.runtime.collectives import TABLE, group_of, is_wait
from moec.runtime.once import ONCE, carrier, maxima

aten, moec_ops = torch.ops.aten, torch.ops.moec
VIEWS = frozenset({aten.transpose.int, aten.t.default, aten.reshape.default, aten.view.default, aten.permute.default})
CAST, M_TO_I = aten._to_copy.default, TABLE["m_to_i"].op
ALONG = VIEWS | {CAST, aten.detach.default, TABLE["i_to_r"].op}
"""Ops on one operand that a carrier's gradient may pass."""


def quantise_once(program: Program) -> None:
    """Cut the graphs of a program that is being bound."""
    found = _quantised(program.graph, program)  # 1
    if not found:
        return
    needed = {n for needs in found.values() for n in needs}
    order = [n for n in program.graph.nodes if n in needed]
    program.once = _graph(program, order, list(found))  # 2
    made = {_signature(q): k for k, q in enumerate(found)}
    _read(program.graph, found, made)  # 3
    if program.step:
        cut = {f: _cut(getattr(program.step, f), program, made) for f in ("forward", "inference")}
        program.step = replace(program.step, **cut, made={})
    left = {c.args[0].name for c in program.graph.find_nodes(op="call_function", target=CAST)}
    program.narrowed = {name: dtype for name, dtype in program.narrowed.items() if name in left}


# -- 1


def _quantised(graph: fx.Graph, program: Program) -> dict[fx.Node, list[fx.Node]]:
    """What quantises parameters alone, and what it is computed from."""
    found = {}
    for node in graph.find_nodes(op="call_function", target=moec_ops.quantise.default):
        if node.args[5] in ("weight", "stack") and (needs := _needs(program, node)) is not None:
            found[node] = needs
    return found


def _needs(program: Program, quantise: fx.Node) -> list[fx.Node] | None:
    """What it is computed from, itself included; None if not of parameters alone, or its carrier has no plain way."""
    found: dict[fx.Node, None] = {}
    todo = [quantise]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found[node] = None
        if node.op == "placeholder":
            spec = program.params.get(node.name)
            if spec is None or spec.buffer:
                return None
        elif not (node is quantise or node.target in ALONG or _of_maxima(node)):
            return None
        todo += node.all_input_nodes
    return list(found)


def _of_maxima(node: fx.Node) -> bool:
    return op_name(node) == "moec.amax" or node.target is M_TO_I or (is_wait(node.target) and _of_maxima(node.args[0]))


# -- 2


def _graph(program: Program, order: list[fx.Node], quantised: list[fx.Node]) -> OncePerStep:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    by_group: dict[str, list[fx.Node]] = defaultdict(list)
    behind: set[fx.Node] = set()  # of a maximum
    for node in order:
        if node.target is M_TO_I:
            by_group[group_of(node)].append(node)
            behind.add(node)
        elif behind.intersection(node.all_input_nodes):
            behind.add(node)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    for group, starts in by_group.items():
        args = ([env[s.args[0]] for s in starts], starts[0].args[-2], group)
        together = graph.call_function(maxima, args)
        together.meta.update(val=[s.meta["val"] for s in starts], types=[s.meta["types"] for s in starts])
        together.meta["where"] = "FP8 weights"
        together.meta["group_key"] = starts[0].meta.get("group_key", group)
        for i, s in enumerate(starts):
            env[s] = graph.call_function(operator.getitem, (together, i))
    for node in order:
        if node not in env:
            env[node] = env[node.args[0]] if is_wait(node.target) else graph.node_copy(node, env.__getitem__)
    graph.output(tuple(graph.call_function(operator.getitem, (env[q], i)) for q in quantised for i in range(1, 5)))
    graph.lint()
    names = tuple(n.name for n in order if n.op == "placeholder")
    return OncePerStep(fx.GraphModule(program.module, graph), names)


# -- 3


def _cut(module: fx.GraphModule, program: Program, made: dict[Hashable, int]) -> fx.GraphModule:
    """A graph of ``step`` that reads what is ``made``; the rest it goes on making itself."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    found = {q: needs for q, needs in _quantised(graph, program).items() if _signature(q) in made}
    if not found:
        return module
    _read(graph, found, made)
    return fx.GraphModule(module, graph)


def _signature(x: Any) -> Hashable:
    """The same of nodes that compute the same of the same parameters in two graphs, one of which was traced from the
    other: that adds views without effect, and process groups by purpose."""
    if isinstance(x, list | tuple):
        return tuple(map(_signature, x))
    if not isinstance(x, fx.Node):
        return x
    if x.op == "placeholder":
        return x.name
    if x.target in (aten.detach.default, M_TO_I) or is_wait(x.target):
        return _signature(x.args[0])
    return x.target, _signature(x.args), dtype_of(x) if x.target is CAST else None


def _read(graph: fx.Graph, found: dict[fx.Node, list[fx.Node]], made: dict[Hashable, int]) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_before(next(iter(graph.nodes))):
        once = graph.placeholder(ONCE)
    for node in found:
        at = made[_signature(node)]
        for item in list(node.users):
            with graph.inserting_before(item):
                if item.args[1]:
                    read = graph.call_function(operator.getitem, (once, 4 * at + item.args[1] - 1))
                else:
                    read = _carrier(graph, node.args[0])
            read.meta.update(item.meta)
            item.replace_all_uses_with(read)
            graph.erase_node(item)
    for node in sorted({n for needs in found.values() for n in needs}, key=order.__getitem__, reverse=True):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _carrier(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Of the weight ``x``: of the parameter, in x's dtype, seen through the same views."""
    path, dtype = [], dtype_of(x)
    while x.op == "call_function" and x.target in VIEWS | {CAST}:
        path.append(x)
        x = x.args[0]
    made = graph.call_function(carrier, (x, dtype))
    for view in reversed(path):
        if view.target is not CAST:
            made = graph.call_function(view.target, (made, *view.args[1:]), view.kwargs)
    return made
