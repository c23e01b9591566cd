"""allgather: every rank of ep gets all of its tokens, computes the pairs of its own experts, and the results are added.

Cheap where K is near the number of ranks, or where ranks of ep hold the same tokens already (they were tp ranks): then
nothing moves on the way in.

1. Tokens, ids and weights are R over ep (``gathers``): the typed conversions of the deal bring them there, and their
   duals add the gradients.
2. Ids of other ranks' experts become -1, so that only this rank's pairs are permuted.
3. The combine adds this rank's pairs of every token: a pending sum (P) over ep, which leaves by a reduce-scatter, or
   stays pending where tokens were invariant.

Tokens are gathered as equal parts: where dp ranks share ep, all pass inputs of the same shape.
"""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from moec.passes.shard.dispatch.base import Nodes, moec_ops
from moec.passes.shard.dispatch.local import Local
from moec.placement import P, V


class AllGather(Local):
    gathers: ClassVar[bool] = True

    def dispatch_preprocess(self, x: fx.Node, ids: fx.Node) -> Nodes:
        mine = self.numbers(self.ep, self.num_experts, ids)
        types = {a: V if a in self.ep else t for a, t in ids.meta["types"].items()}
        own = self.call(moec_ops.own_ids.default, (ids, mine), ids.meta["val"], types)
        local = self.num_experts // self.mesh.size(self.ep)
        rows, counts, self.row_of = self.permute(x, own, local, moec_ops.permute_kept.default)
        return rows, counts

    def unpermute(self, rows: fx.Node, weights: fx.Node, row_of: fx.Node) -> fx.Node:
        y = super().unpermute(rows, weights, row_of)
        y.meta["types"] = {a: P if a in self.ep else t for a, t in y.meta["types"].items()}
        return y
