"""Storages: which memory the values of a graph lie in, and what is alive at a time.

A view lies where its operand does, and so does what a wait returns; placeholders may share memory, or lie in a
parameter's, which is always there (``meta["lies_in"]``, see ``passes/joint/storages.py``).  Memory of an operand that a
start reads is alive until the wait: the backend still sends from it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from moec.cost.operations import is_view
from moec.cost.sizes import Sizes
from moec.runtime.collectives import is_start, is_wait


class Storages:
    """Of every node in ``nodes`` (in any order in which operands come first).

    ``bytes``: by storage.  ``made[node]``: the storages that it allocates.  ``read[node]``: those that it needs alive,
    of a wait also those of the collective that it waits for."""

    def __init__(self, nodes: Iterable[fx.Node], sizes: Sizes) -> None:
        self.bytes: list[int] = []
        self.made: dict[fx.Node, tuple[int, ...]] = {}
        self.read: dict[fx.Node, frozenset[int]] = {}
        self._of: dict[fx.Node, tuple[int, ...]] = {}
        """Storages of a node's value, one for each tensor of it."""
        self.parameters: set[int] = set()
        """Storages of parameters that a placeholder is a view of."""
        starts: dict[int, fx.Node] = {}
        shared: dict[Any, int] = {}  # by what ``lies_in`` says
        for node in nodes:
            operands = [s for a in node.all_input_nodes for s in self._of.get(a, ())]
            self.made[node] = ()
            if node.op == "output":
                self._of[node] = tuple(operands)
            elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                whole = self._of.get(node.args[0], ())
                one = isinstance(node.args[1], int) and node.args[1] < len(whole) > 1
                self._of[node] = (whole[node.args[1]],) if one else whole
            elif node.op == "call_function" and (is_wait(node.target) or is_view(node)):
                self._of[node] = tuple(operands[:1])
            elif (where := node.meta.get("lies_in")) is not None and where in shared:
                self._of[node] = (shared[where],)
                self.bytes[shared[where]] = max(self.bytes[shared[where]], sizes.bytes(node.meta.get("val")))
            else:
                self.made[node] = self._of[node] = tuple(
                    self._new(sizes.bytes(v)) for v in _tensors(node.meta.get("val"))
                )
                if where is not None:
                    shared[where] = self._of[node][0]
                    if isinstance(where, str):
                        self.parameters.add(shared[where])
            read = set(operands)
            if is_start(node.target):
                starts.update(dict.fromkeys(self._of[node], node))
            elif is_wait(node.target):
                for s in list(read):
                    if s in starts:
                        read |= self.read[starts[s]]
            self.read[node] = frozenset(read)

    def _new(self, nbytes: int) -> int:
        self.bytes.append(nbytes)
        return len(self.bytes) - 1

    def of(self, node: fx.Node) -> tuple[int, ...]:
        """The storages that a node's value lies in."""
        return self._of[node]

    def profile(self, order: Sequence[fx.Node], kept: Collection[fx.Node] = ()) -> list[int]:
        """Bytes that are alive while each node of ``order`` runs, results included.

        Everything lives from the node that makes it (a placeholder's from the beginning) to the last one that reads it,
        and what ``kept`` have (parameters, results of the graph), and parameters, to the end."""
        forever = {s for n in kept for s in self._of[n]} | self.parameters
        left = Counter(s for n in order for s in self.read[n])
        first = [s for n in order if n.op == "placeholder" for s in self.made[n]]
        alive = set(first)
        total, found = sum(self.bytes[s] for s in alive), []
        for node in order:
            for s in self.made[node]:
                if s not in alive:
                    alive.add(s)
                    total += self.bytes[s]
            found.append(total)
            done = set(self.made[node] if node.op != "placeholder" else ()) | self.read[node]
            left.subtract(self.read[node])
            for s in done:
                if left[s] <= 0 and s in alive and s not in forever:
                    alive.remove(s)
                    total -= self.bytes[s]
        return found


def _tensors(val: Any) -> list[torch.Tensor]:
    return [v for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)]
