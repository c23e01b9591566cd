"""Scores of a router, their derivatives, and the best of them (not ops).

Legend: T tokens, E experts, K choices per token, L = K + 1 (at most E).

Scores are formed in fp32 (fp64 for fp64 logits), whatever the model's dtype: in bf16 about 6 % of the tokens tie at the
K-th expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-20
"""Added to a sum of scores that others are divided by: sigmoid scores may all be 0."""

SMALL = -40.0
"""Below it softplus(x) is exp(x) to the last bit of fp64, and √softplus is formed without the underflow in between."""


def score(z: Tensor, kind: str) -> Tensor:
    """Scores of logits; ``softmax_post`` scores by the logits themselves."""
    if kind == "softmax_pre":
        return z.softmax(-1)
    if kind == "sigmoid":
        return z.sigmoid()
    if kind == "sqrtsoftplus":
        return torch.where(z < SMALL, (z / 2).exp(), F.softplus(z).sqrt())
    return z


def slope(z: Tensor, kind: str) -> Tensor:
    """The derivative of a score that depends on its own logit alone."""
    s = score(z, kind)
    if kind == "sigmoid":
        return s * (1 - s)
    if kind == "sqrtsoftplus":
        # d softplus is sigmoid, and 1 where F.softplus is the identity (above 20).
        inner = torch.where(z > 20, torch.ones_like(z), z.sigmoid())
        return torch.where(z < SMALL, s / 2, inner / (2 * s))
    return torch.ones_like(z)


def best(by_TE: Tensor, top_k: int) -> Tensor:
    """int64 [T, K]: the experts of the largest values, falling; of equal ones the lowest index first.

    torch.topk promises no order among equals; but where the K + 1 largest values all differ, there is only one.
    """
    if by_TE.device.type != "cpu":  # whether scores tie is nothing to wait for
        return by_TE.sort(dim=1, descending=True, stable=True)[1][:, :top_k].contiguous()
    E = by_TE.shape[1]
    found_TL, ids_TL = by_TE.topk(min(top_k + 1, E), dim=1)
    ids_TK = ids_TL[:, :top_k].contiguous()
    equal_T = ~(found_TL[:, 1:] < found_TL[:, :-1]).all(1)
    if bool(equal_T.any()):
        again = equal_T.nonzero().squeeze(1)
        ids_TK[again] = by_TE[again].sort(dim=1, descending=True, stable=True)[1][:, :top_k]
    return ids_TK


def entropy(p_TE: Tensor) -> Tensor:
    """[T], in nats; what has probability 0 adds nothing."""
    return -(p_TE * p_TE.clamp_min(torch.finfo(p_TE.dtype).tiny).log()).sum(1)


def score_backward(grad_TK: Tensor, z_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, kind: str) -> Tensor:
    """Gradient of the logits from that of the scores of the chosen experts, which are distinct within a token."""
    if kind == "softmax_pre":
        direct_TK = scores_TE.gather(1, ids_TK) * grad_TK
        return (scores_TE * -direct_TK.sum(1, keepdim=True)).scatter_add_(1, ids_TK, direct_TK)
    return torch.zeros_like(z_TE).scatter_add_(1, ids_TK, grad_TK * slope(z_TE.gather(1, ids_TK), kind))
