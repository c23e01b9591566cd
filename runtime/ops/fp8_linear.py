"""``moec::fp8_linear``: a product with a weight in FP8, and so both products of its derivative.

Legend: N rows (all leading dims as one), K in and M out features; q and s are what ``moec::quantise`` gives.

``fp8_linear(x, w, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared) -> (y, tap, tap_T)``

* x [..., K] and w [M, K] are carriers: what counts of them is shape and dtype, and that gradients go to them.
* y [..., M] in x's dtype: products of q · s, added up in fp32 (fp64 where x is).
* Backward: the gradient g [..., M] is quantised, for dx along M, for dw along N; dx = g · w with ``w_qT``, dw = gᵀ · x
  with ``x_qT``: three products in FP8.  ``grad_amax``: the largest magnitude that g's scale is made from (past steps');
  its gradient is that of g itself, of this rank's part.
* ``shared``: ranks share g, so the largest magnitudes are found over all of them: what arrives as the *gradients* of
  ``tap`` and ``tap_T`` are these (``moec::grad_amax`` states them).  Without it the taps are empty.

Its backward's products by themselves, for a schedule: ``fp8_dgrad(g_q [..., M], g_s, w_qT [M, K], w_sT, recipe, dtype)
-> [..., K]`` and ``fp8_wgrad(g_qT [N, M], g_sT, x_qT [N, K], x_sT, recipe, dtype) -> [M, K]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MoecError
from ..fp8 import Recipe
from .quantise import amax as amax_of
from .quantise import quantise, scale_shape, values
from .rows import accumulator


def working_dtype(dtype: torch.dtype, recipe: Recipe, device: torch.device) -> torch.dtype:
    """What values are multiplied in; sums are fp32 (fp64) in any case.  On a GPU numbers times powers of two, which are
    exact in bf16, are."""
    exact = device.type == "cuda" and dtype == torch.bfloat16 and recipe.scales != "fp32"
    return dtype if exact else accumulator(dtype)


@torch.library.custom_op("moec::fp8_dgrad", mutates_args=(), device_types="cpu")
def fp8_dgrad(g_q: Tensor, g_s: Tensor, w_qT: Tensor, w_sT: Tensor, recipe: str, dtype: torch.dtype) -> Tensor:
    return dgrad_on_any_device(g_q, g_s, w_qT, w_sT, recipe, dtype)


def dgrad_on_any_device(
    g_q: Tensor, g_s: Tensor, w_qT: Tensor, w_sT: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    found = Recipe.parse(recipe)
    wide = working_dtype(dtype, found, g_q.device)
    g, w_MK = values(g_q, g_s, found, "grad", False, wide), values(w_qT, w_sT, found, "weight", True, wide)
    return torch.matmul(g, w_MK).to(dtype)


@fp8_dgrad.register_fake
def dgrad_fake(g_q, g_s, w_qT, w_sT, recipe, dtype):
    return g_q.new_empty((*g_q.shape[:-1], w_qT.shape[1]), dtype=dtype)


@torch.library.custom_op("moec::fp8_wgrad", mutates_args=(), device_types="cpu")
def fp8_wgrad(g_qT: Tensor, g_sT: Tensor, x_qT: Tensor, x_sT: Tensor, recipe: str, dtype: torch.dtype) -> Tensor:
    return wgrad_on_any_device(g_qT, g_sT, x_qT, x_sT, recipe, dtype)


def wgrad_on_any_device(
    g_qT: Tensor, g_sT: Tensor, x_qT: Tensor, x_sT: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    found = Recipe.parse(recipe)
    wide = working_dtype(dtype, found, g_qT.device)
    g_NM = values(g_qT, g_sT, found, "grad", True, wide)
    return torch.mm(g_NM.t(), values(x_qT, x_sT, found, "rows", True, wide)).to(dtype)


@fp8_wgrad.register_fake
def wgrad_fake(g_qT, g_sT, x_qT, x_sT, recipe, dtype):
    return g_qT.new_empty((g_qT.shape[1], x_qT.shape[1]), dtype=dtype)


@torch.library.custom_op("moec::fp8_linear", mutates_args=(), device_types="cpu")
def fp8_linear(
    x: Tensor, w: Tensor, x_q: Tensor, x_s: Tensor, w_q: Tensor, w_s: Tensor, x_qT: Tensor, x_sT: Tensor, w_qT: Tensor,
    w_sT: Tensor, grad_amax: Tensor | None, recipe: str, shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return on_any_device(x, w, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared)


def on_any_device(
    x: Tensor, w: Tensor, x_q: Tensor, x_s: Tensor, w_q: Tensor, w_s: Tensor, x_qT: Tensor, x_sT: Tensor, w_qT: Tensor,
    w_sT: Tensor, grad_amax: Tensor | None, recipe: str, shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check(x, w, x_q, w_q)
    found = Recipe.parse(recipe)
    wide = working_dtype(x.dtype, found, x.device)
    values_x, values_w = values(x_q, x_s, found, "rows", False, wide), values(w_q, w_s, found, "weight", False, wide)
    y = torch.matmul(values_x, values_w.t()).to(x.dtype)
    return y, *taps(y, recipe, shared)


def check(x: Tensor, w: Tensor, x_q: Tensor, w_q: Tensor) -> None:
    """Raise MoecError unless the operands fit each other."""
    if x_q.shape != x.shape or w_q.shape != w.shape or x.shape[-1] != w.shape[-1]:
        raise MoecError(
            f"x {tuple(x.shape)} quantised {tuple(x_q.shape)}, w {tuple(w.shape)} quantised {tuple(w_q.shape)} do "
            "not fit",
            where="moec::fp8_linear",
        )


@fp8_linear.register_fake
def fake(x, w, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared):
    y = x.new_empty((*x.shape[:-1], w.shape[0]))
    return y, *taps(y, recipe, shared)


def taps(y: Tensor, recipe: str, shared: bool) -> tuple[Tensor, Tensor]:
    """fp32 zeros, each as the largest magnitudes of y's gradient that scales are made from; empty if not ``shared``."""
    found = Recipe.parse(recipe)
    shape = scale_shape(y, found, "grad", False) if shared else [0]
    shape_T = scale_shape(y, found, "grad", True) if shared and found.shared == "vector" else [0]
    return y.new_zeros(shape, dtype=torch.float32), y.new_zeros(shape_T, dtype=torch.float32)


