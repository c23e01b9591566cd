"""Score functions of a router, and their derivatives (not ops).  Legend: T tokens, E experts, K choices per token.

Scores are formed in fp32 (fp64 for fp64 logits), whatever the model's dtype: in bf16 about 6 % of the tokens tie at the
K-th expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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


def score_backward(grad_TK: Tensor, z_TE: Tensor, ids_TK: Tensor, kind: str) -> Tensor:
    """Gradient of the logits from that of the scores of the chosen experts, which are distinct within a token."""
    if kind == "softmax_pre":
        p_TE = z_TE.softmax(-1)
        direct_TK = p_TE.gather(1, ids_TK) * grad_TK
        return p_TE.mul_(-direct_TK.sum(1, keepdim=True)).scatter_add_(1, ids_TK, direct_TK)
    z_TK = z_TE.gather(1, ids_TK)
    if kind == "sigmoid":
        s_TK = z_TK.sigmoid()
        grad_TK = grad_TK * s_TK * (1 - s_TK)
    elif kind == "sqrtsoftplus":
        s_TK = score(z_TK, kind)
        # d softplus is sigmoid, and 1 where F.softplus is the identity (above 20).
        inner = torch.where(z_TK > 20, torch.ones_like(z_TK), z_TK.sigmoid())
        grad_TK = grad_TK * torch.where(z_TK < SMALL, s_TK / 2, inner / (2 * s_TK))
    return torch.zeros_like(z_TE).scatter_add_(1, ids_TK, grad_TK)
