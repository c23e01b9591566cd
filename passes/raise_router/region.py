"""Regions: the nodes between a router's logits and its ids and weights, and running them on numbers.

Legend: T tokens, E experts, K choices.

A value [..., E] can be the logits if ids and weights follow from it, constants, sizes, and vectors [E] (parameters and
buffers) alone.  Looked for backward from ids and weights; products with matrices of parameters end the search, so that
no more than a router's own surroundings is ever walked.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from moec.program import Program, op_name
from moec.runtime.torch_compat import OpOverload, expr, is_unbacked

LOW = (torch.float32, torch.bfloat16, torch.float16)
MIN_TOKENS = 64

SHAPE_ONLY = frozenset(
    f"aten.{name}" for name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones",
                                "new_full", "new_empty")
)  # fmt: skip
"""Ops that look at the shape of their operand alone."""

LAYOUT = frozenset(
    f"aten.{name}" for name in ("transpose", "permute", "t", "unsqueeze", "squeeze", "reshape", "expand", "slice",
                                "split", "split_with_sizes", "unbind", "cat", "stack")
)  # fmt: skip
"""Ops whose dims are about where things lie."""

BOUNDS = frozenset(
    f"aten.{name}" for name in ("clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "nan_to_num", "gt", "ge",
                                "lt", "le")
)  # fmt: skip
"""Ops that treat numbers beyond an argument in another way."""


class Unfit(Exception):
    """Why a region is no ``moec.route``; ``distance`` orders reasons, the nearest first."""

    def __init__(self, reason: str, distance: tuple[float, ...] = (float("inf"),)) -> None:
        super().__init__(reason)
        self.distance = distance


@dataclass(frozen=True)
class Region:
    logits: tuple[fx.Node, ...]
    """Equal nodes (a router that is called twice), the first one first."""
    ids: fx.Node
    weights: fx.Node
    num_experts: int
    nodes: tuple[fx.Node, ...]
    """What lies between, in order."""
    vectors: tuple[fx.Node, ...]
    """Placeholders of parameters and buffers [E]."""
    constants: dict[str, Tensor]

    @property
    def after(self) -> fx.Node:
        """The node before which the logits and every placeholder are there."""
        node = self.logits[0].next
        while node.op == "placeholder":
            node = node.next
        return node

    def text(self) -> str:
        """The region without its names: equal texts compute the same."""
        names = dict.fromkeys(self.logits, "logits")
        names |= {n: f"vector{i}" for i, n in enumerate(self.vectors)}
        names |= {n: f"n{i}" for i, n in enumerate(self.nodes)}

        lines = [_show(n) + f" {names[n]}" for n in (self.logits[0], *self.vectors)]
        for n in self.nodes:
            if n.op == "get_attr":
                c = self.constants[n.target]
                lines.append(f"{names[n]} = {c.tolist() if not c.is_meta and c.numel() <= 64 else n.target}")
                continue
            args = fx.node.map_arg((n.args, n.kwargs), lambda x: f"%{names.get(x) or _show(x)}")
            lines.append(f"{names[n]} = {op_name(n)}{args} {_show(n)}")
        return "\n".join([*lines, f"{names[self.ids]} {names[self.weights]} {self.num_experts}"])

    def numbers(self) -> set[int]:
        """Integers that stand in it, sizes and arguments: what numbers of groups may be."""
        found: set[int] = set()
        for n in self.nodes:
            found |= {a for a in pytree.tree_leaves((n.args, n.kwargs)) if type(a) is int}
            found |= {s for t in _tensors(n) for s in t.shape if isinstance(s, int)}
        return found

    def bounds(self) -> set[float]:
        """Numbers of ordinary size that values are clamped to or compared with."""
        found: set[float] = set()
        for n in self.nodes:
            if n.op == "call_function" and op_name(n) in BOUNDS:
                found |= {abs(a) for a in n.args[1:] if isinstance(a, (int, float)) and 8 < abs(a) < 1e4}
        return found

    def softmax_over(self) -> set[int]:
        """Widths that a softmax runs over."""
        return {n.meta["val"].shape[n.args[1]] for n in self.nodes if op_name(n) in ("aten.softmax", "aten._softmax")}

    def problem(self) -> str | None:
        """Why no spec can compute it whatever the numbers say, or None."""
        for n in self.nodes:
            if n.op != "call_function":
                continue
            name = op_name(n)
            if any(is_unbacked(expr(s)) for t in _tensors(n) for s in t.shape):
                return f"{name} makes a value whose size depends on data"
            if name not in LAYOUT and _runs_over_tokens(n):
                return f"{name} runs over tokens"
        return None

    def unsorted(self) -> bool:
        """Is the order of choices whatever top-k makes of it?"""
        return any(op_name(n) == "aten.topk" and n.args[4:] == (False,) for n in self.nodes)

    def sizes(self) -> dict[sympy.Symbol, int]:
        """Numbers for the symbols, such that there are enough tokens."""
        used = [s for n in (*self.logits, *self.nodes) for v in _values(n) for s in _free(v)]
        symbols = sorted(set(used), key=str)
        sizes = dict(zip(symbols, (5, 13, 3, 7, 2, 11), strict=False))
        lead = [s for d in self.logits[0].meta["val"].shape for s in _free(d)]
        while lead and self._tokens(sizes) < MIN_TOKENS:
            sizes[lead[0]] += 2
        return sizes

    def shape(self, sizes: dict[sympy.Symbol, int]) -> list[int]:
        return [_number(s, sizes) for s in self.logits[0].meta["val"].shape]

    def _tokens(self, sizes: dict[sympy.Symbol, int]) -> int:
        return math.prod(self.shape(sizes)[:-1])

    def run(self, logits: Tensor, vectors: list[Tensor], sizes: dict[sympy.Symbol, int]) -> tuple[Tensor, Tensor]:
        """Ids and weights, in float64 wherever the nodes say less."""
        env: dict[fx.Node, object] = dict.fromkeys(self.logits, logits)
        env |= dict(zip(self.vectors, vectors, strict=True))

        def value(n: fx.Node) -> object:
            if n in env:
                return env[n]
            val = n.meta["val"]
            if isinstance(val, Tensor):  # of which the shape alone is asked
                return torch.zeros([_number(s, sizes) for s in val.shape], dtype=_up(val.dtype))
            return _number(val, sizes)

        for n in self.nodes:
            if n.op == "get_attr":
                constant = self.constants[n.target]
                env[n] = constant.to(_up(constant.dtype))
                continue
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), value)
            args, kwargs = fx.node.map_aggregate((args, kwargs), _up)
            kwargs = dict(kwargs)
            if isinstance(n.target, OpOverload) and isinstance(n.meta["val"], Tensor) and n.meta["val"].dtype in LOW:
                creates = any(a.name == "dtype" and a.kwarg_only for a in n.target._schema.arguments)
                if creates and "dtype" not in kwargs:
                    kwargs["dtype"] = torch.float64
            if "device" in kwargs:
                kwargs["device"] = logits.device
            env[n] = n.target(*args, **kwargs)
        return env[self.ids], env[self.weights]  # type: ignore[return-value]


class Locator:
    """Finds regions in one program; what it knows of the graph is computed once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.order: dict[fx.Node, int] = {}
        self.matrices: set[fx.Node] = set()
        """Parameters that are no vectors, and what is made of parameters alone."""
        made: set[fx.Node] = set()
        for i, n in enumerate(program.graph.nodes):
            self.order[n] = i
            if n.op == "placeholder":
                if n.name in program.params:
                    made.add(n)
            elif n.op == "call_function" and n.all_input_nodes and all(a in made for a in n.all_input_nodes):
                made.add(n)
            if n in made and isinstance(n.meta.get("val"), Tensor) and sum(s != 1 for s in n.meta["val"].shape) > 1:
                self.matrices.add(n)

    def regions(self, ids: fx.Node, weights: fx.Node, num_experts: int) -> Iterator[Region]:
        """Regions that end in ids and weights, the longest first."""
        inside, edge = self._slice((ids, weights), frozenset())
        near = sorted((n for n in inside | edge if n.op == "call_function"), key=self.order.__getitem__)
        equal: dict[tuple[str, ...], list[fx.Node]] = {}
        for n in near:
            equal.setdefault((op_name(n), str(n.args), str(n.kwargs)), []).append(n)
        for same in equal.values():
            val = same[0].meta.get("val")
            if not isinstance(val, Tensor) or not val.is_floating_point() or val.ndim < 2:
                continue
            if not isinstance(val.shape[-1], int) or val.shape[-1] != num_experts:
                continue
            nodes, leaves = self._slice((ids, weights), frozenset(same))
            vectors = leaves - set(same)
            if leaves & set(same) and all(self._is_vector(n, num_experts) for n in vectors):
                yield Region(
                    tuple(same), ids, weights, num_experts, tuple(sorted(nodes, key=self.order.__getitem__)),
                    tuple(sorted(vectors, key=self.order.__getitem__)), self.program.constants,
                )  # fmt: skip

    def _is_vector(self, n: fx.Node, num_experts: int) -> bool:
        spec = self.program.params.get(n.name) if n.op == "placeholder" else None
        if spec is None or not spec.dtype.is_floating_point:
            return False
        return max(spec.shape, default=0) == math.prod(spec.shape) == num_experts

    def _slice(self, roots: tuple[fx.Node, ...], stop: frozenset[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        """What the roots are computed from: nodes to run, and leaves where the walk ends.  Sizes are neither."""
        nodes: set[fx.Node] = set()
        leaves: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            n = todo.pop()
            if n in nodes or n in leaves or not _tensors(n):
                continue
            if n in stop or n.op == "placeholder" or self._opaque(n):
                leaves.add(n)
                continue
            nodes.add(n)
            if n.op == "call_function" and op_name(n) not in SHAPE_ONLY:
                todo += n.all_input_nodes
        return nodes, leaves

    def _opaque(self, n: fx.Node) -> bool:
        if n.op == "get_attr":
            return False
        if n.target is operator.getitem:
            return self._opaque(n.args[0])
        return op_name(n).startswith("moec.") or any(a in self.matrices for a in n.all_input_nodes)


def _runs_over_tokens(n: fx.Node) -> bool:
    """Does it sum, sort or scan over a dim whose size is symbolic, as numbers of tokens are?"""
    source = next((a for a in n.all_input_nodes if isinstance(a.meta.get("val"), Tensor)), None)
    if source is None or not isinstance(n.target, OpOverload) or op_name(n) in SHAPE_ONLY:
        return False
    shape = source.meta["val"].shape
    symbolic = [bool(_free(s)) for s in shape]
    given = {a.name: v for a, v in zip(n.target._schema.arguments, n.args, strict=False)} | n.kwargs
    dims = given.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    if isinstance(dims, (list, tuple)) and any(symbolic[d] for d in dims):
        return True
    return any(symbolic) and not any(_free(s) for t in _tensors(n) for s in t.shape)


def _tensors(n: fx.Node) -> list[Tensor]:
    val = n.meta.get("val")
    return [t for t in (val if isinstance(val, (tuple, list)) else [val]) if isinstance(t, Tensor)]


def _values(n: fx.Node) -> list:
    sizes = [a.meta["val"] for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.SymInt)]
    return [*sizes, *(s for t in _tensors(n) for s in t.shape)]


def _free(size) -> list[sympy.Symbol]:
    return sorted(expr(size).free_symbols, key=str) if isinstance(size, torch.SymInt) else []


def _number(size, sizes: dict[sympy.Symbol, int]) -> int:
    return int(expr(size).subs(sizes)) if isinstance(size, torch.SymInt) else size


def _up(x):
    return torch.float64 if isinstance(x, torch.dtype) and x in LOW else x


def _show(n: fx.Node) -> str:
    val = n.meta.get("val")
    if isinstance(val, torch.SymInt):
        return str(expr(val))
    return " ".join(f"{t.dtype}{[str(expr(s)) for s in t.shape]}" for t in _tensors(n)) or str(val)
