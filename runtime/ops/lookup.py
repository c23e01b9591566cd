"""``moec::lookup``: rows of a table by number, where a rank may hold only some of the rows.

Legend: V rows of the table (a vocabulary, or a rank's part of it), H hidden.

* ``lookup(weight_VH, vocab_V, ids, padding_idx) -> [*ids.shape, H]``: ``vocab_V`` (int64, ascending) are the numbers of
  the rows; an id that is not among them yields zeros.  So the results of parts of a table add up to that of the whole.
* ``lookup_backward(g, vocab_V, ids, padding_idx) -> [V, H]``: its gradient for the table.  As with ``aten.embedding``,
  the row ``padding_idx`` gets none (-1: every row gets its gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError


def find(vocab_V: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where each id stands in ``vocab_V``, and whether it is there (the place of one that is not is arbitrary)."""
    ids = ids.to(vocab_V.dtype)
    place = torch.searchsorted(vocab_V, ids).clamp_(max=vocab_V.shape[0] - 1)
    return place, vocab_V[place] == ids


@torch.library.custom_op("moec::lookup", mutates_args=())
def lookup(weight_VH: Tensor, vocab_V: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    if weight_VH.ndim != 2 or vocab_V.shape != weight_VH.shape[:1] or not weight_VH.shape[0]:
        raise MoecError(
            f"a table {tuple(weight_VH.shape)} and row numbers {tuple(vocab_V.shape)} do not fit", where="moec::lookup"
        )
    place, there = find(vocab_V, ids.contiguous())
    return weight_VH[place].masked_fill_(~there[..., None], 0)


@lookup.register_fake
def _(weight_VH, vocab_V, ids, padding_idx):
    return weight_VH.new_empty((*ids.shape, weight_VH.shape[1]))


@torch.library.custom_op("moec::lookup_backward", mutates_args=())
def lookup_backward(g: Tensor, vocab_V: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    place, there = find(vocab_V, ids.contiguous())
    g = g.masked_fill(~(there & (ids != padding_idx))[..., None], 0)
    return torch.ops.aten.embedding_dense_backward(g, place, vocab_V.shape[0], -1, False)


@lookup_backward.register_fake
def _(g, vocab_V, ids, padding_idx):
    return g.new_empty((vocab_V.shape[0], g.shape[-1]))


def _setup(ctx, inputs, output) -> None:
    _, vocab_V, ids, ctx.padding_idx = inputs
    ctx.save_for_backward(vocab_V, ids)


def _backward(ctx, g):
    return lookup_backward(g, *ctx.saved_tensors, ctx.padding_idx), None, None, None


lookup.register_autograd(_backward, setup_context=_setup)
