"""Rule makers for families of ops: pointwise, contractions written as dims, ops along one dim, reductions.

A maker takes what a family's members differ in and returns a function from a node to its :class:`Rule`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from moec.passes.shard.rule import Dims, Rule, is_one, operands, result_shapes, shape


def pointwise(carries: str = "none") -> Callable[[fx.Node], Rule]:
    """Broadcast: dims are aligned from the right; every factor is shared."""

    def make(node: fx.Node) -> Rule:
        out = result_shapes(node)[0]
        rank = len(out)
        ops = []
        for o in operands(node):
            s = shape(o)
            off = rank - len(s)
            ops.append(
                tuple(None if is_one(d) and not is_one(out[off + i]) else f"f{off + i}" for i, d in enumerate(s))
            )
        how = carries
        if carries == "linear" and len(ops) == 1 and len([a for a in node.args[:2] if not isinstance(a, fx.Node)]) == 1:
            other = node.args[0] if isinstance(node.args[1], fx.Node) else node.args[1]
            how = "linear" if other == 0 else "none"  # P + constant would add the constant once a rank
        return Rule(tuple(ops), (tuple(f"f{i}" for i in range(rank)),), carries=how)

    return make


def like(node: fx.Node) -> Rule:
    """zeros_like and friends: the operand is metadata, the result is laid out as it is."""
    dims = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((dims,), (dims,), carries="none")


def einsum(spec: str, carries: str = "multilinear", added: int | None = None) -> Callable[[fx.Node], Rule]:
    """A rule written as dims: ``"... k, n k -> ... n"``.  ``!x`` blocks a factor, ``...`` aligns leading dims from the
    right, ``1`` is a dim without factor."""
    left, right = spec.split("->")

    def make(node: fx.Node) -> Rule:
        shapes = [shape(o) for o in operands(node)]
        blocked: set[str] = set()

        def expand(term: str, s: tuple) -> Dims:
            names = term.split()
            if "..." in names:
                i = names.index("...")
                extra = len(s) - (len(names) - 1)
                names[i : i + 1] = [f"...{extra - j}" for j in range(extra)]
            out: list[str | None] = []
            for n, d in zip(names, s, strict=True):
                if n.startswith("!"):
                    n = n[1:]
                    blocked.add(n)
                broadcast = n == "1" or (n.startswith("...") and is_one(d))
                out.append(None if broadcast else n)
            return tuple(out)

        terms = left.split(",")
        ops = tuple(expand(t, s) for t, s in zip(terms, shapes, strict=False))
        res = tuple(expand(t, s) for t, s in zip(right.split(","), result_shapes(node), strict=True))
        if added is not None and added < len(ops):  # P operands would have to be P together with the bias
            return Rule(ops, res, frozenset(blocked), "none", added=frozenset({added}))
        return Rule(ops, res, frozenset(blocked), carries)

    return make


def along(dim_arg: int, default: int = -1, carries: str = "none", kwarg: str = "dim") -> Callable[[fx.Node], Rule]:
    """Ops that mix values along one dim (softmax, topk, cumsum …): that dim is blocked, the others are shared."""

    def make(node: fx.Node) -> Rule:
        rank = len(shape(operands(node)[0]))
        dim = node.kwargs.get(kwarg, node.args[dim_arg] if len(node.args) > dim_arg else default)
        names = tuple(f"f{i}" for i in range(rank))
        results = tuple(
            names if len(s) == rank else tuple(n for i, n in enumerate(names) if i != dim % rank)
            for s in result_shapes(node)
        )
        return Rule(
            tuple(names for _ in operands(node)),
            results,
            frozenset({f"f{dim % rank}"}) if rank else frozenset(),
            carries,
        )

    return make


def _overload(node: fx.Node) -> str:
    return getattr(node.target, "_overloadname", "")


def reduction(is_sum: bool) -> Callable[[fx.Node], Rule]:
    """sum (a sharded reduced factor gives P) or mean, amax, … (the reduced dims are blocked)."""

    def make(node: fx.Node) -> Rule:
        rank = len(shape(operands(node)[0]))
        if "other" in _overload(node):  # max(x, y) is no reduction
            return pointwise()(node)
        at = [a.name for a in node.target._schema.arguments]
        given = dict(zip(at, node.args, strict=False)) | dict(node.kwargs)
        dims = given.get("dim")
        if isinstance(dims, int):
            dims = [dims]
        gone = {d % rank for d in (dims if dims else range(rank))} if rank else set()
        keep = given.get("keepdim", False)
        names = tuple(f"f{i}" for i in range(rank))
        res = tuple(None if i in gone else n for i, n in enumerate(names) if keep or i not in gone)
        blocked = frozenset() if is_sum else frozenset(f"f{i}" for i in gone)
        return Rule((names,), tuple(res for _ in result_shapes(node)), blocked, "linear" if is_sum else "none")

    return make


def matmul_rule(node: fx.Node) -> Rule:
    """``... m k, ... k n -> ... m n``; a vector has no m or n."""
    a, b = (len(shape(o)) for o in operands(node))
    left = "k" if a == 1 else "... m k"
    right = "k" if b == 1 else "... k n"
    out = " ".join(["..."] * (max(a, b) > 2) + ["m"] * (a > 1) + ["n"] * (b > 1))
    return einsum(f"{left}, {right} -> {out}")(node)


def cast_rule(node: fx.Node) -> Rule:
    """Sums pass through a cast between floats or between integers, but not from one to the other."""
    x, y = operands(node)[0].meta["val"].dtype, node.meta["val"].dtype
    same = x.is_floating_point == y.is_floating_point and y != torch.bool
    return pointwise("linear" if same else "none")(node)


def div_rule(node: fx.Node) -> Rule:
    rounded = node.kwargs.get("rounding_mode") is not None
    return pointwise("first" if isinstance(node.args[0], fx.Node) and not rounded else "none")(node)


def where_rule(node: fx.Node) -> Rule:
    """Choice is pointwise; with one operand it lists what is true, in order."""
    if len(operands(node)) > 1:
        return pointwise()(node)
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), tuple((None,) for _ in result_shapes(node)), frozenset(names))


def argmax_rule(node: fx.Node) -> Rule:
    """Of one dim, or of everything."""
    if len(node.args) > 1 and node.args[1] is not None:
        return along(1)(node)
    names = tuple(f"f{i}" for i in range(len(shape(operands(node)[0]))))
    return Rule((names,), ((None,) * len(result_shapes(node)[0]),), frozenset(names))


def flip_rule(node: fx.Node) -> Rule:
    rank = len(shape(operands(node)[0]))
    names = tuple(f"f{i}" for i in range(rank))
    return Rule((names,), (names,), frozenset(f"f{d % rank}" for d in node.args[1]), "linear")
