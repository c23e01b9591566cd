"""FP8 products of experts on a GPU that has them (``fp8_ways.py``): ``SCALED_GROUPED_MM``, or generated kernels.

Legend: N rows, E experts, K and M in and out features.

torch's multiplies numbers and applies the scales to the sums: what the CPU op computes, rounded in another order.  A
scale of a whole operand is repeated for every row.  Each expert's rows begin at a multiple of 16: so recipes align
them.  Nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8 import Recipe
from ..ops import fp8_grouped_mm as op
from ..ops.align_rows import padded
from ..ops.fp8_linear import taps
from ..torch_compat import SCALED_GROUPED_MM
from . import order, scaled, zero_tail
from .fp8_ways import GROUPS, Product, Way, capability, fit, way


def rows_product(
    a_NK: Tensor, a_s: Tensor, b_EKM: Tensor, b_s: Tensor, counts_E: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """a · b of every expert: a contiguous along K, with scales [N, 1] or [1, 1]; b too, with [E, 1, M] or [E, 1, 1]."""
    (N, _), (E, _, M) = a_NK.shape, b_EKM.shape
    offset_E1 = order.offsets(padded(counts_E, recipe.alignment))
    scales = a_s.reshape(-1).expand(N).contiguous(), b_s.reshape(E, -1).expand(E, M).contiguous()
    y_NM = SCALED_GROUPED_MM(a_NK, b_EKM, *scales, offs=offset_E1[1:], out_dtype=dtype)
    return zero_tail.launch(offset_E1, y_NM)  # rows of nobody are memory as it was


def outer_product(
    a_NM: Tensor, a_s: Tensor, b_NK: Tensor, b_s: Tensor, counts_E: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """aᵀ · b of every expert [E, M, K]: both contiguous along N, with scales [1, M] and [1, K], the same for all
    experts."""
    E, M, K = counts_E.shape[0], a_NM.shape[1], b_NK.shape[1]
    ends_E = order.offsets(padded(counts_E, recipe.alignment))[1:]
    scales = a_s.reshape(1, M).expand(E, M).reshape(-1), b_s.reshape(1, K).expand(E, K).reshape(-1)
    dw_EMK = SCALED_GROUPED_MM(a_NM.t(), b_NK, *scales, offs=ends_E, out_dtype=dtype)
    return dw_EMK.masked_fill_((counts_E == 0)[:, None, None], 0)


ROWS = {"grouped": rows_product, "generated": scaled.grouped_rows}
OUTER = {"grouped": outer_product, "generated": scaled.grouped_outer}


def found_way(x: Tensor, recipe: Recipe, product: Product, dtype: torch.dtype, *sizes: int) -> Way | None:
    return way(GROUPS, recipe.name, product, dtype, capability(x)) if fit(*sizes) else None


def forward(
    x: Tensor, w: Tensor, counts_E: Tensor, x_q: Tensor, x_s: Tensor, w_q: Tensor, w_s: Tensor, *rest
) -> tuple[Tensor, Tensor, Tensor]:
    """``moec::fp8_grouped_mm``."""
    recipe, shared = rest[-2:]
    found = Recipe.parse(recipe)
    by = found_way(x_q, found, "forward", x.dtype, *x_q.shape, *w_q.shape[1:])
    if by is None:
        return op.on_any_device(x, w, counts_E, x_q, x_s, w_q, w_s, *rest)
    op.check(x, w, counts_E, x_q, w_q)
    y = ROWS[by.name](x_q, x_s, w_q, w_s, counts_E, found, x.dtype)
    return y, *taps(y, recipe, shared)


def dgrad(
    g_q: Tensor, g_s: Tensor, w_qT: Tensor, w_sT: Tensor, counts_E: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    """``moec::fp8_grouped_dgrad``."""
    found = Recipe.parse(recipe)
    by = found_way(g_q, found, "dgrad", dtype, *g_q.shape, *w_qT.shape[1:])
    if by is None:
        return op.dgrad_on_any_device(g_q, g_s, w_qT, w_sT, counts_E, recipe, dtype)
    return ROWS[by.name](g_q, g_s, w_qT.transpose(1, 2), w_sT.transpose(1, 2), counts_E, found, dtype)


def wgrad(
    x_qT: Tensor, x_sT: Tensor, g_qT: Tensor, g_sT: Tensor, counts_E: Tensor, recipe: str, dtype: torch.dtype
) -> Tensor:
    """``moec::fp8_grouped_wgrad``."""
    found = Recipe.parse(recipe)
    by = found_way(g_qT, found, "wgrad", dtype, *g_qT.shape, *x_qT.shape)
    if by is None:
        return op.wgrad_on_any_device(x_qT, x_sT, g_qT, g_sT, counts_E, recipe, dtype)
    return OUTER[by.name](g_qT, g_sT, x_qT, x_sT, counts_E, found, dtype)


op.fp8_grouped_mm.register_kernel("cuda")(forward)
op.fp8_grouped_dgrad.register_kernel("cuda")(dgrad)
op.fp8_grouped_wgrad.register_kernel("cuda")(wgrad)
