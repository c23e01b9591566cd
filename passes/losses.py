"""Losses over classes, one spelling for each: the part of ``normalize`` that knows them.

Legend: N leading dims, C classes.

1. A mean cross entropy becomes a sum over a count: of the labels that are not ignored, or of their classes' weights.
2. ``nll_loss`` becomes ``pick`` (the entry at the label), sum and count.
3. ``gather`` of one dim whose index has sizes of another input, and ``x[arange(N), labels]``, become ``pick`` too: what
   says that row n goes with label n is that their sizes agree.  For gather they might not (an index may be shorter), so
   that they do is noted as a guard, held against every call.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from moec.passes.rewrite import apply, new, replace
from moec.program import Program
from moec.runtime.torch_compat import expr, hint

aten, moec_ops = torch.ops.aten, torch.ops.moec


def cross_entropy(program: Program, node: fx.Node) -> None:
    given = _arguments(node, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0)
    x, target, weight, ignore = node.args[0], node.args[1], given["weight"], given["ignore_index"]
    if given["reduction"] != 1 or target.meta["val"].dtype.is_floating_point:
        return
    total = (x, target, weight, 2, ignore, given["label_smoothing"])
    loss = new(node, aten.cross_entropy_loss.default, total, node.meta["val"])
    replace(node, _mean(node, loss, target, weight, ignore))


def nll_loss(program: Program, node: fx.Node) -> None:
    given = _arguments(node, weight=None, reduction=1, ignore_index=-100)
    x, target, weight, ignore = node.args[0], node.args[1], given["weight"], given["ignore_index"]
    dim = 1 if x.meta["val"].ndim > 1 else 0
    taken = pick(node, x, dim, apply(node, aten.unsqueeze.default, target, dim))
    rows = apply(node, aten.neg.default, apply(node, aten.select.int, taken, dim, 0))
    if weight is not None:
        rows = apply(node, aten.mul.Tensor, rows, _weights(node, target, weight, ignore))
    rows = apply(node, aten.masked_fill.Scalar, rows, apply(node, aten.eq.Scalar, target, ignore), 0.0)
    if given["reduction"]:
        rows = apply(node, aten.sum.default, rows)
    replace(node, rows if given["reduction"] != 1 else _mean(node, rows, target, weight, ignore))


def gather(program: Program, node: fx.Node) -> None:
    x, dim, index = node.args[:3]
    dim %= max(x.meta["val"].ndim, 1)
    sizes = list(zip(x.meta["val"].shape, index.meta["val"].shape, strict=True))
    del sizes[dim]
    if all(expr(a) == expr(b) for a, b in sizes):
        return  # its rule knows
    if _has_classes(x, dim) and agree(program, sizes):
        replace(node, pick(node, x, dim, index))


def at_labels(program: Program, node: fx.Node, x: fx.Node, rows: fx.Node, labels: fx.Node) -> None:
    """``x[rows, labels]`` of x [N, C], rows 0 … N − 1 and labels [N], which count from the end where negative."""
    N, C = x.meta["val"].shape
    length = labels.meta["val"].shape[0]
    if not _has_classes(x, 1) or expr(length) == 1 or not agree(program, [(N, rows.meta["val"].shape[0])]):
        return
    wrapped = apply(node, aten.add.Tensor, labels, C)
    labels = apply(node, aten.where.self, apply(node, aten.lt.Scalar, labels, 0), wrapped, labels)
    taken = pick(node, x, 1, apply(node, aten.unsqueeze.default, labels, 1))
    replace(node, apply(node, aten.select.int, taken, 1, 0))


def _has_classes(x: fx.Node, dim: int) -> bool:
    return isinstance(x.meta["val"].shape[dim], int) and x.meta["val"].dtype.is_floating_point


def agree(program: Program, sizes: list[tuple[Any, Any]]) -> bool:
    """Are these sizes equal?  Where only the examples say so, it becomes a guard of the program."""
    unsure = [(expr(a), expr(b)) for a, b in sizes if expr(a) != expr(b)]
    known = {s for n in program.placeholders() for d in n.meta["val"].shape for s in expr(d).free_symbols}
    if any(hint(a) != hint(b) for a, b in sizes) or any(not (a - b).free_symbols <= known for a, b in unsure):
        return False
    program.size_guards += tuple(sympy.Eq(a, b) for a, b in unsure)
    return True


def pick(node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
    """``x.gather(dim, index)`` where all other dims agree."""
    rank = x.meta["val"].ndim
    last = [*(d for d in range(rank) if d != dim), dim]
    back = [last.index(d) for d in range(rank)]
    numbers = apply(node, aten.arange.default, x.meta["val"].shape[dim], dtype=torch.int64, device=x.meta["val"].device)
    if dim == rank - 1:
        return apply(node, moec_ops.pick.default, x, numbers, index)
    x, index = (apply(node, aten.permute.default, n, last) for n in (x, index))
    return apply(node, aten.permute.default, apply(node, moec_ops.pick.default, x, numbers, index), back)


def _mean(node: fx.Node, total: fx.Node, target: fx.Node, weight: fx.Node | None, ignore: int) -> fx.Node:
    if weight is None:
        counted = apply(node, aten.ne.Scalar, target, ignore)
    else:
        counted = _weights(node, target, weight, ignore)
        counted = apply(node, aten.masked_fill.Scalar, counted, apply(node, aten.eq.Scalar, target, ignore), 0.0)
    return new(node, aten.div.Tensor, (total, apply(node, aten.sum.default, counted)), node.meta["val"])


def _weights(node: fx.Node, target: fx.Node, weight: fx.Node, ignore: int) -> fx.Node:
    """The weight of each label's class (of class 0 where the label is ignored); it has no gradient."""
    weight = apply(node, aten.detach.default, weight)
    safe = apply(node, aten.masked_fill.Scalar, target, apply(node, aten.eq.Scalar, target, ignore), 0)
    return apply(node, aten.index.Tensor, weight, [safe])


def _arguments(node: fx.Node, **defaults: Any) -> dict[str, Any]:
    """What follows (input, target), by name."""
    return defaults | dict(zip(defaults, node.args[2:], strict=False)) | dict(node.kwargs)


REWRITES = {"aten.cross_entropy_loss": cross_entropy, "aten.nll_loss_nd": nll_loss, "aten.gather": gather}
