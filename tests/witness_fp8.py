"""Typing rules in the vocabulary of ``spmd_types`` of FP8's ops: operands as their carriers, a scale as its tile, which
no two ranks may have parts of unless the largest magnitude is that of all.  ``w`` is the walk of ``witness.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
from spmd_types import rules
from torch import Tensor
from witness_moves import belong, derived, spec_of

from moec.runtime.fp8 import Recipe


def _made(w, x: Any, dims: list, reduced: dict) -> Any:
    """Of x's types, but on dims of its own; ``reduced``: what it is on axes that it has no dim of."""
    out, local = rules.NdimWithSpmdType(len(dims)), {}
    kept = {a for d in dims for a in d}
    for a, t in dict(spmd.get_local_type(x)).items():
        local[a] = t if a in kept else reduced.get(a, spmd.R if t is spmd.V else t)
    spmd.assert_type(out, local, partition_spec=spec_of(dims))
    return out


def _tiles(w, x: Any, recipe: Recipe, role: str, transposed: bool) -> tuple[list, list]:
    """``(dims of the scales, axes whose ranks have parts of one tile)``."""
    dims = w.dims(x)
    if role in ("rows", "grad") and (transposed or recipe.shared == "tensor"):
        dims = [[a for d in dims[:-1] for a in d], dims[-1]]
    tile = recipe.tile(role, transposed)
    ours = {w.axes[name] for name in w.mesh.names}  # owners are no ranks
    shared = [a for i in (-2, -1) if tile[i] == 0 for a in dims[i] if a in ours]
    return [*dims[:-2], *([] if tile[i] == 0 else dims[i] for i in (-2, -1))], shared


def _matrix(w, x: Any, role: str, transposed: bool) -> list:
    dims = w.dims(x)
    return [[a for d in dims[:-1] for a in d], dims[-1]] if transposed and role in ("rows", "grad") else dims


def _no_sum(w, x: Any) -> Any:
    return w.einsum("...->...", x)


def _amax(w, node, x, counts, recipe, role, transposed):
    rules.ignore(*([counts] if counts is not None else []))
    dims, shared = _tiles(w, x, Recipe.parse(recipe), role, transposed)
    return _made(w, _no_sum(w, x), dims, dict.fromkeys(shared, spmd.V))


def _quantise(w, node, x, amax, amax_T, counts, recipe, role, both):
    found, typed = Recipe.parse(recipe), _no_sum(w, x)
    if counts is not None:
        rules.ignore(counts)
    out = [typed]
    for transposed, given in ((False, amax), (True, amax_T)):
        if transposed and not both:
            out += [_made(w, typed, [[]], {}) for _ in range(2)]
            continue
        dims, shared = _tiles(w, x, found, role, transposed)
        for a in shared:
            if given is None or derived(given, a)[0] not in "IR":
                raise spmd.SpmdTypeError(f"ranks of {a} have parts of a tile, and no maximum over them")
        if given is not None and transposed >= (amax_T is not amax):
            rules.ignore(given)
        out += [_made(w, typed, _matrix(w, x, role, transposed), {}), _made(w, typed, dims, {})]
    return tuple(out)


def _operands(w, x, role, recipe, pairs) -> None:
    """(q, scale) of both layouts lie where their carrier lies."""
    for transposed, (q, scale) in enumerate(pairs):
        rules.ignore(q)
        rules.ignore(scale)
        if transposed and not q.numel():
            continue
        if w.dims(q) != _matrix(w, x, role, bool(transposed)):
            raise spmd.SpmdTypeError(f"an operand is cut as {w.dims(q)}, its carrier as {w.dims(x)}")
        if w.dims(scale) != _tiles(w, x, recipe, role, bool(transposed))[0]:
            raise spmd.SpmdTypeError(f"scales are cut as {w.dims(scale)}, their operand as {w.dims(q)}")


def _taps(w, y, recipe: Recipe, shared: bool) -> list:
    out = []
    for transposed in (False, True):
        dims = [[]]
        if shared and (not transposed or recipe.shared == "vector"):
            dims, _ = _tiles(w, y, recipe, "grad", transposed)
        out.append(_made(w, y, dims, dict.fromkeys(w.axes.values(), spmd.I)))
    return out


def fp8_tiles(w, y: Any, recipe: str, transposed: bool) -> list:
    """Axes whose ranks have parts of one tile of y's gradient."""
    return _tiles(w, y, Recipe.parse(recipe), "grad", transposed)[1]


def _fp8_linear(w, node, x, weight, *rest):
    *q, _, recipe, shared = rest
    found = Recipe.parse(recipe)
    _operands(w, x, "rows", found, (q[0:2], q[4:6]))
    _operands(w, weight, "weight", found, (q[2:4], q[6:8]))
    y = w.einsum("...k,nk->...n", x, weight, linear_in=(0, 1))
    return y, *_taps(w, y, found, shared)


