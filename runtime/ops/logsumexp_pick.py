"""``moec::logsumexp_pick``: what a loss over a sharded vocabulary takes of this rank's logits, read once.

Legend: N leading dims, V entries, b blocks.

``logsumexp_pick(x_NV, vocab_V, ids_N1, blocks) -> (lse_Nb, picked_N1, total_N)``:

* ``lse = blocked_logsumexp(x, blocks)``, fp32 (fp64 for fp64);
* ``picked = pick(x, vocab, ids)``, in x's dtype: 0 where this rank does not have the number;
* ``total = x.sum(-1)``, fp32 (fp64 for fp64): what label smoothing asks for.

Backward: ``logsumexp_pick_backward``, the sum of the three, in one read of x and one write (``softmax_rows``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .lookup import find
from .rows import accumulator
from .softmax_rows import row_grads, row_sums


@torch.library.custom_op("moec::logsumexp_pick", mutates_args=(), device_types="cpu")
def logsumexp_pick(x_NV: Tensor, vocab_V: Tensor, ids_N1: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    check(x_NV, vocab_V, ids_N1, blocks)
    sums = row_sums(by_block(x_NV, blocks), places(vocab_V, ids_N1, blocks), True)
    return shaped(*sums, x_NV, blocks)


@logsumexp_pick.register_fake
def _(x_NV, vocab_V, ids_N1, blocks):
    lead, wide = x_NV.shape[:-1], accumulator(x_NV.dtype)
    return (
        x_NV.new_empty((*lead, blocks), dtype=wide),
        x_NV.new_empty(ids_N1.shape),
        x_NV.new_empty(lead, dtype=wide),
    )


@torch.library.custom_op("moec::logsumexp_pick_backward", mutates_args=(), device_types="cpu")
def logsumexp_pick_backward(
    grad_Nb: Tensor, grad_N1: Tensor, grad_N: Tensor, x_NV: Tensor, vocab_V: Tensor, ids_N1: Tensor, lse_Nb: Tensor
) -> Tensor:
    place_M, *factors = grad_factors(grad_Nb, grad_N1, grad_N, vocab_V, ids_N1)
    blocks = lse_Nb.shape[-1]
    return row_grads(by_block(x_NV, blocks), place_M, lse_Nb.reshape(-1), *factors).view(x_NV.shape)


@logsumexp_pick_backward.register_fake
def _(grad_Nb, grad_N1, grad_N, x_NV, vocab_V, ids_N1, lse_Nb):
    return x_NV.new_empty(x_NV.shape)


def check(x_NV: Tensor, vocab_V: Tensor, ids_N1: Tensor, blocks: int) -> None:
    if x_NV.shape[-1:] != vocab_V.shape or ids_N1.shape != (*x_NV.shape[:-1], 1) or not vocab_V.shape[0]:
        raise MoecError(
            f"x {tuple(x_NV.shape)}, entry numbers {tuple(vocab_V.shape)} and ids {tuple(ids_N1.shape)} do not fit",
            where="moec::logsumexp_pick",
        )
    if blocks < 1 or x_NV.shape[-1] % blocks:
        raise MoecError(f"{x_NV.shape[-1]} entries do not make {blocks} equal blocks", where="moec::logsumexp_pick")


def by_block(x_NV: Tensor, blocks: int) -> Tensor:
    """Rows [N * b, V / b]."""
    return x_NV.reshape(-1, x_NV.shape[-1] // blocks)


def places(vocab_V: Tensor, ids_N1: Tensor, blocks: int) -> Tensor:
    """int64 [N * b]: where a row of a block has the entry asked for, -1 where it has not."""
    place, there = find(vocab_V, ids_N1.reshape(-1, 1))
    inside = place - torch.arange(blocks, device=place.device) * (vocab_V.shape[0] // blocks)
    return inside.masked_fill(~there | (inside < 0) | (inside >= vocab_V.shape[0] // blocks), -1).view(-1)


def shaped(
    lse_M: Tensor, picked_M: Tensor, total_M: Tensor, x_NV: Tensor, blocks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The results from the sums of rows [N * b]."""
    lead = x_NV.shape[:-1]
    picked_N1 = picked_M.view(*lead, blocks).sum(-1, keepdim=True).to(x_NV.dtype)
    return lse_M.view(*lead, blocks), picked_N1, total_M.view(*lead, blocks).sum(-1)


def grad_factors(
    grad_Nb: Tensor, grad_N1: Tensor, grad_N: Tensor, vocab_V: Tensor, ids_N1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``row_grads`` takes: place, a, b, c."""
    each = torch.zeros_like(grad_Nb)
    b_M, c_M = ((each + g).reshape(-1) for g in (grad_N1, grad_N[..., None]))
    return places(vocab_V, ids_N1, grad_Nb.shape[-1]), grad_Nb.reshape(-1), b_M, c_M


def _setup(ctx, inputs, output) -> None:
    x_NV, vocab_V, ids_N1, _ = inputs
    ctx.save_for_backward(x_NV, vocab_V, ids_N1, output[0])


def _backward(ctx, grad_Nb, grad_N1, grad_N):
    x_NV, vocab_V, ids_N1, lse_Nb = ctx.saved_tensors
    return logsumexp_pick_backward(grad_Nb, grad_N1, grad_N, x_NV, vocab_V, ids_N1, lse_Nb), None, None, None


logsumexp_pick.register_autograd(_backward, setup_context=_setup)
