"""``moec::rms_norm``: rows divided by their root mean square, times a weight, in one op each way.

Legend: N rows (all dims of x but the last), H numbers of a row.

``rms_norm(x, shape, weight_H, eps) -> (y, scale)``: ``y = (x · scale) · weight`` with
``scale = rsqrt(mean(x²) + eps)``, one number a row (its last dim has size 1).  ``shape`` is ``[H]``; x and the weight
are of one dtype, fp32 or fp64, in which everything is formed.  ``scale`` has no gradient of its own.

Backward: ``rms_norm_backward(grad, x, weight, scale) -> (dx, dweight_H)``: kept are x and a number a row, and nothing
as large as x besides.  On a CPU both are C where that can be compiled (``kernels/c_norm.py``), else PyTorch's steps, as
on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from ..kernels import c_norm


@torch.library.custom_op("moec::rms_norm", mutates_args=(), device_types=("cpu", "cuda"))
def rms_norm(x: Tensor, shape: list[int], weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.dtype in (torch.float32, torch.float64)
    if list(x.shape[-1:]) != shape or weight_H.shape != x.shape[-1:] or weight_H.dtype != x.dtype or not wide:
        raise MoecError(
            f"x {tuple(x.shape)} of {x.dtype}, weight {tuple(weight_H.shape)} of {weight_H.dtype}, shape {shape}",
            where="moec::rms_norm",
            way_out="x and the weight are fp32 or fp64 both, and the weight is as long as a row",
        )
    if (kernels := c_norm.of(x)) is not None:
        return kernels.forward(x, weight_H, eps)
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt_()
    return torch.mul(x, scale, out=x.new_empty(x.shape)).mul_(weight_H), scale  # contiguous, however x lies


@rms_norm.register_fake
def _(x, shape, weight_H, eps):
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1))


@torch.library.custom_op("moec::rms_norm_backward", mutates_args=(), device_types=("cpu", "cuda"))
def rms_norm_backward(grad: Tensor, x: Tensor, weight_H: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if (kernels := c_norm.of(x)) is not None:
        return kernels.backward(grad, x, weight_H, scale)
    unit, grad_unit = x * scale, torch.mul(grad, weight_H, out=x.new_empty(x.shape))
    dweight_H = (grad * unit).reshape(-1, x.shape[-1]).sum(0)
    along = (grad_unit * unit).mean(-1, keepdim=True)
    return grad_unit.sub_(unit.mul_(along)).mul_(scale), dweight_H


@rms_norm_backward.register_fake
def _(grad, x, weight_H, scale):
    return x.new_empty(x.shape), weight_H.new_empty(weight_H.shape)


def _setup(ctx, inputs, output) -> None:
    x, _, weight_H, _ = inputs
    ctx.save_for_backward(x, weight_H, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _scale):
    dx, dweight_H = rms_norm_backward(grad, *ctx.saved_tensors)
    return dx, None, dweight_H, None


rms_norm.register_autograd(_backward, setup_context=_setup)
