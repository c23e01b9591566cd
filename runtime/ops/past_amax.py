"""``moec::past_amax``: the largest magnitude of past steps, for ``moec::quantise`` (FP8's recipe ``delayed``).

Legend: H steps that a history remembers; its rows are ``ROWS``: a product's activations, its weight, its gradient.

``past_amax(history [3, 1 + H], row, x, recipe, role)``: fp32, the largest of the H past steps in a row of the history,
shaped like the scales of ``x`` in this role (of which only the shape is read): all tiles have the same.  Column 0 is of
the step under way and does not count.  0 without history; scales are then 1.  No gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from ..fp8 import Recipe
from .quantise import DEVICES, scale_shape

ROWS = ("rows", "weight", "grad")


@torch.library.custom_op("moec::past_amax", mutates_args=(), device_types=DEVICES)
def past_amax(history: Tensor, row: int, x: Tensor, recipe: str, role: str) -> Tensor:
    if history.ndim != 2 or history.shape[0] != len(ROWS) or history.shape[1] < 2:
        raise MoecError(f"a history of shape {tuple(history.shape)}, not [3, 1 + steps]", where="moec::past_amax")
    found = history[row, 1:].amax().float()
    return found.expand(scale_shape(x, Recipe.parse(recipe), role, False)).contiguous()


@past_amax.register_fake
def _(history, row, x, recipe, role):
    return history.new_empty(scale_shape(x, Recipe.parse(recipe), role, False), dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output)


past_amax.register_autograd(lambda ctx, g: (None,) * 5, setup_context=_setup)
