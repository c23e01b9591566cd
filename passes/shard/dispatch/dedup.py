"""dedup: a token travels once to each rank that has some of its experts, and one sum comes back from there.

Legend: T tokens, K top-k, E experts, R ranks, D = min(K, R), M rows (token, rank), N rows (token, expert), H hidden.

One *level* (``Level``) sends tokens to the members of a group, each of which has an equal share of the experts:

1. ``destinations``: the distinct members of a token's experts.  Rows in order of (member, token); counts travel first.
2. Rows, ids (int32) and, when they come back, weights travel.  A receiver keeps of the ids those of its own share.
3. Back: a row for each row received, which home adds by token.

After the last level a rank permutes the received tokens by its own experts; before the way back it adds what they give
for each token, weighted.  With several members in a token's choice the sums are rounded to the model's dtype once on
the way: results differ from ``alltoall`` by the order of additions.

Weights travel with the combine: the graph may compute them after the permute.  Their gradient comes back by the duals.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.shard.dispatch.base import Dispatcher, Nodes, aten, expected_distinct, moec_ops
from moec.passes.shard.dispatch.local import Local
from moec.placement import Types, V
from moec.runtime.torch_compat import resized


class Dedup(Local):
    def levels(self) -> list[tuple[str, ...]]:
        """The groups that tokens pass, one after the other; together they are ep."""
        return [self.ep]

    def dispatch_preprocess(self, x: fx.Node, ids: fx.Node) -> Nodes:
        small = self.call(aten._to_copy.default, (ids,), ids.meta["val"].to(torch.int32), ids.meta["types"])
        small.kwargs = {"dtype": torch.int32}
        return x, small

    def token_dispatch(self, *payload: fx.Node) -> Nodes:
        x, ids = payload
        self.passed: list[Level] = []
        (tokens, top_k), experts, ranks = ids.meta["val"].shape, self.num_experts, 1
        for axes in self.levels():
            ranks *= self.mesh.size(axes)
            level = Level(self, axes, experts, (tokens, expected_distinct(self.num_experts, top_k, ranks)))
            self.passed.append(level)
            x, ids = level.send(x, ids)
            experts //= self.mesh.size(axes)
        return x, ids

    def dispatch_postprocess(self, *payload: fx.Node) -> Nodes:
        x, ids = payload
        experts = self.num_experts // self.mesh.size(self.ep)
        rows, counts, self.row_of = self.permute(x, ids, experts, moec_ops.permute_kept.default)
        return rows, counts, self.row_of

    def combine_preprocess(self, rows: fx.Node, weights: fx.Node) -> Nodes:
        for level in self.passed:
            weights = level.follow(weights)
        return (self.unpermute(rows, weights, self.row_of),)

    def token_combine(self, *payload: fx.Node) -> Nodes:
        (sums,) = payload
        for level in reversed(self.passed):
            sums = level.back(sums)
        return (sums,)

    def combine_postprocess(self, *payload: fx.Node) -> fx.Node:
        return payload[0]


class Level:
    """Tokens to the members of the group over ``axes``, who share ``num_experts`` experts, and sums back."""

    def __init__(self, of: Dispatcher, axes: tuple[str, ...], num_experts: int, moves: tuple) -> None:
        self.of, self.axes, self.num_experts, self.moves = of, axes, num_experts, moves
        self.size = of.mesh.size(axes)

    def send(self, x: fx.Node, ids: fx.Node) -> Nodes:
        of, tokens, ids_val = self.of, ids.meta["types"], ids.meta["val"]
        val = resized(ids_val.to(torch.int64), (ids_val.shape[0], min(ids_val.shape[1], self.size)))
        where = of.call(moec_ops.destinations.default, (ids, self.num_experts, self.size), val, tokens)  # 1
        rows, self.send_R, self.row_of = of.permute(x, where, self.size)
        rows_at, val_R = rows.meta["types"], self.send_R.meta["val"]
        args = (self.send_R, self.size, of.mesh.key(self.axes))
        came_R1 = of.wait(of.call(moec_ops.exchange_counts.default, args, val_R, rows_at))
        self.recv_R = of.call(aten.sum.dim_IntList, (came_R1, [1]), val_R, rows_at)
        self.num_rows = of.call(aten.sym_size.int, (rows, 0), None, None)
        self.tokens: Types = tokens
        x = of.exchange(rows, self.send_R, self.recv_R, self.axes, self.moves)  # 2
        ids = self.follow(ids)
        mine = of.numbers(self.axes, self.num_experts, ids)
        own = dict.fromkeys(self.axes, V)
        return x, of.call(moec_ops.own_ids.default, (ids, mine), ids.meta["val"], {**ids.meta["types"], **own})

    def follow(self, value: fx.Node) -> fx.Node:
        """Another payload of the same tokens."""
        of, source = self.of, value.meta["types"]
        types = {a: V if t.sharded else source[a] for a, t in self.tokens.items()}
        pairs = self.row_of.meta["val"].shape
        val = resized(value.meta["val"], (pairs[0] * pairs[1], *value.meta["val"].shape[1:]))
        args = (value, self.row_of, self.num_rows)
        placed = of.call(moec_ops.place_rows.default, args, val, types, value.meta["grad"])
        return of.exchange(placed, self.send_R, self.recv_R, self.axes, self.moves)

    def back(self, sums: fx.Node) -> fx.Node:  # 3
        of = self.of
        rows = of.exchange(sums, self.recv_R, self.send_R, self.axes, self.moves)
        types = {a: self.tokens[a] if t.kind == "V" else t for a, t in rows.meta["types"].items()}
        val = resized(rows.meta["val"], (self.row_of.meta["val"].shape[0], *rows.meta["val"].shape[1:]))
        return of.call(moec_ops.add_rows.default, (rows, self.row_of), val, types, rows.meta["grad"])
