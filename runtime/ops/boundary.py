"""``moec::boundary(x, name) -> x``: marks where one of many equal layers ends, while a graph holds only some of them.

Forward and backward are the identity.  Capture puts boundaries in, passes carry them along (they are pointwise), and
``expand`` takes them out; no program that runs for long has one.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("moec::boundary", mutates_args=())
def boundary(x: Tensor, name: str) -> Tensor:
    return x.clone()  # a custom op may not return its input


@boundary.register_fake
def _(x, name):
    return torch.empty_like(x)


def _backward(ctx, grad):
    return grad, None


boundary.register_autograd(_backward)
