"""The expert region: how tokens reach the ranks that own their experts, and come back.

Legend: T tokens, K top-k, E experts, R ranks of ep, N rows, H hidden.

A raised block is ``permute(x_TH, ids_TK) -> rows_NH … body … unpermute(rows_NH, weights_TK)``.  On the expert axes:

1. **Deal**: over ep and edp every rank needs distinct tokens, over etp all ranks need the same.  Tokens that are
   invariant over an ep or edp axis (they were dense tp ranks) are split there, padded with id −1 to a multiple first;
   those of a sharded sequence are distinct as they are.  Tokens that are sharded over an etp axis (they were dense dp
   ranks, or shared the sequence) are gathered there.
2. **Dispatch** (ep > 1): counts are exchanged, rows travel to the rank of their expert (uneven all-to-all), and the
   received chunks are re-sorted from (rank, expert) to (expert, rank).  Rows are ragged (V) from here on.
3. The body runs on the local experts: ordinary nodes, typed by the ordinary rules.
4. **Combine**: re-sort, all-to-all back, unpermute; the result has the tokens' types of step 1, P over etp where the
   second GEMM contracted a sharded width.
5. **Restore**: tokens that step 1 split are gathered and unpadded, those that it gathered are reduce-scattered.  A sum
   that is still pending over an invariant axis stays P, so that a shared expert can be added before the reduction.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from moec.placement import I, P, R, S, Type, Types, V
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import WAIT

aten, moec_ops = torch.ops.aten, torch.ops.moec


@dataclass
class Region:
    """What dispatch leaves for combine."""

    dealt: Types
    """Types of tokens after step 1."""
    original: Types
    tokens: fx.Node | None = None
    """Number of tokens before padding (a size node), None when nothing was padded."""
    split_axes: tuple[str, ...] = ()
    send_R: fx.Node | None = None
    recv_R: fx.Node | None = None
    recv_RE: fx.Node | None = None


class Experts:
    """Shards expert regions.  ``ctx`` is the pass (``Sharder``): graph, mesh, convert, call."""

    def __init__(self, ctx) -> None:
        self.ctx = ctx
        self.mesh = ctx.mesh
        self.regions: dict[fx.Node, Region] = {}  # row_of -> region

    # -- steps 1 and 2

    def permute(self, node: fx.Node) -> None:
        """Rewrite ``rows, counts, row_of = permute(x, ids, E)`` in place."""
        ctx = self.ctx
        x, ids, num_experts = node.args
        # Tokens are whole rows: anything but a split of the token dim is undone first.
        original = {
            a: t if (t.kind == "S" and t.dim == 0) or t.kind in "IR" else ctx.default_type(x)
            for a, t in x.meta["types"].items()
        }
        x = ctx.convert(x, original)
        dealt: Types = {
            a.name: R if a.expert == "etp" else original[a.name] if original[a.name].sharded else S(0)
            for a in self.mesh.axes
        }
        region = Region(dealt=dealt, original=original)
        region.split_axes = tuple(a for a in dealt if dealt[a].sharded and not original[a].sharded)
        x, ids = self._deal(x, region, 0.0), self._deal(ids, region, -1)

        num_ranks = self.mesh.size(self.mesh.role("ep"))
        rows_types: Types = {a: V if t.sharded else R for a, t in dealt.items()}
        permuted = ctx.call(moec_ops.permute.default, (x, ids, num_experts), node.meta["val"], None, x.meta["grad"])
        rows, counts, row_of = (
            ctx.call(operator.getitem, (permuted, i), v, t, g)
            for i, (v, t, g) in enumerate(
                zip(
                    node.meta["val"], (rows_types, rows_types, dict(dealt)), (x.meta["grad"], False, False), strict=True
                )
            )
        )
        for n in (permuted, rows, counts, row_of):
            if region.tokens is not None:
                n.meta["padded"] = True
        permuted.meta["types"] = [n.meta["types"] for n in (rows, counts, row_of)]
        ctx.counts[node.meta.get("where", "")] = counts
        if num_ranks > 1:
            rows, counts = self._dispatch(rows, counts, region, num_experts, num_ranks)
        self.regions[row_of] = region
        outs = (rows, counts, row_of)
        for user in list(node.users):
            user.replace_all_uses_with(outs[user.args[1]])
            ctx.graph.erase_node(user)
        ctx.graph.erase_node(node)

    def _deal(self, value: fx.Node, region: Region, fill) -> fx.Node:
        """Give a token-major value the types that the experts need, padding where tokens are newly split."""
        ctx = self.ctx
        whole = ctx.default_type(value)
        split = region.split_axes
        value = ctx.convert(value, {a: whole if a in split else t for a, t in region.dealt.items()})
        if not split:
            return value
        n = self.mesh.size(split)
        tokens = ctx.local_dim(value, 0)
        if isinstance(tokens, int) and tokens % n == 0:
            return ctx.convert(value, {**value.meta["types"], **{a: S(0) for a in split}})
        region.tokens = tokens
        padded = ctx.call(
            moec_ops.pad_rows.default,
            (value, n, float(fill)),
            value.meta["val"],
            value.meta["types"],
            value.meta["grad"],
        )
        padded.meta["padded"] = True  # its rows are no longer the recorded ones over the shards
        return ctx.convert(padded, {**value.meta["types"], **{a: S(0) for a in split}})

    def _dispatch(self, rows: fx.Node, counts_E: fx.Node, region: Region, num_experts: int, num_ranks: int):
        ctx, group = self.ctx, self.mesh.key(self.mesh.role("ep"))
        types, val, grad = rows.meta["types"], rows.meta["val"], rows.meta["grad"]
        int_val = counts_E.meta["val"]
        recv_RE = self._wait(ctx.call(moec_ops.exchange_counts.default, (counts_E, num_ranks, group), int_val, types))
        send_RE = ctx.call(aten.reshape.default, (counts_E, [num_ranks, num_experts // num_ranks]), int_val, types)
        region.send_R = ctx.call(aten.sum.dim_IntList, (send_RE, [1]), int_val, types)
        region.recv_R = ctx.call(aten.sum.dim_IntList, (recv_RE, [1]), int_val, types)
        region.recv_RE = recv_RE
        counts_local = ctx.call(aten.sum.dim_IntList, (recv_RE, [0]), int_val, types)
        sent = ctx.call(
            moec_ops.all_to_all.default, (rows, region.send_R, region.recv_R, num_ranks, group), val, types, grad
        )
        rows = ctx.call(moec_ops.sort_chunks.default, (self._wait(sent), recv_RE, False), val, types, grad)
        return rows, counts_local

    def _wait(self, started: fx.Node) -> fx.Node:
        return self.ctx.call(WAIT, (started,), started.meta["val"], started.meta["types"], started.meta["grad"])

    # -- steps 4 and 5

    def unpermute(self, node: fx.Node) -> fx.Node:
        """Rewrite ``y = unpermute(rows, weights, row_of)``; returns the node that stands for y."""
        ctx = self.ctx
        rows, weights, row_of = node.args
        region = self.regions[row_of]
        etp = self.mesh.role("etp")
        for a, t in rows.meta["types"].items():
            if t.kind == "V" or (a in etp and t.kind in "RPI"):
                continue
            raise MoecError(
                f"expert rows arrive at the combine with type {t} on {a}",
                where=node.meta.get("where", ""),
                way_out="a plan with etp=1 keeps each expert whole",
            )
        if region.recv_RE is not None:
            rows = self._return(rows, region)
        types: Types = {a: region.dealt[a] if t.kind == "V" else t for a, t in rows.meta["types"].items()}
        # Rows that were summed over etp within the body are invariant there; then so must be what they are weighted by.
        region.dealt = {a: t if t == I else region.dealt[a] for a, t in types.items()}
        weights = self._deal(weights, region, 0)
        grad = rows.meta["grad"] or weights.meta["grad"]
        y = ctx.call(moec_ops.unpermute.default, (rows, weights, row_of), node.meta["val"], types, grad)
        if region.tokens is not None:
            y.meta["padded"] = True
        restored = {a: self._restored(t, region.original[a], node) for a, t in types.items()}
        y = ctx.convert(y, restored)
        if region.tokens is not None:
            y = ctx.call(moec_ops.take_rows.default, (y, region.tokens), node.meta["val"], restored, grad)
        return y

    def _return(self, rows: fx.Node, region: Region) -> fx.Node:
        ctx, ep = self.ctx, self.mesh.role("ep")
        types, val, grad = rows.meta["types"], rows.meta["val"], rows.meta["grad"]
        rows = ctx.call(moec_ops.sort_chunks.default, (rows, region.recv_RE, True), val, types, grad)
        args = (rows, region.recv_R, region.send_R, self.mesh.size(ep), self.mesh.key(ep))
        return self._wait(ctx.call(moec_ops.all_to_all.default, args, val, types, grad))

    def _restored(self, now: Type, original: Type, node: fx.Node) -> Type:
        if now == original or (now == P and original.kind in "IR"):
            return now
        if now == R and original.kind != "R":
            raise MoecError(
                "etp ranks computed whole experts, whose gradient would be counted more than once",
                where=node.meta.get("where", ""),
                way_out="a plan with etp=1, or a layout that splits the experts",
            )
        return original
