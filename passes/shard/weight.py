"""The parameter that a GEMM multiplies by, seen through what lies between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from moec.passes.shard.rule import is_getitem, shape
from moec.program import Program, op_name

GEMMS = {"aten.linear": (0, 1), "moec.grouped_mm": (2, 1)}
"""op -> (output dim, contraction dim) of its weight operand, which is operand 1."""


@dataclass
class Weight:
    """A parameter seen through the transposes between it and the GEMM that uses it."""

    placeholder: str
    dims: tuple[int, ...]
    """dims[i]: which dim of the parameter is dim i of the weight operand."""
    part: fx.Node | None = None
    """The rows of the parameter that are meant, where a fused projection was taken apart."""


def weight_of(node: fx.Node, program: Program) -> Weight | None:
    """The parameter behind a GEMM's weight operand, None if it is computed."""
    w = node.args[1]
    dims = tuple(range(len(shape(w))))
    while w.op == "call_function" and op_name(w) in ("aten.transpose", "aten.permute", "aten.t", "aten.detach"):
        rank = len(dims)
        if op_name(w) == "aten.permute":
            order = [d % rank for d in w.args[1]]
        else:
            order = list(range(rank))
            a, b = (
                (0, 1)
                if op_name(w) == "aten.t"
                else (w.args[1] % rank, w.args[2] % rank)
                if len(w.args) > 1
                else (0, 0)
            )
            order[a], order[b] = order[b], order[a]
        dims = tuple(order[d] for d in dims)
        w = w.args[0]
    part = None
    if (whole := whole_of(w)) is not None:
        part, w = w, whole
    return Weight(w.name, dims, part) if w.op == "placeholder" and w.name in program.params else None


def whole_of(part: fx.Node) -> fx.Node | None:
    """The parameter whose rows ``part`` is some of (see ``moec.passes.fused``)."""
    split = part.args[0] if is_getitem(part) else None
    if split is None or op_name(split) != "aten.split_with_sizes" or split.args[0].op != "placeholder":
        return None
    return split.args[0]
