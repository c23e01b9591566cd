"""What moves no payload and brings its gradient back: one op ``moec::carry_<move>`` beside every op that moves rows.

Legend: T tokens, N rows, H numbers and W bytes a row, K rows a token.

``carry_<move>(x [.., H], data [.., W], ...) -> carrier [.., H]``: ``x`` is the carrier (``payload.py``) of what was
moved and ``data`` the moved payload, whose rows the result has, in x's dtype and without memory.  Forward nothing is
moved; backward the gradient is, by the dual of the move, in the dtype that it has:

====================  =======================================  =================================================
op                    beside                                   backward
====================  =======================================  =================================================
``carry_rows``        permute, slots (their ``row_of_TK``)     ``permute_backward``
``carry_sorted``      sort_chunks                              sort_chunks, the other way
``carry_swapped``     swap_chunks                              swap_chunks, the other way
``carry_aligned``     align_rows                               unalign_rows
``carry_exchange``    all_to_all                               all_to_all_rows
``carry_equal``       all_to_all_equal                         all_to_all_equal
``carry_gather``      s_to_r                                   p_to_s
``carry_home``        nothing: rows stay where they are        the identity
====================  =======================================  =================================================

``carry_exchange``, ``carry_equal`` and ``carry_home`` name a payload for the gradients (empty: they travel as they
are): these are rounded once, as ``grad``, and travel as bytes.  ``carry_home`` does it where no rank is far away, so
that one device rounds what many do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..collectives import TABLE
from ..torch_compat import wait
from .align_rows import unalign_rows
from .convert import convert
from .payload import decode_rows, encode_rows
from .permute import permute_backward
from .quantise import DEVICES
from .slots import swap_chunks
from .sort_chunks import sort_chunks

Move = Callable[[Tensor], Tensor]


def coded(grad: Tensor, payload: str, rows, move: Move) -> Tensor:
    """``move(grad)``, of ``rows`` rows, as bytes on the way where a payload is named."""
    if not payload:
        return move(grad)
    _, data = encode_rows(grad, None, payload, "grad")
    like = grad.new_zeros(()).expand(rows, grad.shape[1])
    return decode_rows(move(data), like, None, payload, "grad")


def _rows(grad, x_shape, row_of_TK):
    return permute_backward(grad, row_of_TK)


def _sorted(grad, x_shape, counts_RE, inverse):
    return sort_chunks(grad, counts_RE, not inverse)


def _swapped(grad, x_shape, outer, inner):
    return swap_chunks(grad, inner, outer)


def _aligned(grad, x_shape, counts_E, alignment):
    return unalign_rows(grad, counts_E, alignment, x_shape[0])


def _exchange(grad, x_shape, send_R, recv_R, payload, size, group):
    op = TABLE[TABLE["carry_exchange"].dual].op
    return coded(grad, payload, x_shape[0], lambda g: wait(op(g, recv_R, send_R, x_shape[0], size, group)))


def _equal(grad, x_shape, payload, size, group):
    op = TABLE[TABLE["carry_equal"].dual].op
    return coded(grad, payload, x_shape[0], lambda g: wait(op(g, size, group)))


def _gather(grad, x_shape, dim, size, group):
    return convert(TABLE["carry_gather"].dual, grad, dim % len(x_shape), 0, size, group)


def _home(grad, x_shape, payload):
    return coded(grad, payload, x_shape[0], lambda g: g)


def _define(name: str, arguments: str, back: Callable[..., Tensor]) -> Any:
    def forward(x: Tensor, data: Tensor, *args) -> Tensor:
        return x.new_zeros(()).expand(*data.shape[:-1], x.shape[-1])

    def setup(ctx, inputs, output) -> None:
        x, _, *args = inputs
        ctx.shape = x.shape
        ctx.tensors = [isinstance(a, Tensor) for a in args]
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))

    def backward(ctx, grad):
        saved = iter(ctx.saved_tensors)
        args = [next(saved) if t else a for t, a in zip(ctx.tensors, ctx.others, strict=True)]
        return back(grad, ctx.shape, *args), None, *[None] * len(args)

    schema = f"(Tensor x, Tensor data{arguments}) -> Tensor"
    op = torch.library.custom_op(
        f"moec::carry_{name}", forward, mutates_args=(), device_types=DEVICES, schema=schema
    )
    op.register_fake(forward)
    op.register_autograd(backward, setup_context=setup)
    return op


CARRY = {
    name: _define(name, arguments, back)
    for name, arguments, back in (
        ("rows", ", Tensor row_of_TK", _rows),
        ("sorted", ", Tensor counts_RE, bool inverse", _sorted),
        ("swapped", ", int outer, int inner", _swapped),
        ("aligned", ", Tensor counts_E, int alignment", _aligned),
        ("exchange", ", Tensor send_R, Tensor recv_R, str payload, int size, str group", _exchange),
        ("equal", ", str payload, int size, str group", _equal),
        ("gather", ", int dim, int size, str group", _gather),
        ("home", ", str payload", _home),
    )
}