def _fp8_grouped_mm(w, node, x_NK, weight_EKM, counts_E, *rest):
    *q, _, recipe, shared = rest
    found = Recipe.parse(recipe)
    _operands(w, x_NK, "rows", found, (q[0:2], q[4:6]))
    _operands(w, weight_EKM, "stack", found, (q[2:4], q[6:8]))
    w.check_counts(counts_E, weight_EKM)
    y = w.as_rows(w.einsum("enk,ekm->enm", w.by_expert(x_NK), weight_EKM, linear_in=(0, 1)))
    return y, *_taps(w, y, found, shared)


def _grad_amax(w, node, y, tap, tap_T, counts, recipe):
    found = Recipe.parse(recipe)
    if counts is not None:
        rules.ignore(counts)
    for transposed, t in ((False, tap), (True, tap_T)):
        rules.ignore(t)
        if t.numel():
            for a in _tiles(w, y, found, "grad", transposed)[1]:
                if derived(t, a) != ("V", -1):
                    raise spmd.SpmdTypeError(f"the gradient's magnitude on {a} is that of one rank's part")
    return w.einsum("...->...", y, linear_in=(0,))


def _dequantise(w, node, q: Tensor, scale: Tensor, *_):
    rules.ignore(scale)
    return w.einsum("...->...", q)


def _turn(w, node, q: Tensor, role):
    return _made(w, _no_sum(w, q), _matrix(w, q, role, True), {})


def _encode_rows(w, node, x, amax, payload, role):
    """Whole rows are rounded, no sums; one scale for all is made from what is the same on all ranks."""
    typed, dims = _no_sum(w, x), w.dims(x)
    if dims[-1]:
        raise spmd.SpmdTypeError(f"ranks of {dims[-1]} have parts of a row")
    _largest(w, x, amax, payload)
    return typed, _made(w, typed, dims, {})


def _largest(w, x, amax, payload) -> None:
    if payload != "bf16" and Recipe.parse(payload).shared == "tensor":
        rules.ignore(amax)
        for a in (a for d in w.dims(x) for a in d if a in [w.axes[n] for n in w.mesh.names]):
            if derived(amax, a)[0] not in "IR":
                raise spmd.SpmdTypeError(f"one scale is made of what is {derived(amax, a)} on {a}")


def _decode_rows(w, node, data, carrier, amax, payload, role):
    belong(w, data, carrier)
    _largest(w, carrier, amax, payload)
    return _no_sum(w, carrier)


def _decode_operand(w, node, data, carrier, amax, amax_T, counts, payload, both):
    belong(w, data, carrier)
    _largest(w, carrier, amax, payload)
    known = amax if Recipe.parse(payload).shared == "tensor" else None
    return _quantise(w, node, carrier, known, amax_T, counts, payload, "rows", both)


def _own_rows(w, node, x, counts, *_):
    rules.ignore(counts)
    return w.einsum("...->...", x, linear_in=(0,))


def _history(w, history: Tensor) -> None:
    """The same on every rank: a rank of its own would scale by what it alone has seen."""
    for a in w.axes.values():
        if derived(history, a)[0] not in "IR":
            raise spmd.SpmdTypeError(f"a history that is not the same on {a}")


def _past_amax(w, node, history, row, x, recipe, role):
    _history(w, history)
    rules.ignore(history)
    dims, shared = _tiles(w, x, Recipe.parse(recipe), role, False)
    return _made(w, _no_sum(w, x), dims, dict.fromkeys(shared, spmd.R))


def _note_amax(w, node, history, amax_x, amax_w):
    """Of any part of the operands: the maximum over all ranks is taken where the histories' gradients arrive."""
    _history(w, history)
    rules.ignore(amax_x)
    rules.ignore(amax_w)
    return _made(w, history, [[], []], dict.fromkeys(w.axes.values(), spmd.R))


def _fan_max(w, node, history, n):
    _history(w, history)
    return [_made(w, history, [[], []], dict.fromkeys(w.axes.values(), spmd.I)) for _ in range(n)]


FP8: dict[str, Callable] = {
    "moec.amax": _amax, "moec.quantise": _quantise, "moec.dequantise": _dequantise, "moec.fp8_linear": _fp8_linear,
    "moec.fp8_grouped_mm": _fp8_grouped_mm, "moec.grad_amax": _grad_amax, "moec.align_rows": _own_rows,
    "moec.unalign_rows": _own_rows, "moec.turn": _turn,
    "moec.encode_rows": _encode_rows, "moec.decode_rows": _decode_rows,
    "moec.decode_operand": _decode_operand,
    "moec.past_amax": _past_amax, "moec.note_amax": _note_amax,
    "moec.fan_max": _fan_max,
}  # fmt: skip
