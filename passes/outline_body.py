"""Nodes between the grouped products of an expert as a ``Body``: a text that a fused op takes.

``outline(result, counts, mesh)`` walks from ``result``, the operand of a second product, back to first products, and
gives the body, the first products in graph order, and the nodes that the body replaces.

* A first product is a ``moec.grouped_mm`` over ``counts``, or the ``moec.grouped_add`` of its bias; or what another
  ``product`` says.
* Its columns enter whole, as one of several equal blocks (split, slice, select of a dim that a reshape made), or as
  every n-th of them.  Widths are those of a rank: after ``shard`` a packed dim is cut in each of its blocks.
* Other nodes are pointwise functions that a primitive computes (``moec/runtime/pointwise.py``), of these and numbers.
* Dims of size 1 may come and go.
* A cast to the computing dtype is what the body does anyway; one to the dtype of the products is a rounding, and kept.

Raises ``Declined`` with the reason where any of this does not hold, or a value has users beyond these nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moec.passes.shard.rule import is_getitem
from moec.placement import local_shape
from moec.program import op_name
from moec.runtime.body import Body, Builder, Operand
from moec.runtime.mesh import Mesh
from moec.runtime.ops.rows import accumulator
from moec.runtime.pointwise import ROUNDED
from moec.runtime.torch_compat import expr

INF = float("inf")


class Declined(Exception):
    """Why something stays as it is."""


def outline(
    result: fx.Node, counts: fx.Node, mesh: Mesh, product: Callable[[Any, fx.Node], bool] | None = None
) -> tuple[Body, list[fx.Node], set[fx.Node]]:
    """``product(node, counts)``: is the node a product over these counts (its bias aside)?"""
    products = _first_products(result, counts, product or is_product)
    if not products:
        raise Declined("no product over the same counts comes before")
    walk = _Walk(products, mesh)
    value = walk.value(result)
    if not isinstance(value, str):
        raise Declined("what is between the products does not depend on the first of them")
    return walk.build.body(value), products, walk.seen - set(products)


def is_product(node: Any, counts: fx.Node) -> bool:
    return isinstance(node, fx.Node) and op_name(node) == "moec.grouped_mm" and node.args[2] is counts


def with_bias(product: fx.Node, counts: fx.Node) -> fx.Node:
    """The sum of a product over ``counts`` and its bias, if that is its only use; else the product.  Aligned rows have
    counts that are computed from those of the product."""
    users = list(product.users)
    added = len(users) == 1 and op_name(users[0]) == "moec.grouped_add" and users[0].args[0] is product
    return users[0] if added and _made_of(users[0].args[2], counts) else product


def _made_of(node: Any, counts: fx.Node) -> bool:
    """Is ``node`` the counts, or these rounded up to a multiple (``fp8_rows.py``)?"""
    steps = ["aten.mul", "aten.floor_divide", "aten.add"]
    while node is not counts and steps and op_name(node) == steps.pop(0):
        node = node.args[0]
    return node is counts and len(steps) in (0, 3)


def _first_products(
    result: fx.Node, counts: fx.Node, product: Callable[[Any, fx.Node], bool]
) -> list[fx.Node]:
    """The nearest products over ``counts`` that ``result`` depends on, with their biases, in graph order."""
    found, seen, todo = dict[fx.Node, None](), set[fx.Node](), [result]
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        bare = node.args[0] if op_name(node) == "moec.grouped_add" else node
        if product(bare, counts) and with_bias(bare, counts) is node:
            found[node] = None
        elif not op_name(node).startswith(("moec.", "_c10d")):
            todo += node.all_input_nodes
    return [n for n in result.graph.nodes if n in found]


class _Walk:
    def __init__(self, products: list[fx.Node], mesh: Mesh) -> None:
        self.products = {p: i for i, p in enumerate(products)}
        self.mesh, self.build = mesh, Builder()
        self.storage: torch.dtype = products[0].meta["val"].dtype
        self.computing = accumulator(self.storage)
        self.rows = products[0].meta["val"].shape[0]
        self.seen: set[fx.Node] = set()
        self._known: dict[fx.Node, Operand] = {}

    def value(self, node: Any) -> Operand:
        if isinstance(node, (int, float)) and not isinstance(node, bool):
            return float(node)
        if not isinstance(node, fx.Node):
            raise Declined(f"{node!r} is no number")
        if node not in self._known:
            self._known[node] = self._value(node)
            self.seen.add(node)
        return self._known[node]

    def _value(self, node: fx.Node) -> Operand:
        if node in self.products:
            return self.build.input("whole", self.products[node])
        if node.op != "call_function":
            raise Declined(f"{node.name} enters between the products")
        if (source := _same_matrix(node)) is not None:
            return self.value(source)
        if (part := self._part(node)) is not None:
            return part
        name = op_name(node)
        if is_getitem(node):
            raise Declined(f"a result of {op_name(node.args[0])} enters between the products")
        if isinstance(node.meta["val"], torch.Tensor) and not self._is_matrix(node):
            raise Declined(f"{name} mixes rows, or rows and columns")
        if node.meta["val"].dtype not in (self.storage, self.computing):
            raise Declined(f"{name} computes in {node.meta['val'].dtype}")
        write = _WRITE.get(name)
        if write is None:
            raise Declined(f"{name} is no function that generated code knows")
        return write(self, node, *node.args, **node.kwargs)

    def _is_matrix(self, node: fx.Node) -> bool:
        """Are its dims rows and columns, and others of size 1 at most?"""
        shape = _without_ones(node)
        return len(shape) <= 2 and (not shape or bool(expr(shape[0]) == expr(self.rows)))

    # -- columns of a product

    def _part(self, node: fx.Node) -> str | None:
        """``node`` as a part of the columns of a product."""
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        source, name = node.args[0], op_name(node)
        if is_getitem(node) and op_name(source) in ("aten.split", "aten.split_with_sizes", "aten.chunk"):
            parts, product = source.meta["val"], self._product(source.args[0])
            if product is not None and len({p.shape[-1] for p in parts}) == 1:
                if not _cuts_columns(source, 2):
                    raise Declined(f"{source.name} cuts rows")
                return self._chunk(product, len(parts), node.args[1], via=source)
        if name == "aten.slice" and (product := self._product(source)) is not None and _cuts_columns(node, 1):
            return self._slice(node, product, *node.args[2:])
        cut = source if is_getitem(node) and op_name(source) == "aten.unbind" else node
        reshaped = cut.args[0]
        if (cut is not node or name == "aten.select") and op_name(reshaped) == "aten.reshape":
            if reshaped.args[0] in self.products and reshaped.meta["val"].ndim == 3:
                self.seen |= {reshaped, cut}
                dim = (cut.args[1] if len(cut.args) > 1 else 0) % 3
                return self._of_reshaped(reshaped, dim, node.args[1] if cut is not node else node.args[2])
        return None

    def _product(self, node: Any) -> fx.Node | None:
        """The product that ``node`` is, dims of size 1 apart."""
        via = []
        while node not in self.products and (source := _same_matrix(node)) is not None:
            via.append(node)
            node = source
        if node not in self.products:
            return None
        self.seen |= set(via)
        return node

    def _chunk(self, product: fx.Node, parts: int, index: int, via: fx.Node) -> str:
        self.seen.add(via)
        return self.build.input("chunk" if parts > 1 else "whole", self.products[product], parts, index)

    def _slice(self, node: fx.Node, product: fx.Node, start: Any = 0, end: Any = None, step: int = 1) -> str:
        """Numbers are those of a rank, recorded shapes global."""
        whole, width = self._width(product), self._width(node)
        start, end = start or 0, whole if end is None else end
        if not all(isinstance(n, int) for n in (start, end, step)):
            raise Declined(f"{node.name} cuts at a size that is not known")
        start, end = (max(0, n + whole) if n < 0 else min(n, whole) for n in (start, end))
        if step > 1:
            if whole % step or end <= whole - step + start or start >= step:
                raise Declined(f"{node.name} takes neither a block of columns nor every {step}th of all")
            return self.build.input("every", self.products[product], step, start)
        if end <= start or whole % (end - start) or start % (end - start) or width != end - start:
            raise Declined(f"{node.name} takes columns {start} to {end} of {whole}, no one of several equal blocks")
        return self._chunk(product, whole // (end - start), start // (end - start), via=node)

    def _of_reshaped(self, reshaped: fx.Node, dim: int, index: int) -> str:
        """``[N, parts, width]`` and ``[N, width, parts]``, one index of the parts taken."""
        product = reshaped.args[0]
        parts = reshaped.meta["val"].shape[dim]
        if dim == 0 or not isinstance(parts, int) or expr(reshaped.meta["val"].shape[0]) != expr(self.rows):
            raise Declined(f"{reshaped.name} mixes rows and columns")
        return self.build.input("chunk" if dim == 1 else "every", self.products[product], parts, index % parts)

    def _width(self, node: fx.Node) -> int:
        shape = (0,) * (node.meta["val"].ndim - 1) + (node.meta["val"].shape[-1],)
        return local_shape(shape, node.meta.get("types") or {}, self.mesh)[-1]

    # -- functions

    def cast(self, node: fx.Node, x: Any, **to: Any) -> Operand:
        dtype = to.get("dtype") or node.meta["val"].dtype
        if isinstance(x, fx.Node) and x.meta["val"].dtype not in (self.storage, self.computing):
            raise Declined(f"{node.name} casts {x.meta['val'].dtype}")
        value = self.value(x)
        return self.build.step(ROUNDED, value) if dtype != self.computing else value

    def scaled(self, op: str) -> Callable[..., Operand]:
        """``a + alpha * b`` and ``a - alpha * b``."""

        def write(node: fx.Node, a: Any, b: Any, *, alpha: Any = 1) -> Operand:
            b = self.value(b)
            return self.build.step(op, self.value(a), b if alpha == 1 else self.build.step("mul", b, float(alpha)))

        return write


def _cuts_columns(node: fx.Node, at: int) -> bool:
    """Is the operand ``at`` of a node that cuts its first operand the last dim?"""
    ndim = node.args[0].meta["val"].ndim
    return (node.args[at] if len(node.args) > at else 0) % ndim == ndim - 1


def _without_ones(node: fx.Node) -> list:
    return [n for n in node.meta["val"].shape if not (isinstance(n, int) and n == 1)]


def _same_matrix(node: fx.Node) -> fx.Node | None:
    """The operand of a node that only makes or drops dims of size 1, or moves them."""
    name = op_name(node)
    if name not in ("aten.reshape", "aten.permute", "aten.transpose", "aten.unsqueeze", "aten.squeeze"):
        return None
    source = node.args[0]
    old, new = _without_ones(source), _without_ones(node)
    if len(old) != len(new) or any(expr(a) != expr(b) for a, b in zip(old, new, strict=True)):
        return None
    if name in ("aten.permute", "aten.transpose"):
        order = list(range(source.meta["val"].ndim))
        if name == "aten.permute":
            order = [d % len(order) for d in node.args[1]]
        else:
            a, b = node.args[1] % len(order), node.args[2] % len(order)
            order[a], order[b] = order[b], order[a]
        kept = [d for d in order if not (isinstance(n := source.meta["val"].shape[d], int) and n == 1)]
        if kept != sorted(kept):
            return None
    return source


def _plain(op: str) -> Callable[..., Operand]:
    def write(walk: _Walk, node: fx.Node, *operands: Any) -> Operand:
        return walk.build.step(op, *[walk.value(o) for o in operands])

    return write


def _clamp(walk: _Walk, node: fx.Node, x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None):
    low, high = low if min is None else min, high if max is None else max
    low, high = (walk.value(bound) if bound is not None else no for bound, no in ((low, -INF), (high, INF)))
    if not isinstance(low, float) or not isinstance(high, float):
        raise Declined(f"{node.name} has bounds that are no numbers")
    return walk.build.step("clamp", walk.value(x), low, high)


def _clamp_max(walk: _Walk, node: fx.Node, x: Any, high: Any) -> Operand:
    return _clamp(walk, node, x, None, high)


def _hardtanh(walk: _Walk, node: fx.Node, x: Any, low: float = -1.0, high: float = 1.0) -> Operand:
    return _clamp(walk, node, x, low, high)


def _gelu(walk: _Walk, node: fx.Node, x: Any, *, approximate: str = "none") -> Operand:
    return walk.build.step("gelu_tanh" if approximate == "tanh" else "gelu", walk.value(x))


def _pow(walk: _Walk, node: fx.Node, x: Any, exponent: Any) -> Operand:
    a, build = walk.value(x), walk.build
    squared = build.step("square", a) if exponent in (2, 3, 4) else ""
    if exponent in (2, 4):
        return squared if exponent == 2 else build.step("square", squared)
    if exponent == 3:
        return build.step("mul", a, squared)
    if exponent in (0.5, -0.5):
        return build.step("sqrt" if exponent == 0.5 else "rsqrt", a)
    if exponent == -1:
        return build.step("div", 1.0, a)
    raise Declined(f"{node.name}: power {exponent}")


def _div(walk: _Walk, node: fx.Node, a: Any, b: Any, *, rounding_mode: Any = None) -> Operand:
    if rounding_mode is not None:
        raise Declined(f"{node.name} rounds")
    return walk.build.step("div", walk.value(a), walk.value(b))


_WRITE: dict[str, Callable[..., Operand]] = {
    **{
        f"aten.{n}": _plain(n)
        for n in (
            "mul", "neg", "maximum", "minimum", "abs", "square", "exp", "log", "sqrt", "rsqrt", "erf", "tanh",
            "sigmoid", "silu", "relu",
        )
    },
    "aten.add": lambda walk, *args, **kw: walk.scaled("add")(*args, **kw),
    "aten.sub": lambda walk, *args, **kw: walk.scaled("sub")(*args, **kw),
    "aten.rsub": lambda walk, node, a, b, **kw: walk.scaled("sub")(node, b, a, **kw),
    "aten.div": _div, "aten.reciprocal": lambda walk, node, x: _pow(walk, node, x, -1), "aten.pow": _pow,
    "aten.clamp": _clamp, "aten.clamp_min": _clamp, "aten.clamp_max": _clamp_max, "aten.hardtanh": _hardtanh,
    "aten.relu6": lambda walk, node, x: _clamp(walk, node, x, 0, 6), "aten.gelu": _gelu,
    "aten.clone": lambda walk, node, x, **_: walk.value(x),
    "aten._to_copy": lambda walk, *args, **kw: walk.cast(*args, **kw),
}  # fmt: skip
