"""``moec::permute_quantised``: tokens in expert order, quantised for FP8 products as they are gathered.

Legend: T tokens, K choices per token, H hidden, E experts, N aligned rows.

``permute_quantised(x_TH, ids_TK, num_experts, amax, amax_T, recipe, both)
-> (carrier, q, scale, q_T, scale_T, counts_E, row_of_TK)``

* ``moec::permute_aligned`` with the recipe's alignment, and ``moec::quantise`` of its rows (as ``rows``), to the bit;
  the rows in x's dtype are in no result, and on a GPU nowhere.
* ``carrier`` [N, H] has no memory; its gradient, added over a token's rows, is the gradient of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8 import Recipe
from .permute import permute_backward
from .permute_aligned import num_rows, permute_aligned
from .quantise import fake, on_any_device

Result = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("moec::permute_quantised", mutates_args=(), device_types="cpu")
def permute_quantised(
    x_TH: Tensor, ids_TK: Tensor, num_experts: int, amax: Tensor | None, amax_T: Tensor | None, recipe: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return in_two_steps(x_TH, ids_TK, num_experts, amax, amax_T, recipe, both)


def in_two_steps(
    x_TH: Tensor, ids_TK: Tensor, num_experts: int, amax: Tensor | None, amax_T: Tensor | None, recipe: str, both: bool
) -> Result:
    alignment = Recipe.parse(recipe).alignment
    rows_NH, _, counts_E, row_of_TK = permute_aligned(x_TH, ids_TK, num_experts, alignment, "none")
    return *on_any_device(rows_NH, amax, amax_T, counts_E, recipe, "rows", both), counts_E, row_of_TK


@permute_quantised.register_fake
def _(x_TH, ids_TK, num_experts, amax, amax_T, recipe, both):
    N = num_rows(ids_TK, num_experts, Recipe.parse(recipe).alignment)
    return (
        *fake(x_TH.new_empty((N, x_TH.shape[1])), recipe, "rows", both),
        ids_TK.new_empty((num_experts,), dtype=torch.int64),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int64),
    )


def _setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad_NH, *_):
    grad_TH = None if grad_NH is None else permute_backward(grad_NH, ctx.saved_tensors[0])
    return grad_TH, None, None, None, None, None, None


permute_quantised.register_autograd(_backward, setup_context=_setup)
