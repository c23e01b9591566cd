"""The experts of a block on a GPU: launchers that put the generated kernels together, forward and backward.

Legend: T tokens, K choices per token, P = T · K pairs, N rows (of pairs, by expert), E experts, H hidden, M columns of
a first product, A columns of all of them, I columns of the body's result.

Forward, two kernels over the rows and one over the tokens:

1. ``experts_forward`` gathers the rows of x as it multiplies, stores the pre-activations and the activation;
2. ``grouped_rows`` multiplies that with w_out, adds the bias, weights, and puts each row at the place of its pair;
3. ``sum_choices`` adds the K rows of a token in order.

Backward, from the inputs, the pre-activations and the order alone:

1. ``experts_backward``: the activation's gradient as it is multiplied; out come the gradient of the pre-activations,
   the weighted activation and the shares of the weights' gradient;
2. ``grouped_rows`` and ``sum_choices``: the gradient of x;
3. ``grouped_outer``: gradients of w_in and w_out, gathering x and the gradient by pair; ``grouped_sum``: of biases.

Rows between exchanges have no pairs: the same kernels without gathering.  Only what is needed is launched.  Functions
take tensors of any device: CPU tensors run where Triton interprets.  Nothing waits for the host, but ``kept``, whose
result's size depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from ..body import Body
from ..ops import experts as ops
from . import (
    choice_dot,
    experts_backward,
    experts_forward,
    grouped_gemm,
    grouped_outer,
    grouped_rows,
    grouped_sum,
    order,
    sum_choices,
    zero_tail,
)
from .grouped import refuse_float64
from .grouped_outer import GroupedOuter, Rows
from .tiles import Shape, Tile, choose

Strides = tuple[int, ...]
forward_spec = cache(experts_forward.spec)
backward_spec = cache(experts_backward.spec)
rows_spec = cache(grouped_rows.spec)


class Weights:
    """The weights of a block, and what follows from their shapes."""

    def __init__(
        self, x: Tensor, w_in: Sequence[Tensor], b_in: Sequence[Tensor], w_out: Tensor, b_out: Tensor | None,
        body: str, tile: Tile | None,
    ) -> None:  # fmt: skip
        refuse_float64(x, "experts")
        self.w_in, self.b_in = list(w_in), [b.contiguous() for b in b_in]
        self.w_out, self.b_out = w_out, None if b_out is None else b_out.contiguous()
        self.body, self.dtype, self.device = Body.parse(body), x.dtype, x.device
        self.widths = tuple(w.shape[2] for w in w_in)
        self.E, self.H = w_in[0].shape[0], w_in[0].shape[1]
        self.A, self.I, self.C = sum(self.widths), w_out.shape[1], w_out.shape[2]
        self._tile = tile

    @property
    def strides_in(self) -> tuple[Strides, ...]:
        return tuple(tuple(w.stride()) for w in self.w_in)

    def tile(self, family: str, columns: int, depth: int, num_rows: int) -> Tile:
        steps = len(self.body.derivative(value=True).steps) if family == "experts_backward" else 0
        shape = Shape(columns, depth, -(-num_rows // max(self.E, 1)), self.dtype, steps)
        return self._tile or choose(family, shape, self.device)


def forward(
    x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_in: Sequence[Tensor], b_in: Sequence[Tensor], w_out: Tensor,
    b_out: Tensor | None, body: str, kept: bool = False, *, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(y_TH, h_NA, row_of_TK, counts_E)`` of ``moec::experts``."""
    ops.check_pairs(x_TH, ids_TK, weights_TK)
    ops.check("experts", x_TH, w_out.shape[0], list(w_in), list(b_in), w_out, b_out, body)
    w = Weights(x_TH, w_in, b_in, w_out, b_out, body, tile)
    found, K = order.of_ids(ids_TK, w.E, "experts"), ids_TK.shape[1]
    N = int(found.offset_E1[-1]) if kept else ids_TK.numel()
    h_NA, act_NI = first(w, x_TH, found.offset_E1, found.pair_P, N, K)
    y_PC = x_TH.new_empty((ids_TK.numel(), w.C))
    weights_P = weights_TK.contiguous()
    second(w, act_NI, found.offset_E1, y_PC, (found.pair_P, K, weights_P))
    return sum_choices.launch(found.row_of_TK, y_PC), h_NA, found.row_of_TK, found.counts_E


