"""Where the pairs of a token go: what a dispatcher asks of the ids before it moves anything.  No gradients.

Legend: T tokens, K choices a token, E experts, R ranks of a group, D = min(K, R), N experts of this rank.

Experts lie on the ranks of a group in equal consecutive shares.  An id of -1 is no pair.

* ``destinations(ids_TK, num_experts, ranks) -> rank_TD`` (int64): the distinct ranks that have an expert of the token,
  ascending, then -1.
* ``own_ids(ids_TK, numbers_N) -> ids_TK``: ids among the consecutive ``numbers_N`` (those of this rank's experts) as
  indices into them, others -1; in the dtype of the ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError


@torch.library.custom_op("moec::destinations", mutates_args=(), device_types=("cpu", "cuda"))
def destinations(ids_TK: Tensor, num_experts: int, ranks: int) -> Tensor:
    if num_experts % ranks:
        raise MoecError(f"{ranks} ranks do not divide {num_experts} experts", where="moec::destinations")
    rank_TK = torch.where(ids_TK < 0, ranks, ids_TK.long() // (num_experts // ranks))
    hit_TR = rank_TK.new_zeros((ids_TK.shape[0], ranks + 1))
    hit_TR = hit_TR.scatter_(1, rank_TK, 1)[:, :ranks]
    first_TD = hit_TR.argsort(stable=True, dim=1, descending=True)[:, : min(ids_TK.shape[1], ranks)]
    return torch.where(hit_TR.gather(1, first_TD) > 0, first_TD, -1)


@destinations.register_fake
def _(ids_TK, num_experts, ranks):
    return ids_TK.new_empty((ids_TK.shape[0], min(ids_TK.shape[1], ranks)), dtype=torch.int64)


@torch.library.custom_op("moec::own_ids", mutates_args=(), device_types=("cpu", "cuda"))
def own_ids(ids_TK: Tensor, numbers_N: Tensor) -> Tensor:
    local_TK = ids_TK - numbers_N[0].to(ids_TK.dtype)
    return torch.where((local_TK >= 0) & (local_TK < numbers_N.shape[0]), local_TK, -1)


@own_ids.register_fake
def _(ids_TK, numbers_N):
    return ids_TK.new_empty(ids_TK.shape)
