"""``moec::align_rows`` and ``moec::unalign_rows``: gaps between the rows of experts, and away again.

Legend: N rows, H width, E experts, a alignment, A aligned rows.

``align_rows(x_NH, counts_E, alignment) -> x_AH``: expert e's ``counts_E[e]`` rows, which lie one after the other, begin
at multiples of a, as in ``moec::permute_aligned``: A = floor((N + E·(a − 1)) / a) · a.  What is no expert's is zeros.

``unalign_rows(x_AH, counts_E, alignment, rows) -> x_NH``: the other way round; past ``sum(counts_E)`` zeros.

Each is the other's backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .permute_aligned import aligned_size, padded, starts

__all__ = ["align_rows", "padded", "real_rows", "unalign_rows"]

DEVICES = ("cpu", "cuda")


def _expert_of(start_E: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """``(row, expert)``: the last expert that begins at or before each row."""
    row_N = torch.arange(num_rows, device=start_E.device)
    return row_N, torch.searchsorted(start_E, row_N, right=True) - 1


def real_rows(counts_E: Tensor, num_rows: int, alignment: int, op: str) -> Tensor:
    """bool [A]: whether each aligned row is some expert's.  Raises MoecError where they cannot be (on a CPU)."""
    start_E = starts(counts_E, alignment)
    if counts_E.device.type == "cpu":
        end = int(start_E[-1] + counts_E[-1]) if counts_E.numel() else 0
        if num_rows % alignment or end > num_rows:
            raise MoecError(
                f"{num_rows} rows are not those of experts with {counts_E.tolist()} rows that begin at multiples of "
                f"{alignment}",
                where=f"moec::{op}",
                way_out="moec::align_rows or moec::permute_aligned with the recipe's alignment",
            )
    row_N, expert_N = _expert_of(start_E, num_rows)
    return row_N - start_E[expert_N] < counts_E[expert_N]


@torch.library.custom_op("moec::align_rows", mutates_args=(), device_types=DEVICES)
def align_rows(x_NH: Tensor, counts_E: Tensor, alignment: int) -> Tensor:
    A = aligned_size(x_NH.shape[0], counts_E.shape[0], alignment)
    if not x_NH.shape[0]:
        return x_NH.new_zeros((A, *x_NH.shape[1:]))
    start_E = starts(counts_E, alignment)
    row_A, expert_A = _expert_of(start_E, A)
    at_A = row_A - start_E[expert_A]
    source_A = (counts_E.cumsum(0) - counts_E)[expert_A] + at_A
    real_A = at_A < counts_E[expert_A]
    taken = x_NH.index_select(0, torch.where(real_A, source_A, 0))
    return taken.masked_fill_(_column(~real_A, taken), 0)


@torch.library.custom_op("moec::unalign_rows", mutates_args=(), device_types=DEVICES)
def unalign_rows(x_AH: Tensor, counts_E: Tensor, alignment: int, rows: int) -> Tensor:
    if x_AH.shape[0] != aligned_size(rows, counts_E.shape[0], alignment):
        raise MoecError(
            f"{x_AH.shape[0]} rows are not what {rows} become, aligned to {alignment}", where="moec::unalign_rows"
        )
    if not x_AH.shape[0]:
        return x_AH.new_zeros((rows, *x_AH.shape[1:]))
    end_E = counts_E.cumsum(0)
    row_N, expert_N = _expert_of(end_E - counts_E, rows)
    place_N = starts(counts_E, alignment)[expert_N] + row_N - (end_E - counts_E)[expert_N]
    real_N = row_N < end_E[-1]
    taken = x_AH.index_select(0, torch.where(real_N, place_N, 0))
    return taken.masked_fill_(_column(~real_N, taken), 0)


def _column(mask_N: Tensor, like: Tensor) -> Tensor:
    return mask_N.view(-1, *[1] * (like.ndim - 1))


@align_rows.register_fake
def _(x_NH, counts_E, alignment):
    return x_NH.new_empty((aligned_size(x_NH.shape[0], counts_E.shape[0], alignment), *x_NH.shape[1:]))


@unalign_rows.register_fake
def _(x_AH, counts_E, alignment, rows):
    return x_AH.new_empty((rows, *x_AH.shape[1:]))


def _setup_align(ctx, inputs, output) -> None:
    x_NH, counts_E, ctx.alignment = inputs
    ctx.rows = x_NH.shape[0]
    ctx.save_for_backward(counts_E)


def _setup_unalign(ctx, inputs, output) -> None:
    _, counts_E, ctx.alignment, _ = inputs
    ctx.aligned = inputs[0].shape[0]
    ctx.save_for_backward(counts_E)


def _align_backward(ctx, grad):
    return unalign_rows(grad, ctx.saved_tensors[0], ctx.alignment, ctx.rows), None, None


def _unalign_backward(ctx, grad):
    back = align_rows(grad, ctx.saved_tensors[0], ctx.alignment)
    return back, None, None, None


align_rows.register_autograd(_align_backward, setup_context=_setup_align)
unalign_rows.register_autograd(_unalign_backward, setup_context=_setup_unalign)
