"""Reshape as factors: which dim of the input is the major part of which dim of the output.

``view_factors((B, S, H), (B*S, H))`` gives ``(("g0", "minor0_1", "g1"), ("g0", "g1"))``: the dims fall into groups of
equal product; in each group the first dim of either side shares a factor (a contiguous block of the major dim is a
contiguous block of the merged one) and the others are *minor*: an input that is sharded there has to be gathered
first.  Sizes that are equal only by an assumption of the capture do not show it: all dims of such a group are minor.
"""

from __future__ import annotations

import sympy

from moec.runtime.torch_compat import expr


def view_factors(src: tuple, dst: tuple) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Factor names of every dim of ``src`` and ``dst`` (sizes may be symbolic); size-1 dims have None."""
    ins: list[str | None] = [None] * len(src)
    outs: list[str | None] = [None] * len(dst)
    i = j = group = 0
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
        same = sympy.expand(a - b) == 0
        if same:
            ins[left[0]] = outs[right[0]] = f"g{group}"
        for k in left[same:]:
            ins[k] = f"minor{group}_{k}" if expr(src[k]) != 1 else None
        group += 1
    return tuple(ins), tuple(outs)


def _whole(quotient: sympy.Expr) -> bool:
    _, denominator = sympy.fraction(sympy.cancel(quotient))
    return denominator == 1
