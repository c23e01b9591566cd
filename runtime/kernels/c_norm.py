"""Root-mean-square norms compiled for this machine's CPU (``c_library.py``): a row is read once forward, and with its
gradient once backward.

    void forward(x_NH, x_row, w_H, y_NH, scale_N, N, H, eps)
    void backward(g_NH, g_row, x_NH, x_row, w_H, scale_N, dx_NH, dw_H, piece_H, N, H)

Legend: N rows, H columns, neighbours in memory; ``*_row`` are elements from a row to the next one.

A row's sums are formed in lanes, whatever the rows beside it; the weight's gradient is one sum in the order of the
rows, in pieces of RUN.  ``piece_H``: room for one.

``of`` is None where PyTorch is to compute: other dtypes than fp32, other devices, more threads than one (its steps use
them all), no compiler, or one that fails.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import c_library
from .source import cache_directory

RUN = 256

TEXT = """\
#include <math.h>
#include <string.h>

void forward(const float *restrict x, long x_row, const float *restrict w, float *restrict y, float *restrict scale,
             long N, long H, float eps) {
    for (long n = 0; n < N; n++, x += x_row, y += H) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long h = 0; h < H; h++) sum += x[h] * x[h];
        const float s = scale[n] = 1 / sqrtf(sum / H + eps);
#pragma omp simd
        for (long h = 0; h < H; h++) y[h] = x[h] * s * w[h];
    }
}

void backward(const float *restrict g, long g_row, const float *restrict x, long x_row, const float *restrict w,
              const float *restrict scale, float *restrict dx, float *restrict dw, float *restrict piece,
              long N, long H) {
    memset(dw, 0, H * sizeof(float));
    for (long start = 0; start < N; start += RUN) {
        memset(piece, 0, H * sizeof(float));
        for (long n = start; n < N && n < start + RUN; n++, g += g_row, x += x_row, dx += H) {
            const float s = scale[n];
            float along = 0;
#pragma omp simd reduction(+ : along)
            for (long h = 0; h < H; h++) along += g[h] * w[h] * (x[h] * s);
            along /= H;
#pragma omp simd
            for (long h = 0; h < H; h++) {
                const float unit = x[h] * s;
                dx[h] = (g[h] * w[h] - unit * along) * s;
                piece[h] += g[h] * unit;
            }
        }
#pragma omp simd
        for (long h = 0; h < H; h++) dw[h] += piece[h];
    }
}
""".replace("RUN", str(RUN))


@dataclass(frozen=True)
class CNorm:
    library: Any

    def forward(self, x: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_NH, weight_H = _rows(x), weight_H.contiguous()
        y, scale = x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1))
        rest = (t.data_ptr() for t in (weight_H, y, scale))
        self.library.forward(x_NH.data_ptr(), x_NH.stride(0), *rest, *x_NH.shape, eps)
        return y, scale

    def backward(self, grad: Tensor, x: Tensor, weight_H: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        g_NH, x_NH, scale, weight_H = _rows(grad), _rows(x), scale.contiguous(), weight_H.contiguous()
        dx, dw_H, piece_H = x.new_empty(x.shape), weight_H.new_empty(weight_H.shape), x.new_empty(weight_H.shape)
        rows = g_NH.data_ptr(), g_NH.stride(0), x_NH.data_ptr(), x_NH.stride(0)
        rest = (t.data_ptr() for t in (weight_H, scale, dx, dw_H, piece_H))
        self.library.backward(*rows, *rest, *x_NH.shape)
        return dx, dw_H


def _rows(x: Tensor) -> Tensor:
    """As a matrix whose columns are neighbours."""
    x_NH = x.reshape(-1, x.shape[-1])
    return x_NH if x_NH.stride(1) == 1 else x_NH.contiguous()


def of(x: Tensor) -> CNorm | None:
    """The kernels for rows such as these, or None."""
    if x.dtype != torch.float32 or x.device.type != "cpu" or not x.numel() or torch.get_num_threads() > 1:
        return None
    command = c_library.compiler()
    return _compiled(command, cache_directory()) if command else None


@cache
def _compiled(command: str, directory: Path) -> CNorm | None:
    library = c_library.load(TEXT, "norm", command, directory)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    matrix = (pointer, number)
    library.forward.argtypes = (*matrix, pointer, pointer, pointer, number, number, ctypes.c_float)
    library.backward.argtypes = (*matrix, *matrix, *[pointer] * 5, number, number)
    library.forward.restype = library.backward.restype = None
    return CNorm(library)
