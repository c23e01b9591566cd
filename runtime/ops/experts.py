"""``moec::experts`` and ``moec::experts_rows``: the experts of a block in one op each, forward and backward.

Legend: T tokens, K choices per token, N rows (pairs of a token and a choice, by expert), E experts, H hidden,
M columns of a first product, A columns of all of them, I columns of the body's result.

``experts(x_TH, ids_TK, weights_TK, w_in, b_in, w_out, b_out, body, kept) -> (y_TH, h_NA, row_of_TK, counts_E)``
    gathers the rows of each expert, multiplies them with every ``w_in[i]`` [E, H, M] (and adds ``b_in[i]`` [E, M]),
    applies the elementwise ``body`` (``moec.runtime.body``), multiplies with ``w_out`` [E, I, H] (and adds ``b_out``
    [E, H]), weights, and adds the K rows of a token in order of k (in fp32; fp64 if an operand is).
``experts_rows(x_NH, counts_E, w_in, b_in, w_out, b_out, body) -> (y_NH, h_NA)``
    is the same without the tokens, for rows that lie by expert already: expert e owns the next ``counts_E[e]``.

* ``b_in`` has as many entries as ``w_in``, or none.  Weights may have any strides (usually they are transposed views of
  ``[E, M, H]`` and ``[E, H, I]``); each gradient has the strides of its weight.
* An id of -1 drops the pair: it adds nothing, whatever its weight, and gets no gradient.  Rows past ``sum(counts_E)``
  are zeros.  With ``kept`` there are none of them (for ids most of which are -1): a size that depends on data.
* What the backward needs is the inputs, the pre-activations ``h_NA`` (the first products side by side, biases included)
  and the indices ``row_of_TK`` and ``counts_E`` (those of ``moec::permute``), nothing else: it computes the activation
  anew, and the gradient of a pair's weight is ``activation · (grad w_outᵀ) + grad · b_out``, not a product with a saved
  result.
* ``experts_backward`` and ``experts_rows_backward`` compute the gradients that ``need`` asks for, in the order of the
  tensors among the inputs, and leave the others empty.

Rounding: pre-activations, activations and results of products are of the dtype of the rows, as without fusion; the body
rounds once (see ``moec.runtime.body``), and so does the sum over K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..body import Body
from ..errors import MoecError
from . import experts_cpu as cpu
from .permute import sorted_pairs
from .rows import accumulator, pair_of_row, sum_of_rows


def check(
    op: str, x: Tensor, num_experts: int, w_in: list[Tensor], b_in: list[Tensor], w_out: Tensor, b_out: Tensor | None,
    body: str,
) -> None:  # fmt: skip
    """Raise MoecError unless the operands fit each other."""
    E, H = num_experts, x.shape[1]
    widths = [w.shape[2] for w in w_in]
    parsed = Body.parse(body)
    if parsed.rows:
        raise MoecError(f"the body {body!r} asks for numbers of a row", where=f"moec::{op}")
    parsed.check_widths(widths, f"moec::{op}")
    wanted: list[tuple[str, Tensor, tuple[int, ...]]]
    wanted = [(f"w_in[{i}]", w, (E, H, m)) for i, (w, m) in enumerate(zip(w_in, widths, strict=True))]
    wanted += [("w_out", w_out, (E, parsed.width(widths), w_out.shape[2]))]
    wanted += [(f"b_in[{i}]", b, (E, m)) for i, (b, m) in enumerate(zip(b_in, widths, strict=False))]
    if b_out is not None:
        wanted += [("b_out", b_out, (E, w_out.shape[2]))]
    wrong = [f"{n} is {tuple(t.shape)}, not {s}" for n, t, s in wanted if tuple(t.shape) != s]
    wrong += [f"{n} is {t.dtype}, x is {x.dtype}" for n, t, _ in wanted if t.dtype != x.dtype]
    if b_in and len(b_in) != len(w_in):
        wrong.append(f"{len(b_in)} biases for {len(w_in)} first products")
    if wrong:
        raise MoecError("; ".join(wrong), where=f"moec::{op}")


def check_pairs(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Raise MoecError unless the pairs fit the tokens and each other."""
    if weights_TK.shape != ids_TK.shape:
        raise MoecError(
            f"weights {tuple(weights_TK.shape)} and ids {tuple(ids_TK.shape)} differ in shape", where="moec::experts"
        )
    if ids_TK.shape[0] != x_TH.shape[0]:
        raise MoecError(f"x has {x_TH.shape[0]} tokens but ids has {ids_TK.shape[0]}", where="moec::experts")


