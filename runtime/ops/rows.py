"""Small row helpers that several kernels share (not ops).  Legend: N rows, T tokens, H hidden, E experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError


def accumulator(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: fp64 if any operand is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def take_rows(rows_NH: Tensor, row_T: Tensor) -> Tensor:
    """``rows_NH[row_T]``, zeros where the row is -1."""
    if not rows_NH.shape[0]:
        return rows_NH.new_zeros((row_T.shape[0], rows_NH.shape[1]))
    return rows_NH.index_select(0, row_T.clamp(min=0)).masked_fill_((row_T < 0)[:, None], 0)


def segments(counts_E: Tensor, num_rows: int, op: str) -> list[tuple[int, int, int]]:
    """``(expert, first row, end row)`` of every expert that has rows."""
    found, start = [], 0
    for e, count in enumerate(counts_E.tolist()):
        if count < 0 or start + count > num_rows:
            raise MoecError(f"counts {counts_E.tolist()} do not fit {num_rows} rows", where=f"moec::{op}")
        if count:
            found.append((e, start, start + count))
        start += count
    return found
