"""``moec::grad_amax``: the identity, whose backward states how large the gradient is.

``grad_amax(y, tap, tap_T, counts_E, recipe) -> y``: y's gradient passes, and the gradients of ``tap`` and ``tap_T``
(fp32, shaped like the scales that ``recipe`` gives a ``grad``; empty: none is asked for) are its tiles' largest
magnitudes.  Between the taps of a product and these lie conversions whose backward takes the maximum over ranks; so a
product of the backward knows how large a gradient is of which it has a part.  ``counts_E``: as in ``moec::quantise``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantise import DEVICES, amax


@torch.library.custom_op("moec::grad_amax", mutates_args=(), device_types=DEVICES)
def grad_amax(y: Tensor, tap: Tensor, tap_T: Tensor, counts_E: Tensor | None, recipe: str) -> Tensor:
    return y.clone(memory_format=torch.contiguous_format)  # a custom op may not return its input


@grad_amax.register_fake
def _(y, tap, tap_T, counts_E, recipe):
    return y.new_empty(y.shape)


def _setup(ctx, inputs, output) -> None:
    _, *taps, counts_E, ctx.recipe = inputs
    ctx.asked = [tap.numel() > 0 for tap in taps]
    ctx.save_for_backward(counts_E)


def _backward(ctx, g):
    (counts_E,) = ctx.saved_tensors
    found = [amax(g, counts_E, ctx.recipe, "grad", t == 1) if asked else None for t, asked in enumerate(ctx.asked)]
    return g, *found, None, None


grad_amax.register_autograd(_backward, setup_context=_setup)
