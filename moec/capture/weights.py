"""Weights: the forms in which a router hands over its weights, and how they enter the sum over experts.

Legend: T tokens, K choices, E experts, C slots, H and M features in and out, N = T*K rows.

Forms: one number a pair ``[…T…, K]``; a dense matrix ``[…T…, E]`` (or ``[E, T]``) that is zero for the experts that a
token does not use; the same with the slots that a token takes, ``[…T…, E, C]``, of which at most one is not zero.

``combined`` computes the block from tokens, ids and weights:

    after     out[t] = sum_k w[t, k] * f_{ids[t, k]}(x[t])
    before    out[t] = sum_k f_{ids[t, k]}(w[t, k] * x[t])
    inside    out[t] = sum_k f_{ids[t, k]}(x[t], w[t, k])

The same code compares numbers while a block is located and emits the graph when it is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .body import Body
from .observe import Tape

Form = Literal["pairs", "dense", "dense by expert", "slots"]
How = Literal["after", "before", "inside"]


@dataclass(frozen=True)
class Weights:
    value: int
    form: Form

    def per_pair(self, w: Tensor, ids_TK: Tensor, num_experts: int) -> Tensor:
        """``[T, K]``"""
        if self.form == "pairs":
            return w.reshape(-1, ids_TK.shape[1])
        return self.dense(w, num_experts).gather(1, ids_TK.clamp_min(0))

    def dense(self, w: Tensor, num_experts: int) -> Tensor:
        """``[T, E]``"""
        if self.form == "slots":
            w = w.sum(-1)
        return w.reshape(num_experts, -1).t() if self.form == "dense by expert" else w.reshape(-1, num_experts)


def chosen(dense_TE: Tensor) -> Tensor:
    """Ids ``[T, E]`` of a router that only says its weights: expert e in column e where it has weight, else -1."""
    return torch.where(dense_TE != 0, torch.arange(dense_TE.shape[1], device=dense_TE.device), -1)


def candidates(tape: Tape, tokens: int, k: int | None, num_experts: int, of_experts: set[int]) -> Iterator[Weights]:
    """Values that could be weights of so many tokens: with ``k`` choices each; without, those that say the choice."""
    for v, t in enumerate(tape.values):
        if t is None or not t.is_floating_point() or not t.dim() or v in of_experts or v in tape.params:
            continue
        if k is not None and t.numel() == tokens * k and (t.shape[-1] == k or k == 1):
            yield Weights(v, "pairs")
    for v, t in enumerate(tape.values):
        if t is None or not t.is_floating_point() or t.dim() < 2 or v in of_experts or v in tape.params:
            continue
        if t.numel() == tokens * num_experts:
            if t.shape[-1] == num_experts:
                yield Weights(v, "dense")
            elif t.shape[0] == num_experts:
                yield Weights(v, "dense by expert")
        elif t.dim() >= 3 and t.shape[-2] == num_experts and t.numel() == tokens * num_experts * t.shape[-1]:
            yield Weights(v, "slots")


def combined(
    how: How,
    body: Body,
    x_TH: Tensor,
    ids_TK: Tensor,
    w_TK: Tensor,
    num_experts: int,
    stack: Callable[[str], Tensor],
) -> Tensor:
    """``[T, M]``; an id of -1 is no expert."""
    ops, k = torch.ops.moec, ids_TK.shape[1]
    if how == "after":
        rows_NH, counts_E, row_of_TK = ops.permute(x_TH, ids_TK, num_experts)
        return ops.unpermute(body.grouped(rows_NH, counts_E, stack), w_TK, row_of_TK)
    # A row for each pair from the start, so that its weight can travel with it.
    x_NH = x_TH if k == 1 else x_TH.unsqueeze(1).expand(-1, k, -1).reshape(-1, x_TH.shape[1])
    w_N1, ids_N1 = w_TK.reshape(-1, 1), ids_TK.reshape(-1, 1)
    if how == "before":
        rows_NH, counts_E, row_of_N1 = ops.permute((x_NH * w_N1).to(x_TH.dtype), ids_N1, num_experts)
        y_NM = body.grouped(rows_NH, counts_E, stack)
    else:
        both = torch.promote_types(x_NH.dtype, w_N1.dtype)
        rows, counts_E, row_of_N1 = ops.permute(torch.cat([x_NH.to(both), w_N1.to(both)], 1), ids_N1, num_experts)
        rows_NH, scale_N1 = (
            r.to(t.dtype) for r, t in zip(rows.split([x_TH.shape[1], 1], 1), (x_NH, w_N1), strict=True)
        )
        y_NM = body.grouped(rows_NH, counts_E, stack, scale_N1)
    y_NM = ops.unpermute(y_NM, torch.ones_like(w_N1, dtype=y_NM.dtype), row_of_N1)
    return y_NM if k == 1 else y_NM.reshape(-1, k, y_NM.shape[1]).sum(1)
