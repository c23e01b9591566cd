"""A body compiled for this machine's CPU (``c_library.py``).

Where there is no compiler, where it fails, or where a body has no C text, ``of`` is None and the body is computed step
by step by PyTorch: slower, and the same but for rounding.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..body import Body
from . import c_library
from .c_text import c_text
from .source import cache_directory


@dataclass(frozen=True)
class CBody:
    """See ``c_text``.  Tensors are of the dtype that it was compiled for, their columns neighbours in memory."""

    library: Any

    def forward(self, h_RA: Tensor, a_RI: Tensor) -> None:
        self.library.forward(*_matrix(h_RA), *_matrix(a_RI), *a_RI.shape)

    def backward(
        self, h_RA: Tensor, d_RI: Tensor, weight_R: Tensor | None, dweight_R: Tensor | None, a_RI: Tensor, dh_RA: Tensor
    ) -> None:
        weight = None if weight_R is None else weight_R.float().contiguous()
        dweight = dweight_R
        if dweight_R is not None and (dweight_R.dtype != torch.float32 or not dweight_R.is_contiguous()):
            dweight = d_RI.new_empty(d_RI.shape[0], dtype=torch.float32)
        vectors = (None if t is None else t.data_ptr() for t in (weight, dweight))
        self.library.backward(*_matrix(h_RA), *_matrix(d_RI), *vectors, *_matrix(a_RI), *_matrix(dh_RA), *d_RI.shape)
        if dweight_R is not None and dweight is not None and dweight is not dweight_R:
            dweight_R.copy_(dweight)


def _matrix(t: Tensor) -> tuple[int, int]:
    assert t.stride(1) == 1 or t.shape[1] <= 1, t.stride()
    return t.data_ptr(), t.stride(0)


def of(body: Body, dtype: torch.dtype) -> CBody | None:
    """``body`` compiled for tensors of ``dtype``, or None."""
    command = c_library.compiler()
    return _compiled(body, dtype, command, cache_directory()) if command else None


@cache
def _compiled(body: Body, dtype: torch.dtype, command: str, directory: Path) -> CBody | None:
    text = c_text(body, dtype)
    library = None if text is None else c_library.load(text, "body", command, directory)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    matrix = (pointer, number)
    library.forward.argtypes = (*matrix, *matrix, number, number)
    library.backward.argtypes = (*matrix, *matrix, pointer, pointer, *matrix, *matrix, number, number)
    library.forward.restype = library.backward.restype = None
    return CBody(library)
