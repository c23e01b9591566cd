"""``moec::grouped_mm``: one matrix product per expert over consecutive segments of rows.

Legend: N rows, E experts, K and M in and out features.

* ``grouped_mm(x_NK, w_EKM, counts_E) -> y_NM``: expert e owns the next ``counts_E[e]`` rows; rows past
  ``sum(counts_E)`` give zeros.  ``w_EKM`` may have any strides (usually it is a transposed view of ``[E, M, K]``).
* ``grouped_mm_wgrad(x_NK, g_NM, counts_E) -> [E, K, M]``: its gradient for ``w``; zeros for an expert without rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .rows import segments


def check_mm(x_NK: Tensor, w_EKM: Tensor, counts_E: Tensor) -> None:
    """Raise MoecError unless the operands fit each other."""
    if x_NK.dtype != w_EKM.dtype or x_NK.shape[1] != w_EKM.shape[1] or counts_E.shape[0] != w_EKM.shape[0]:
        raise MoecError(
            f"x {tuple(x_NK.shape)} {x_NK.dtype}, w {tuple(w_EKM.shape)} {w_EKM.dtype} and counts "
            f"{tuple(counts_E.shape)} do not fit",
            where="moec::grouped_mm",
        )


@torch.library.custom_op("moec::grouped_mm", mutates_args=(), device_types="cpu")
def grouped_mm(x_NK: Tensor, w_EKM: Tensor, counts_E: Tensor) -> Tensor:
    check_mm(x_NK, w_EKM, counts_E)
    y_NM = x_NK.new_empty((x_NK.shape[0], w_EKM.shape[2]))
    end = 0
    for e, start, end in segments(counts_E, x_NK.shape[0], "grouped_mm"):
        torch.mm(x_NK[start:end], w_EKM[e], out=y_NM[start:end])
    y_NM[end:].zero_()
    return y_NM


@grouped_mm.register_fake
def _(x_NK, w_EKM, counts_E):
    return x_NK.new_empty((x_NK.shape[0], w_EKM.shape[2]))


@torch.library.custom_op("moec::grouped_mm_wgrad", mutates_args=(), device_types="cpu")
def grouped_mm_wgrad(x_NK: Tensor, g_NM: Tensor, counts_E: Tensor) -> Tensor:
    dw_EKM = x_NK.new_zeros((counts_E.shape[0], x_NK.shape[1], g_NM.shape[1]))
    for e, start, end in segments(counts_E, x_NK.shape[0], "grouped_mm_wgrad"):
        torch.mm(x_NK[start:end].t(), g_NM[start:end], out=dw_EKM[e])
    return dw_EKM


@grouped_mm_wgrad.register_fake
def _(x_NK, g_NM, counts_E):
    return x_NK.new_empty((counts_E.shape[0], x_NK.shape[1], g_NM.shape[1]))


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, g_NM):
    x_NK, w_EKM, counts_E = ctx.saved_tensors
    need_x, need_w, _ = ctx.needs_input_grad
    dx_NK = grouped_mm(g_NM, w_EKM.transpose(1, 2), counts_E) if need_x else None
    dw_EKM = None
    if need_w and w_EKM.stride(1) == 1:
        # w is a view of [E, M, K]: form the gradient in that layout too, so that the parameter gets it without a copy.
        dw_EKM = grouped_mm_wgrad(g_NM, x_NK, counts_E).transpose(1, 2)
    elif need_w:
        dw_EKM = grouped_mm_wgrad(x_NK, g_NM, counts_E)
    return dx_NK, dw_EKM, None


def _wgrad_backward(ctx, dw_EKM):
    x_NK, g_NM, counts_E = ctx.saved_tensors
    dx_NK = grouped_mm(g_NM, dw_EKM.transpose(1, 2), counts_E)
    return dx_NK, grouped_mm(x_NK, dw_EKM, counts_E), None


grouped_mm.register_autograd(_backward, setup_context=_setup)
grouped_mm_wgrad.register_autograd(_wgrad_backward, setup_context=_setup)
