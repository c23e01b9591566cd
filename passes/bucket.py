"""bucket: gradient reductions, and gathers and reduce-scatters of parameters, merged into buckets.

Contract
    requires   a graph of ``joint`` with reductions as nodes and groups by purpose
    provides   fewer, larger collectives, in one order on every rank
    preserves  values; of sums over three ranks and more, a backend may add in another order
    never      merges over groups, dtypes or kinds; delays a gather behind its use, or a sum before its operands

Algorithm
    1. Candidates are starts for gradients (``#gradients``) and parameters (``#parameters``), of one kind, group and
       dtype, in the order of the graph.  What lies between a reduction and the output moves behind the bucket; a
       reduction that anything else reads is left alone.
    2. A bucket takes the next candidate while it stays within its size.  One as large as a bucket stays alone, and the
       small ones around it share one.
    3. It becomes pack → collective → wait → unpack: at the place of the first gather, and behind what the last
       reduction reads.

How large: a collective takes ``alpha + bytes / beta``.  By the cost model a bucket is as small as keeps ``alpha`` to a
``LATENCY`` th of its time: the first is under way early, and the last, which nothing covers, is short.  For the same
reason it has no more than a ``SHARES`` th of all bytes, unless it takes less than ``alpha`` anyway.

If all of a tiny model fit one such bucket, that may be right (a bucket more is a latency more, which others on the
link wait for) or wrong (what is needed first waits for the rest, and nothing runs meanwhile). So there is another
way, and whoever schedules takes the faster one. The next bucket begins where computing takes ``alpha`` since the
first use of the last (of sums: since its first operand), which hides its latency, if the bytes on either side take
longer than a bucket costs compute (to pack, start and unpack it).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import fx

from moec.passes.overlap.tasks import Costs
from moec.runtime.collectives import collective, group_of, is_start, is_wait
from moec.runtime.mesh import GRADIENTS, PARAMETERS
from moec.runtime.ops.pack import flatten_shapes
from moec.runtime.torch_compat import WAIT

pack, unpack = torch.ops.moec.pack.default, torch.ops.moec.unpack.default
LATENCY, SHARES = 20, 8
PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter")


def buckets(graph: fx.Graph, costs: Costs, megabytes: float | Literal["auto"]) -> list[fx.Graph]:
    """Copies of the graph with merged collectives: one, or two of which the faster is to be taken."""
    ways = [bucket(graph, costs, megabytes)]
    if megabytes != "auto" or not all(_fits(starts, costs) for starts in _candidates(graph).values()):
        return ways  # a model that is not tiny: to schedule it twice takes long, and little would be gained
    ways.append(bucket(graph, costs, megabytes, apart=True))
    return ways[:1] if str(ways[0]) == str(ways[1]) else ways


def bucket(whole: fx.Graph, costs: Costs, megabytes: float | Literal["auto"], apart: bool = False) -> fx.Graph:
    """A copy of the graph with merged collectives.  ``apart``: what fits one bucket (all do) may be several."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(whole, {}))
    for key, starts in _candidates(graph).items():  # 1
        limit = _limit(starts, costs) if megabytes == "auto" else int(megabytes * 1e6)
        parts = [starts]
        if apart:
            parts = _apart(starts, costs, _computed(graph, costs))
        for members in (m for part in parts for m in _fill(part, limit)):  # 2
            if len(members) > 1:
                _Bucket(graph, key[0], members).merge()  # 3
    _sort(graph)
    graph.lint()
    return graph


def _limit(starts: list[fx.Node], costs: Costs) -> int:
    alpha, beta = _link(starts, costs)
    share = sum(map(_bytes, starts)) / SHARES
    return int(min(LATENCY * alpha * beta, max(share, alpha * beta)))


def _fits(starts: list[fx.Node], costs: Costs) -> bool:
    """Are all of them one bucket?"""
    return sum(map(_bytes, starts)) <= _limit(starts, costs)


def _link(starts: list[fx.Node], costs: Costs) -> tuple[float, float]:
    """Its alpha and beta."""
    return costs.cluster.link(costs.link(starts[0])).of(collective(starts[0].target).primitive)  # type: ignore[union-attr]


def _computed(graph: fx.Graph, costs: Costs) -> dict[fx.Node, float]:
    """Start -> seconds of compute before what is gathered is first used, or before what is summed is there."""
    before: dict[fx.Node, float] = {}
    total = 0.0
    for node in graph.nodes:
        before[node] = total
        total += 0.0 if is_start(node.target) else costs.seconds(node)

    def used(node: fx.Node) -> float:
        """Views and parts of a value are no use of it."""
        uses = (before[u] if costs.seconds(u) or is_start(u.target) else used(u) for u in node.users)
        return min(uses, default=total)

    starts = {n: collective(n.target).primitive for n in before if is_start(n.target)}  # type: ignore[union-attr]
    return {n: used(n) if primitive == "all_gather" else before[n] for n, primitive in starts.items()}


def _apart(starts: list[fx.Node], costs: Costs, at: dict[fx.Node, float]) -> list[list[fx.Node]]:
    """Cut where a latency is hidden by what is computed between them."""
    alpha, beta = _link(starts, costs)
    ordered = sorted(starts, key=at.__getitem__)  # as they are used; of equal ones the order of the graph
    gap = max(alpha, (at[ordered[-1]] - at[ordered[0]]) / SHARES)
    least = beta * (costs.launch + 2 * costs.cluster.op_overhead_s)
    parts, left = [[ordered[0]]], sum(map(_bytes, ordered))
    for before, start in pairwise(ordered):
        left -= _bytes(before)
        if at[start] - at[parts[-1][0]] >= gap and min(left, sum(map(_bytes, parts[-1]))) >= least:
            parts.append([])
        parts[-1].append(start)
    return [sorted(p, key=starts.index) for p in parts]


