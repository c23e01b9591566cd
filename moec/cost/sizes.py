"""Sizes: numbers for the symbolic sizes of a program's graphs, from the sizes of its inputs.

What depends on data (rows that the routing deals out) is taken as under uniform routing.  A dispatcher that does not
move a row for each pair has noted on the exchange how many rows a token is expected to be on this way
(``meta["moves"]``); any other exchange brings as many rows as it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from moec.program import Program
from moec.runtime.collectives import is_start
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import expr

SMALL = (2, 16)
"""Sequences of a rank, and tokens of one, where nobody says."""


class Sizes:
    """``values``: numbers by the symbol's name.  ``dp``: on how many ranks the batch lies, whose symbols ``batch`` are.

    Anything without a number counts as ``unknown`` (1)."""

    def __init__(
        self, values: Mapping[str, int], batch: frozenset[str] = frozenset(), mesh: Mesh | None = None
    ) -> None:
        self.values = dict(values)
        self.batch, self.mesh = batch, mesh or Mesh()
        self._known: dict[sympy.Expr, int] = {}

    @staticmethod
    def of(
        program: Program, sizes: Mapping[str, tuple[int, ...]] | None = None, graphs: Iterable[fx.Graph] = ()
    ) -> Sizes:
        """``sizes``: *local* sizes of the inputs by path; what is not given is 2 sequences of 16.  ``graphs``: those
        whose data-dependent sizes are asked for, in the order in which they run."""
        values: dict[str, int] = {}
        for node in program.placeholders():
            spec = program.inputs.get(node.name)
            if spec is None:
                continue
            given = (sizes or {}).get(spec.path)
            for d, s in enumerate(node.meta["val"].shape):
                n, symbol = expr(s).as_coeff_Mul()  # a sequence that n ranks share is recorded as n * t
                if symbol.is_Symbol:
                    small = SMALL[0] if str(symbol) in program.batch_symbols else -(-SMALL[1] // int(n))
                    values[str(symbol)] = given[d] // int(n) if given else small
        found = Sizes(values, program.batch_symbols, program.mesh)
        for graph in graphs:
            found.learn(graph.nodes)
        return found

    def knows(self, size: int | torch.SymInt) -> bool:
        return all(str(s) in self.values for s in expr(size).free_symbols)

    def number(self, size: int | torch.SymInt | sympy.Expr) -> int:
        if isinstance(size, int):
            return size
        e = size if isinstance(size, sympy.Expr) else expr(size)
        if e not in self._known:
            self._known[e] = int(e.subs({s: self.values.get(str(s), 1) for s in e.free_symbols}))
        return self._known[e]

    def everywhere(self) -> Sizes:
        """For sizes that are recorded globally: those of the batch are of all ranks together."""
        dp = self.mesh.size(self.mesh.role("dp"))
        return Sizes({s: n * dp if s in self.batch else n for s, n in self.values.items()}, self.batch, self.mesh)

    def shape(self, val: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.number(s) for s in val.shape)

    def bytes(self, val: Any) -> int:
        """Of a recorded value: a tensor, or several; what is no tensor has none."""
        if isinstance(val, torch.Tensor):
            return prod(self.shape(val)) * val.dtype.itemsize
        return sum(map(self.bytes, val)) if isinstance(val, (tuple, list)) else 0

    # ------------------------------------------------------------------------------------------- data-dependent sizes
    def learn(self, nodes: Iterable[fx.Node]) -> None:
        """Numbers for the sizes that these nodes introduce."""
        whole = self.everywhere()
        for node in nodes:
            if node.op != "call_function":
                continue
            for val in _tensors(node.meta.get("val")):
                for size in val.shape:
                    e = expr(size)
                    if e.is_Symbol and str(e) not in self.values:
                        self.values[str(e)] = self._rows(node, whole)

    def _rows(self, node: fx.Node, whole: Sizes) -> int:
        """Rows of what ``node`` makes, a number that depends on data."""
        exchange = _exchange(node)
        if exchange is not None:
            tokens, rows = exchange.meta["moves"]
            dealt = self.mesh.size([a for a, t in exchange.meta["types"].items() if t.kind == "V"])
            if exchange is not node:  # experts of tokens that came with their ids: pairs, not tokens
                rows = node.args[1].meta["val"].shape[1]
            return round(whole.number(tokens) * rows / dealt)
        source = next((v for a in node.all_input_nodes for v in _tensors(a.meta.get("val")) if v.ndim), None)
        return 1 if source is None else self.number(source.shape[0])


def _exchange(node: fx.Node) -> fx.Node | None:
    """The exchange that says how many rows ``node`` has: itself, or the one that brought the ids of its pairs."""
    if "moves" in node.meta:
        return node
    if is_start(node.target) or len(node.args) < 2 or not isinstance(node.args[1], fx.Node):
        return None
    at: Any = node.args[1]
    while isinstance(at, fx.Node) and at.args:
        if is_start(at.target):
            return at if "moves" in at.meta else None
        at = at.args[0]
    return None


def _tensors(val: Any) -> list[torch.Tensor]:
    return [v for v in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(v, torch.Tensor)]
