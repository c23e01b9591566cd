"""Types: what a value is on each atomic axis, and so what its gradient is (the ``spmd_types`` vocabulary).

====================  =====================================  ==========================
kind                  forward value                          its gradient
====================  =====================================  ==========================
``I`` invariant       same on all ranks of the axis          same on all (already reduced)
``R`` replicated      same on all ranks                      a pending sum
``S(d)`` sharded      this rank's part of dim d              this rank's part
``V`` ragged          rows dealt out by the routing (dim 0)  this rank's rows
``P`` partial         a pending sum                          same on all ranks
====================  =====================================  ==========================

``S(d, parts=p)``: dim d is p equal blocks laid side by side (a packed gate_up), and *each* block is sharded; the local
tensor is the concatenation of this rank's slice of every block.  A dim that several axes shard is cut major to minor
in mesh order.  Values that need no gradient make no difference between I and R and are typed R.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Type:
    kind: str
    dim: int = -1
    parts: int = 1

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
V = Type("V", 0)


def S(dim: int, parts: int = 1) -> Type:
    return Type("S", dim, parts)


Types = dict[str, Type]
"""Axis name -> Type, one entry for every atomic axis of the mesh."""


def show(types: Types) -> str:
    """``dp_ep:S(0) tp_ep:I``"""
    return " ".join(f"{a}:{t}" for a, t in types.items())
