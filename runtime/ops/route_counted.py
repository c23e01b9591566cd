"""``moec::route_counted``: ``moec::route`` and what is counted of the same logits, with their scores formed once.

Legend: T tokens, E experts, K choices per token.

``route_counted(logits_TE, bias_E, valid_T, token_T, counted_T, spec, balanced)
-> (weights_TK, ids_TK, tally_[E + 3], probs_E, counts_E)``, what these make of the logits:

* ``weights, ids = route(logits, bias, valid, token, spec)``;
* ``tally = tally(ids, None, logits, counted, E, score)``: ``counted_T`` (bool) is False where tokens are not counted.
  Counts are exact; each token's entropy is formed in the dtype of the scores (fp32, fp64 for fp64 logits), where
  ``moec::tally`` forms it in fp64, and summed in fp64;
* ``probs, counts = balance(logits, counted, K, score)`` where ``balanced``, else both are empty.

``force`` replaces the logits that are routed; what is counted is the real ones.

Backward: ``route_counted_backward``, the sum of the backwards of ``route`` and ``balance``, recomputed from the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from ..route_spec import RouteSpec
from .balance import normalised, probabilities_grad
from .route import check, logits_grad, pairs, routed_logits
from .rows import accumulator
from .scores import best, entropy, score


@torch.library.custom_op("moec::route_counted", mutates_args=(), device_types="cpu")
def route_counted(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    token_T: Tensor | None,
    counted_T: Tensor | None,
    spec: str,
    balanced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    s = RouteSpec.parse(spec)
    check(logits_TE, bias_E, valid_T, token_T, s)
    if counted_T is not None and counted_T.shape != logits_TE.shape[:1]:
        found = f"counted {tuple(counted_T.shape)} beside logits {tuple(logits_TE.shape)}"
        raise MoecError(found, where="moec::route_counted")
    scores_TE, own_TE = _scores(logits_TE, token_T, s)
    weights_TK, ids_TK = pairs(scores_TE, bias_E, valid_T, token_T, s)
    p_TE = normalised(own_TE, s.score)
    tally = _tally(ids_TK, entropy(p_TE), counted_T, s)
    if not balanced:
        return weights_TK, ids_TK, tally, p_TE.new_empty((0,)), ids_TK.new_empty((0,))
    best_TK = ids_TK
    if not balance_choices_are_routes(s, bias_E is not None, valid_T is not None):
        best_TK = best(p_TE, s.top_k)
    of_TK = best_TK if counted_T is None else best_TK.masked_fill(~counted_T[:, None], s.num_experts)
    counts_E = torch.bincount(of_TK.reshape(-1), minlength=s.num_experts + 1)[: s.num_experts].clone()
    if counted_T is not None:
        p_TE = p_TE.masked_fill(~counted_T[:, None], 0)
    return weights_TK, ids_TK, tally, p_TE.sum(0), counts_E


@route_counted.register_fake
def _(logits_TE, bias_E, valid_T, token_T, counted_T, spec, balanced):
    s, wide = RouteSpec.parse(spec), accumulator(logits_TE.dtype)
    shape, length = (logits_TE.shape[0], s.top_k), s.num_experts if balanced else 0
    return (
        logits_TE.new_empty(shape, dtype=wide),
        logits_TE.new_empty(shape, dtype=torch.int64),
        logits_TE.new_empty((s.num_experts + 3,), dtype=torch.float64),
        logits_TE.new_empty((length,), dtype=wide),
        logits_TE.new_empty((length,), dtype=torch.int64),
    )


@torch.library.custom_op("moec::route_counted_backward", mutates_args=(), device_types="cpu")
def route_counted_backward(
    grad_TK: Tensor,
    grad_E: Tensor,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    token_T: Tensor | None,
    counted_T: Tensor | None,
    ids_TK: Tensor,
    spec: str,
    balanced: bool,
) -> Tensor:
    s = RouteSpec.parse(spec)
    scores_TE, own_TE = _scores(logits_TE, token_T, s)
    z_TE = routed_logits(logits_TE, token_T, s)
    grad_TE = logits_grad(grad_TK, z_TE, scores_TE, bias_E, valid_T, token_T, ids_TK, s)
    if balanced:
        more_TE = probabilities_grad(grad_E, normalised(own_TE, s.score), logits_TE, s.score)
        grad_TE = grad_TE + (more_TE if counted_T is None else more_TE.masked_fill(~counted_T[:, None], 0))
    return grad_TE.to(logits_TE.dtype)


@route_counted_backward.register_fake
def _(grad_TK, grad_E, logits_TE, bias_E, valid_T, token_T, counted_T, ids_TK, spec, balanced):
    return logits_TE.new_empty(logits_TE.shape)


def balance_choices_are_routes(s: RouteSpec, biased: bool, padded: bool) -> bool:
    """Whether ``balance`` counts the very choices of ``route``: of the largest probabilities, all kept."""
    plain = s.score == "softmax_pre" and s.groups == 1 and s.capacity_factor is None and s.force is None
    return plain and not biased and not padded


def _scores(logits_TE: Tensor, token_T: Tensor | None, s: RouteSpec) -> tuple[Tensor, Tensor]:
    """What is routed by, and the scores of the logits themselves."""
    own_TE = score(logits_TE.to(accumulator(logits_TE.dtype)), s.score)
    return (own_TE if s.force is None else score(routed_logits(logits_TE, token_T, s), s.score)), own_TE


def _tally(ids_TK: Tensor, entropy_T: Tensor, counted_T: Tensor | None, s: RouteSpec) -> Tensor:
    E, T = s.num_experts, ids_TK.shape[0]
    of_TK, tokens = torch.where(ids_TK < 0, E, ids_TK), torch.tensor(T)
    if counted_T is not None:
        of_TK, tokens = of_TK.masked_fill(~counted_T[:, None], E + 1), counted_T.sum()
        entropy_T = entropy_T.masked_fill(~counted_T, 0)
    out = torch.empty(E + 3, dtype=torch.float64)
    out[: E + 1] = torch.bincount(of_TK.reshape(-1), minlength=E + 2)[: E + 1]
    out[E + 1], out[E + 2] = tokens, entropy_T.double().sum()
    return out


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.spec, ctx.balanced = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1], output[2], output[4])


def _backward(ctx, grad_TK, _ids, _tally_E, grad_E, _counts):
    grad_TE = route_counted_backward(grad_TK, grad_E, *ctx.saved_tensors, ctx.spec, ctx.balanced)
    return grad_TE, None, None, None, None, None, None


route_counted.register_autograd(_backward, setup_context=_setup)
