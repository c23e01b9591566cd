"""Reshape as factors: which dim of the input is the major part of which dim of the output.

``view_factors((B, S, H), (B*S, H))`` gives ``(("g0", "minor0_1", "g1"), ("g0", "g1"))``: the dims fall into groups of
equal product; in each group the first dim of either side shares a factor (a contiguous block of the major dim is a
contiguous block of the merged one) and the others are *minor*.  Sizes that are equal only by an assumption of the
capture do not show it: all dims of such a group are minor.

A sharded minor dim becomes a packed one and back (``moved``): rows ``[B*S]`` whose S is sharded are B blocks, each of
which is sharded.

1. A dim is cut at a *place* of its group: the product of the dims before it, times the parts of its type.
2. The same place in the result is the last dim with which the place can be divided by the product of the dims before
   it; the quotient is the number of parts there.
"""

from __future__ import annotations

import sympy

from moec.placement import S, Type
from moec.runtime.torch_compat import expr


def view_factors(src: tuple, dst: tuple) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Factor names of every dim of ``src`` and ``dst`` (sizes may be symbolic); size-1 dims have None."""
    ins: list[str | None] = [None] * len(src)
    outs: list[str | None] = [None] * len(dst)
    for group, (left, right, same) in enumerate(_groups(src, dst)):
        if same:
            ins[left[0]] = outs[right[0]] = f"g{group}"
        for k in left[same:]:
            ins[k] = f"minor{group}_{k}" if expr(src[k]) != 1 else None
    return tuple(ins), tuple(outs)


def moved(src: tuple, dst: tuple, t: Type) -> Type | None:
    """What becomes of S: the type of the result, or None if the operand has to be gathered first."""
    for left, right, same in _groups(src, dst):
        if t.dim not in left:
            continue
        if not same:
            return None
        before = left[: left.index(t.dim)]
        place = _product(src, before) * t.parts  # 1
        for n in reversed(range(len(right))):  # 2
            parts = place / _product(dst, right[:n])
            if _whole(parts):
                return S(right[n], parts)
    return None


def _product(sizes: tuple, dims: list[int]) -> sympy.Expr:
    return sympy.Mul(*[expr(sizes[d]) for d in dims])


def _groups(src: tuple, dst: tuple) -> list[tuple[list[int], list[int], bool]]:
    """Dims of either side that have the same product, and whether their sizes show it."""
    found = []
    i = j = 0
    while i < len(src) or j < len(dst):
        if i < len(src) and expr(src[i]) == 1:
            i += 1
            continue
        if j < len(dst) and expr(dst[j]) == 1:
            j += 1
            continue
        if i >= len(src) or j >= len(dst):
            break
        a, b, left, right = expr(src[i]), expr(dst[j]), [i], [j]
        i, j = i + 1, j + 1
        while sympy.expand(a - b) != 0:
            if i >= len(src) and j >= len(dst):
                break
            # Grow the side whose product divides the other's; for symbols "divides" means the quotient is whole.
            grow_left = j >= len(dst) or (i < len(src) and _whole(b / a))
            if grow_left:
                a, left = sympy.expand(a * expr(src[i])), [*left, i]
                i += 1
            else:
                b, right = sympy.expand(b * expr(dst[j])), [*right, j]
                j += 1
        found.append((left, right, sympy.expand(a - b) == 0))
    return found


def _whole(quotient: sympy.Expr) -> bool:
    _, denominator = sympy.fraction(sympy.cancel(quotient))
    return denominator == 1
