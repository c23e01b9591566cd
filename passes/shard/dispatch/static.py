"""static: every rank sends every expert the same number of slots, used or not.

Sizes depend on the number of tokens alone: splits are equal, no counts travel, nothing waits for the host.  It takes a
router with a capacity (``moec::drop`` has removed the pairs beyond it), and is exact: an expert gets as many slots of a
rank as that rank's pairs can be, min(tokens of the rank, capacity).  With ``level="dp_shard"`` that is the capacity of
a dp rank's own tokens, about capacity_factor times the rows of ``alltoall``; with ``level="global"`` a rank may hold
all pairs of an expert, and slots are many times as much.  A pair too many would be an error of ``moec::slots``: pairs
are dropped by the router, which counts them.

1. Slots by (expert, token), equal all-to-all over ep, chunks from (rank, expert) to (expert, rank).
2. Experts see all slots; those that nobody uses are zeros, no pair reads what becomes of them, and so nothing but zero
   gradients comes from there: an expert's body must be finite, with its derivative, at a row of zeros.
3. Back the same way, weighted sum at home.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.shard.dispatch.base import Nodes, moec_ops, rows_types
from moec.passes.shard.dispatch.local import Local
from moec.program import EQUAL_LENGTHS, op_name
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec
from moec.runtime.torch_compat import resized


class Static(Local):
    def dispatch_preprocess(self, x: fx.Node, ids: fx.Node) -> Nodes:
        drop = self._drop(ids)
        spec = RouteSpec.parse(drop.args[2])
        self.ctx.program.facts.add(EQUAL_LENGTHS)  # equal splits are those of equal numbers of tokens
        tokens = self.ctx.local_dim(drop.args[0], 0)
        (T, K), H = ids.meta["val"].shape, x.meta["val"].shape[1:]
        vals = (resized(x.meta["val"], (T * K, *H)), ids.meta["val"])
        dealt, grad = rows_types(ids.meta["types"]), x.meta["grad"]
        node = self.call(moec_ops.slots.default, (x, ids, tokens, spec.text()), vals, None, grad)
        rows, self.row_of = self.outputs(node, [dealt, dict(ids.meta["types"])], [grad, False])
        return (rows,)

    def token_dispatch(self, *payload: fx.Node) -> Nodes:
        return (self._exchanged(payload[0]),)

    def dispatch_postprocess(self, *payload: fx.Node) -> Nodes:
        ranks = self.mesh.size(self.ep)
        local = self.num_experts // ranks
        rows = self._moved(moec_ops.swap_chunks.default, payload[0], ranks, local)
        val = resized(self.row_of.meta["val"], (local,))
        counts = self.call(moec_ops.equal_counts.default, (rows, local), val, rows.meta["types"])
        return rows, counts, self.row_of

    def combine_preprocess(self, rows: fx.Node, weights: fx.Node) -> Nodes:
        ranks = self.mesh.size(self.ep)
        return self._moved(moec_ops.swap_chunks.default, rows, self.num_experts // ranks, ranks), weights

    def token_combine(self, *payload: fx.Node) -> Nodes:
        return self._exchanged(payload[0]), payload[1]

    def _exchanged(self, rows: fx.Node) -> fx.Node:
        args = (self.mesh.size(self.ep), self.mesh.key(self.ep))
        return self.wait(self._moved(moec_ops.all_to_all_equal.default, rows, *args))

    def _moved(self, op, rows: fx.Node, *args) -> fx.Node:
        return self.call(op, (rows, *args), rows.meta["val"], rows.meta["types"], rows.meta["grad"])

    def _drop(self, ids: fx.Node) -> fx.Node:
        """The node that has dropped the pairs beyond the capacity: ids come straight from there."""
        node = ids
        while node.op == "call_function" and op_name(node) != "moec.drop":
            values = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (torch.Tensor, tuple))]
            if len(values) != 1:
                break
            node = values[0]
        else:
            if node.op == "call_function" and RouteSpec.parse(node.args[2]).capacity_factor is not None:
                return node
        raise MoecError(
            "dispatch='static' needs a capacity, and no router of this block has one that moec knows of",
            where=self.where,
            way_out="Plan.router with a capacity_factor, or another dispatch",
        )
