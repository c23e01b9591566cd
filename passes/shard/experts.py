"""The expert region: which tokens a rank deals with, and what becomes of them afterwards.

Legend: T tokens, K top-k, E experts, N rows, H hidden.

A raised block is ``permute(x_TH, ids_TK) -> rows_NH … body … unpermute(rows_NH, weights_TK)``.  On the expert axes:

1. **Deal**: over ep and edp every rank needs distinct tokens, over etp all ranks need the same (over ep too, if the
   dispatcher gathers).  Tokens that are invariant over an axis that needs distinct ones (they were dense tp ranks) are
   split there, padded with id −1 to a multiple first; those of a sharded sequence are distinct as they are.  Tokens
   that are sharded over an axis that needs the same (they were dense dp ranks, or shared the sequence) are gathered
there. 2. **Dispatch**: a dispatcher (``dispatch/``, chosen by the plan) brings rows to the ranks of their experts.
   Rows are ragged (V) from here on.
3. The body runs on the local experts: ordinary nodes, typed by the ordinary rules.
4. **Combine**: the dispatcher brings the weighted sums back; they have the tokens' types of step 1, P over etp where
   the second GEMM contracted a sharded width, P over ep where tokens were gathered.
5. **Restore**: tokens that step 1 split are gathered and unpadded, those that it gathered are reduce-scattered.  A sum
   that is still pending over an invariant axis stays P, so that a shared expert can be added before the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from moec.passes.shard.dispatch import Dispatcher, chosen
from moec.placement import I, P, R, S, Type, Types
from moec.program import EQUAL_LENGTHS
from moec.runtime.errors import MoecError

moec_ops = torch.ops.moec


@dataclass
class Region:
    """What the permute leaves for the unpermute."""

    dealt: Types
    """Types of tokens after step 1."""
    original: Types
    dispatcher: Dispatcher
    tokens: fx.Node | None = None
    """Number of tokens before padding (a size node), None when nothing was padded."""
    split_axes: tuple[str, ...] = ()


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
        where = node.meta.get("where", "")
        dispatcher = chosen(ctx.plan)(ctx, num_experts, where)
        same = ("etp", "ep") if dispatcher.gathers else ("etp",)
        dealt: Types = {
            a.name: R if a.expert in same else original[a.name] if original[a.name].sharded else S(0)
            for a in self.mesh.axes
        }
        region = Region(dealt, original, dispatcher)
        region.split_axes = tuple(a for a in dealt if dealt[a].sharded and not original[a].sharded)
        if any(original[a].sharded and dealt[a] == R for a in ctx.dp):  # equal parts are gathered
            ctx.program.facts.add(EQUAL_LENGTHS)
        x, ids = self._deal(x, region, 0.0), self._deal(ids, region, -1)
        outs = dispatcher.dispatch(x, ids)
        self.regions[outs[2]] = region
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
        # Rows that were summed over etp within the body are invariant there; then so must be what they are weighted by.
        region.dealt = {a: I if rows.meta["types"][a] == I else t for a, t in region.dealt.items()}
        weights = self._deal(weights, region, 0)
        y = region.dispatcher.combine(rows, weights)
        types, grad = y.meta["types"], y.meta["grad"]
        if region.tokens is not None:
            y.meta["padded"] = True
        restored = {a: self._restored(t, region.original[a], node) for a, t in types.items()}
        y = ctx.convert(y, restored)
        if region.tokens is not None:
            y = ctx.call(moec_ops.take_rows.default, (y, region.tokens), node.meta["val"], restored, grad)
        return y

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
