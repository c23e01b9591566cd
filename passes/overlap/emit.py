"""From the times of tasks to an order of all nodes.

1. Tasks in the order in which compute runs them.
2. Views and waits come right before the first that reads them: a wait is as late as it may be.  That of a gradient's
   reduction comes earlier if the transfer should have been over for ``SURELY`` times as long as it takes: then it costs
   nothing even if the link is slower than expected, and what was sent can go.
3. Parts of a tuple, and sizes, come right behind what has them, so that the tuple can go.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop

import torch
from torch import fx

from moec.passes.overlap.listing import Times
from moec.passes.overlap.tasks import Tasks
from moec.runtime.collectives import is_wait

SURELY = 4


@dataclass(frozen=True)
class Links:
    """What ties the nodes of a graph to each other; all orders of it have the same."""

    nodes: Sequence[fx.Node]
    operands: dict[fx.Node, tuple[fx.Node, ...]]
    parts: dict[fx.Node, tuple[fx.Node, ...]]
    """Node -> parts of it, and sizes of it."""

    @staticmethod
    def of(nodes: Sequence[fx.Node]) -> Links:
        parts = {n: tuple(u for u in n.users if u.target is operator.getitem or _is_number(u)) for n in nodes}
        return Links(nodes, {n: tuple(n.all_input_nodes) for n in nodes}, parts)


def order(links: Links, tasks: Tasks, times: Times) -> list[fx.Node]:
    nodes = links.nodes
    out = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    writer = _Writer(links, out)
    sequence = sorted(range(len(tasks.nodes)), key=lambda i: (times.start[i], times.end[i], i))  # 1
    over = [(times.end[j] + SURELY * tasks.seconds[j], s) for s, j in tasks.job.items() if s in tasks.final]
    heapify(over)
    for node in list(out):
        writer.parts_of(node)
    for task in sequence:
        while over and over[0][0] <= times.start[task]:
            writer.wait_for(tasks.nodes[heappop(over)[1]])
        writer.write(tasks.nodes[task])
    writer.write(nodes[-1])  # the output
    writer.rest(nodes)
    return out


class _Writer:
    def __init__(self, links: Links, out: list[fx.Node]) -> None:
        self.links, self.out = links, out
        self.written = set(out)

    def write(self, node: fx.Node) -> None:
        """``node``, and before it what it reads and has not been written: views and waits."""
        todo = [node]
        while todo:
            now = todo[-1]
            if now in self.written:
                todo.pop()
                continue
            missing = [a for a in self.links.operands[now] if a not in self.written]
            todo += reversed(missing)
            if not missing:
                todo.pop()
                self._append(now)

    def wait_for(self, start: fx.Node) -> None:
        for user in start.users:
            if is_wait(user.target) and start in self.written:
                self.write(user)

    def rest(self, nodes: Sequence[fx.Node]) -> None:
        """What nothing reads, in front of the output."""
        output = self.out.pop()
        for node in nodes:
            if node.op != "output":
                self.write(node)
        self.out.append(output)

    def _append(self, node: fx.Node) -> None:
        self.written.add(node)
        self.out.append(node)
        self.parts_of(node)

    def parts_of(self, node: fx.Node) -> None:
        for part in self.links.parts[node]:
            if part not in self.written and self.written.issuperset(self.links.operands[part]):
                self._append(part)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), (int, torch.SymInt))
