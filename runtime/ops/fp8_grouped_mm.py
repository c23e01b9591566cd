"""``moec::fp8_grouped_mm``: one FP8 product per expert over consecutive segments of rows.

Legend: N rows, E experts, K and M in and out features; q and s are what ``moec::quantise`` gives.

``fp8_grouped_mm(x, w, counts_E, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared) -> (y, tap,
tap_T)``

* As ``moec::fp8_linear``, with carriers x [N, K] and w [E, K, M], quantised as ``rows`` (with ``counts_E``) and
  ``stack``.
* Expert e's ``counts_E[e]`` rows begin at a multiple of the recipe's alignment (MoecError where they cannot); rows of
  none give zeros.  So a tile of 128 or 32 rows never holds rows of two experts, and kernels need no masks.

Its backward's products: ``fp8_grouped_dgrad(g_q [N, M], g_s, w_qT [E, K, M], w_sT, counts_E, recipe, dtype) -> [N, K]``
and ``fp8_grouped_wgrad(x_qT [N, K], x_sT, g_qT [N, M], g_sT, counts_E, recipe, dtype) -> [E, M, K]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MoecError
from ..fp8 import Recipe
from .align_rows import padded, real_rows
from .fp8_linear import quantised_grad, require_both, taps, working_dtype
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .quantise import amax, values


def _product(
    a_q: Tensor, a_s: Tensor, b_q: Tensor, b_s: Tensor, counts_E: Tensor, recipe: str, a_role: str, b_transposed: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """a · b of every expert, or a · bᵀ."""
    found = Recipe.parse(recipe)
    wide = working_dtype(dtype, found, a_q.device)
    real_rows(counts_E, a_q.shape[0], found.alignment, "fp8_grouped_mm")
    b = values(b_q, b_s, found, "stack", b_transposed, wide)
    a = values(a_q, a_s, found, a_role, False, wide)
    return grouped_mm(a, b.transpose(1, 2) if b_transposed else b, padded(counts_E, found.alignment)).to(dtype)


@torch.library.custom_op("moec::fp8_grouped_dgrad", mutates_args=(), device_types="cpu")
def fp8_grouped_dgrad(
    g_q: Tensor, g_s: Tensor, w_qT: Tensor, w_sT: Tensor, counts_E: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    return dgrad_on_any_device(g_q, g_s, w_qT, w_sT, counts_E, recipe, dtype)


def dgrad_on_any_device(
    g_q: Tensor, g_s: Tensor, w_qT: Tensor, w_sT: Tensor, counts_E: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    return _product(g_q, g_s, w_qT, w_sT, counts_E, recipe, "grad", True, dtype)


@fp8_grouped_dgrad.register_fake
def dgrad_fake(g_q, g_s, w_qT, w_sT, counts_E, recipe, dtype):
    return g_q.new_empty((g_q.shape[0], w_qT.shape[1]), dtype=dtype)


@torch.library.custom_op("moec::fp8_grouped_wgrad", mutates_args=(), device_types="cpu")
def fp8_grouped_wgrad(
    x_qT: Tensor, x_sT: Tensor, g_qT: Tensor, g_sT: Tensor, counts_E: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    return wgrad_on_any_device(x_qT, x_sT, g_qT, g_sT, counts_E, recipe, dtype)


def wgrad_on_any_device(
    x_qT: Tensor, x_sT: Tensor, g_qT: Tensor, g_sT: Tensor, counts_E: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    found = Recipe.parse(recipe)
    wide = working_dtype(dtype, found, x_qT.device)
    real_rows(counts_E, x_qT.shape[0], found.alignment, "fp8_grouped_mm")
    g_NM, x_NK = values(g_qT, g_sT, found, "grad", True, wide), values(x_qT, x_sT, found, "rows", True, wide)
    return grouped_mm_wgrad(g_NM, x_NK, padded(counts_E, found.alignment)).to(dtype)


@fp8_grouped_wgrad.register_fake
def wgrad_fake(x_qT, x_sT, g_qT, g_sT, counts_E, recipe, dtype):
    return x_qT.new_empty((counts_E.shape[0], g_qT.shape[1], x_qT.shape[1]), dtype=dtype)


@torch.library.custom_op("moec::fp8_grouped_mm", mutates_args=(), device_types="cpu")
def fp8_grouped_mm(
    x: Tensor, w: Tensor, counts_E: Tensor, x_q: Tensor, x_s: Tensor, w_q: Tensor, w_s: Tensor, x_qT: Tensor,
    x_sT: Tensor, w_qT: Tensor, w_sT: Tensor, grad_amax: Tensor | None, recipe: str, shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return on_any_device(
        x, w, counts_E, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared
    )


def on_any_device(
    x: Tensor, w: Tensor, counts_E: Tensor, x_q: Tensor, x_s: Tensor, w_q: Tensor, w_s: Tensor, x_qT: Tensor,
    x_sT: Tensor, w_qT: Tensor, w_sT: Tensor, grad_amax: Tensor | None, recipe: str, shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check(x, w, counts_E, x_q, w_q)
    y = _product(x_q, x_s, w_q, w_s, counts_E, recipe, "rows", False, x.dtype)
    return y, *taps(y, recipe, shared)


def check(x: Tensor, w: Tensor, counts_E: Tensor, x_q: Tensor, w_q: Tensor) -> None:
    """Raise MoecError unless the operands fit each other."""
    if x_q.shape != x.shape or w_q.shape != w.shape or (counts_E.shape[0], x.shape[1]) != tuple(w.shape[:2]):
        raise MoecError(
            f"x {tuple(x.shape)} quantised {tuple(x_q.shape)}, w {tuple(w.shape)} quantised {tuple(w_q.shape)} and "
            f"counts {tuple(counts_E.shape)} do not fit",
            where="moec::fp8_grouped_mm",
        )


@fp8_grouped_mm.register_fake
def fake(x, w, counts_E, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared):
    y = x.new_empty((x.shape[0], w.shape[2]))
    return y, *taps(y, recipe, shared)


def setup(ctx, inputs, output) -> None:
    x, w, counts_E, *quantised, grad_amax, ctx.recipe, ctx.shared = inputs
    ctx.save_for_backward(counts_E, *quantised[4:], grad_amax)
    ctx.dtypes = x.dtype, w.dtype
    ctx.set_materialize_grads(False)


def backward_by(dgrad: Callable[..., Tensor], wgrad: Callable[..., Tensor]) -> Callable[..., tuple]:
    """The derivative, by these ops of the two products."""

    def backward(ctx, g, *reduced):
        if g is None:
            return (None,) * 14
        counts_E, x_qT, x_sT, w_qT, w_sT, grad_amax = ctx.saved_tensors
        require_both(x_qT, "moec::fp8_grouped_mm")
        need_x, need_w, *_, need_amax, _, _ = ctx.needs_input_grad
        g_q, g_s, g_qT, g_sT = quantised_grad(g, reduced, grad_amax, counts_E, ctx.recipe, ctx.shared, need_w)
        dx = dw = None
        if need_x:
            dx = dgrad(g_q, g_s, w_qT, w_sT, counts_E, ctx.recipe, ctx.dtypes[0])
        if need_w:  # in the layout that weights are stored in: [E, M, K]
            dw = wgrad(x_qT, x_sT, g_qT, g_sT, counts_E, ctx.recipe, ctx.dtypes[1]).transpose(1, 2)
        found = amax(g, counts_E, ctx.recipe, "grad", False) if need_amax else None
        return dx, dw, *(None,) * 9, found, None, None

    return backward


fp8_grouped_mm.register_autograd(backward_by(fp8_grouped_dgrad, fp8_grouped_wgrad), setup_context=setup)
