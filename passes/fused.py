"""A fused projection whose parts are different numbers of heads becomes one projection a part (part of ``normalize``).

``linear(x, W [q+k+v, H])`` with fewer key/value heads than query heads: rank r of tensor parallelism needs its heads of
each part, which are no equal blocks of W.  With one ``linear`` a part, on a part of W, each is cut by itself.

1. A ``linear`` by a parameter, all of whose uses take static parts of its last dim (a split, or slices side by side).
2. The parts are of different sizes, and each is reshaped to heads of one common width right away.
3. W and the bias are split, and each part has a ``linear`` of its own.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from moec.passes.rewrite import new, replace
from moec.program import Program, op_name

aten = torch.ops.aten
VIEWS = ("aten.reshape", "aten.unflatten")


def split_projection(program: Program, node: fx.Node) -> None:
    _, weight, *rest = node.args
    bias = rest[0] if rest else None
    given = [p for p in (weight, bias) if p is not None]
    if any(p.op != "placeholder" or p.name not in program.params for p in given):
        return
    parts = _parts(node)  # 1
    sizes = [end - start for start, end, _ in parts]
    if len(set(sizes)) < 2 or sum(sizes) != node.meta["val"].shape[-1] or not _one_width([n for _, _, n in parts]):  # 2
        return
    weights, biases = (_split(node, p, sizes) if p is not None else [None] * len(sizes) for p in (weight, bias))
    for (_, _, part), w, b in zip(parts, weights, biases, strict=True):  # 3
        args = (node.args[0], w) if b is None else (node.args[0], w, b)
        replace(part, new(node, aten.linear.default, args, part.meta["val"]))


def _parts(node: fx.Node) -> list[tuple[int, int, fx.Node]]:
    """(start, end, value) of the parts that all uses take, in order; none if some use is another."""
    rank, width = node.meta["val"].ndim, node.meta["val"].shape[-1]
    found: list[tuple[int, int, fx.Node]] = []
    for user in node.users:
        args = list(user.args)
        if op_name(user) == "aten.split_with_sizes" and _dim(args, 2) % rank == rank - 1 and len(node.users) == 1:
            ends = [sum(args[1][: i + 1]) for i in range(len(args[1]))]
            found += [(ends[n.args[1]] - args[1][n.args[1]], ends[n.args[1]], n) for n in user.users]
        elif op_name(user) == "aten.slice" and _dim(args, 1) % rank == rank - 1 and (args[4:] or [1]) == [1]:
            start, end = (*args[2:4], None, None)[:2]
            start, end = start or 0, width if end is None else end
            if not (isinstance(start, int) and isinstance(end, int)):
                return []
            start, end = (at + width if at < 0 else min(at, width) for at in (start, end))
            found.append((start, end, user))
        else:
            return []
    found.sort(key=lambda p: p[:2])
    side_by_side = [start for start, _, _ in found] == [0, *(end for _, end, _ in found[:-1])]
    return found if side_by_side else []


def _dim(args: list, at: int) -> int:
    return args[at] if len(args) > at else 0


def _one_width(parts: list[fx.Node]) -> bool:
    """Are all parts reshaped to heads of one width?"""
    views = [u for part in parts for u in part.users]
    widths = {v.meta["val"].shape[-1] for v in views if op_name(v) in VIEWS and v.meta["val"].ndim > 3}
    return all(p.users for p in parts) and all(op_name(v) in VIEWS for v in views) and len(widths) == 1


def _split(node: fx.Node, parameter: fx.Node, sizes: list[int]) -> list[fx.Node]:
    val = parameter.meta["val"]
    vals = [val.new_empty((n, *val.shape[1:])) for n in sizes]
    split = new(node, aten.split_with_sizes.default, (parameter, sizes, 0), vals)
    return [new(node, operator.getitem, (split, i), v) for i, v in enumerate(vals)]