@torch.library.custom_op("moec::experts", mutates_args=(), device_types="cpu")
def experts(
    x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_in: list[Tensor], b_in: list[Tensor], w_out: Tensor,
    b_out: Tensor | None, body: str, kept: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    check("experts", x_TH, w_out.shape[0], w_in, b_in, w_out, b_out, body)
    check_pairs(x_TH, ids_TK, weights_TK)
    pair_N, counts_E, row_of_TK = sorted_pairs(x_TH, ids_TK, w_out.shape[0], "experts")
    total, token_N = pair_N.shape[0] if kept else ids_TK.numel(), _token(pair_N, ids_TK)
    rows_NH, h_NA = cpu.forward(x_TH, token_N, counts_E.tolist(), total, w_in, b_in, w_out, b_out, Body.parse(body))
    y_TH = sum_of_rows(rows_NH, row_of_TK, weights_TK, accumulator(x_TH.dtype, weights_TK.dtype))
    return y_TH, h_NA, row_of_TK, counts_E


def _token(pair_N: Tensor, of_TK: Tensor) -> Tensor:
    return pair_N.div(max(of_TK.shape[1], 1), rounding_mode="floor")


@experts.register_fake
def _(x_TH, ids_TK, weights_TK, w_in, b_in, w_out, b_out, body, kept):
    N = torch.library.get_ctx().new_dynamic_size() if kept else ids_TK.shape[0] * ids_TK.shape[1]
    return (
        x_TH.new_empty((x_TH.shape[0], w_out.shape[2])),
        x_TH.new_empty((N, sum(w.shape[2] for w in w_in))),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int64),
        ids_TK.new_empty((w_out.shape[0],), dtype=torch.int64),
    )


@torch.library.custom_op("moec::experts_backward", mutates_args=(), device_types="cpu")
def experts_backward(
    grad_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, w_in: list[Tensor], b_in: list[Tensor], w_out: Tensor,
    b_out: Tensor | None, h_NA: Tensor, row_of_TK: Tensor, counts_E: Tensor, body: str, need: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of x_TH, weights_TK, w_in…, b_in…, w_out and b_out (where there is one)."""
    counts = counts_E.tolist()
    pair_N = pair_of_row(row_of_TK, sum(counts))
    dx_NH, dweight_N, rest = cpu.backward(
        grad_TH, x_TH, _token(pair_N, row_of_TK), weights_TK.reshape(-1)[pair_N], counts,
        w_in, b_in, w_out, b_out, h_NA, Body.parse(body), need,
    )  # fmt: skip
    dweights_TK = weights_TK.new_empty(0)
    if dweight_N is not None:
        dweights_TK = torch.zeros_like(weights_TK, memory_format=torch.contiguous_format)
        dweights_TK.view(-1)[pair_N] = dweight_N
    dx_TH = sum_of_rows(dx_NH, row_of_TK, None, accumulator(x_TH.dtype)) if need[0] else x_TH.new_empty(0)
    return [dx_TH, dweights_TK, *rest]


@experts_backward.register_fake
def _(grad_TH, x_TH, weights_TK, w_in, b_in, w_out, b_out, h_NA, row_of_TK, counts_E, body, need):
    return _fake_gradients([x_TH, weights_TK, *w_in, *b_in, w_out, b_out], need)


def _fake_gradients(inputs: list[Tensor | None], need: list[bool]) -> list[Tensor]:
    held = [t for t in inputs if t is not None]
    return [
        t.new_empty(0) if not n else torch.empty_like(t) if t.ndim == 3 else t.new_empty(t.shape)
        for t, n in zip(held, need, strict=True)
    ]


@torch.library.custom_op("moec::experts_rows", mutates_args=(), device_types="cpu")
def experts_rows(
    x_NH: Tensor, counts_E: Tensor, w_in: list[Tensor], b_in: list[Tensor], w_out: Tensor, b_out: Tensor | None,
    body: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check("experts_rows", x_NH, counts_E.shape[0], w_in, b_in, w_out, b_out, body)
    counts = counts_E.tolist()
    _check_counts(counts, x_NH.shape[0])
    return cpu.forward(x_NH, None, counts, x_NH.shape[0], w_in, b_in, w_out, b_out, Body.parse(body))


def _check_counts(counts: list[int], num_rows: int) -> None:
    if min(counts, default=0) < 0 or sum(counts) > num_rows:
        raise MoecError(f"counts {counts} do not fit {num_rows} rows", where="moec::experts_rows")


@experts_rows.register_fake
def _(x_NH, counts_E, w_in, b_in, w_out, b_out, body):
    N = x_NH.shape[0]
    return x_NH.new_empty((N, w_out.shape[2])), x_NH.new_empty((N, sum(w.shape[2] for w in w_in)))


@torch.library.custom_op("moec::experts_rows_backward", mutates_args=(), device_types="cpu")
def experts_rows_backward(
    grad_NH: Tensor, x_NH: Tensor, w_in: list[Tensor], b_in: list[Tensor], w_out: Tensor, b_out: Tensor | None,
    h_NA: Tensor, counts_E: Tensor, body: str, need: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of x_NH, w_in…, b_in…, w_out and b_out (where there is one)."""
    need_x, *need_rest = need
    dx_NH, _, rest = cpu.backward(
        grad_NH, x_NH, None, None, counts_E.tolist(), w_in, b_in, w_out, b_out, h_NA, Body.parse(body),
        [need_x, False, *need_rest],
    )  # fmt: skip
    return [dx_NH if need_x else x_NH.new_empty(0), *rest]


@experts_rows_backward.register_fake
def _(grad_NH, x_NH, w_in, b_in, w_out, b_out, h_NA, counts_E, body, need):
    return _fake_gradients([x_NH, *w_in, *b_in, w_out, b_out], need)


def _setup(ctx, inputs, output) -> None:
    x_TH, _, weights_TK, w_in, b_in, w_out, b_out, ctx.body, _ = inputs
    _, h_NA, row_of_TK, counts_E = output
    _save(ctx, w_in, b_in, w_out, b_out, x_TH, weights_TK, h_NA, row_of_TK, counts_E)
    ctx.mark_non_differentiable(h_NA, row_of_TK, counts_E)


def _setup_rows(ctx, inputs, output) -> None:
    x_NH, counts_E, w_in, b_in, w_out, b_out, ctx.body = inputs
    _, h_NA = output
    _save(ctx, w_in, b_in, w_out, b_out, x_NH, counts_E, h_NA)
    ctx.mark_non_differentiable(h_NA)


def _save(ctx, w_in: list[Tensor], b_in: list[Tensor], w_out: Tensor, b_out: Tensor | None, *others: Tensor) -> None:
    ctx.parts = len(w_in), len(b_in), b_out is not None
    ctx.set_materialize_grads(False)  # of h and indices: zeros that nobody reads
    ctx.save_for_backward(*w_in, *b_in, w_out, *([] if b_out is None else [b_out]), *others)


def _saved(ctx) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None, list[Tensor]]:
    products, biases, has_b_out = ctx.parts
    saved = list(ctx.saved_tensors)
    w_in, b_in, rest = saved[:products], saved[products : products + biases], saved[products + biases :]
    return w_in, b_in, rest[0], rest[1] if has_b_out else None, rest[2:] if has_b_out else rest[1:]