def _bytes(start: fx.Node) -> int:
    entry, (taken, given) = collective(start.target), (_val(start.args[0]), _val(start))
    return entry.tensor_bytes(*(v.numel() * v.dtype.itemsize for v in (taken, given)))  # type: ignore[union-attr]


def _val(node) -> torch.Tensor:
    return node.meta["val"]


# -- 1


def _candidates(graph: fx.Graph) -> dict[tuple, list[fx.Node]]:
    found: dict[tuple, list[fx.Node]] = defaultdict(list)
    last = _last(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not is_start(node.target):
            continue
        primitive = collective(node.target).primitive  # type: ignore[union-attr]
        if primitive not in PRIMITIVES or group_of(node).partition("#")[2] not in (GRADIENTS, PARAMETERS):
            continue
        movable = len(node.users) == 1 and (primitive == "all_gather" or node in last)
        if movable and _plain(node) and _plain(node.args[0]):
            found[node.target, group_of(node), _val(node).dtype].append(node)
    return found


def _plain(node: fx.Node) -> bool:
    """Of a size that is known, and laid out as what is unpacked will be."""
    val = _val(node)
    return val.ndim > 0 and all(isinstance(n, int) for n in val.shape) and val.is_contiguous()


def _last(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that lead to no communication but reductions of gradients: they may move to the end of the graph."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        ends = all(u in found and (not is_start(u.target) or group_of(u).endswith(GRADIENTS)) for u in node.users)
        if node.op == "output" or (node.users and ends):
            found.add(node)
    return found


# -- 2


def _fill(starts: list[fx.Node], limit: int) -> Iterator[list[fx.Node]]:
    members: list[fx.Node] = []
    total = 0
    for start in starts:
        size = _bytes(start)
        if size >= limit:
            yield [start]
            continue
        if members and total + size > limit:
            yield members
            members, total = [], 0
        members.append(start)
        total += size
    if members:
        yield members


# -- 3


@dataclass
class _Bucket:
    graph: fx.Graph
    op: object
    members: list[fx.Node]

    def merge(self) -> None:
        first = self.members[0]
        gathers = collective(first.target).primitive == "all_gather"  # type: ignore[union-attr]
        sums = collective(first.target).primitive == "all_reduce"  # type: ignore[union-attr]
        size, key = first.args[-2:]
        sources = [s.args[0] for s in self.members]
        dims = [0 if sums else s.args[1] for s in self.members]
        waits = [next(iter(s.users)) for s in self.members]
        parts = size if not gathers and not sums else 1  # into how many each tensor is cut
        self.where = first.meta.get("where", "")
        elements = sum(_val(x).numel() for x in sources)
        flat_val = _val(sources[0]).new_empty((elements,))
        done_val = flat_val.new_empty((sum(_val(w).numel() for w in waits),))
        if gathers:
            for source in sources:
                _hoist(source, first)
        with self.graph.inserting_before(first if gathers else self.members[-1]):
            flat = self._call(pack, (sources, parts, dims), flat_val)
            start = self._call(self.op, (flat, 0, size, key), done_val)
            start.meta["bucket"] = tuple(s.meta.get("where", "") for s in self.members)  # for people
            wait = self._call(WAIT, (start,), done_val)
            whole = size if gathers else 1
            shapes = flatten_shapes([list(_val(w).shape) for w in waits])
            out = self._call(unpack, (wait, whole, dims, shapes), [_val(w) for w in waits])
            results = [self._call(operator.getitem, (out, i), _val(w)) for i, w in enumerate(waits)]
        for old, new in zip(waits, results, strict=True):
            assert is_wait(old.target)
            old.replace_all_uses_with(new)
        for wait_, start_ in zip(waits, self.members, strict=True):
            self.graph.erase_node(wait_)
            self.graph.erase_node(start_)

    def _call(self, target, args: tuple, val) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(val=val, where=self.where)
        return node


def _hoist(node: fx.Node, before: fx.Node) -> None:
    """Put what makes ``node`` of parameters in front of ``before``."""
    if node.op == "call_function" and before < node:
        for operand in node.all_input_nodes:
            _hoist(operand, before)
        before.prepend(node)


def _sort(graph: fx.Graph) -> None:
    """Operands before what reads them again, otherwise the order stays: readers of a bucket move behind it."""
    done: set[fx.Node] = set()
    late: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # operand that is missing -> who waits for it

    def settle(node: fx.Node, after: fx.Node | None) -> fx.Node | None:
        """Note that ``node`` is in place, and put behind it whoever waited for it alone."""
        done.add(node)
        for reader in late.pop(node, ()):
            missing = next((a for a in reader.all_input_nodes if a not in done), None)
            if missing is not None:
                late[missing].append(reader)
                continue
            (after or node).append(reader)
            after = settle(reader, reader)
        return after or node

    for node in list(graph.nodes):
        missing = next((a for a in node.all_input_nodes if a not in done), None)
        if missing is None:
            settle(node, None)
        else:
            late[missing].append(node)
