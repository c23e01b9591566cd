"""Types: what a value is on each atomic axis, and so what its gradient is (the ``spmd_types`` vocabulary).

====================  =====================================  ==========================
kind                  forward value                          its gradient
====================  =====================================  ==========================
``I`` invariant       same on all ranks of the axis          same on all (already reduced)
``R`` replicated      same on all ranks                      a pending sum
``S(d)`` sharded      this rank's part of dim d              this rank's part
``V`` ragged          rows dealt out by the routing (dim 0)  this rank's rows
``P`` partial         a pending sum                          same on all ranks
``M`` largest         a pending maximum (of FP8 scales)      a pending maximum
====================  =====================================  ==========================

``S(d, parts=p)``: dim d is p equal blocks laid side by side (a packed gate_up), and *each* block is sharded; the local
tensor is the concatenation of this rank's slice of every block.  ``p`` may be a recorded size: the rows ``[B*S]`` of
B sequences that are sharded on S are ``S(0, parts=B)``.

A dim that several axes shard is cut by axes of fewer parts first, and among axes of equal parts major to minor in mesh
order.  (Each axis of more parts cuts within the blocks that those of fewer parts deal out.)  Values that need no
gradient make no difference between I and R and are typed R.

A parameter's dim that its degree does not divide is cut unevenly, as ``torch.chunk`` does (and DTensor): parts of the
rounded-up length, the last ones shorter or empty.  Only FSDP does that; graphs see parts padded to equal lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy

from moec.runtime.mesh import Mesh

Parts: TypeAlias = "int | sympy.Expr"
"""A number of blocks: of a weight a number, of activations maybe an expression of recorded (global) sizes."""


@dataclass(frozen=True)
class Type:
    kind: str
    dim: int = -1
    parts: Parts = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.parts == 1 else f"S({self.dim},parts={self.parts})"

    @property
    def sharded(self) -> bool:
        return self.kind in "SV"


I = Type("I")  # noqa: E741  the published name of the type
R = Type("R")
P = Type("P")
M = Type("M")
V = Type("V", 0)


Types = dict[str, Type]
"""Axis name -> Type, one entry for every atomic axis of the mesh."""


def S(dim: int, parts: Parts = 1) -> Type:
    """Equal numbers of parts make equal types, however the expression was written."""
    if isinstance(parts, sympy.Expr):
        parts = sympy.cancel(parts)
        parts = int(parts) if parts.is_Integer else parts
    return Type("S", dim, parts)


def part(size: int, ways: int, index: int) -> tuple[int, int]:
    """(start, length) of the part ``index`` of a dim of ``size`` that is cut ``ways`` ways."""
    longest = -(-size // ways)
    start = min(index * longest, size)
    return start, min(longest, size - start)


def local_shape(shape: Sequence[int], types: Types, mesh: Mesh, rank: int | None = None) -> tuple[int, ...]:
    """Shape of the part of a parameter that ``rank`` holds; without a rank the largest, which parts are padded to."""
    out, at = list(shape), mesh.coords(rank or 0)  # the first part is the largest
    for axis in mesh.axes:
        t = types.get(axis.name)
        if t is not None and t.kind == "S":
            out[t.dim] = t.parts * part(out[t.dim] // t.parts, axis.size, at[axis.name])[1]
    return tuple(out)


def show(types: Types) -> str:
    """``dp_ep:S(0) tp_ep:I``"""
    return " ".join(f"{a}:{t}" for a, t in types.items())
