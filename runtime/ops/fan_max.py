"""``moec::fan_max``: a value for several readers, whose gradient is the largest of theirs, not their sum.

``fan_max(x, n) -> [x, …]``: ``n`` copies.  Backward: element by element the maximum of what arrives.  Several products
by one weight (token chunks, a layer that is used twice) share a history, whose gradients are magnitudes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantise import DEVICES


@torch.library.custom_op("moec::fan_max", mutates_args=(), device_types=DEVICES)
def fan_max(x: Tensor, n: int) -> list[Tensor]:
    return [x.clone() for _ in range(n)]


@fan_max.register_fake
def _(x, n):
    return [torch.empty_like(x) for _ in range(n)]


def _setup(ctx, inputs, output) -> None:
    pass


def _backward(ctx, grads):
    arrived = [g for g in grads if g is not None]
    return torch.stack(arrived).amax(0) if arrived else None, None


fan_max.register_autograd(_backward, setup_context=_setup)
