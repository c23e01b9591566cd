"""``moec::pick``: entries of the last dim by number, where a rank may hold only some of them.

Legend: N leading dims, V numbered entries (a vocabulary, or a rank's part of it), K entries asked for.

* ``pick(x_NV, vocab_V, ids_NK) -> [N, K]``: ``vocab_V`` (int64, ascending) are the numbers of the entries; a number
  that is not among them yields zero.  So the results of parts of x add up to that of the whole (``aten.gather``).
* ``pick_backward(g_NK, vocab_V, ids_NK) -> [N, V]``: its gradient for x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .lookup import find


@torch.library.custom_op("moec::pick", mutates_args=())
def pick(x_NV: Tensor, vocab_V: Tensor, ids_NK: Tensor) -> Tensor:
    if x_NV.shape[-1:] != vocab_V.shape or not vocab_V.shape[0] or x_NV.shape[:-1] != ids_NK.shape[:-1]:
        raise MoecError(
            f"x {tuple(x_NV.shape)}, entry numbers {tuple(vocab_V.shape)} and ids {tuple(ids_NK.shape)} do not fit",
            where="moec::pick",
        )
    place, there = find(vocab_V, ids_NK.contiguous())
    return x_NV.gather(-1, place).masked_fill_(~there, 0)


@pick.register_fake
def _(x_NV, vocab_V, ids_NK):
    return x_NV.new_empty(ids_NK.shape)


@torch.library.custom_op("moec::pick_backward", mutates_args=())
def pick_backward(g_NK: Tensor, vocab_V: Tensor, ids_NK: Tensor) -> Tensor:
    place, there = find(vocab_V, ids_NK.contiguous())
    g_NV = g_NK.new_zeros((*ids_NK.shape[:-1], vocab_V.shape[0]))
    return g_NV.scatter_add_(-1, place, g_NK.masked_fill(~there, 0))


@pick_backward.register_fake
def _(g_NK, vocab_V, ids_NK):
    return g_NK.new_empty((*ids_NK.shape[:-1], vocab_V.shape[0]))


def _setup(ctx, inputs, output) -> None:
    _, vocab_V, ids_NK = inputs
    ctx.save_for_backward(vocab_V, ids_NK)


def _backward(ctx, g_NK):
    return pick_backward(g_NK, *ctx.saved_tensors), None, None


pick.register_autograd(_backward, setup_context=_setup)
