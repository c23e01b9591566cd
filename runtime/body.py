"""Body: the elementwise function between the grouped products of an expert, as one immutable value that travels through
a graph as text.

Legend: N rows, M columns of a first product, I columns of the result.

    g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1

* Inputs are parts of the first products h0, h1 … [N, M] (pre-activations, bias included) or numbers of a row:
  ``whole(hI)``; ``chunk(hI, parts, index)``, a block of M/parts columns; ``every(hI, step, index)``, the columns index,
  index + step …; ``row(rJ)``, one number a row, the same for all columns; in a derivative ``grad()``, the gradient of
  the result.
* Steps are primitives (``pointwise.py``) of earlier names and numbers.
* Inputs are rounded to the storage dtype (they are stored, and the backward starts from them); the steps compute in
  fp32 (fp64 for fp64); the result is rounded once.

``derivative()`` is a Body of the same inputs and ``grad()`` that returns the gradient of each input in order; that of a
row is summed over the columns (``rowsum``).  It computes again what it needs of the forward.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import MoecError
from .pointwise import PRIMITIVES, ROUNDED

FORMS = {"whole": "h", "chunk": "h", "every": "h", "row": "r", "grad": ""}
"""Form of an input -> the letter of what it is a part of."""
ROWSUM = "rowsum"
"""The sum over the columns, [N, 1]: only as the last step of a row's gradient."""

Operand = str | float


@dataclass(frozen=True)
class Input:
    name: str
    form: str
    source: int = 0
    """Which product (``h0``) or row vector (``r0``)."""
    parts: int = 1
    """Of ``chunk`` and ``every``: into how many the columns are divided."""
    index: int = 0

    def text(self) -> str:
        of = [f"{FORMS[self.form]}{self.source}"] if self.form != "grad" else []
        part = [str(self.parts), str(self.index)] if self.divides else []
        return f"{self.name} = {self.form}({', '.join(of + part)})"

    @property
    def divides(self) -> bool:
        return self.form in ("chunk", "every")

    def of(self, h_NM: Tensor) -> Tensor:
        """The columns of a product that this input is: a view."""
        if self.form == "chunk":
            width = h_NM.shape[1] // self.parts
            return h_NM[:, self.index * width : (self.index + 1) * width]
        return h_NM[:, self.index :: self.parts] if self.form == "every" else h_NM


@dataclass(frozen=True)
class Step:
    name: str
    op: str
    operands: tuple[Operand, ...]

    def text(self) -> str:
        return f"{self.name} = {self.op}({', '.join(map(_show, self.operands))})"


