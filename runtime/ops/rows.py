"""Small row helpers that several kernels share (not ops).

Legend: N rows, T tokens, K choices per token, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
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


def blocks(count: int, row_bytes: int) -> Iterator[slice]:
    """Runs of rows that a core keeps in its cache while it works on them."""
    step = max(16, (1 << 19) // max(row_bytes, 1))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def sum_of_rows(rows_NH: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None, wide: torch.dtype) -> Tensor:
    """``sum_k weights[t, k] * rows[row_of[t, k]]`` in order of k, formed in ``wide`` and rounded once to the dtype of
    ``rows``; a row of -1 adds nothing, whatever its weight.

    Where nothing has to be widened, an embedding bag is one read of the rows and one write of the sums.
    """
    T, (N, H) = row_of_TK.shape[0], rows_NH.shape
    if not (T and N and H and row_of_TK.shape[1]):
        return rows_NH.new_zeros((T, H))
    if rows_NH.dtype == wide and (weights_TK is None or weights_TK.dtype == wide):
        bags, starts = row_of_TK.contiguous(), None
        if int(row_of_TK.min()) < 0:  # bags of different sizes: of token 0 in order of k, then of token 1 …
            there_TK = row_of_TK >= 0
            counts_T = there_TK.sum(1)
            bags, starts = row_of_TK[there_TK], counts_T.cumsum(0) - counts_T
            weights_TK = None if weights_TK is None else weights_TK[there_TK]
        return F.embedding_bag(bags, rows_NH, starts, mode="sum", per_sample_weights=weights_TK)
    y_TH = rows_NH.new_empty((T, H))
    for at in blocks(T, H * wide.itemsize):
        sum_BH = rows_NH.new_zeros((at.stop - at.start, H), dtype=wide)
        for k, row_B in enumerate(row_of_TK[at].unbind(1)):
            taken_BH = take_rows(rows_NH, row_B)
            if weights_TK is None:
                sum_BH.add_(taken_BH)
            else:
                weight_B = weights_TK[at, k].to(wide).masked_fill(row_B < 0, 0)
                sum_BH.addcmul_(taken_BH.to(wide), weight_B[:, None])
        y_TH[at] = sum_BH
    return y_TH


def pair_of_row(row_of_TK: Tensor, num_rows: int) -> Tensor:
    """int64 [N]: the pair (t * K + k) whose row each is, -1 for rows of none."""
    of_P = row_of_TK.reshape(-1)
    pair_N = of_P.new_full((num_rows + 1,), -1)
    pair_N[of_P] = torch.arange(of_P.shape[0], device=of_P.device)  # pairs without a row: to the end, which is cut off
    return pair_N[:num_rows]


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
