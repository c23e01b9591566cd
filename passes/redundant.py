"""redundant: conversions that say again what is known, or that undo each other, go.

Contract
    requires   sharded
    provides   irredundant: no value is converted twice alike, no conversion undoes the one before it
    preserves  values, forward and backward, and the type of everything that an op reads
    never      reorders the collectives that stay, or makes one that moves more

Why it is right: a conversion A → B changes how a value lies on the ranks of a group, not what it means, and its
backward is its adjoint.  Equal conversions of one value are one linear map, so their gradients may be added before its
adjoint.  A → B followed by B → C over the same group means what A → C means, forward and (C's gradient to A's)
backward; where A is C, that is the value itself.  (Of a pending sum the addends may then differ, never the sum.)

Algorithm, until nothing changes:

1. Equal: a conversion of a value by the same kind, dims and group as an earlier one reads that one's result.
2. In a row: a conversion of a conversion's result over the same group becomes the value itself, or the one conversion
   of the table that goes all the way, if that moves less (forward and backward) and nothing else reads what is between.
3. What nobody reads any more goes.

Without a gradient I and R are one type.
"""

from __future__ import annotations

from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import CONVERSIONS, PRIMITIVES, TABLE, Collective, collective, is_wait
from moec.runtime.torch_compat import WAIT

End = tuple[str, int]
"""A type's letter, and the dim of S (-1 for others)."""


def _run(program: Program, plan: Plan) -> Program:
    graph = program.graph
    _sweep(graph)
    while _equal(graph) | _in_a_row(graph):  # both, every time
        _sweep(graph)
    graph.lint()
    program.module.recompile()
    return program


def _conversions(graph: fx.Graph) -> list[tuple[fx.Node, Collective]]:
    calls = ((n, collective(n.target)) for n in graph.nodes if n.op == "call_function")
    return [(n, c) for n, c in calls if c is not None and c.kind in CONVERSIONS]


def _result(node: fx.Node) -> fx.Node:
    """The node whose value others read: the wait of a start."""
    return next((u for u in node.users if is_wait(u.target)), node)


def _maker(value: fx.Node) -> fx.Node:
    """The node that ``value`` is the result of."""
    return value.args[0] if is_wait(value.target) else value


def _ends(node: fx.Node, entry: Collective) -> tuple[End, End]:
    """The types that a conversion goes from and to."""
    dims = {"s_to_s": node.args[1:3]}.get(entry.kind, (node.args[1], node.args[1]))
    rank = max(node.meta["val"].ndim, 1)
    source, dest = ((t, d % rank if t == "S" else -1) for t, d in zip((entry.source, entry.dest), dims, strict=True))
    if not node.args[0].meta["grad"]:
        source, dest = (("R", -1) if t[0] == "I" else t for t in (source, dest))
    return source, dest


def _sweep(graph: fx.Graph) -> None:
    """Step 3.  To torch a wait has a side effect, so that no general pass removes one; a conversion has none."""
    graph.eliminate_dead_code()
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            made = collective(_maker(node).target)
            if made is not None and made.kind in CONVERSIONS:
                graph.erase_node(node)
    graph.eliminate_dead_code()


def _equal(graph: fx.Graph) -> bool:
    """Step 1."""
    first: dict[tuple, fx.Node] = {}
    changed = False
    for node, entry in _conversions(graph):
        known = first.setdefault((node.args[0], *_ends(node, entry), node.args[-1]), node)
        # A conversion that has no reader left is only waiting for step 3.
        if known is not node and _result(node).users:
            _result(node).replace_all_uses_with(_result(known))
            changed = True
    return changed


def _in_a_row(graph: fx.Graph) -> bool:
    """Step 2."""
    changed = False
    for node, entry in _conversions(graph):
        between = node.args[0]
        before = _maker(between)
        made = collective(before.target) if before.op == "call_function" else None
        if made is None or made.kind not in CONVERSIONS or before.args[-1] != node.args[-1] or not _result(node).users:
            continue
        (start, middle), (source, end) = _ends(before, made), _ends(node, entry)
        if middle != source:  # the same letter on another dim
            continue
        if start == end:
            _result(node).replace_all_uses_with(before.args[0])
            changed = True
        elif len(between.users) == 1 and (kind := _straight(start, end, made, entry, node.args[-2])):
            _go_straight(graph, node, before, kind, start, end)
            changed = True
    return changed


def _straight(start: End, end: End, made: Collective, entry: Collective, size: int) -> str | None:
    """The kind that goes all the way and moves less than both, None without one."""
    kind = f"{start[0]}_to_{end[0]}".lower()
    if kind not in TABLE:
        return None
    return kind if _moved(TABLE[kind], size) < _moved(made, size) + _moved(entry, size) else None


def _moved(c: Collective, size: int) -> float:
    """How often a ring moves the whole tensor for it, forward and backward; an all-to-all moves a rank's part."""
    used = (c.primitive, TABLE[c.dual].primitive)
    return sum((PRIMITIVES[p] or 0) / (size if p == "all_to_all" else 1) for p in used)


def _go_straight(graph: fx.Graph, node: fx.Node, before: fx.Node, kind: str, start: End, end: End) -> None:
    x, (size, group) = before.args[0], node.args[-2:]
    dim = start[1] if start[0] == "S" else max(end[1], 0)
    args = (x, dim, end[1], size, group) if kind == "s_to_s" else (x, dim, size, group)
    with graph.inserting_before(node):
        new = graph.call_function(TABLE[kind].op, args)
        new.meta.update(node.meta)
        result = new
        if TABLE[kind].needs_wait:
            result = graph.call_function(WAIT, (new,))
            result.meta.update(node.meta)
    _result(node).replace_all_uses_with(result)


CONTRACT = PassContract(
    name="redundant",
    requires=frozenset({"sharded"}),
    provides=frozenset({"irredundant"}),
    conflicts_with=frozenset({"lowered"}),
)
redundant = Pass(CONTRACT, _run)
