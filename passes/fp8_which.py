"""Which products compute in FP8 (part of ``cast_fp8``): linears by a parameter, and experts' products.

Stays out, with a reason in ``why_not``: what ``Precision.exclude`` names, routers, the head, what has no parameter,
what is not differentiable in FP8 on this layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from moec.passes.shard.rule import differentiable
from moec.passes.shard.rules import is_creation
from moec.placement import R
from moec.plan import matches
from moec.precision import Precision
from moec.program import PENDING, Program, op_name
from moec.runtime.collectives import collective, is_wait

ROUTES = ("moec.route", "moec.route_counted")
VIEWS = ("aten.reshape", "aten._to_copy", "aten.transpose", "aten.t", "getitem", "moec.unpack", "moec.pack")


class Which:
    """``linears``: in graph order; ``experts``: counts of rows -> products over these rows, in graph order."""

    def __init__(self, program: Program, precision: Precision) -> None:
        self.program = program
        products = [n for n in program.graph.nodes if op_name(n) in ("aten.linear", "moec.grouped_mm")]
        # By their parameters: tokens in chunks have a product each.
        weighted = [name for n in products if (name := self.parameter(n.args[1])) is not None]
        self.last = weighted[-1] if weighted else None
        ends = {name: word for word, at in (("first", weighted[:1]), ("last", weighted[-1:])) for name in at}
        self.linears: list[fx.Node] = []
        self.experts: dict[fx.Node, list[fx.Node]] = {}
        for node in products:
            reason = self._reason(node, precision, ends)
            if reason is not None:
                program.why_not.append(f"{self._where(node)}: {op_name(node)} is not FP8: {reason}")
            elif op_name(node) == "aten.linear":
                self.linears.append(node)
            else:
                self.experts.setdefault(node.args[2], []).append(node)

    def _where(self, node: fx.Node) -> str:
        name = self.parameter(node.args[1])
        return self.program.params[name].name.rpartition(".")[0] if name else node.meta.get("where", "")

    def _reason(self, node: fx.Node, precision: Precision, ends: dict[str, str]) -> str | None:
        name = self.parameter(node.args[1])
        if name is None:
            return "its weight is no parameter"
        spec = self.program.params[name]
        if any(u.startswith(ROUTES) for u in self._readers(node)):
            return "it is a router"
        if self._is_head(name):
            return "it is the head"
        for pattern in precision.exclude:
            if pattern == ends.get(name):
                return f"it is the {pattern} product"
            if any(matches(pattern, name) for name in (spec.name, *spec.members, *spec.aliases)):
                return f"{pattern!r} excludes it"
        if node.args[0].meta["val"].ndim < 2 or spec.shape[0] == 1:
            return "it is a product with one vector"
        types = node.meta.get("types") or {}
        pending = [a for a, t in types.items() if t == R and node.meta["grad"]]
        delayed = precision.fp8 == "delayed"  # with and without training it has the same products, and their histories
        if delayed and not any(map(self._trained, node.args[:2])):
            return "delayed learns scales in the backward, and it has none"
        if (self.program.training or delayed) and pending:
            return f"{PENDING} over {', '.join(pending)}"
        return None

    def parameter(self, node: fx.Node) -> str | None:
        """The placeholder of the parameter that a value is made of, by conversions and views alone."""
        while isinstance(node, fx.Node):
            if node.op == "placeholder":
                return node.name if node.name in self.program.params else None
            if op_name(node) == "getitem" and op_name(node.args[0]) == "moec.unpack":
                unpack, index = node.args
                packed = next((n for n in _sources(unpack) if op_name(n) == "moec.pack"), None)
                node = packed.args[0][index] if packed is not None else None
            elif collective(node.target) or is_wait(node.target) or op_name(node) in (*VIEWS, "moec.s_to_r_low"):
                node = node.args[0]
            elif op_name(node) in ("aten.split_with_sizes", "aten.slice"):
                node = node.args[0]
            else:
                return None
        return None

    def _trained(self, value: fx.Node) -> bool:
        """Does a gradient go through it, whatever the mesh?"""
        todo, seen = [value], set()
        while todo:
            node = todo.pop()
            if node in seen or op_name(node) == "aten.detach" or not _floats(node) or is_creation(node):
                continue
            seen.add(node)
            if node.name in self.program.params and self.program.params[node.name].requires_grad:
                return True
            todo += node.all_input_nodes
        return False

    def _readers(self, node: fx.Node) -> Iterator[str]:
        """Ops that read a value, through views and conversions."""
        todo, seen = list(node.users), set()
        while todo:
            user = todo.pop()
            if user in seen:
                continue
            seen.add(user)
            if (
                collective(user.target)
                or is_wait(user.target)
                or op_name(user) in (*VIEWS, "aten.add", "aten.mul", "aten.div")
            ):
                todo += user.users
            yield op_name(user)

    def _is_head(self, name: str) -> bool:
        """The last product, by a weight with a row for every row of a table that inputs look up."""
        if name != self.last:
            return False
        tables = [n.args[0] for n in self.program.graph.nodes if op_name(n) in ("aten.embedding", "moec.lookup")]
        rows = {self.program.params[p].shape[0] for t in tables if (p := self.parameter(t)) is not None}
        return self.program.params[name].shape[0] in rows


def _floats(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return any(isinstance(v, Tensor) and differentiable(v) for v in (val if isinstance(val, (tuple, list)) else [val]))


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        yield node
