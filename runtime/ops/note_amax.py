"""``moec::note_amax``: what a step learns for a product's history (FP8's recipe ``delayed``).

``note_amax(history [3, 1 + H], amax_x, amax_w) -> [1, 1]``: the largest magnitude of the product's past gradients,
fp32, as ``moec::past_amax`` gives it: what an FP8 product takes as ``grad_amax``, for whose gradient it sends back how
large the gradient was this time.  Backward: the history's gradient has in column 0, which is of the step under way,
the largest magnitudes of this step: of the activations and the weight (``amax_x``, ``amax_w``: as ``moec::amax`` gives
them, of this rank's part), and of the gradient.  It is 0 elsewhere.

So all that a step learns of magnitudes arrives when the backward ends, as the gradients of the histories; nothing is
written, and a forward that is computed again learns nothing twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .past_amax import ROWS
from .quantise import DEVICES


@torch.library.custom_op("moec::note_amax", mutates_args=(), device_types=DEVICES)
def note_amax(history: Tensor, amax_x: Tensor, amax_w: Tensor) -> Tensor:
    return history[ROWS.index("grad"), 1:].amax().float().expand(1, 1).contiguous()


@note_amax.register_fake
def _(history, amax_x, amax_w):
    return history.new_empty((1, 1), dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:
    history, *found = inputs
    ctx.save_for_backward(*found)
    ctx.width, ctx.dtype = history.shape[1], history.dtype


def _backward(ctx, g):
    now_3 = torch.stack([x.amax().to(ctx.dtype) for x in (*ctx.saved_tensors, g)])
    return torch.nn.functional.pad(now_3[:, None], (0, ctx.width - 1)), None, None


note_amax.register_autograd(_backward, setup_context=_setup)
