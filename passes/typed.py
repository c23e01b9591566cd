"""How a pass writes nodes into a graph whose values have types: what it makes is typed by the verifier's own rules.

Used behind ``shard`` by passes that compute the same in another way, between values that are typed already.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from moec.passes.rewrite import apply, new
from moec.passes.shard.rule import differentiable, operands
from moec.passes.verify.types import derive
from moec.placement import R
from moec.program import Program
from moec.runtime.collectives import collective, is_wait


def typed(program: Program, at: fx.Node, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
    """A node before ``at``, of its module: its value (global shapes) inferred or given, its types derived.

    Raises MoecError where the operands' types are not those that the op takes."""
    with at.graph.inserting_before(at):
        node = apply(at, target, *args, **kwargs) if val is None else new(at, target, args, val, **kwargs)
    return _with_types(program, node)


def result(program: Program, node: fx.Node, index: int) -> fx.Node:
    """Result ``index`` of a node of several, behind it and its other results."""
    last = node
    while last.next.op == "call_function" and last.next.target is operator.getitem and last.next.args[0] is node:
        last = last.next
    with node.graph.inserting_after(last):
        made = new(node, operator.getitem, (node, index), node.meta["val"][index])
    return _with_types(program, made)


def _with_types(program: Program, node: fx.Node) -> fx.Node:
    ops = operands(node)
    val = node.meta["val"]
    floats = [differentiable(v) for v in (val if isinstance(val, (tuple, list)) else [val])]
    node.meta["grad"] = any(floats) and any(o.meta["grad"] for o in node.all_input_nodes if "grad" in o.meta)
    for key in ("padded", "chunk"):  # rows that are not the recorded ones stay so
        for o in (o for o in node.all_input_nodes if key in o.meta):
            node.meta[key] = o.meta[key]
    node.meta["types"] = dict.fromkeys(program.mesh.names, R)  # no op that is written so makes a dim of its own
    types = {o: o.meta["types"] for o in (*ops, *node.all_input_nodes) if o.meta.get("types") is not None}
    if program.mesh.names:
        node.meta["types"] = derive(program, node, types)
    return node


def bring_before(nodes: list[fx.Node], at: fx.Node) -> bool:
    """Move whatever of ``nodes``, and of what they are computed from, stands behind ``at`` to before it.

    False, and nothing is moved, where some of it is computed from ``at``, or is communication."""
    order = {n: i for i, n in enumerate(at.graph.nodes)}
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if order[node] < order[at] or node in found:
            continue
        if node is at or node.op != "call_function" or is_wait(node.target) or _communicates(node):
            return False
        found.add(node)
        todo += node.all_input_nodes
    for node in sorted(found, key=order.__getitem__):
        at.prepend(node)
    return True


def _communicates(node: fx.Node) -> bool:
    entry = collective(node.target)
    return entry is not None and entry.needs_wait


def sweep(node: fx.Node) -> None:
    """Erase ``node``, and what it alone reads, if nobody reads it."""
    if node.users or node.op != "call_function" or is_wait(node.target) or _communicates(node):
        return
    read = dict.fromkeys(node.all_input_nodes)
    node.graph.erase_node(node)
    for source in read:
        sweep(source)


def dtype_of(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype
