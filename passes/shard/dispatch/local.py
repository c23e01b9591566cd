"""No expert parallelism: every rank has all experts (or its part of each), and nothing travels."""

from __future__ import annotations

from torch import fx

from moec.passes.shard.dispatch.base import Dispatcher, Nodes, moec_ops
from moec.placement import Types
from moec.runtime.torch_compat import resized


class Local(Dispatcher):
    """permute … unpermute."""

    def dispatch_preprocess(self, x: fx.Node, ids: fx.Node) -> Nodes:
        rows, counts, self.row_of = self.permute(x, ids, self.num_experts)
        return rows, counts

    def token_dispatch(self, *payload: fx.Node) -> Nodes:
        return payload

    def dispatch_postprocess(self, *payload: fx.Node) -> Nodes:
        rows, counts = payload
        return rows, counts, self.row_of

    def combine_preprocess(self, rows: fx.Node, weights: fx.Node) -> Nodes:
        return rows, weights

    def token_combine(self, *payload: fx.Node) -> Nodes:
        return payload

    def combine_postprocess(self, *payload: fx.Node) -> fx.Node:
        rows, weights = payload
        return self.unpermute(rows, weights, self.row_of)

    def unpermute(self, rows: fx.Node, weights: fx.Node, row_of: fx.Node) -> fx.Node:
        tokens: Types = row_of.meta["types"]
        types = {a: tokens[a] if t.kind == "V" else t for a, t in rows.meta["types"].items()}
        val = resized(rows.meta["val"], (row_of.meta["val"].shape[0], *rows.meta["val"].shape[1:]))
        grad = rows.meta["grad"] or weights.meta["grad"]
        return self.call(moec_ops.unpermute.default, (rows, weights, row_of), val, types, grad)
