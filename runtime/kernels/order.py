"""Rows in order of experts, found on the device: nothing here waits for the host.

Legend: T tokens, K choices per token, P = T · K pairs, N rows, E experts.

A pair's number is token · K + k.  Rows lie in stable order of (expert, pair); pairs whose id is −1 have no row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """``offset_E1`` (int32): where each expert's rows begin, and where the last ones end; ``pair_P`` (int64): the pair
    of each row, then the dropped pairs; ``row_of_TK`` (int64): the row of each pair, −1 without one; ``counts_E``
    (int64)."""

    offset_E1: Tensor
    pair_P: Tensor
    row_of_TK: Tensor
    counts_E: Tensor


def of_ids(ids_TK: Tensor, num_experts: int, op: str) -> Order:
    """A stable counting sort.  Ids outside of [−1, E) stop the device (an asynchronous assertion)."""
    known = ((ids_TK >= -1) & (ids_TK < num_experts)).all()
    torch.ops.aten._assert_async.msg(known, f"moec::{op}: ids must lie in [0, {num_experts}), or be -1")
    key_P = torch.where(ids_TK < 0, num_experts, ids_TK).reshape(-1)
    sorted_P, pair_P = key_P.sort(stable=True)
    bounds_E1 = torch.arange(num_experts + 1, device=ids_TK.device, dtype=key_P.dtype)
    offset_E1 = torch.searchsorted(sorted_P, bounds_E1, out_int32=True)
    row_P = torch.empty_like(pair_P).scatter_(0, pair_P, torch.arange(pair_P.numel(), device=ids_TK.device))
    row_of_TK = torch.where(ids_TK < 0, -1, row_P.view(ids_TK.shape))
    return Order(offset_E1, pair_P, row_of_TK, offset_E1.diff().long())


def checked_offsets(counts_E: Tensor, num_rows: int, op: str) -> Tensor:
    """``offsets``; counts that are negative or more than the rows stop the device (an asynchronous assertion)."""
    fit = ((counts_E >= 0).all()) & (counts_E.sum() <= num_rows)
    torch.ops.aten._assert_async.msg(fit, f"moec::{op}: counts do not fit {num_rows} rows")
    return offsets(counts_E)


def offsets(counts_E: Tensor) -> Tensor:
    """``offset_E1`` (int32) of counts."""
    offset_E1 = torch.zeros(counts_E.shape[0] + 1, dtype=torch.int32, device=counts_E.device)
    torch.cumsum(counts_E, 0, dtype=torch.int32, out=offset_E1[1:])
    return offset_E1


def pairs(row_of_TK: Tensor, num_rows: int) -> Tensor:
    """``pair_N``: the pair of each row, from the row of each pair; anything for rows without one."""
    place_P = torch.where(row_of_TK < 0, num_rows, row_of_TK).reshape(-1)
    number_P = torch.arange(place_P.numel(), device=row_of_TK.device)
    return number_P.new_zeros(num_rows + 1).scatter_(0, place_P, number_P)[:num_rows]


def experts(row_of_TK: Tensor, offset_E1: Tensor) -> Tensor:
    """The expert of each pair, −1 for a dropped one."""
    found_TK = torch.searchsorted(offset_E1[1:].long(), row_of_TK, right=True)
    return torch.where(row_of_TK < 0, -1, found_TK)
