"""``moec::balance``: what load-balancing losses are made of.

Legend: N leading dims (none, or sequences), T tokens, E experts, K choices per token.

``balance(logits_NTE, valid_NT, top_k, score) -> (probs_NE, counts_NE)``: sums over the tokens that are no padding.

* ``probs`` (fp32, fp64 for fp64 logits): the probability p of the expert: softmax over all experts, or sigmoid
  (sqrtsoftplus) scores divided by their sum + 1e-20.  ``balance_backward`` is its gradient for the logits.
* ``counts`` (int64): how many tokens have the expert among the ``top_k`` of largest probability.  Neither a bias nor
  groups take part; of equal ones the lowest index first.

Both are sums over tokens: those of parts of the tokens add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import accumulator
from .scores import EPSILON, best, score, slope


@torch.library.custom_op("moec::balance", mutates_args=())
def balance(logits_NTE: Tensor, valid_NT: Tensor | None, top_k: int, kind: str) -> tuple[Tensor, Tensor]:
    p_NTE = probabilities(logits_NTE, kind)
    ids_MK = best(p_NTE.flatten(0, -2) if p_NTE.ndim > 2 else p_NTE, top_k)
    hot_NTE = torch.zeros_like(p_NTE, dtype=torch.int64).scatter_(-1, ids_MK.view(*p_NTE.shape[:-1], top_k), 1)
    if valid_NT is not None:
        hot_NTE, p_NTE = (x.masked_fill(~valid_NT[..., None], 0) for x in (hot_NTE, p_NTE))
    return p_NTE.sum(-2), hot_NTE.sum(-2)


@balance.register_fake
def _(logits_NTE, valid_NT, top_k, kind):
    shape = (*logits_NTE.shape[:-2], logits_NTE.shape[-1])
    probs_NE = logits_NTE.new_empty(shape, dtype=accumulator(logits_NTE.dtype))
    return probs_NE, torch.empty_like(probs_NE, dtype=torch.int64)


@torch.library.custom_op("moec::balance_backward", mutates_args=())
def balance_backward(grad_NE: Tensor, logits_NTE: Tensor, valid_NT: Tensor | None, kind: str) -> Tensor:
    grad_NTE = probabilities_grad(grad_NE[..., None, :], probabilities(logits_NTE, kind), logits_NTE, kind)
    if valid_NT is not None:
        grad_NTE = grad_NTE.masked_fill(~valid_NT[..., None], 0)
    return grad_NTE.to(logits_NTE.dtype)


@balance_backward.register_fake
def _(grad_NE, logits_NTE, valid_NT, kind):
    return logits_NTE.new_empty(logits_NTE.shape)


def probabilities(logits: Tensor, kind: str) -> Tensor:
    return normalised(score(logits.to(accumulator(logits.dtype)), kind), kind)


def normalised(scores: Tensor, kind: str) -> Tensor:
    """Probabilities from scores."""
    if kind == "softmax_pre":
        return scores
    if kind == "softmax_post":
        return scores.softmax(-1)
    return scores / (scores.sum(-1, keepdim=True) + EPSILON)


def probabilities_grad(grad: Tensor, p: Tensor, logits: Tensor, kind: str) -> Tensor:
    """The gradient of the logits from that of the probabilities."""
    grad = grad - (grad * p).sum(-1, keepdim=True)
    if kind.startswith("softmax"):
        return grad * p
    z = logits.to(p.dtype)  # p = s / sum
    return grad * slope(z, kind) / (score(z, kind).sum(-1, keepdim=True) + EPSILON)


def _setup(ctx, inputs, output) -> None:
    logits_NTE, valid_NT, _, ctx.kind = inputs
    ctx.save_for_backward(logits_NTE, valid_NT)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_NE, _counts):
    return balance_backward(grad_NE, *ctx.saved_tensors, ctx.kind), None, None, None


balance.register_autograd(_backward, setup_context=_setup)
