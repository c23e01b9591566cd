"""alltoall: a row for every pair, to the rank of its expert and back.  Dropless; splits are uneven.

1. Rows in order of (expert, token) are in order of ranks; their counts travel first.
2. Uneven all-to-all over ep.
3. What arrives lies by (rank, expert), and is sorted by (expert, rank).
4. Back: sorted by (rank, expert), the same exchange the other way, weighted sum at home.
"""

from __future__ import annotations

from torch import fx

from moec.passes.shard.dispatch.base import Nodes, aten, moec_ops
from moec.passes.shard.dispatch.local import Local


class AllToAll(Local):
    def token_dispatch(self, *payload: fx.Node) -> Nodes:
        rows, counts_E = payload
        ranks, group = self.mesh.size(self.ep), self.mesh.key(self.ep)
        types, val = rows.meta["types"], counts_E.meta["val"]

        def count(op, *args) -> fx.Node:
            return self.call(op, args, val, types)

        recv_RE = self.wait(count(moec_ops.exchange_counts.default, counts_E, ranks, group))
        send_RE = count(aten.reshape.default, counts_E, [ranks, self.num_experts // ranks])
        self.send_R = count(aten.sum.dim_IntList, send_RE, [1])
        self.recv_R = count(aten.sum.dim_IntList, recv_RE, [1])
        self.recv_RE = recv_RE
        return self.exchange(rows, self.send_R, self.recv_R, self.ep), count(aten.sum.dim_IntList, recv_RE, [0])

    def dispatch_postprocess(self, *payload: fx.Node) -> Nodes:
        rows, counts = payload
        return self._sorted(rows, False), counts, self.row_of

    def combine_preprocess(self, rows: fx.Node, weights: fx.Node) -> Nodes:
        return self._sorted(rows, True), weights

    def token_combine(self, *payload: fx.Node) -> Nodes:
        rows, weights = payload
        return self.exchange(rows, self.recv_R, self.send_R, self.ep), weights

    def _sorted(self, rows: fx.Node, inverse: bool) -> fx.Node:
        args = (rows, self.recv_RE, inverse)
        return self.call(
            moec_ops.sort_chunks.default, args, rows.meta["val"], rows.meta["types"], rows.meta["grad"]
        )
