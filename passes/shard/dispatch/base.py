"""What a dispatcher is: six stages, each of which emits nodes into the graph and hands nodes to the next.

Legend: T tokens of this rank, K top-k, E experts, N rows for this rank's experts, H hidden.

    x_TH, ids_TK → dispatch_preprocess → token_dispatch → dispatch_postprocess → rows_NH, counts, row_of
    rows_NH, weights_TK → combine_preprocess → token_combine → combine_postprocess → y_TH

Before the first stage tokens have been dealt (``experts.py``): over ep and edp ranks have distinct tokens (with
``gathers``, over ep the same ones), over etp the same.  An id of -1 is no pair.  What a dispatcher owes:

* ``rows`` in order of this rank's experts, ``counts`` of them, types V on ep and edp;
* ``y[t] = sum_k weights[t, k] · body(x[t])`` over the pairs, with its types; gradients follow from those of the ops;
* every rank takes part in every collective, whatever its number of tokens; sums are in a fixed order;
* on an exchange that does not move a row for each pair, ``meta["moves"]``: the recorded number of tokens, and how many
  rows each is expected to move under uniform routing, for ``explain``.

Only ``token_dispatch`` and ``token_combine`` communicate activations, so that passes can schedule the others around
them.  (Weights may follow their tokens in ``combine_preprocess``: the graph may compute them after the permute.)
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from math import comb
from typing import ClassVar

import torch
from torch import fx

from moec.placement import R, S, Types, V
from moec.runtime.torch_compat import WAIT, resized

aten, moec_ops = torch.ops.aten, torch.ops.moec
Nodes = tuple[fx.Node, ...]


class Dispatcher(ABC):
    """One for each expert region.  ``ctx`` is the pass (``Sharder``)."""

    gathers: ClassVar[bool] = False
    """All ranks of ep get all of its tokens before the first stage, and y may be a pending sum over them."""

    def __init__(self, ctx, num_experts: int, where: str) -> None:
        self.ctx, self.mesh = ctx, ctx.mesh
        self.num_experts, self.where = num_experts, where
        self.ep: tuple[str, ...] = self.mesh.role("ep")

    @abstractmethod
    def dispatch_preprocess(self, x: fx.Node, ids: fx.Node) -> Nodes: ...

    @abstractmethod
    def token_dispatch(self, *payload: fx.Node) -> Nodes: ...

    @abstractmethod
    def dispatch_postprocess(self, *payload: fx.Node) -> Nodes:
        """Returns ``(rows, counts, row_of)``; ``row_of`` stands for the region until the combine."""

    @abstractmethod
    def combine_preprocess(self, rows: fx.Node, weights: fx.Node) -> Nodes: ...

    @abstractmethod
    def token_combine(self, *payload: fx.Node) -> Nodes: ...

    @abstractmethod
    def combine_postprocess(self, *payload: fx.Node) -> fx.Node: ...

    def dispatch(self, x: fx.Node, ids: fx.Node) -> Nodes:
        return self.dispatch_postprocess(*self.token_dispatch(*self.dispatch_preprocess(x, ids)))

    def combine(self, rows: fx.Node, weights: fx.Node) -> fx.Node:
        return self.combine_postprocess(*self.token_combine(*self.combine_preprocess(rows, weights)))

    # -- what they share

    def call(self, target, args: tuple, val, types, grad: bool = False) -> fx.Node:
        node = self.ctx.call(target, args, val, types, grad)
        node.meta["where"] = self.where
        if any("padded" in a.meta for a in args if isinstance(a, fx.Node)):
            node.meta["padded"] = True
        return node

    def outputs(self, node: fx.Node, types: list[Types], grads: list[bool]) -> Nodes:
        """The results of a node that has several."""
        node.meta["types"] = types
        outs = enumerate(zip(node.meta["val"], types, grads, strict=True))
        return tuple(self.call(operator.getitem, (node, i), v, t, g) for i, (v, t, g) in outs)

    def wait(self, started: fx.Node) -> fx.Node:
        return self.call(WAIT, (started,), started.meta["val"], started.meta["types"], started.meta["grad"])

    def exchange(self, rows: fx.Node, send_R: fx.Node, recv_R: fx.Node, axes: tuple[str, ...], moves=None) -> fx.Node:
        """Rows to the ranks of a group, waited for."""
        args = (rows, send_R, recv_R, self.mesh.size(axes), self.mesh.key(axes))
        started = self.call(moec_ops.all_to_all.default, args, rows.meta["val"], rows.meta["types"], rows.meta["grad"])
        if moves is not None:
            started.meta["moves"] = moves
        return self.wait(started)

    def permute(self, x: fx.Node, ids: fx.Node, num_experts: int, op=moec_ops.permute.default) -> Nodes:
        """``(rows, counts, row_of)`` of ``permute`` or ``permute_kept``."""
        ids_val = ids.meta["val"]
        pairs = resized(x.meta["val"], (ids_val.shape[0] * ids_val.shape[1], *x.meta["val"].shape[1:]))
        vals = (pairs, resized(ids_val.to(torch.int64), (num_experts,)), ids_val.to(torch.int64))
        dealt, grad = rows_types(ids.meta["types"]), x.meta["grad"]
        node = self.call(op, (x, ids, num_experts), vals, None, grad)
        return self.outputs(node, [dealt, dealt, dict(ids.meta["types"])], [grad, False, False])

    def numbers(self, axes: tuple[str, ...], num_experts: int, like: fx.Node) -> fx.Node:
        """The numbers of the experts that ``axes`` leave this rank."""
        val = resized(like.meta["val"].to(torch.int64), (num_experts,))
        every = self.call(aten.arange.default, (num_experts,), val, dict.fromkeys(self.mesh.names, R))
        every.kwargs = {"dtype": torch.int64, "device": val.device}
        return self.ctx.convert(every, {a: S(0) if a in axes else R for a in self.mesh.names})


def rows_types(tokens: Types) -> Types:
    """Types of the rows that tokens of these types become."""
    return {a: V if t.sharded else R for a, t in tokens.items()}


def expected_distinct(num_experts: int, top_k: int, ranks: int) -> float:
    """How many of ``ranks`` equal shares of the experts ``top_k`` different experts, drawn uniformly, lie in."""
    return ranks * (1 - comb(num_experts - num_experts // ranks, top_k) / comb(num_experts, top_k))
