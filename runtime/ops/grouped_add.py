"""``moec::grouped_add``: a bias per expert, over consecutive segments of rows.

Legend: N rows, E experts, M features.

* ``grouped_add(x_NM, b_EM, counts_E) -> y_NM``: rows past ``sum(counts_E)`` are unchanged.
* ``grouped_sum(g_NM, counts_E) -> [E, M]``: its gradient for ``b``, summed in fp32 (fp64 for fp64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .rows import accumulator, segments


def check_add(x_NM: Tensor, b_EM: Tensor, counts_E: Tensor) -> None:
    """Raise MoecError unless the operands fit each other."""
    if x_NM.dtype != b_EM.dtype or b_EM.shape != (counts_E.shape[0], x_NM.shape[1]):
        raise MoecError(
            f"x {tuple(x_NM.shape)} {x_NM.dtype}, b {tuple(b_EM.shape)} {b_EM.dtype} and counts "
            f"{tuple(counts_E.shape)} do not fit",
            where="moec::grouped_add",
        )


@torch.library.custom_op("moec::grouped_add", mutates_args=(), device_types="cpu")
def grouped_add(x_NM: Tensor, b_EM: Tensor, counts_E: Tensor) -> Tensor:
    check_add(x_NM, b_EM, counts_E)
    y_NM = x_NM.clone(memory_format=torch.contiguous_format)
    for e, start, end in segments(counts_E, x_NM.shape[0], "grouped_add"):
        y_NM[start:end] += b_EM[e]
    return y_NM


@grouped_add.register_fake
def _(x_NM, b_EM, counts_E):
    return x_NM.new_empty(x_NM.shape)


@torch.library.custom_op("moec::grouped_sum", mutates_args=(), device_types="cpu")
def grouped_sum(g_NM: Tensor, counts_E: Tensor) -> Tensor:
    db_EM = g_NM.new_zeros((counts_E.shape[0], g_NM.shape[1]))
    for e, start, end in segments(counts_E, g_NM.shape[0], "grouped_sum"):
        db_EM[e] = g_NM[start:end].sum(0, dtype=accumulator(g_NM.dtype))
    return db_EM


@grouped_sum.register_fake
def _(g_NM, counts_E):
    return g_NM.new_empty((counts_E.shape[0], g_NM.shape[1]))


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[-1])


def _backward(ctx, g_NM):
    (counts_E,) = ctx.saved_tensors
    need_x, need_b, _ = ctx.needs_input_grad
    return g_NM if need_x else None, grouped_sum(g_NM, counts_E) if need_b else None, None


grouped_add.register_autograd(_backward, setup_context=_setup)
