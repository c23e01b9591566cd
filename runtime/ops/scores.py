"""Score functions of a router, and their derivatives (not ops).  Legend: T tokens, E experts, K choices per token.

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


def score_backward(grad_TK: Tensor, z_TE: Tensor, ids_TK: Tensor, kind: str) -> Tensor:
    """Gradient of the logits from that of the scores of the chosen experts, which are distinct within a token."""
    if kind == "softmax_pre":
        p_TE = z_TE.softmax(-1)
        direct_TK = p_TE.gather(1, ids_TK) * grad_TK
        return p_TE.mul_(-direct_TK.sum(1, keepdim=True)).scatter_add_(1, ids_TK, direct_TK)
    return torch.zeros_like(z_TE).scatter_add_(1, ids_TK, grad_TK * slope(z_TE.gather(1, ids_TK), kind))
