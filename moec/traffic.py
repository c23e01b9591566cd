"""traffic: what a dispatcher moves for a given routing, rank by rank, without running anything.

Legend: T tokens of a rank, K choices a token, E experts, R ranks of one ep group, L ranks inside a node, H hidden.

From the ids alone follows who sends how many rows to whom:

* ``alltoall``: a row for each pair whose expert lies there;
* ``dedup``: a row for each token with at least one expert there;
* ``hierarchical``: a row for each token with an expert in the other node, to the rank with the same place in it; from
  there a row for each token with an expert on the other rank;
* ``allgather``: a row for each token, to every rank;
* ``static``: C slots for each expert that lies there, used or not.

A step moves activations one way with what goes along (ids, weights), sums the other way, and in the backward the same
with gradients the other way round.  ``moec.runtime.world.Event.sent`` counts the same where a program runs; tests
compare the two.  Tokens are taken to be dealt over ep already (``ids[r]``: those of rank r, -1 is no pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moec.runtime.errors import MoecError


@dataclass(frozen=True)
class Payload:
    """Bytes of what travels: a row of activations, its K ids, its K weights."""

    row: int
    ids: int
    weights: int


@dataclass(frozen=True)
class Traffic:
    """``[R, R]`` int64: bytes that a rank sends another, and rows of activations on their way to the experts."""

    forward: Tensor
    backward: Tensor
    rows: Tensor

    @property
    def bytes(self) -> int:
        return int((self.forward + self.backward).sum())

    def crossing(self, ranks_per_node: int) -> int:
        """Bytes that go from one node to another."""
        node_R = torch.arange(len(self.forward)) // ranks_per_node
        return int((self.forward + self.backward)[node_R[:, None] != node_R].sum())


def predict(
    dispatch: str,
    ids: Sequence[Tensor],
    num_experts: int,
    payload: Payload,
    *,
    ranks_per_node: int | None = None,
    capacity: int | None = None,
) -> Traffic:
    """Traffic of one MoE block and one ep group.

    Raises MoecError for an unknown dispatcher, for ``hierarchical`` without ``ranks_per_node``, and for ``static``
    without ``capacity`` (slots of an expert on each rank).
    """
    R = len(ids)
    share = num_experts // R
    on_rank = torch.stack([_tokens_with(i, share, R) for i in ids])  # [R, R] tokens of a rank with an expert on another
    tokens = torch.tensor([len(i) for i in ids])[:, None].expand(R, R)
    along = payload.ids + payload.weights
    match dispatch:
        case "alltoall":
            pairs = torch.stack([torch.bincount(i[i >= 0] // share, minlength=R) for i in ids])
            steps = [_Step(pairs, payload.row, 0, 0, 8 * share)]
        case "dedup":
            steps = [_Step(on_rank, payload.row, along, payload.weights, 8)]
        case "hierarchical":
            if ranks_per_node is None:
                raise MoecError("hierarchical needs ranks_per_node", where="traffic")
            L = ranks_per_node
            place, node = torch.arange(R) % L, torch.arange(R) // L
            in_node = torch.stack([_tokens_with(i, share * L, R // L) for i in ids])
            first = in_node[:, node] * (place[:, None] == place)
            # From the rank with its place in the node, whoever had the token: sums over sources with that place.
            second = torch.zeros(R, R, dtype=torch.int64)
            for source in range(R):
                second += torch.where((place == place[source])[:, None] & (node[:, None] == node), on_rank[source], 0)
            inside, across = (node[:, None] == node), (place[:, None] == place)
            steps = [
                _Step(first, payload.row, along, payload.weights, 8 * across),
                _Step(second, payload.row, along, payload.weights, 8 * inside),
            ]
        case "allgather":
            steps = [_Step(tokens, payload.row, 2 * payload.ids + payload.weights, payload.weights, 0)]
        case "static":
            if capacity is None:
                raise MoecError("static needs the slots of an expert", where="traffic")
            steps = [_Step(torch.full((R, R), share * capacity), payload.row, 0, 0, 0)]
        case _:
            raise MoecError(f"unknown dispatcher {dispatch!r}", where="traffic")
    away = 1 - torch.eye(R, dtype=torch.int64)
    forward, backward, rows = torch.zeros(3, R, R, dtype=torch.int64)
    for s in steps:
        forward += s.rows * (s.row + s.along) + s.rows.T * s.row + s.counts
        backward += s.rows.T * (s.row + s.back) + s.rows * s.row
        rows += s.rows
    return Traffic(forward * away, backward * away, rows * away)


@dataclass(frozen=True)
class _Step:
    rows: Tensor
    row: int
    along: int
    """Bytes that go along with a row of activations, and those of them whose gradients come back."""
    back: int
    counts: int | Tensor
    """Bytes of counts that precede it."""


def _tokens_with(ids_TK: Tensor, share: int, ranks: int) -> Tensor:
    """[ranks]: tokens that have an expert in each equal share."""
    owner_TK = torch.where(ids_TK < 0, -1, ids_TK // share)
    return (owner_TK[:, :, None] == torch.arange(ranks)).any(1).sum(0)