@dataclass(frozen=True)
class Body:
    """Raises MoecError for what has no meaning: unknown forms and primitives, names before they are defined."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]
    """One name; of a derivative one for each input (0.0 where nothing depends on it)."""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise MoecError("; ".join(problems), where="body", way_out="moec.runtime.body says what a body is")

    # ------------------------------------------------------------------------------------------------------ text
    def text(self) -> str:
        lines = [i.text() for i in self.inputs] + [s.text() for s in self.steps]
        return "; ".join([*lines, "return " + ", ".join(map(_show, self.results))])

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Body:
        try:
            return _parse(text)
        except (SyntaxError, ValueError, IndexError, AttributeError, KeyError, TypeError) as e:
            raise MoecError(f"not a body: {e} in {text!r}", where="body") from None

    # ------------------------------------------------------------------------------------------------ what it needs
    @property
    def products(self) -> int:
        """How many first products there are."""
        return 1 + max((i.source for i in self.inputs if FORMS[i.form] == "h"), default=-1)

    @property
    def rows(self) -> int:
        """How many vectors of one number a row there are."""
        return 1 + max((i.source for i in self.inputs if i.form == "row"), default=-1)

    def width(self, widths: Sequence[int]) -> int:
        """Columns of the result, where the products have ``widths`` columns."""
        return next(widths[i.source] // i.parts for i in self.inputs if FORMS[i.form] == "h")

    def check_widths(self, widths: Sequence[int], where: str) -> None:
        """Raise MoecError unless products of these widths can be divided as the inputs say, into equal parts."""
        parts = [(i.source, i.parts) for i in self.inputs if FORMS[i.form] == "h"]
        fits = len(widths) == self.products and not any(widths[h] % n for h, n in parts)
        if not fits or len({widths[h] // n for h, n in parts}) != 1:
            raise MoecError(f"products of {list(widths)} columns do not fit the body {self.text()!r}", where=where)

    def covers(self) -> bool:
        """Is every column of every product part of exactly one input?"""
        of: dict[int, list[Input]] = {}
        for i in self.inputs:
            if FORMS[i.form] == "h":
                of.setdefault(i.source, []).append(i)
        return all(
            len({(i.form, i.parts) for i in parts}) == 1
            and sorted(i.index for i in parts) == list(range(parts[0].parts))
            for parts in of.values()
        )

    # --------------------------------------------------------------------------------------------------- derivative
    @lru_cache(maxsize=256)  # noqa: B019  (bodies are few, and values)
    def derivative(self, value: bool = False) -> Body:
        """Gradients of the inputs in order, given ``grad()``; with ``value`` the result itself before them."""
        build = Builder(*self.inputs, taken=[s.name for s in self.steps])
        grad = build.input("grad")
        for s in self.steps:
            build.take(s)
        (result,) = self.results
        gradients: dict[str, Operand] = {str(result): grad}
        for s in reversed(self.steps):
            if s.name not in gradients:
                continue
            known = {"g": gradients[s.name], "y": s.name} | dict(zip("abc", s.operands, strict=False))
            for operand, rule in zip(s.operands, PRIMITIVES[s.op].derivative, strict=True):
                if not isinstance(operand, str) or rule is None:
                    continue
                part = build.expression(ast.parse(rule, mode="eval").body, known)
                before = gradients.get(operand)
                gradients[operand] = part if before is None else build.step("add", before, part)
        out: list[Operand] = [str(result)] if value else []
        for i in self.inputs:
            found = gradients.get(i.name, 0.0)
            if i.form == "row":
                found = build.step(ROWSUM, found if isinstance(found, str) else build.step("mul", grad, 0.0))
            out.append(found)
        return build.body(*out)

    # ---------------------------------------------------------------------------------------------------------- run
    def run(
        self, products: Sequence[Tensor], rows: Sequence[Tensor] = (), grad: Tensor | None = None, *,
        out: Sequence[Tensor] = (), buffers: Buffers | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """The results for ``products`` [N, M] each, ``rows`` [N] each and in a derivative ``grad`` [N, I]: [N, I] each
        (the gradient of a row: [N]), in the dtype of the products.  They are written to ``out``, if given.  Steps use
        the memory of ``buffers``."""
        storage = products[0].dtype
        computing = torch.float64 if storage == torch.float64 else torch.float32
        shape = products[0].shape[0], self.width([h.shape[1] for h in products])
        values: dict[Operand, Tensor] = {}
        for i in self.inputs:
            if i.form == "grad":
                assert grad is not None
                source = grad
            else:
                source = rows[i.source][:, None] if i.form == "row" else i.of(products[i.source])
            values[i.name] = source.to(computing)
        goal = dict(zip(self.results, out, strict=True)) if out and storage == computing else {}
        for s, (slot, wide) in zip(self.steps, self._places, strict=True):
            operands: list[Any] = [values[o] if isinstance(o, str) else o for o in s.operands]
            if s.op == ROWSUM:
                values[s.name] = operands[0].expand(shape).sum(1)
                continue
            if s.op == ROUNDED:
                operands.append(storage)
            into = goal.get(s.name) if wide else None
            if into is None and wide and buffers is not None:
                into = buffers.at(slot, shape, computing)
            values[s.name] = PRIMITIVES[s.op].torch(*operands, out=into)
        results = [values[r] if isinstance(r, str) else products[0].new_full((), r) for r in self.results]
        if not out:  # a vector is the gradient of a row; what does not depend on the columns is spread over them
            return [v.to(storage) if v.ndim == 1 else v.to(storage).expand(shape) for v in results]
        for v, to in zip(results, out, strict=True):
            if v is not to:
                to.copy_(v)
        return list(out)

    @cached_property
    def _places(self) -> tuple[tuple[int, bool], ...]:
        """For each step the number of a buffer that is free while the step's value is needed, and whether the value
        has a number for every column (not only for every row)."""
        last: dict[Operand, int] = {o: n for n, s in enumerate(self.steps) for o in s.operands}
        last |= dict.fromkeys(self.results, len(self.steps))
        wide: set[Operand] = {i.name for i in self.inputs if i.form != "row"}
        holders: list[Operand] = []
        places = []
        for n, s in enumerate(self.steps):
            free = (i for i, name in enumerate(holders) if last.get(name, -1) < n)
            slot = next(free, len(holders))
            holders[slot : slot + 1] = [s.name]
            if not wide.isdisjoint(s.operands):
                wide.add(s.name)
            places.append((slot, s.name in wide))
        return tuple(places)

    def _problems(self) -> list[str]:
        problems, known = [], set()
        for i in self.inputs:
            if i.form not in FORMS or i.name in known or not 0 <= i.index < i.parts or (i.parts > 1 and not i.divides):
                problems.append(f"{i} has no meaning")
            known.add(i.name)
        for s in self.steps:
            arity = 1 if s.op == ROWSUM else len(PRIMITIVES[s.op].derivative) if s.op in PRIMITIVES else None
            if arity is None:
                problems.append(f"{s.op!r} is no primitive")
            elif len(s.operands) != arity:
                problems.append(f"{s.text()}: {s.op} takes {arity}")
            if unknown := [o for o in s.operands if isinstance(o, str) and o not in known]:
                problems.append(f"{s.text()}: {', '.join(unknown)} not defined before")
            if not any(isinstance(o, str) for o in s.operands) or s.name in known:
                problems.append(f"{s.text()} has no meaning")
            known.add(s.name)
        problems += [f"result {r} is not defined" for r in self.results if isinstance(r, str) and r not in known]
        if not any(FORMS.get(i.form) == "h" for i in self.inputs):
            problems.append("no input is a part of a product")
        return problems


class Buffers:
    """Memory of the steps of a body, kept from block to block: blocks of equal shape reuse it."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def at(self, number: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        kept = self._kept.get(number)
        if kept is None or kept.numel() < shape[0] * shape[1] or kept.dtype != dtype:
            kept = self._kept[number] = torch.empty(shape[0] * shape[1], dtype=dtype)
        return kept[: shape[0] * shape[1]].view(shape)