def rows_forward(
    x_NH: Tensor, counts_E: Tensor, w_in: Sequence[Tensor], b_in: Sequence[Tensor], w_out: Tensor,
    b_out: Tensor | None, body: str, *, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(y_NC, h_NA)`` of ``moec::experts_rows``."""
    ops.check("experts_rows", x_NH, counts_E.shape[0], list(w_in), list(b_in), w_out, b_out, body)
    w = Weights(x_NH, w_in, b_in, w_out, b_out, body, tile)
    offset_E1 = order.checked_offsets(counts_E, x_NH.shape[0], "experts_rows")
    h_NA, act_NI = first(w, x_NH, offset_E1, None, x_NH.shape[0], 0)
    y_NC = x_NH.new_empty((x_NH.shape[0], w.C))
    second(w, act_NI, offset_E1, y_NC, None)
    return zero_tail.launch(offset_E1, y_NC), h_NA


def first(w: Weights, x: Tensor, offset_E1: Tensor, pair: Tensor | None, N: int, K: int) -> tuple[Tensor, Tensor]:
    """Pre-activations and activation of N rows."""
    h_NA, act_NI = x.new_empty((N, w.A)), x.new_empty((N, w.I))
    spec = forward_spec(
        w.body, w.widths, w.E, w.H, w.strides_in, bool(w.b_in), w.dtype, w.tile("experts_forward", w.I, w.H, N), K
    )
    pairs = [] if pair is None else [pair]
    grouped_gemm.launch(spec, N, offset_E1, *pairs, x.contiguous(), *w.w_in, *w.b_in, h_NA, act_NI)
    return zero_tail.launch(offset_E1, h_NA), act_NI


def second(
    w: Weights, act_NI: Tensor, offset_E1: Tensor, y: Tensor, pairs: tuple[Tensor, int, Tensor] | None
) -> None:
    """``y``: rows of the second product; with ``pairs`` (of rows, K, weights) weighted, each at its pair's place."""
    N, bias = act_NI.shape[0], [] if w.b_out is None else [w.b_out]
    spec = rows_spec(
        "moec::experts, forward: second product.", w.E, w.C, (w.I,), (tuple(w.w_out.stride()),), w.dtype,
        w.tile("grouped_rows", w.C, w.I, N), pairs[1] if pairs else 0, bool(bias), bool(pairs),
    )  # fmt: skip
    if pairs:
        pair, _, weights = pairs
        grouped_gemm.launch(spec, N, offset_E1, pair, act_NI, w.w_out, *bias, weights, y)
    else:
        grouped_gemm.launch(spec, N, offset_E1, act_NI, w.w_out, *bias, y)


def backward(
    grad_TC: Tensor, x_TH: Tensor, weights_TK: Tensor, w_in: Sequence[Tensor], b_in: Sequence[Tensor], w_out: Tensor,
    b_out: Tensor | None, h_NA: Tensor, row_of_TK: Tensor, counts_E: Tensor, body: str, need: Sequence[bool], *,
    tile: Tile | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x_TH, weights_TK, w_in…, b_in…, w_out and b_out (where there is one), as ``need`` asks for
    them; the others are empty."""
    w, K = Weights(x_TH, w_in, b_in, w_out, b_out, body, tile), row_of_TK.shape[1]
    offset_E1, pair_N = order.offsets(counts_E), order.pairs(row_of_TK, h_NA.shape[0])
    weights_P, grad_TC, x_TH = weights_TK.contiguous(), grad_TC.contiguous(), x_TH.contiguous()
    need_x, need_weights, *need_rest = need
    rest, d_NA, share = _gradients(
        w, grad_TC, x_TH, h_NA, offset_E1, (pair_N, K, weights_P), need_x, need_weights, need_rest
    )
    dx_TH, dweights_TK = x_TH.new_empty(0), weights_TK.new_empty(0)
    if need_x:
        dx_PH = rows_gradient(w, d_NA, offset_E1, x_TH.new_empty((row_of_TK.numel(), w.H)), (pair_N, K))
        dx_TH = sum_choices.launch(row_of_TK, dx_PH)
    if need_weights:
        total_TK = share.sum(-1).view(row_of_TK.shape)
        if w.b_out is not None:
            total_TK += choice_dot.launch(order.experts(row_of_TK, offset_E1), grad_TC, w.b_out)
        dweights_TK = total_TK.to(weights_TK.dtype)
    return [dx_TH, dweights_TK, *rest]


def rows_backward(
    grad_NC: Tensor, x_NH: Tensor, w_in: Sequence[Tensor], b_in: Sequence[Tensor], w_out: Tensor,
    b_out: Tensor | None, h_NA: Tensor, counts_E: Tensor, body: str, need: Sequence[bool], *, tile: Tile | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x_NH, w_in…, b_in…, w_out and b_out (where there is one), as ``need`` asks for them."""
    w, offset_E1 = Weights(x_NH, w_in, b_in, w_out, b_out, body, tile), order.offsets(counts_E)
    grad_NC, x_NH = grad_NC.contiguous(), x_NH.contiguous()
    rest, d_NA, _ = _gradients(w, grad_NC, x_NH, h_NA, offset_E1, None, need[0], False, need[1:])
    dx_NH = x_NH.new_empty(0)
    if need[0]:
        dx_NH = zero_tail.launch(offset_E1, rows_gradient(w, d_NA, offset_E1, torch.empty_like(x_NH), None))
    return [dx_NH, *rest]


def _gradients(
    w: Weights, grad: Tensor, x: Tensor, h_NA: Tensor, offset_E1: Tensor, pairs: tuple[Tensor, int, Tensor] | None,
    need_x: bool, need_weights: bool, need: Sequence[bool],
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """``(gradients of w_in…, b_in…, w_out, b_out, gradient of the pre-activations, shares)``."""
    N, J, B = h_NA.shape[0], len(w.w_in), len(w.b_in)
    need_w, need_b, (need_out, *need_bias) = need[:J], need[J : J + B], need[J + B :]
    need_d = need_x or any(need_w) or any(need_b)
    pair, K = pairs[:2] if pairs else (None, 0)
    d_NA, act_NI, share = activation_gradient(w, grad, h_NA, offset_E1, pairs, need_d, need_out, need_weights)
    outer = partial(weight_gradient, w, offset_E1, pair, K, N)
    out, offset = [], 0
    for n, of, width in zip(need_w, w.w_in, w.widths, strict=True):
        found = outer(of, x, Rows(w.H, w.H, gathered=bool(K)), d_NA, Rows(width, w.A, offset)) if n else None
        out.append(x.new_empty(0) if found is None else found)
        offset += width
    db_EA = x.new_empty((w.E, w.A))
    if any(need_b):
        grouped_sum.launch(w.E, w.A, 0, offset_E1, d_NA, db_EA)
    out += [b.clone() if n else x.new_empty(0) for n, b in zip(need_b, db_EA.split(w.widths, 1), strict=False)]
    of_grad = Rows(w.C, w.C, gathered=bool(K))
    out.append(outer(w.w_out, act_NI, Rows(w.I, w.I), grad, of_grad) if need_out else x.new_empty(0))
    if w.b_out is not None:
        db_EC = torch.empty_like(w.b_out) if need_bias[0] else x.new_empty(0)
        if need_bias[0]:
            grouped_sum.launch(w.E, w.C, K, offset_E1, *((pairs[0], pairs[2]) if pairs else ()), grad, db_EC)
        out.append(db_EC)
    return out, d_NA, share


def activation_gradient(
    w: Weights, grad: Tensor, h_NA: Tensor, offset_E1: Tensor, pairs: tuple[Tensor, int, Tensor] | None, need_d: bool,
    need_act: bool, need_share: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``(d_NA, weighted activation [N, I], shares of each pair)``; what is not needed is empty."""
    N, K, tile = h_NA.shape[0], pairs[1] if pairs else 0, w.tile("experts_backward", w.I, w.C, h_NA.shape[0])
    d_NA = torch.empty_like(h_NA) if need_d else h_NA.new_empty(0)
    act_NI = h_NA.new_empty((N, w.I)) if need_act else h_NA.new_empty(0)
    shares = (pairs[2].numel(), experts_backward.shares(w.I, tile)) if pairs and need_share else (0, 0)
    share = h_NA.new_zeros(shares, dtype=torch.float32)
    if need_d or need_act or need_share:
        strides = tuple(w.w_out.stride())
        spec = backward_spec(w.body, w.widths, w.E, w.C, strides, w.dtype, tile, K, need_d, need_act, need_share)
        results = [t for t, n in ((d_NA, need_d), (act_NI, need_act), (share, need_share)) if n]
        pair, weights = ([pairs[0]], [pairs[2]]) if pairs else ([], [])
        grouped_gemm.launch(spec, N, offset_E1, *pair, grad, w.w_out, h_NA, *weights, *results)
    return d_NA, act_NI, share


def rows_gradient(w: Weights, d_NA: Tensor, offset_E1: Tensor, dx: Tensor, pairs: tuple[Tensor, int] | None) -> Tensor:
    """``dx``: the gradient of every row, with ``pairs`` (of rows, K) at the place of its pair."""
    strides = tuple((e, m, h) for e, h, m in w.strides_in)
    spec = rows_spec(
        "moec::experts, backward: gradient of the rows.", w.E, w.H, w.widths, strides, w.dtype,
        w.tile("grouped_rows", w.H, w.A, d_NA.shape[0]), pairs[1] if pairs else 0,
    )  # fmt: skip
    pair = [pairs[0]] if pairs else []
    grouped_gemm.launch(spec, d_NA.shape[0], offset_E1, *pair, d_NA, *w.w_in, dx)
    return dx


def weight_gradient(
    w: Weights, offset_E1: Tensor, pair: Tensor | None, K: int, N: int, of: Tensor, a: Tensor, rows_a: Rows, b: Tensor,
    rows_b: Rows,
) -> Tensor:  # fmt: skip
    """The gradient of a weight ``of``, in its own layout."""
    dw = torch.empty_like(of)
    tile = w.tile("grouped_outer", rows_b.width, rows_a.width, N)
    title = "moec::experts, backward: gradient of a weight."
    spec = GroupedOuter(title, w.E, rows_a, rows_b, _triple(dw), w.dtype, tile, K)
    grouped_outer.launch(spec, offset_E1, *([] if pair is None else [pair]), a, b, dw)
    return dw


def _triple(t: Tensor) -> tuple[int, int, int]:
    a, b, c = t.stride()
    return a, b, c


ops.experts.register_kernel("cuda")(forward)
ops.experts_rows.register_kernel("cuda")(rows_forward)
ops.experts_backward.register_kernel("cuda")(backward)
ops.experts_rows_backward.register_kernel("cuda")(rows_backward)
