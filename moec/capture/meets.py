"""Meets: where rows meet an expert's parameter, and the grouped form of that step.

* ``contraction``: a product that sums over the features (``linear``, ``matmul``, ``bmm``, ``einsum``, ``addmm``,
  ``grouped_mm``).  It becomes ``moec::grouped_mm``; a bias becomes ``moec::grouped_add``.
* anything else is taken to act feature by feature: a sum with a bias becomes ``moec::grouped_add``; for other functions
  (a scale, a slope) each row is given its expert's entries, and the function runs as it was written.

The rows' layout and the parameter's *features* (the axes that one expert's parameter has) decide which axes are which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .axes import Layout, rows_of, spread
from .observe import Call, Tape
from .owners import walk
from .steps import Env, Refused, function_name, substitute

_PRODUCTS = frozenset({"matmul", "mm", "bmm", "__matmul__", "__rmatmul__"})
_ADDED = frozenset({"addmm", "baddbmm"})
_SEGMENTED = frozenset({"grouped_mm", "_grouped_mm"})
_SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
_NORMS = frozenset({"layer_norm", "rms_norm"})


@dataclass(frozen=True)
class Contraction:
    """``out = rows @ w (+ bias)``: which operand is which, and which axis of it is which."""

    rows: int
    weight: int
    bias: int | None
    rows_axis: int
    transposed: bool
    """The weight's features are (out, in)."""
    target: int
    layout: Layout

    def apply(self, env: Env, counts_E: Tensor) -> None:
        ops = torch.ops.moec
        w_EKM = env[self.weight].transpose(-2, -1) if self.transposed else env[self.weight]
        y_NM = ops.grouped_mm(rows_of(env[self.rows], self.rows_axis), w_EKM, counts_E)
        if self.bias is not None:
            y_NM = ops.grouped_add(y_NM, env[self.bias], counts_E)
        env[self.target] = spread(y_NM, self.layout)


def contraction(tape: Tape, call: Call, features: dict[int, tuple[int, ...]]) -> Contraction | None:
    """The step as a contraction, None if it is none.  ``features``: parameter value -> its feature axes.

    Raises Refused if it contracts in a way that has no grouped form."""
    name = function_name(call.func)
    if len(call.makes) != 1:
        return None
    reads, target = call.reads, call.makes[0]
    rank = len(_shape(tape, target))
    if call.func is F.linear:
        x, w, b = reads[0], reads[1], reads[2] if len(reads) > 2 else None
        if x in features or w not in features or (b is not None and b not in features):
            raise Refused("linear mixes an expert's parameters with other values")
        return Contraction(x, w, b, len(_shape(tape, x)) - 1, True, target, Layout(rank, rank - 1))
    if name in _PRODUCTS and len(reads) == 2:
        return _matmul(tape, *(reads[::-1] if name == "__rmatmul__" else reads), None, features, target)
    if name in _ADDED and len(reads) == 3 and not call.kwargs:
        return _matmul(tape, reads[1], reads[2], reads[0], features, target)
    if name in _SEGMENTED and len(reads) == 3:
        return _matmul(tape, reads[0], reads[1], None, features, target)
    if name == "einsum" and len(reads) == 2:
        return _einsum(tape, call, features, target)
    return None


def _matmul(
    tape: Tape, a: int, b: int, bias: int | None, features: dict[int, tuple[int, ...]], target: int
) -> Contraction | None:
    rank_a, rank_b, rank = len(_shape(tape, a)), len(_shape(tape, b)), len(_shape(tape, target))
    if bias is not None and bias not in features:
        raise Refused("a product adds a value that is no parameter of the expert")
    if a not in features and features.get(b) == (rank_b - 2, rank_b - 1):
        return Contraction(a, b, bias, rank_a - 1, False, target, Layout(rank, rank - 1))
    if b not in features and features.get(a) == (rank_a - 2, rank_a - 1) and rank_b >= 2 and bias is None:
        return Contraction(b, a, None, rank_b - 2, True, target, Layout(rank, rank - 2))
    raise Refused("rows and an expert parameter are multiplied along axes that have no grouped form")