def setup(ctx, inputs, output) -> None:
    x, w, *quantised, grad_amax, ctx.recipe, ctx.shared = inputs
    ctx.save_for_backward(*quantised[4:], grad_amax)
    ctx.dtypes = x.dtype, w.dtype
    ctx.set_materialize_grads(False)


def backward_by(dgrad: Callable[..., Tensor], wgrad: Callable[..., Tensor]) -> Callable[..., tuple]:
    """The derivative, by these ops of the two products."""

    def backward(ctx, g, *reduced):
        if g is None:
            return (None,) * 13
        x_qT, x_sT, w_qT, w_sT, grad_amax = ctx.saved_tensors
        require_both(x_qT, "moec::fp8_linear")
        need_x, need_w, *_, need_amax, _, _ = ctx.needs_input_grad
        g_q, g_s, g_qT, g_sT = quantised_grad(g, reduced, grad_amax, None, ctx.recipe, ctx.shared, need_w)
        dx = dgrad(g_q, g_s, w_qT, w_sT, ctx.recipe, ctx.dtypes[0]) if need_x else None
        dw = wgrad(g_qT, g_sT, x_qT, x_sT, ctx.recipe, ctx.dtypes[1]) if need_w else None
        found = amax_of(g, None, ctx.recipe, "grad", False) if need_amax else None
        return dx, dw, *(None,) * 8, found, None, None

    return backward


def require_both(q_T: Tensor, where: str) -> None:
    """Raise MoecError where an operand was not quantised for the products of a derivative."""
    if q_T.ndim == 1:
        raise MoecError(
            "a backward of what was computed in FP8 for evaluation alone: operands have no layout for it", where=where,
            way_out="model.train() before the forward",
        )  # fmt: skip


def quantised_grad(
    g: Tensor, reduced: tuple[Tensor | None, ...], grad_amax: Tensor | None, counts_E: Tensor | None, recipe: str,
    shared: bool, both: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient for both products, from the largest magnitudes that the taps or past steps have."""
    amax = amax_T = grad_amax
    if shared and grad_amax is None:
        amax, amax_T = reduced
        if amax is None:
            raise MoecError(
                "the largest magnitudes of a gradient that ranks share did not arrive", where="moec::fp8_linear",
                way_out="moec::grad_amax behind the product, with its taps",
            )  # fmt: skip
        amax_T = amax if Recipe.parse(recipe).shared == "tensor" else amax_T
    return quantise(g, amax, amax_T, counts_E, recipe, "grad", both)[1:]


fp8_linear.register_autograd(backward_by(fp8_dgrad, fp8_wgrad), setup_context=setup)