class Builder:
    """Steps one by one; the same step of the same operands is made once."""

    def __init__(self, *inputs: Input, taken: Iterable[str] = ()) -> None:
        self.inputs, self.steps = list(inputs), list[Step]()
        self._taken = {i.name for i in inputs} | set(taken)
        self._made: dict[tuple, str] = {}

    def input(self, form: str, source: int = 0, parts: int = 1, index: int = 0) -> str:
        for i in self.inputs:
            if (i.form, i.source, i.parts, i.index) == (form, source, parts, index):
                return i.name
        name = self._fresh("dy" if form == "grad" else "r" if form == "row" else "x")
        self.inputs.append(Input(name, form, source, parts, index))
        return name

    def take(self, step: Step) -> None:
        self.steps.append(step)
        self._made.setdefault((step.op, *step.operands), step.name)

    def step(self, op: str, *operands: Operand) -> str:
        if (op, *operands) not in self._made:
            self.take(Step(self._fresh("t"), op, operands))
        return self._made[op, *operands]

    def expression(self, node: ast.expr, known: dict[str, Operand]) -> Operand:
        """The steps of a nested expression of primitives, names and numbers."""
        if isinstance(node, ast.Name):
            return known[node.id]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.step(node.func.id, *[self.expression(a, known) for a in node.args])
        return _number(node)

    def body(self, *results: Operand) -> Body:
        used, steps = set(results), list[Step]()
        for s in reversed(self.steps):
            if s.name in used:
                used.update(s.operands)
                steps.append(s)
        return Body(tuple(self.inputs), tuple(reversed(steps)), results)

    def _fresh(self, letter: str) -> str:
        n = 0
        while f"{letter}{n}" in self._taken:
            n += 1
        self._taken.add(f"{letter}{n}")
        return f"{letter}{n}"


def _parse(text: str) -> Body:
    *lines, last = ast.parse(text).body
    if not isinstance(last, ast.Return) or last.value is None:
        raise ValueError("no return at the end")
    inputs, steps = [], []
    for line in lines:
        if not isinstance(line, ast.Assign) or not isinstance(line.value, ast.Call):
            raise ValueError(f"{ast.unparse(line)!r} is not name = function(…)")
        name, op, args = line.targets[0].id, line.value.func.id, line.value.args  # type: ignore[attr-defined]
        if op not in FORMS:
            steps.append(Step(name, op, tuple(_operand(a) for a in args)))
            continue
        if steps:
            raise ValueError(f"input {name} after a step")
        numbers = [int(_number(a)) for a in args[1:]]
        source = 0
        if op != "grad":
            if args[0].id[0] != FORMS[op]:  # type: ignore[attr-defined]
                raise ValueError(f"{ast.unparse(line)!r}: {op} is a part of {FORMS[op]}0, {FORMS[op]}1 …")
            source = int(args[0].id[1:])  # type: ignore[attr-defined]
        inputs.append(Input(name, op, source, *numbers))
    results = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    return Body(tuple(inputs), tuple(steps), tuple(_operand(r) for r in results))


def _operand(node: ast.expr) -> Operand:
    return node.id if isinstance(node, ast.Name) and node.id != "inf" else _number(node)


def _number(node: ast.expr) -> float:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    raise ValueError(f"{ast.unparse(node)!r} is no number")


def _show(operand: Operand) -> str:
    return operand if isinstance(operand, str) else repr(float(operand))


__all__ = ["FORMS", "PRIMITIVES", "ROWSUM", "Body", "Buffers", "Builder", "Input", "Step"]
