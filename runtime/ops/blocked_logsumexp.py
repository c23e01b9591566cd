"""``moec::blocked_logsumexp``: logsumexp of each of several equal blocks of the last dim.

Legend: N leading dims, V entries, b blocks.

* ``blocked_logsumexp(x_NV, blocks) -> [N, b]`` in fp32 (fp64 for fp64).  A rank that holds some of the blocks makes
  their columns; ``logsumexp`` over the b columns is that over V.  So a sharded V needs neither a maximum over ranks nor
  a value that could overflow.
* ``blocked_logsumexp_backward(g_Nb, x_NV, lse_Nb) -> [N, V]`` in x's dtype: the softmax within each block times g.
  It is computed anew, so that nothing but x and the result is kept for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .rows import accumulator


@torch.library.custom_op("moec::blocked_logsumexp", mutates_args=())
def blocked_logsumexp(x_NV: Tensor, blocks: int) -> Tensor:
    if blocks < 1 or x_NV.shape[-1] % blocks:
        raise MoecError(f"{x_NV.shape[-1]} entries do not make {blocks} equal blocks", where="moec::blocked_logsumexp")
    return x_NV.to(accumulator(x_NV.dtype)).unflatten(-1, (blocks, -1)).logsumexp(-1)


@blocked_logsumexp.register_fake
def _(x_NV, blocks):
    return x_NV.new_empty((*x_NV.shape[:-1], blocks), dtype=accumulator(x_NV.dtype))


@torch.library.custom_op("moec::blocked_logsumexp_backward", mutates_args=())
def blocked_logsumexp_backward(g_Nb: Tensor, x_NV: Tensor, lse_Nb: Tensor) -> Tensor:
    # A block of -inf alone has no softmax: exp(-inf - 0) = 0 and not exp(-inf + inf).
    floor_Nb = lse_Nb.masked_fill(lse_Nb == -torch.inf, 0)
    blocks_Nbv = x_NV.unflatten(-1, (lse_Nb.shape[-1], -1))
    y_Nbv = (blocks_Nbv - floor_Nb[..., None]).exp_().mul_(g_Nb[..., None])
    return y_Nbv.flatten(-2).to(x_NV.dtype)


@blocked_logsumexp_backward.register_fake
def _(g_Nb, x_NV, lse_Nb):
    return x_NV.new_empty(x_NV.shape)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx, g_Nb):
    return blocked_logsumexp_backward(g_Nb, *ctx.saved_tensors), None


blocked_logsumexp.register_autograd(_backward, setup_context=_setup)
