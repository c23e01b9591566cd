"""Products of groups of rows with one matrix each, compiled for this machine's CPU (``c_products_text.py``).

``of`` is None where PyTorch is to multiply: other dtypes than fp32, more threads than one (its products use them all),
a processor without vectors of 8 floats (no figures are known of others), no compiler, or one that fails.  A weight
whose strides no kernel reads (``can_multiply``, ``can_add_outers``) is PyTorch's too.

Measured (one core of a Zen 4 with 512-bit vectors, weights not in a cache, H 256 to 1024, 2 to 1024 rows a group):
1.1 times as fast as MKL's product of each group with hundreds of rows, 1.2 to 1.8 times with about thirty.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import c_library
from .c_products_text import c_text, room_of_dots, room_of_outers
from .source import cache_directory

FLAGS = (*c_library.FLAGS, "-ffp-contract=fast")  # a product and a sum are one instruction


class Groups:
    """The next ``lengths[i]`` rows belong to ``experts[i]``; no length is 0."""

    def __init__(self, experts: list[int], lengths: list[int]) -> None:
        numbers = ctypes.c_long * len(experts)
        self.arguments = len(experts), numbers(*lengths), numbers(*experts)
        self.most_rows = max(lengths, default=0)


@dataclass(frozen=True)
class CProducts:
    """Operands are fp32; the columns of rows are neighbours in memory."""

    library: Any

    def can_multiply(self, w_EKN: Tensor) -> bool:
        """Whether ``multiply`` takes this weight."""
        return w_EKN.numel() > 0 and w_EKN.dtype == torch.float32 and bool(_by_rows(w_EKN) or _by_dots(w_EKN))

    def can_add_outers(self, dw_EMN: Tensor) -> bool:
        """Whether ``add_outers`` takes this gradient."""
        return dw_EMN.numel() > 0 and dw_EMN.dtype == torch.float32 and (_by_rows(dw_EMN) or _by_rows(dw_EMN.mT))

    def multiply(self, groups: Groups, x_RK: Tensor, w_EKN: Tensor, y_RN: Tensor, add: bool) -> None:
        """``y = x w`` of each group, added to y if ``add``."""
        _, K, N = w_EKN.shape
        x, y = _matrix(x_RK), _matrix(y_RN)
        if _by_rows(w_EKN):
            w = (w_EKN.data_ptr(), w_EKN.stride(0), w_EKN.stride(1))
            self.library.rows(*groups.arguments, *x, *w, *y, K, N, add)
        else:
            w, room = (w_EKN.data_ptr(), w_EKN.stride(0), w_EKN.stride(2)), _room(room_of_dots(groups.most_rows, K))
            self.library.dots(*groups.arguments, *x, *w, *y, K, N, add, room.data_ptr())

    def add_outers(self, groups: Groups, a_RM: Tensor, g_RN: Tensor, dw_EMN: Tensor, add: bool) -> None:
        """``dw = aᵀ g`` of each group, added to dw if ``add``."""
        if not _by_rows(dw_EMN):
            a_RM, g_RN, dw_EMN = g_RN, a_RM, dw_EMN.mT
        _, M, N = dw_EMN.shape
        dw, room = (dw_EMN.data_ptr(), dw_EMN.stride(0), dw_EMN.stride(1)), _room(room_of_outers(groups.most_rows, N))
        self.library.outers(*groups.arguments, *_matrix(a_RM), *_matrix(g_RN), *dw, M, N, add, room.data_ptr())


def _by_rows(w_EKN: Tensor) -> bool:
    """Whether a row's columns are neighbours, and a whole number of eights."""
    return w_EKN.stride(2) == 1 and w_EKN.shape[2] % 8 == 0


def _by_dots(w_EKN: Tensor) -> bool:
    return w_EKN.stride(1) == 1


def _room(floats: int) -> Tensor:
    return torch.empty(floats, dtype=torch.float32)


def _matrix(t: Tensor) -> tuple[int, int]:
    assert t.stride(1) == 1 or t.shape[1] <= 1, t.stride()
    return t.data_ptr(), t.stride(0)


def of(dtype: torch.dtype) -> CProducts | None:
    """The kernels for tensors of ``dtype``, or None."""
    lanes = _lanes(c_library.processor())
    if dtype != torch.float32 or lanes is None or torch.get_num_threads() > 1:
        return None
    command = c_library.compiler()
    return compiled(lanes, command, cache_directory()) if command else None


@cache
def _lanes(processor: str) -> int | None:
    """Floats of a vector of this processor; None where there are no kernels for it."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    flags = set(processor.split())
    return 16 if "avx512f" in flags else 8 if {"avx2", "fma"} <= flags else None


@cache
def compiled(lanes: int, command: str, directory: Path) -> CProducts | None:
    """The kernels for vectors of ``lanes`` floats; None, and a warning, if the compiler fails."""
    library = c_library.load(c_text(lanes), "products", command, directory, FLAGS)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    groups, matrix, stack = (number, pointer, pointer), (pointer, number), (pointer, number, number)
    library.rows.argtypes = (*groups, *matrix, *stack, *matrix, number, number, number)
    library.dots.argtypes = (*library.rows.argtypes, pointer)
    library.outers.argtypes = (*groups, *matrix, *matrix, *stack, number, number, number, pointer)
    library.rows.restype = library.dots.restype = library.outers.restype = None
    return CProducts(library)
