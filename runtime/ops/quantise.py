"""``moec::quantise``: an operand of FP8 products, for the one that it enters and for the one of its derivative.

Legend: N rows (of ``rows`` and ``grad`` all leading dims as one), E experts; recipes, roles, tiles and transposition as
in ``runtime/fp8/recipes.py``.

``quantise(x, amax, amax_T, counts_E, recipe, role, both) -> (carrier, q, scale, q_T, scale_T)``

* ``q`` has x's shape; ``scale`` one number a tile.  ``q_T`` and ``scale_T`` are the transposed ones, of a matrix [N, C]
  for ``rows`` and ``grad``; both from x's own values.  Without ``both`` (nothing will be differentiated) they are
  empty.
* ``amax``, ``amax_T``: the largest magnitudes that scales are made from, as ``amax`` gives them, where they are not
  those of this x: all ranks' or past steps'.
* ``counts_E``: rows are those of experts, each beginning at a multiple of the recipe's alignment, and what lies between
  is taken for zeros.
* ``carrier`` has x's shape and dtype and no memory: products take it beside q, and what they send back as its gradient
  is the gradient of x.  Its values mean nothing.  So q and its scales travel as plain bytes, and no derivative asks for
  them.

``amax(x, counts_E, recipe, role, transposed)``: fp32, the largest finite magnitude of every tile.

``dequantise(q, scale, recipe, role, transposed, dtype)``: q · scale; no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from ..fp8 import Recipe, dequantised, quantised
from ..fp8 import amax as amax_of
from ..fp8.recipes import E8M0
from ..fp8.tiles import num_tiles
from .align_rows import real_rows

DEVICES = ("cpu", "cuda")


def as_matrix(x: Tensor, role: str, transposed: bool) -> Tensor:
    """Transposed, rows and gradients are [N, C]."""
    return x.reshape(-1, x.shape[-1]) if transposed and role in ("rows", "grad") else x


def of_experts(x: Tensor, counts_E: Tensor | None, recipe: Recipe) -> Tensor:
    """Zeros where a row is none of an expert's."""
    if counts_E is None:
        return x
    return x.masked_fill(~real_rows(counts_E, x.shape[0], recipe.alignment, "quantise")[:, None], 0)


def scale_shape(x: Tensor, recipe: Recipe, role: str, transposed: bool) -> list:
    """Shape of the scales."""
    *lead, rows, columns = as_matrix(x, role, transposed).shape
    if role in ("rows", "grad") and lead and recipe.shared == "tensor":
        return [1, 1]
    tile = recipe.tile(role, transposed)
    sizes = [n if s == 1 else num_tiles(n, s) for n, s in zip((rows, columns), tile, strict=True)]
    return [*lead, *sizes]


@torch.library.custom_op("moec::amax", mutates_args=(), device_types="cpu")
def amax(x: Tensor, counts_E: Tensor | None, recipe: str, role: str, transposed: bool) -> Tensor:
    return amax_on_any_device(x, counts_E, recipe, role, transposed)


def amax_on_any_device(x: Tensor, counts_E: Tensor | None, recipe: str, role: str, transposed: bool) -> Tensor:
    found = Recipe.parse(recipe)
    x = of_experts(x, counts_E, found)
    matrix = found.shared == "tensor" and role in ("rows", "grad")
    return amax_of(as_matrix(x, role, transposed or matrix), found.tile(role, transposed)).clone()


@amax.register_fake
def _(x, counts_E, recipe, role, transposed):
    return x.new_empty(scale_shape(x, Recipe.parse(recipe), role, transposed), dtype=torch.float32)


def none(ctx, *grads):
    return (None,) * ctx.arguments


def no_gradient(ctx, inputs, output) -> None:
    ctx.arguments = len(inputs)
    ctx.mark_non_differentiable(output)


amax.register_autograd(none, setup_context=no_gradient)


def on_any_device(
    x: Tensor, amax: Tensor | None, amax_T: Tensor | None, counts_E: Tensor | None, recipe: str, role: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = Recipe.parse(recipe)
    real = of_experts(x, counts_E, found)
    made: list[Tensor] = [carrier(x)]
    for transposed, given in ((False, amax), (True, amax_T)):
        if transposed and not both:
            made += nothing(x, found, role)
            continue
        shape = checked_shape(x, given, found, role, transposed)
        q, scale = quantised(as_matrix(real, role, transposed or len(shape) < x.ndim), found, role, transposed, given)
        made += [q if transposed else q.view(x.shape), scale]
    like_x, q, scale, q_T, scale_T = made
    return like_x, q, scale, q_T, scale_T


def checked_shape(x: Tensor, amax: Tensor | None, recipe: Recipe, role: str, transposed: bool) -> list:
    """Shape of the scales.  Raises MoecError where the largest magnitudes that are given have another one."""
    shape = scale_shape(x, recipe, role, transposed)
    if amax is not None and list(amax.shape) != shape:
        raise MoecError(
            f"x {tuple(x.shape)} and {'transposed ' if transposed else ''}amax {tuple(amax.shape)} do not fit: "
            f"{recipe.name} has scales {tuple(shape)}",
            where="moec::quantise",
        )
    return shape


@torch.library.custom_op("moec::quantise", mutates_args=(), device_types="cpu")
def quantise(
    x: Tensor, amax: Tensor | None, amax_T: Tensor | None, counts_E: Tensor | None, recipe: str, role: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return on_any_device(x, amax, amax_T, counts_E, recipe, role, both)


def carrier(x: Tensor) -> Tensor:
    return x.new_zeros(()).expand(x.shape)


def nothing(x: Tensor, recipe: Recipe, role: str) -> list[Tensor]:
    scale = E8M0 if recipe.scales == "e8m0" else torch.float32
    return [x.new_empty((0,), dtype=recipe.format(role)), x.new_empty((0,), dtype=scale)]


def fake(x: Tensor, recipe: str, role: str, both: bool) -> tuple[Tensor, ...]:
    """Results for a fake x."""
    found = Recipe.parse(recipe)
    made = []
    for transposed in (False, True):
        if transposed and not both:
            made += nothing(x, found, role)
            continue
        q = x if role in ("weight", "stack") or not transposed else as_matrix(x, role, True)
        order = list(range(q.ndim))
        if transposed != (role == "stack"):
            order[-2:] = order[-1], order[-2]
        scale = E8M0 if found.scales == "e8m0" else torch.float32
        made += [
            torch.empty_permuted(q.shape, order, dtype=found.format(role), device=x.device),
            x.new_empty(scale_shape(x, found, role, transposed), dtype=scale),
        ]
    return carrier(x), *made


@quantise.register_fake
def _(x, amax, amax_T, counts_E, recipe, role, both):
    return fake(x, recipe, role, both)


def _setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    return grad, None, None, None, None, None, None


quantise.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("moec::dequantise", mutates_args=(), device_types=DEVICES)
def dequantise(q: Tensor, scale: Tensor, recipe: str, role: str, transposed: bool, dtype: torch.dtype) -> Tensor:
    return values(q, scale, Recipe.parse(recipe), role, transposed, dtype)


def values(q: Tensor, scale: Tensor, recipe: Recipe, role: str, transposed: bool, dtype: torch.dtype) -> Tensor:
    """``q · scale`` in q's shape."""
    matrix = as_matrix(q, role, transposed or scale.ndim < q.ndim)
    return dequantised(matrix, scale, recipe, role, transposed, dtype).view(q.shape)


@dequantise.register_fake
def _(q, scale, recipe, role, transposed, dtype):
    return q.new_empty(q.shape, dtype=dtype)


dequantise.register_autograd(none, setup_context=no_gradient)
