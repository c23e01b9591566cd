"""A Body as lines of a Triton kernel.

The caller says how each input is had (an expression of the computing dtype: an accumulator, a load); the steps follow
one line each, from the templates of ``pointwise.py``.  The text is a function of the body and the dtype alone, but for
names that the kernel around it uses itself: those get an underscore behind them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set

import torch

from ..body import ROWSUM, Body
from ..pointwise import PRIMITIVES

TRITON = {
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}


def computing(dtype: torch.dtype) -> str:
    """The Triton dtype that values stored as ``dtype`` are computed in."""
    return "tl.float64" if dtype == torch.float64 else "tl.float32"


def literal(number: float) -> str:
    """A number as a Triton expression that any operator may stand beside."""
    if math.isinf(number):
        return f'float("{number}")'
    return f"({number!r})" if math.copysign(1.0, number) < 0 else repr(number)


def lines(
    body: Body, inputs: Mapping[str, str], dtype: torch.dtype, taken: Set[str], zeros: str
) -> tuple[list[str], list[str]]:
    """``(lines, results)``: statements that evaluate the body, and an expression for each of its results.

    ``inputs`` has an expression for every input's name, ``dtype`` is the storage dtype, ``taken`` the names that the
    kernel uses and ``zeros`` an expression of a whole block, which makes one of a result that is none (a number, or
    one value a row).  A sum over columns (``rowsum``) stays what it sums: the kernel knows which columns there are.
    """
    names: dict[object, str] = {}
    whole = {i.name for i in body.inputs if i.form != "row"}
    out = []
    for i in body.inputs:
        names[i.name] = _free(i.name, taken, names.values())
        out.append(f"{names[i.name]} = {inputs[i.name]}")
    for s in body.steps:
        operands = [names[o] if isinstance(o, str) else literal(o) for o in s.operands]
        if whole.intersection(s.operands):
            whole.add(s.name)
        if s.op == ROWSUM:
            names[s.name] = operands[0]
            continue
        names[s.name] = _free(s.name, taken, names.values())
        expression = PRIMITIVES[s.op].triton.format(*operands, storage=TRITON[dtype], computing=computing(dtype))
        if inner := _repeated(expression):
            names[s.name, "inner"] = part = _free(f"{s.name}_inner", taken, names.values())
            out.append(f"{part} = {inner[1:-1]}")
            expression = expression.replace(inner, part)
        out.append(f"{names[s.name]} = {expression}")
    results = [names[r] if isinstance(r, str) else literal(r) for r in body.results]
    return out, [e if r in whole else f"({zeros} + {e})" for r, e in zip(body.results, results, strict=True)]


def listing(body: Body) -> tuple[str, ...]:
    """The body for a comment, a line for each step."""
    return tuple(body.text().split("; "))


def _repeated(expression: str) -> str | None:
    """The longest part in parentheses that a long expression has more than once: it gets a line of its own."""
    found = []
    for n, c in enumerate(expression):
        if c == "(" and (n == 0 or not (expression[n - 1].isalnum() or expression[n - 1] in "_.")):
            depth = 0
            for end in range(n, len(expression)):
                depth += {"(": 1, ")": -1}.get(expression[end], 0)
                if not depth:
                    break
            part = expression[n : end + 1]
            if expression.count(part) > 1:
                found.append(part)
    return max(found, key=len) if found and len(expression) > 100 else None


def _free(name: str, taken: Set[str], used: Collection[str]) -> str:
    while name in taken or name in used:
        name += "_"
    return name
