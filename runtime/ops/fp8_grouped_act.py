"""``moec::fp8_grouped_act``: first products of experts in FP8, and their activation, quantised for the next product.

Legend: N rows, E experts, K in features, M columns of a first product, A of all of them, I of the body's result.

``fp8_grouped_act(x, w, b, counts_E, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, body, recipe, both)
-> (carrier, q, scale, q_T, scale_T, h_NA)``

* ``moec::fp8_grouped_mm`` of the same rows with every ``w[i]`` [E, K, M] (and ``moec::grouped_add`` of ``b[i]`` [E, M],
  one for each product or none), the elementwise ``body`` (``runtime/body.py``), rounded once, and ``moec::quantise`` of
  it as ``rows``, whose ``carrier`` [N, I] and results these are.
* What the backward needs is ``h_NA``, the pre-activations side by side, and FP8 numbers: no activation is kept, nor
  anything on the way to it.  The gradients of the pre-activations become FP8 where they are computed.
* Scales are those of these rows alone: where ranks share them the ops stay apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..body import Body
from ..errors import MoecError
from ..fp8 import Recipe
from .align_rows import padded
from .fp8_grouped_mm import fp8_grouped_dgrad, fp8_grouped_mm, fp8_grouped_wgrad
from .fp8_linear import require_both
from .grouped_add import grouped_add, grouped_sum
from .quantise import DEVICES, carrier, fake
from .quantise_act import quantise_act, quantise_act_grad, quantised_of


@torch.library.custom_op("moec::fp8_grouped_act", mutates_args=(), device_types=DEVICES)
def fp8_grouped_act(
    x: Tensor, w: list[Tensor], b: list[Tensor], counts_E: Tensor, x_q: Tensor, x_s: Tensor, w_q: list[Tensor],
    w_s: list[Tensor], x_qT: Tensor, x_sT: Tensor, w_qT: list[Tensor], w_sT: list[Tensor], body: str, recipe: str,
    both: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(x, w, b, counts_E, x_q, w_q, body)
    own = zip(w, w_q, w_s, w_qT, w_sT, strict=True)
    h = [fp8_grouped_mm(x, of, counts_E, x_q, x_s, q, s, x_qT, x_sT, q_T, s_T, None, recipe, False)[0]
         for of, q, s, q_T, s_T in own]  # fmt: skip
    if b:
        whole_E = padded(counts_E, Recipe.parse(recipe).alignment)
        h = [grouped_add(y, of, whole_E) for y, of in zip(h, b, strict=True)]
    h_NA = torch.cat(h, 1) if len(h) > 1 else h[0]
    q, scale, q_T, scale_T = quantise_act(h_NA, _widths(w), counts_E, body, recipe, both)
    return carrier(h_NA.new_empty(()).expand(q.shape)), q, scale, q_T, scale_T, h_NA


def _check(
    x: Tensor, w: list[Tensor], b: list[Tensor], counts_E: Tensor, x_q: Tensor, w_q: list[Tensor], body: str
) -> None:
    E, K = counts_E.shape[0], x.shape[1]
    wrong = [f"w {tuple(of.shape)} quantised {tuple(q.shape)}" for of, q in zip(w, w_q, strict=True)
             if of.shape != q.shape or tuple(of.shape[:2]) != (E, K)]  # fmt: skip
    wrong += [f"x {tuple(x.shape)} quantised {tuple(x_q.shape)}"] if x_q.shape != x.shape else []
    shapes = [tuple(t.shape) for t in b]
    wrong += [f"biases {shapes}"] if b and shapes != [(E, of.shape[2]) for of in w] else []
    if wrong:
        raise MoecError(f"{E} experts of {K} features, and {', '.join(wrong)}", where="moec::fp8_grouped_act")
    Body.parse(body).check_widths(_widths(w), "moec::fp8_grouped_act")


def _widths(w: list[Tensor]) -> list[int]:
    return [of.shape[2] for of in w]


@fp8_grouped_act.register_fake
def _(x, w, b, counts_E, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, body, recipe, both):
    act = x.new_empty((x.shape[0], Body.parse(body).width(_widths(w))))
    return *fake(act, recipe, "rows", both), x.new_empty((x.shape[0], sum(_widths(w))))


def _setup(ctx, inputs, output) -> None:
    x, w, b, counts_E, _, _, _, _, x_qT, x_sT, w_qT, w_sT, ctx.body, ctx.recipe, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.widths, ctx.biased = _widths(w), bool(b)
    ctx.dtypes = x.dtype, w[0].dtype
    ctx.save_for_backward(counts_E, output[5], x_qT, x_sT, *w_qT, *w_sT)


def _backward(ctx, grad_NI, *_):
    if grad_NI is None:
        return (None,) * 15
    counts_E, h_NA, x_qT, x_sT, *weights = ctx.saved_tensors
    require_both(x_qT, "moec::fp8_grouped_act")
    n, recipe = len(ctx.widths), ctx.recipe
    need_x, need_w, need_b, *_ = ctx.needs_input_grad
    made = quantise_act_grad(
        grad_NI, h_NA, ctx.widths, counts_E, ctx.body, recipe, any(need_w), any(need_b or []) and ctx.biased
    )
    dx, dw, db = None, [], []
    for i in range(n):
        q, s, q_T, s_T = quantised_of(made, i)
        if need_x:
            more = fp8_grouped_dgrad(q, s, weights[i], weights[n + i], counts_E, recipe, ctx.dtypes[0])
            dx = more if dx is None else dx + more
        own = fp8_grouped_wgrad(x_qT, x_sT, q_T, s_T, counts_E, recipe, ctx.dtypes[1]) if need_w[i] else None
        dw.append(None if own is None else own.transpose(1, 2))
    if ctx.biased:
        whole_E = padded(counts_E, Recipe.parse(recipe).alignment)
        db = [grouped_sum(made[4 * n + i], whole_E) if wanted else None for i, wanted in enumerate(need_b)]
    none = [None] * n
    return dx, dw, db, None, None, None, none, none, None, None, none, none, None, None, None


fp8_grouped_act.register_autograd(_backward, setup_context=_setup)
