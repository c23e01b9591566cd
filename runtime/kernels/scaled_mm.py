"""FP8 linears on a GPU whose tensor cores multiply FP8 (``fp8_ways.py``): ``torch.nn.functional.scaled_mm``, for
recipes with fp32 scales, or generated kernels.

Legend: N rows, K and M in and out features.

torch's multiplies numbers and applies the scales to the sums: what the CPU op computes, rounded in another order.
Where neither can (features or, for a weight's gradient, rows that 16 does not divide), the op is ordinary torch code:
numbers times powers of two are exact in bf16, and are multiplied so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fp8 import Recipe
from ..ops import fp8_linear as op
from . import scaled
from .fp8_ways import LINEARS, Product, Way, capability, fit, way


def found_way(a_NK: Tensor, b_MK: Tensor, recipe: Recipe, product: Product, dtype: torch.dtype) -> Way | None:
    """What computes ``product`` on this device."""
    fits = bool(a_NK.numel()) and fit(a_NK.shape[1], b_MK.shape[0])
    return way(LINEARS, recipe.name, product, dtype, capability(a_NK)) if fits else None


def product(a_NK: Tensor, a_s: Tensor, b_MK: Tensor, b_s: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """a · bᵀ as torch computes it, both contiguous along K; scales [N, 1] and [M, 1], or [1, 1]."""
    if recipe.shared == "tensor":
        kind, scales = F.ScalingType.TensorWise, (a_s.reshape(-1), b_s.reshape(-1))
    else:
        kind, scales = F.ScalingType.RowWise, (a_s.reshape(-1).view(-1, 1), b_s.reshape(-1).view(1, -1))
    return F.scaled_mm(a_NK, b_MK.t(), scales[0], kind, scales[1], kind, output_dtype=dtype)


def forward(x: Tensor, w: Tensor, x_q: Tensor, x_s: Tensor, w_q: Tensor, w_s: Tensor, *rest) -> tuple[Tensor, ...]:
    """``moec::fp8_linear``."""
    recipe, shared = rest[-2:]
    found, a_NK = Recipe.parse(recipe), x_q.reshape(-1, x_q.shape[-1])
    by = found_way(a_NK, w_q, found, "forward", x.dtype)
    if by is None:
        return op.on_any_device(x, w, x_q, x_s, w_q, w_s, *rest)
    compute = scaled.linear_rows if by.name == "generated" else product
    y = compute(a_NK, x_s.reshape(-1, x_s.shape[-1]), w_q, w_s, found, x.dtype).view(*x.shape[:-1], w.shape[0])
    return y, *op.taps(y, recipe, shared)


def dgrad(g_q: Tensor, g_s: Tensor, w_qT: Tensor, w_sT: Tensor, recipe: str, dtype: torch.dtype) -> Tensor:
    """``moec::fp8_dgrad``."""
    found, a_NM = Recipe.parse(recipe), g_q.reshape(-1, g_q.shape[-1])
    by = found_way(a_NM, w_qT.t(), found, "dgrad", dtype)
    if by is None:
        return op.dgrad_on_any_device(g_q, g_s, w_qT, w_sT, recipe, dtype)
    compute = scaled.linear_rows if by.name == "generated" else product
    dx = compute(a_NM, g_s.reshape(-1, g_s.shape[-1]), w_qT.t(), w_sT.t(), found, dtype)
    return dx.view(*g_q.shape[:-1], w_qT.shape[1])


def wgrad(g_qT: Tensor, g_sT: Tensor, x_qT: Tensor, x_sT: Tensor, recipe: str, dtype: torch.dtype) -> Tensor:
    """``moec::fp8_wgrad``."""
    found = Recipe.parse(recipe)
    by = found_way(g_qT.t(), x_qT.t(), found, "wgrad", dtype)
    if by is None:
        return op.wgrad_on_any_device(g_qT, g_sT, x_qT, x_sT, recipe, dtype)
    if by.name == "generated":
        return scaled.linear_outer(g_qT, g_sT, x_qT, x_sT, found, dtype)
    return product(g_qT.t(), g_sT.t(), x_qT.t(), x_sT.t(), found, dtype)


op.fp8_linear.register_kernel("cuda")(forward)
op.fp8_dgrad.register_kernel("cuda")(dgrad)
op.fp8_wgrad.register_kernel("cuda")(wgrad)
