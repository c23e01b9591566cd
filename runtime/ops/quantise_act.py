"""``moec::quantise_act`` and ``moec::quantise_act_grad``: experts' activations, and their derivative, in FP8 alone.

Legend: N rows, A columns of all first products side by side (of ``widths`` columns each), I of the body's result.

* ``quantise_act(h_NA, widths, counts_E, body, recipe, both) -> [q, scale, q_T, scale_T]``: ``moec::quantise`` (as
  ``rows``) of the ``body`` (``runtime/body.py``) of pre-activations, rounded once to their dtype.
* ``quantise_act_grad(grad_NI, h_NA, widths, counts_E, body, recipe, both, wide)``: of the gradient of the body's result
  ``[q, scale, q_T, scale_T]`` (as ``grad``) for every first product in turn: of its gradient, rounded to h's dtype;
  with ``wide`` then these themselves, [N, width] each (a bias wants their sums), zeros where a row is no expert's.

Neither result exists in a wide dtype on a GPU.  No derivative: ``moec::fp8_grouped_act`` is what is differentiated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..body import Body
from ..fp8 import Recipe
from .quantise import fake, of_experts, on_any_device


@torch.library.custom_op("moec::quantise_act", mutates_args=(), device_types="cpu")
def quantise_act(
    h_NA: Tensor, widths: list[int], counts_E: Tensor, body: str, recipe: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return act_on_any_device(h_NA, widths, counts_E, body, recipe, both)


def act_on_any_device(
    h_NA: Tensor, widths: list[int], counts_E: Tensor, body: str, recipe: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (act_NI,) = Body.parse(body).run(h_NA.split(widths, 1))
    _, q, scale, q_T, scale_T = on_any_device(act_NI, None, None, counts_E, recipe, "rows", both)
    return q, scale, q_T, scale_T


@quantise_act.register_fake
def _(h_NA, widths, counts_E, body, recipe, both):
    _, q, scale, q_T, scale_T = fake(_result(h_NA, widths, body), recipe, "rows", both)
    return q, scale, q_T, scale_T


def _result(h_NA: Tensor, widths: list[int], body: str) -> Tensor:
    return h_NA.new_empty((h_NA.shape[0], Body.parse(body).width(widths)))


@torch.library.custom_op("moec::quantise_act_grad", mutates_args=(), device_types="cpu")
def quantise_act_grad(
    grad_NI: Tensor, h_NA: Tensor, widths: list[int], counts_E: Tensor, body: str, recipe: str, both: bool, wide: bool
) -> list[Tensor]:
    return act_grad_on_any_device(grad_NI, h_NA, widths, counts_E, body, recipe, both, wide)


def act_grad_on_any_device(
    grad_NI: Tensor, h_NA: Tensor, widths: list[int], counts_E: Tensor, body: str, recipe: str, both: bool, wide: bool
) -> list[Tensor]:
    d = [of_experts(of, counts_E, Recipe.parse(recipe)) for of in gradients(grad_NI, h_NA, widths, body)]
    made = [t for of in d for t in on_any_device(of, None, None, counts_E, recipe, "grad", both)[1:]]
    return made + (d if wide else [])


def gradients(grad_NI: Tensor, h_NA: Tensor, widths: list[int], body: str) -> list[Tensor]:
    """Of the first products, [N, width] each."""
    found, h = Body.parse(body), h_NA.split(widths, 1)
    d = [torch.zeros_like(of, memory_format=torch.contiguous_format) for of in h]
    each = [i for i in found.derivative().inputs if i.form != "grad"]
    for i, g in zip(each, found.derivative().run(h, grad=grad_NI), strict=True):
        i.of(d[i.source]).copy_(g)
    return d


@quantise_act_grad.register_fake
def _(grad_NI, h_NA, widths, counts_E, body, recipe, both, wide):
    d = [h_NA.new_empty((h_NA.shape[0], width)) for width in widths]
    return [t for of in d for t in fake(of, recipe, "grad", both)[1:]] + (d if wide else [])


def quantised_of(made: list[Tensor], product: int) -> list[Tensor]:
    """``[q, scale, q_T, scale_T]`` of a first product, of what ``quantise_act_grad`` returns."""
    return made[4 * product : 4 * product + 4]