def _flat(need) -> list[bool]:
    """``needs_input_grad`` of w_in, b_in, w_out and b_out, of which the first two are lists."""
    w_in, b_in, w_out, b_out = need
    return [*(w_in or []), *(b_in or []), w_out, b_out]


def _nested(ctx, gradients: list[Tensor], need: list[bool]) -> tuple:
    """``gradients`` of the weights as autograd wants them."""
    products, biases, has_b_out = ctx.parts
    grads = [g if n else None for g, n in zip(gradients, need, strict=True)]
    rest = grads[products + biases :]
    return grads[:products], grads[products : products + biases], rest[0], rest[1] if has_b_out else None


def _backward(ctx, grad_TH, _h, _row_of, _counts):
    if grad_TH is None:
        return (None,) * 9
    w_in, b_in, w_out, b_out, (x_TH, weights_TK, h_NA, row_of_TK, counts_E) = _saved(ctx)
    need_x, _, need_weights, *rest = ctx.needs_input_grad[:7]
    need = [need_x, need_weights, *_flat(rest)][: 3 + len(w_in) + len(b_in) + (b_out is not None)]
    dx_TH, dweights_TK, *gradients = experts_backward(
        grad_TH, x_TH, weights_TK, w_in, b_in, w_out, b_out, h_NA, row_of_TK, counts_E, ctx.body, need
    )
    of_weights = _nested(ctx, gradients, need[2:])
    return dx_TH if need_x else None, None, dweights_TK if need_weights else None, *of_weights, None, None


def _rows_backward(ctx, grad_NH, _h):
    if grad_NH is None:
        return (None,) * 7
    w_in, b_in, w_out, b_out, (x_NH, counts_E, h_NA) = _saved(ctx)
    need_x, _, *rest = ctx.needs_input_grad[:6]
    need = [need_x, *_flat(rest)][: 2 + len(w_in) + len(b_in) + (b_out is not None)]
    dx_NH, *gradients = experts_rows_backward(grad_NH, x_NH, w_in, b_in, w_out, b_out, h_NA, counts_E, ctx.body, need)
    return dx_NH if need_x else None, None, *_nested(ctx, gradients, need[1:]), None


experts.register_autograd(_backward, setup_context=_setup)
experts_rows.register_autograd(_rows_backward, setup_context=_setup_rows)
