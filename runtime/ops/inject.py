"""``moec::inject``: an activation that brings a loss with it.

``inject(x, loss) -> x``: forward the identity on ``x``; ``loss`` is a scalar, and its gradient is 1 whenever a gradient
reaches ``x``, whatever that gradient is.  So a term of the objective that no output shows (a balancing loss deep in a
model) is trained on.  On several ranks ``loss`` is that of the global batch, the same on all of them (invariant): each
states its gradient in full.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError


@torch.library.custom_op("moec::inject", mutates_args=())
def inject(x: Tensor, loss: Tensor) -> Tensor:
    if loss.ndim:
        raise MoecError(f"a loss of shape {tuple(loss.shape)} is no scalar", where="moec::inject")
    return x.clone()  # a custom op may not return its input


@inject.register_fake
def _(x, loss):
    return torch.empty_like(x)


def _setup(ctx, inputs, output) -> None:
    ctx.dtype = inputs[1].dtype


def _backward(ctx, grad):
    return grad, grad.new_ones((), dtype=ctx.dtype)


inject.register_autograd(_backward, setup_context=_setup)
