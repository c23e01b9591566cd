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
from heapq import heapify, heappop

import torch
from torch import fx

from moec.passes.overlap.listing import Times
from moec.passes.overlap.tasks import Tasks
from moec.runtime.collectives import is_wait

SURELY = 4


def order(nodes: Sequence[fx.Node], tasks: Tasks, times: Times) -> list[fx.Node]:
    out = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    writer = _Writer(out)
    sequence = sorted(range(len(tasks.nodes)), key=lambda i: (times.start[i], times.end[i], i))  # 1
    final = tasks.final()
    over = [(times.end[j] + SURELY * tasks.seconds[j], s) for s, j in tasks.job.items() if s in final]
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
    def __init__(self, out: list[fx.Node]) -> None:
        self.out = out
        self.written = set(out)

    def write(self, node: fx.Node) -> None:
        """``node``, and before it what it reads and has not been written: views and waits."""
        todo = [node]
        while todo:
            now = todo[-1]
            if now in self.written:
                todo.pop()
                continue
            missing = [a for a in now.all_input_nodes if a not in self.written]
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
        for user in node.users:
            alone = all(a in self.written for a in user.all_input_nodes)
            if user not in self.written and alone and (user.target is operator.getitem or _is_number(user)):
                self._append(user)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), (int, torch.SymInt))
