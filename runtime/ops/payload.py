"""Rows as payloads (``runtime/fp8/payload.py``) and back: what is rounded before it travels.

Legend: T tokens or N rows (any leading dims), H numbers and W bytes a row, E experts.

* ``encode_rows(x [..., H], amax, payload, role) -> (carrier, data [..., W])``: data is uint8.  ``carrier`` has x's
  shape and dtype and no memory, as that of ``moec::quantise``: beside the data it passes ops that move nothing forward
  and gradients backward (``carry.py``), and what arrives as its gradient is the gradient of x.  So rounding has the
  gradient of the identity, and data travel as plain bytes.
* ``decode_rows(data, carrier, amax, payload, role) -> y``: the values, in the carrier's shape and dtype; y's gradient
  is the carrier's.
* ``decode_operand(data, carrier, amax, amax_T, counts_E, payload, both) -> (carrier, q, scale, q_T, scale_T)``:
  what ``moec::quantise`` gives of role ``rows``, without rounding again: q and its scales are those that travelled.
  q_T is quantised from the values that they mean, in the carrier's dtype (``amax_T``: as there).
* ``amax`` (fp32 [1, 1]): the largest magnitude over all ranks, for a recipe with one scale; else None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8 import Recipe, quantised
from ..fp8.payload import packed, unpacked, values, width
from .align_rows import real_rows
from .quantise import as_matrix, fake, nothing
from .quantise import carrier as carrier_of


@torch.library.custom_op("moec::encode_rows", mutates_args=(), device_types="cpu")
def encode_rows(x: Tensor, amax: Tensor | None, payload: str, role: str) -> tuple[Tensor, Tensor]:
    return carrier_of(x), packed(x, payload, role, amax)


@encode_rows.register_fake
def _(x, amax, payload, role):
    return carrier_of(x), x.new_empty((*x.shape[:-1], width(x.shape[-1], payload)), dtype=torch.uint8)


def _setup_encode(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


encode_rows.register_autograd(lambda ctx, grad, _: (grad, None, None, None), setup_context=_setup_encode)


@torch.library.custom_op("moec::decode_rows", mutates_args=(), device_types="cpu")
def decode_rows(data: Tensor, carrier: Tensor, amax: Tensor | None, payload: str, role: str) -> Tensor:
    return values(data, carrier.shape[-1], payload, role, carrier.dtype, amax)


@decode_rows.register_fake
def _(data, carrier, amax, payload, role):
    return carrier.new_empty(carrier.shape)


decode_rows.register_autograd(lambda ctx, grad: (None, grad, None, None, None))


@torch.library.custom_op("moec::decode_operand", mutates_args=(), device_types="cpu")
def decode_operand(
    data: Tensor, carrier: Tensor, amax: Tensor | None, amax_T: Tensor | None, counts_E: Tensor | None, payload: str,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return operand_on_any_device(data, carrier, amax, amax_T, counts_E, payload, both)


def operand_on_any_device(
    data: Tensor, carrier: Tensor, amax: Tensor | None, amax_T: Tensor | None, counts_E: Tensor | None, payload: str,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    recipe = Recipe.parse(payload)
    if counts_E is not None:  # what is no expert's row means zeros, whatever is there
        real_A = real_rows(counts_E, data.shape[0], recipe.alignment, "decode_operand")
        data = data.masked_fill(~real_A[:, None], 0)
    q, scale = unpacked(data, carrier.shape[-1], payload, "rows", amax)
    q_T, scale_T = nothing(carrier, recipe, "rows")
    if both:
        x = values(data, carrier.shape[-1], payload, "rows", carrier.dtype, amax)
        q_T, scale_T = quantised(as_matrix(x, "rows", True), recipe, "rows", True, amax_T)
    return carrier_of(carrier), q, scale, q_T, scale_T


@decode_operand.register_fake
def _(data, carrier, amax, amax_T, counts_E, payload, both):
    return fake(carrier, payload, "rows", both)


def _setup_operand(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


decode_operand.register_autograd(
    lambda ctx, grad, *_: (None, grad, *[None] * 5), setup_context=_setup_operand
)
