"""``moec::grouped_mm``, ``grouped_mm_wgrad``, ``grouped_add`` and ``grouped_sum`` on a GPU: what stays unfused.

Legend: N rows, E experts, K and M in and out features.

Launchers take tensors of any device; they are the CUDA kernels of the ops.  Rows past ``sum(counts_E)`` are what the
ops say; counts stay on the device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..errors import MoecError
from ..ops import grouped_add as add_op
from ..ops import grouped_mm as mm_op
from . import grouped_add, grouped_gemm, grouped_outer, grouped_rows, grouped_sum, order, zero_tail
from .grouped_outer import GroupedOuter, Rows
from .tiles import Shape, Tile, choose

rows_spec = cache(grouped_rows.spec)


def mm(x_NK: Tensor, w_EKM: Tensor, counts_E: Tensor, *, tile: Tile | None = None) -> Tensor:
    """``y_NM`` of ``moec::grouped_mm``."""
    mm_op.check_mm(x_NK, w_EKM, counts_E)
    refuse_float64(x_NK, "grouped_mm")
    (N, K), (E, _, M) = x_NK.shape, w_EKM.shape
    tile = tile or choose("grouped_rows", Shape(M, K, -(-N // max(E, 1)), x_NK.dtype), x_NK.device)
    offset_E1, y_NM = order.checked_offsets(counts_E, N, "grouped_mm"), x_NK.new_empty((N, M))
    spec = rows_spec("moec::grouped_mm", E, M, (K,), (tuple(w_EKM.stride()),), x_NK.dtype, tile)
    grouped_gemm.launch(spec, N, offset_E1, x_NK.contiguous(), w_EKM, y_NM)
    return zero_tail.launch(offset_E1, y_NM)


def mm_wgrad(x_NK: Tensor, g_NM: Tensor, counts_E: Tensor, *, tile: Tile | None = None) -> Tensor:
    """``dw_EKM`` of ``moec::grouped_mm_wgrad``."""
    refuse_float64(x_NK, "grouped_mm_wgrad")
    (N, K), M, E = x_NK.shape, g_NM.shape[1], counts_E.shape[0]
    tile = tile or choose("grouped_outer", Shape(M, K, -(-N // max(E, 1)), x_NK.dtype), x_NK.device)
    dw_EKM = x_NK.new_empty((E, K, M))
    spec = GroupedOuter("moec::grouped_mm_wgrad", E, Rows(K, K), Rows(M, M), (K * M, M, 1), x_NK.dtype, tile)
    offset_E1 = order.checked_offsets(counts_E, N, "grouped_mm_wgrad")
    grouped_outer.launch(spec, offset_E1, x_NK.contiguous(), g_NM.contiguous(), dw_EKM)
    return dw_EKM


def add(x_NM: Tensor, b_EM: Tensor, counts_E: Tensor) -> Tensor:
    """``y_NM`` of ``moec::grouped_add``."""
    add_op.check_add(x_NM, b_EM, counts_E)
    offset_E1 = order.checked_offsets(counts_E, x_NM.shape[0], "grouped_add")
    return grouped_add.launch(offset_E1, x_NM.contiguous(), b_EM.contiguous())


def sum_rows(g_NM: Tensor, counts_E: Tensor) -> Tensor:
    """``db_EM`` of ``moec::grouped_sum``."""
    (N, M), E = g_NM.shape, counts_E.shape[0]
    db_EM = g_NM.new_empty((E, M))
    grouped_sum.launch(E, M, 0, order.checked_offsets(counts_E, N, "grouped_sum"), g_NM.contiguous(), db_EM)
    return db_EM


def refuse_float64(x: Tensor, op: str) -> None:
    if x.dtype == torch.float64:
        raise MoecError(
            "no GPU kernel multiplies in float64", where=f"moec::{op}", way_out="float32, bfloat16 or float16"
        )


mm_op.grouped_mm.register_kernel("cuda")(mm)
mm_op.grouped_mm_wgrad.register_kernel("cuda")(mm_wgrad)
add_op.grouped_add.register_kernel("cuda")(add)
add_op.grouped_sum.register_kernel("cuda")(sum_rows)
