"""Wrong programs, one small mistake each, made from a right one: what the checks must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from moec.program import Program, op_name
from moec.runtime.collectives import FUSED, TABLE, Collective, collective, is_wait

aten = torch.ops.aten

PAIRS = (("p_to_i", "p_to_r"), ("s_to_i", "s_to_r"), ("i_to_s", "r_to_s"))
SIBLINGS = dict(PAIRS) | {b: a for a, b in PAIRS}
"""The kind with the same forward and another gradient."""


@dataclass(frozen=True)
class Mistake:
    what: str
    program: Program


def mistakes(program: Program) -> Iterator[Mistake]:
    """Every mistake of the catalogue at every node where it can be made."""
    for node in program.graph.nodes:
        for what, change in _changes(node):
            broken = program.fork()
            twin = next(n for n in broken.graph.nodes if n.name == node.name)
            change(twin)
            broken.graph.eliminate_dead_code()
            broken.graph.lint()
            broken.module.recompile()
            yield Mistake(
                f"{what} at {node.name} ({node.meta.get('where', '')}, {list(map(str, node.args[1:]))})", broken
            )
    for name, key in program.grad_reductions.items():
        param = program.params[name].name
        owed = {k: v for k, v in program.grad_reductions.items() if k != name}
        yield Mistake(f"the gradient of {param} not summed over {key}", replace(program.fork(), grad_reductions=owed))
        for axis in key.split(",") if "," in key else ():
            rest = ",".join(a for a in key.split(",") if a != axis)
            less = {**program.grad_reductions, name: rest}
            yield Mistake(
                f"the gradient of {param} not summed over {axis}", replace(program.fork(), grad_reductions=less)
            )


def _changes(node: fx.Node) -> Iterator[tuple[str, Callable[[fx.Node], None]]]:
    if node.op != "call_function":
        return
    entry, name = collective(node.target), op_name(node)
    if entry is not None:
        if entry.kind in DROPS:
            yield f"{entry.kind} dropped", DROPS[entry.kind]
        # Without a gradient I and R are one type, and siblings the same collective.
        if entry.kind in SIBLINGS and node.meta["grad"]:
            sibling = SIBLINGS[entry.kind]
            yield f"{entry.kind} -> {sibling}", lambda n: setattr(n, "target", TABLE[sibling].op)
    elif name == "moec.permute" and op_name(node.args[1]) != "moec.destinations":  # these are a set
        yield "ids rolled", lambda n: _roll(n, 1)
    elif name == "moec.unpermute":
        yield "weights rolled", lambda n: _roll(n, 1)
        yield "row numbers rolled", lambda n: _roll(n, 2)
    elif name == "moec.unpermute_add":
        yield "weights rolled", lambda n: _roll(n, 2)
        yield "row numbers rolled", lambda n: _roll(n, 3)
        yield "an addend left out", _leave_out
    elif name == "moec.sort_chunks":
        yield "inverse flipped", lambda n: setattr(n, "args", (*n.args[:2], not n.args[2]))
    elif name in ("moec.grouped_mm", "moec.grouped_add"):
        yield "counts reversed", lambda n: _wrap(n, 2, aten.flip.default, [0])


def _leave_out(node: fx.Node) -> None:
    """The last addend counts nothing."""
    *addends, last = node.args[0]
    with node.graph.inserting_before(node):
        zeros = node.graph.call_function(aten.zeros_like.default, (last,))
    node.args = ([*addends, zeros], *node.args[1:])


def _roll(node: fx.Node, at: int) -> None:
    """The operand moved by one choice: token t's k-th choice becomes its (k+1)-th."""
    _wrap(node, at, aten.roll.default, [1], [1])


def _wrap(node: fx.Node, at: int, op, *args) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(op, (node.args[at], *args))
    node.args = (*node.args[:at], new, *node.args[at + 1 :])


def _instead(node: fx.Node, make: Callable[[fx.Graph, fx.Node, int, int], fx.Node]) -> None:
    """What ``make(graph, x, dim, size)`` yields takes the place of a collective and of its wait."""
    with node.graph.inserting_before(node):
        new = make(node.graph, node.args[0], node.args[1], node.args[-2])
    new.meta["val"] = node.meta["val"]  # its global sizes; no types: a checker has to find out
    for user in [u for u in node.users if is_wait(u.target)] or [node]:
        user.replace_all_uses_with(new)


def _keep(graph: fx.Graph, x: fx.Node, dim, size) -> fx.Node:
    return graph.call_function(aten.clone.default, (x,))


def _repeat(graph: fx.Graph, x: fx.Node, dim, size) -> fx.Node:
    """Each rank takes its own part for everyone's."""
    return graph.call_function(aten.cat.default, ([x] * size, dim))


def _first(graph: fx.Graph, x: fx.Node, dim, size) -> fx.Node:
    """Every rank takes the first rank's part."""
    chunks = graph.call_function(torch.chunk, (x, size, dim))
    return graph.call_function(_item, (chunks,))


def _item(chunks):
    return chunks[0]


def _own_counts(graph: fx.Graph, x: fx.Node, dim, size) -> fx.Node:
    return graph.call_function(aten.reshape.default, (x, [size, -1]))


DROPS: dict[str, Callable[[fx.Node], None]] = {
    kind: lambda n, make=make: _instead(n, make)
    for kinds, make in (
        (("i_to_r", "p_to_i", "p_to_r", "all_to_all", "all_to_all_equal"), _keep),
        (("s_to_r", "s_to_i", "s_to_p"), _repeat),
        (("i_to_s", "r_to_s", "p_to_s"), _first),
        (("exchange_counts",), _own_counts),
    )
    for kind in kinds
}


def wrong_duals(program: Program) -> Iterator[tuple[str, dict[str, Collective]]]:
    """Tables in which one kind that carries gradients in this program has another kind's backward."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and n.meta.get("grad")]
    used = {entry.kind for n in calls if (entry := collective(n.target))}
    for kind in sorted(used):
        for other in TABLE:
            if not TABLE[kind].dual or other == TABLE[kind].dual or not _interchangeable(TABLE[kind].dual, other):
                continue
            yield f"the dual of {kind} is {other}", {**TABLE, kind: replace(TABLE[kind], dual=other)}


def _interchangeable(dual: str, other: str) -> bool:
    """Another movement of data, of the same signature.  Kinds that move alike are one backward."""
    a, b = TABLE[dual].primitive, TABLE[other].primitive
    return a != b and not {a, b} & {"exchange", "equal", "counts", "all_to_all", "all_reduce_max", "carry", *FUSED}
