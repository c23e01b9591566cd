"""bundle: small all-reduces that do not depend on each other become one.

Contract
    requires   sharded
    provides   bundled
    preserves  values, bit for bit: the same numbers are summed over the same ranks, side by side
    never      touches a large or ragged value, nor lets anything cross the boundary of a repeated layer

Counts of tokens, sums for a balancing loss, numbers of labels: each takes a whole collective's latency for a few bytes.

Algorithm
    1. Candidates: P→I and P→R of values that no axis shards, of at most ``SMALL`` elements, their number known.
    2. The level of a candidate is one more than the highest that it depends on.  Those of one level, kind, group, dtype
       and types become reshape → cat → one collective → split → reshape, in the place of the last of them.  Within a
       level none depends on another, and bundles depend on bundles of lower levels only: no cycle can arise.
    3. What used the first ones moves behind the bundle: a stable topological sort.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict

import torch
from torch import fx

from moec.passes.contract import Pass, PassContract
from moec.placement import Types
from moec.plan import Plan
from moec.program import Program
from moec.runtime.collectives import collective, group_of
from moec.runtime.torch_compat import WAIT

aten = torch.ops.aten
BOUNDARY = torch.ops.moec.boundary.default
KINDS = ("p_to_i", "p_to_r")
SMALL = 4096
"""Elements.  A collective of so few takes its latency, whatever their number."""


def _run(program: Program, plan: Plan) -> Program:
    bundles: dict[tuple, list[fx.Node]] = defaultdict(list)
    for start, level in _candidates(program):
        of = start.meta["val"].dtype, start.meta["grad"], str((start.args[0].meta["types"], start.meta["types"]))
        bundles[level, start.target, group_of(start), *of].append(start)
    joined = [b for b in bundles.values() if len(b) > 1]
    for bundle in joined:
        _join(program, bundle)  # 2
    if joined:
        _sort(program.graph)  # 3
    program.graph.lint()
    program.module.recompile()
    return program


def _candidates(program: Program) -> list[tuple[fx.Node, int]]:
    """Starts and their levels, in graph order."""
    boundaries = program.graph.find_nodes(op="call_function", target=BOUNDARY)
    behind = not boundaries
    levels: dict[fx.Node, int] = {}
    found = []
    for node in program.graph.nodes:
        level = max((levels[n] for n in node.all_input_nodes), default=0)
        if behind and _is_small(node):  # 1
            level += 1
            found.append((node, level))
        levels[node] = level
        behind = behind or node is boundaries[-1]
    return found


def _is_small(node: fx.Node) -> bool:
    entry = collective(node.target) if node.op == "call_function" else None
    if entry is None or entry.kind not in KINDS:
        return False
    shape = node.meta["val"].shape
    whole = not any(t.sharded for t in (node.meta["types"] | node.args[0].meta["types"]).values())
    return whole and all(isinstance(n, int) for n in shape) and torch.Size(shape).numel() <= SMALL


def _join(program: Program, starts: list[fx.Node]) -> None:
    graph, last = program.graph, starts[-1]
    size, group = last.args[2:]
    where, grad = last.meta["where"], last.meta["grad"]
    waits = [next(iter(s.users)) for s in starts]

    def call(target, args: tuple, val, types: Types | list[Types]) -> fx.Node:
        out = graph.call_function(target, args)
        out.meta.update(val=val, types=types, where=where, grad=grad)
        return out

    pending, whole = last.args[0].meta["types"], last.meta["types"]
    lengths = [s.meta["val"].numel() for s in starts]
    with graph.inserting_before(last):
        flats = [
            call(aten.reshape.default, (s.args[0], [n]), s.meta["val"].new_empty((n,)), dict(s.args[0].meta["types"]))
            for s, n in zip(starts, lengths, strict=True)
        ]
        val = last.meta["val"].new_empty((sum(lengths),))
        flat = call(aten.cat.default, (flats, 0), val, dict(pending))
        done = call(WAIT, (call(last.target, (flat, 0, size, group), val, dict(whole)),), val, dict(whole))
        parts = call(
            aten.split_with_sizes.default, (done, lengths), [val.new_empty((n,)) for n in lengths],
            [dict(whole) for _ in lengths],
        )  # fmt: skip
        for i, (wait, n) in enumerate(zip(waits, lengths, strict=True)):
            part = call(operator.getitem, (parts, i), val.new_empty((n,)), dict(whole))
            shaped = call(aten.reshape.default, (part, list(wait.meta["val"].shape)), wait.meta["val"], dict(whole))
            wait.replace_all_uses_with(shaped)
    for start, wait in zip(starts, waits, strict=True):
        graph.erase_node(wait)
        graph.erase_node(start)


def _sort(graph: fx.Graph) -> None:
    """Every node behind its operands; apart from that in the order that they are in."""
    order = list(graph.nodes)
    index = {n: i for i, n in enumerate(order)}
    waiting = {n: len(n.all_input_nodes) for n in order}
    ready = [i for i, n in enumerate(order) if not waiting[n]]
    heapq.heapify(ready)
    last: fx.Node | None = None
    while ready:
        node = order[heapq.heappop(ready)]
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, index[user])


CONTRACT = PassContract(
    name="bundle",
    requires=frozenset({"sharded"}),
    provides=frozenset({"bundled"}),
    conflicts_with=frozenset({"bundled", "fsdp", "lowered"}),
)
bundle = Pass(CONTRACT, _run)
