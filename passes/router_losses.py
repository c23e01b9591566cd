"""The losses of a router, as nodes of the graph: see ``moec.router`` for what each computes.

Legend: B batch, S sequence, T tokens, E experts, K choices per token.

Ordinary nodes around ``moec::balance``, typed like any other.  Sums over tokens are pending sums where ranks share the
tokens; a loss is linear in Σp, so that p's sums stay pending until the loss is a scalar.  Counts are needed whole, and
are reduced at once (E numbers a block).  The number of tokens is Σc / K: no size of the graph is computed with, so that
ranks may hold sequences of different lengths.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moec.passes.rewrite import apply, fake, new
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec

aten, moec_ops = torch.ops.aten, torch.ops.moec


@dataclass
class Inputs:
    logits_TE: fx.Node
    valid_T: fx.Node | None
    spec: RouteSpec
    shape_BS: fx.Node | None
    """An input whose first two dims are the tokens', if there is one."""
    counts: fx.Node | None
    """The buffer ``aux_counts``."""


@dataclass
class Losses:
    total: fx.Node
    """Scalar: the sum of all, each times its coefficient."""
    statistics: dict[str, fx.Node]
    """float64, without a gradient: each loss times its coefficient, and what ``aux_counts`` grows by."""


def losses(seen: Inputs, wanted: Mapping[str, float]) -> Losses:
    """Emit the losses (name -> coefficient) at the graph's insertion point."""
    E, K = seen.spec.num_experts, seen.spec.top_k
    probs_E, whole_E, counts_E = _balance(seen, seen.logits_TE, seen.valid_T)
    tokens = _tokens(counts_E, K)
    found: dict[str, fx.Node] = {}
    statistics: dict[str, fx.Node] = {}
    if "micro_batch" in wanted:
        loss = _sum(_mul(counts_E, probs_E))
        found["micro_batch"] = _div(_mul(loss, E / K), _mul(tokens, tokens))
    if "sequence" in wanted:
        found["sequence"] = _sequence(seen)
    if "global" in wanted:
        assert seen.counts is not None
        one = apply(whole_E, aten.ones.default, [1], dtype=torch.int64, device=whole_E.meta["val"].device)
        more_E1 = apply(whole_E, aten.cat.default, [whole_E, one])
        statistics["aux_counts"] = apply(whole_E, aten._to_copy.default, more_E1, dtype=torch.float64)
        since_E1 = apply(whole_E, aten.add.Tensor, seen.counts, more_E1)
        mean_E = _float(apply(since_E1, aten.slice.Tensor, since_E1, 0, 0, E), probs_E)
        mean_E = _div(mean_E, _float(apply(since_E1, aten.select.int, since_E1, 0, E), probs_E))
        loss = _sum(_mul(mean_E, probs_E))
        found["global"] = _div(_mul(loss, E / K), _mul(tokens, _tokens(mean_E, K)))
    if "z" in wanted:
        found["z"] = _div(_squared_lse(seen, probs_E), tokens)
    scaled = {name: _mul(found[name], coefficient) for name, coefficient in wanted.items()}
    for name, loss in scaled.items():
        fixed = apply(loss, aten.detach.default, loss)
        statistics[name] = apply(loss, aten._to_copy.default, fixed, dtype=torch.float64)
    total, *rest = scaled.values()
    for loss in rest:
        total = apply(total, aten.add.Tensor, total, loss)
    return Losses(total, statistics)


def _sequence(seen: Inputs) -> fx.Node:
    """Σ over sequences of E / (K·T²) · Σ c·p, T its tokens, over how many have any."""
    logits, like, (E, K) = seen.logits_TE, seen.shape_BS, (seen.spec.num_experts, seen.spec.top_k)
    if like is None:
        raise MoecError(
            "aux_loss sequence: no input [B, S] or [B, S, …] has the router's tokens: what a sequence is, is not known"
        )
    shape = [
        size if isinstance(size := like.meta["val"].shape[d], int) else new(like, aten.sym_size.int, (like, d), size)
        for d in range(2)
    ]
    logits_BSE = apply(logits, aten.reshape.default, logits, [*shape, E])
    valid_BS = None if seen.valid_T is None else apply(logits, aten.reshape.default, seen.valid_T, shape)
    probs_BE, _, counts_BE = _balance(seen, logits_BSE, valid_BS)
    tokens_B = _tokens(counts_BE, K)
    loss_B = apply(probs_BE, aten.sum.dim_IntList, _mul(counts_BE, probs_BE), [-1])
    loss_B = _div(_mul(loss_B, E / K), _mul(tokens_B, tokens_B))
    some_B = apply(counts_BE, aten.sum.dim_IntList, counts_BE, [-1])
    some_B = _float(apply(some_B, aten.gt.Scalar, some_B, 0), loss_B)
    return _div(_sum(loss_B), apply(some_B, aten.clamp_min.default, _sum(some_B), 1))


def _balance(seen: Inputs, logits: fx.Node, valid: fx.Node | None) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Σp, the counts, and the counts as floats."""
    args = (logits, valid, seen.spec.top_k, seen.spec.score)
    both = new(logits, moec_ops.balance.default, args, fake(moec_ops.balance.default, *args))
    probs, counts = (new(logits, operator.getitem, (both, i), both.meta["val"][i]) for i in range(2))
    # No count is negative.  But to ask needs whole counts: they are reduced here, and p's sums need not be.
    whole = apply(counts, aten.clamp_min.default, counts, 0)
    return probs, whole, _float(whole, probs)


def _squared_lse(seen: Inputs, like: fx.Node) -> fx.Node:
    z_TE = _float(seen.logits_TE, like)
    if seen.valid_T is None:
        lse_T = apply(z_TE, aten.logsumexp.default, z_TE, [-1])
        return _sum(_mul(lse_T, lse_T))
    padded_T = apply(z_TE, aten.logical_not.default, seen.valid_T)
    # Masked before and after: whatever the logits of padding are, they have no gradient.
    z_TE = apply(z_TE, aten.masked_fill.Scalar, z_TE, apply(z_TE, aten.unsqueeze.default, padded_T, 1), 0.0)
    lse_T = apply(z_TE, aten.logsumexp.default, z_TE, [-1])
    return _sum(apply(z_TE, aten.masked_fill.Scalar, _mul(lse_T, lse_T), padded_T, 0.0))


def _tokens(counts: fx.Node, K: int) -> fx.Node:
    """How many tokens were counted; 1 where none was, so that nothing is divided by 0."""
    tokens = apply(counts, aten.div.Tensor, apply(counts, aten.sum.dim_IntList, counts, [-1]), K)
    return apply(counts, aten.clamp_min.default, tokens, 1)


def _float(x: fx.Node, like: fx.Node) -> fx.Node:
    dtype = like.meta["val"].dtype
    return x if x.meta["val"].dtype == dtype else apply(x, aten._to_copy.default, x, dtype=dtype)


def _sum(x: fx.Node) -> fx.Node:
    return apply(x, aten.sum.default, x)


def _mul(x: fx.Node, y: Any) -> fx.Node:
    return apply(x, aten.mul.Tensor, x, y)


def _div(x: fx.Node, y: fx.Node) -> fx.Node:
    return apply(x, aten.div.Tensor, x, y)
