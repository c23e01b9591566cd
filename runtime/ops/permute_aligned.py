"""``moec::permute_aligned``: tokens in expert order, every expert's rows padded to a multiple, quantised where asked.

Legend: T tokens, K choices per token, H hidden, E experts, a alignment, N rows, Q scales of a row.

``permute_aligned(x_TH, ids_TK, num_experts, alignment, quantise)
-> (rows_NH, scales_NQ, counts_E, row_of_TK)``

* As ``moec::permute``, but each expert begins at a multiple of ``alignment``: it owns ``ceil(counts / a) * a`` rows, of
  which the last ones may be zeros.  ``counts_E`` are those of real rows, ``row_of_TK`` says where a pair's row lies.
* N = floor((T·K + E·(a − 1)) / a) · a, the most that can be needed: sizes do not depend on the routing.
* ``quantise``: ``none``: rows in x's dtype, Q = 0.  Else rows are float8_e4m3fn, clamped to ±448, and ``row · scale``
  is the value: ``row``: Q = 1, as the recipe ``rowwise`` has it; ``block``: Q = ceil(H / 128), as ``blockwise``
  (``runtime/fp8/recipes.py``).  Scales are fp32.
* Backward: ``permute_backward``, for rows that are not quantised; what is quantised has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from ..fp8 import Recipe
from ..fp8 import quantised as by_recipe
from .permute import permute_backward, sorted_pairs

QUANTISE = ("none", "row", "block")
RECIPE_OF = {"row": "rowwise", "block": "blockwise"}
BLOCK, LARGEST = 128, 448.0


@torch.library.custom_op("moec::permute_aligned", mutates_args=(), device_types="cpu")
def permute_aligned(
    x_TH: Tensor, ids_TK: Tensor, num_experts: int, alignment: int, quantise: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_aligned(alignment, quantise)
    pair_M, counts_E, row_of_TK = sorted_pairs(x_TH, ids_TK, num_experts, "permute_aligned")
    K, N = ids_TK.shape[1], num_rows(ids_TK, num_experts, alignment)
    move_E = starts(counts_E, alignment) - (counts_E.cumsum(0) - counts_E)
    row_M = torch.arange(pair_M.shape[0]) + move_E.repeat_interleave(counts_E)
    row_of_TK.view(-1)[pair_M] = row_M
    x_MH = x_TH.index_select(0, pair_M // max(K, 1))
    if quantise != "none":
        x_MH, scales_MQ = quantised(x_MH, quantise)
    else:
        scales_MQ = x_MH.new_empty((x_MH.shape[0], 0), dtype=torch.float32)
    rows_NH = torch.zeros((N, x_TH.shape[1]), dtype=x_MH.dtype)
    scales_NQ = scales_MQ.new_ones((N, scales_MQ.shape[1]))
    as_bytes = torch.uint8 if quantise != "none" else x_MH.dtype  # float8 is no dtype to index with
    rows_NH.view(as_bytes)[row_M] = x_MH.view(as_bytes)
    scales_NQ[row_M] = scales_MQ
    return rows_NH, scales_NQ, counts_E, row_of_TK


@permute_aligned.register_fake
def _(x_TH, ids_TK, num_experts, alignment, quantise):
    N, H = num_rows(ids_TK, num_experts, alignment), x_TH.shape[1]
    return (
        x_TH.new_empty((N, H), dtype=x_TH.dtype if quantise == "none" else torch.float8_e4m3fn),
        x_TH.new_empty((N, num_scales(H, quantise)), dtype=torch.float32),
        ids_TK.new_empty((num_experts,), dtype=torch.int64),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int64),
    )


def check_aligned(alignment: int, quantise: str) -> None:
    if alignment < 1 or quantise not in QUANTISE:
        raise MoecError(f"alignment={alignment}, quantise={quantise!r}", where="moec::permute_aligned",
                        way_out=f"an alignment is at least 1, quantise one of {', '.join(QUANTISE)}")  # fmt: skip


def num_rows(ids_TK: Tensor, num_experts: int, alignment: int):
    return aligned_size(ids_TK.shape[0] * ids_TK.shape[1], num_experts, alignment)


def aligned_size(rows, num_experts: int, alignment: int):
    """The most rows that ``rows`` of so many experts can take; sizes do not depend on the routing."""
    return (rows + num_experts * (alignment - 1)) // alignment * alignment


def num_scales(H: int, quantise: str) -> int:
    return {"none": 0, "row": 1, "block": -(-H // BLOCK)}[quantise]


def padded(counts_E: Tensor, alignment: int) -> Tensor:
    """How many rows each expert has, with those that align it."""
    return (counts_E + alignment - 1).div(alignment, rounding_mode="floor") * alignment


def starts(counts_E: Tensor, alignment: int) -> Tensor:
    """Where each expert's rows begin."""
    padded_E = padded(counts_E, alignment)
    return padded_E.cumsum(0) - padded_E


def quantised(x_NH: Tensor, quantise: str) -> tuple[Tensor, Tensor]:
    """Rows in float8_e4m3fn, and scales."""
    return by_recipe(x_NH, Recipe.parse(RECIPE_OF[quantise]), "rows", False)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[3])
    ctx.quantised = inputs[4] != "none"
    ctx.mark_non_differentiable(*output[1:], *((output[0],) if ctx.quantised else ()))


def _backward(ctx, grad_rows_NH, *_):
    grad_TH = None if ctx.quantised else permute_backward(grad_rows_NH, ctx.saved_tensors[0])
    return grad_TH, None, None, None, None


permute_aligned.register_autograd(_backward, setup_context=_setup)