def _einsum(tape: Tape, call: Call, features: dict[int, tuple[int, ...]], target: int) -> Contraction:
    equation = next(a for a in call.args if isinstance(a, str)).replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = dict(zip(call.reads, left.split(","), strict=True))
    if not arrow or len(terms) != 2:
        raise Refused(f"einsum {equation!r} over an expert parameter has no grouped form")
    w = next(v for v in call.reads if v in features)
    x = next((v for v in call.reads if v not in features), None)
    letters = {v: _letters(t, len(_shape(tape, v))) for v, t in terms.items()}
    outs = _letters(out, len(_shape(tape, target)))
    if x is not None and len(features[w]) == 2:
        one, two = (letters[w][a] for a in features[w])
        for summed, kept, transposed in ((one, two, False), (two, one, True)):
            if summed in letters[x] and summed not in outs and kept in outs and kept not in letters[x]:
                layout = Layout(len(outs), outs.index(kept))
                return Contraction(x, w, None, letters[x].index(summed), transposed, target, layout)
    raise Refused(f"einsum {equation!r} over an expert parameter has no grouped form")


def _letters(term: str, rank: int) -> list[str]:
    before, dots, after = term.partition("...")
    spread_over = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"...{i}" for i in reversed(range(spread_over))), *after]


@dataclass(frozen=True)
class FeatureWise:
    """A function of rows and parameters, feature by feature."""

    call: Call
    rows: dict[int, Layout]
    params: tuple[int, ...]
    targets: tuple[tuple[int, Layout], ...]

    def apply(self, env: Env, counts_E: Tensor) -> None:
        local: Env = {v: rows_of(env[v], layout.feature) for v, layout in self.rows.items()}
        x_NF = next(iter(local.values()))
        name = function_name(self.call.func)
        if name in _SUMS and len(self.params) == 1 and len(local) == 1 and not self.call.kwargs:
            b_EF = env[self.params[0]].reshape(counts_E.shape[0], -1)
            if b_EF.dtype == x_NF.dtype and b_EF.shape[1] == x_NF.shape[1]:
                ((target, layout),) = self.targets
                env[target] = spread(torch.ops.moec.grouped_add(x_NF, b_EF, counts_E), layout)
                return
        local.update((p, _for_rows(env[p], x_NF, counts_E)) for p in self.params)
        args, kwargs = substitute(self.call, local, x_NF.device)
        out = _norm(name, args, kwargs) if name in _NORMS else _run(name, self.call.func, args, kwargs)
        for (target, layout), y_NF in zip(self.targets, walk(out), strict=True):
            env[target] = spread(y_NF, layout)


def _for_rows(p_E: Tensor, x_NF: Tensor, counts_E: Tensor) -> Tensor:
    """Each row's own entries of ``[E, F]``, or (``[E]``, ``[E, 1]``) its one entry."""
    p_EF = p_E if p_E.dim() == 2 else p_E.reshape(p_E.shape[0], -1)
    like = x_NF if p_EF.shape[1] == x_NF.shape[1] else x_NF[:, :1]
    return torch.ops.moec.grouped_add(torch.zeros_like(like, dtype=p_EF.dtype), p_EF, counts_E)


def _run(name: str, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if name == "prelu":  # takes one slope a channel, not one an entry
        x, slope = args
        return torch.where(x > 0, x, slope * x)
    return func(*args, **kwargs)


def _norm(name: str, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Norms take one weight and bias for all rows: they are applied afterwards."""
    names = ("input", "normalized_shape", "weight", *(("bias",) if name == "layer_norm" else ()), "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    weight, bias = given.pop("weight", None), given.pop("bias", None)
    y = (F.layer_norm if name == "layer_norm" else F.rms_norm)(**given)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def feature_wise(tape: Tape, call: Call, rows: dict[int, Layout], features: dict[int, tuple[int, ...]]) -> FeatureWise:
    """Raises Refused if a parameter does not lie along the rows' features."""
    width = max(layout.rank for layout in rows.values())
    from_right = {layout.rank - layout.feature for layout in rows.values()}
    params = tuple(v for v in call.reads if v in features)
    if len(from_right) != 1:
        raise Refused(f"rows meet along different axes in {function_name(call.func)}")
    (right,) = from_right
    for p in params:
        wide = [a for a in features[p] if _shape(tape, p)[a] > 1]
        if any(len(_shape(tape, p)) - a != right for a in wide):
            raise Refused(f"rows and an expert parameter meet in {function_name(call.func)}, which has no grouped form")
    size = {_shape(tape, v)[layout.feature] for v, layout in rows.items()}
    targets = []
    for v in call.makes:
        shape = _shape(tape, v)
        if len(shape) < right or shape[-right] not in size or len(shape) < width:
            raise Refused(f"{function_name(call.func)} of rows and an expert parameter has no grouped form")
        targets.append((v, Layout(len(shape), len(shape) - right)))
    return FeatureWise(call, rows, params, tuple(targets))


def _shape(tape: Tape, v: int) -> tuple[int, ...]:
    t = tape.values[v]
    return tuple(t.shape) if t is not None else ()
