"""``moec::route``: from logits to the experts of each token and what they are weighted by.

Legend: T tokens, E experts, K choices per token, G groups of experts.

``route(logits_TE, bias_E, valid_T, token_T, spec) -> (weights_TK, ids_TK)`` computes what ``route_spec`` says, in
fp32 (fp64 for fp64 logits):

* ``weights_TK`` is fp32 (fp64 for fp64 logits) and ``ids_TK`` int64, in order of falling selection score, of equal
  scores the lowest index first; a pair that was dropped or padded has id -1 and weight 0.
* ``bias_E`` (any float dtype) takes part in the selection alone and gets no gradient; ``valid_T`` (bool) is False for
  padding; ``token_T`` (int64) numbers the tokens of the global batch, and only ``force`` asks for it.

``force`` replaces the logits, and their gradient passes straight through.  ``random``: uniform on a grid in [-1, 1),
a hash of (seed, token, expert), so that a token is routed alike on any rank and device.  ``round_robin``: equal logits
everywhere; the choice is made of the token's number, and neither bias nor groups are asked.

Backward: ``route_backward`` recomputes from the logits; nothing of the size [T, E] but them is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from ..route_spec import RouteSpec
from .drop import dropped
from .rows import accumulator
from .scores import EPSILON, best, score, score_backward


@torch.library.custom_op("moec::route", mutates_args=())
def route(
    logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, token_T: Tensor | None, spec: str
) -> tuple[Tensor, Tensor]:
    s = RouteSpec.parse(spec)
    check(logits_TE, bias_E, valid_T, token_T, s)
    z_TE = routed_logits(logits_TE, token_T, s)
    return pairs(score(z_TE, s.score), bias_E, valid_T, token_T, s)


@route.register_fake
def _(logits_TE, bias_E, valid_T, token_T, spec):
    shape = (logits_TE.shape[0], RouteSpec.parse(spec).top_k)
    return (
        logits_TE.new_empty(shape, dtype=accumulator(logits_TE.dtype)),
        logits_TE.new_empty(shape, dtype=torch.int64),
    )


@torch.library.custom_op("moec::route_backward", mutates_args=())
def route_backward(
    grad_TK: Tensor,
    logits_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    token_T: Tensor | None,
    ids_TK: Tensor,
    spec: str,
) -> Tensor:
    s = RouteSpec.parse(spec)
    z_TE = routed_logits(logits_TE, token_T, s)
    grad_TE = logits_grad(grad_TK, z_TE, score(z_TE, s.score), bias_E, valid_T, token_T, ids_TK, s)
    return grad_TE.to(logits_TE.dtype)


@route_backward.register_fake
def _(grad_TK, logits_TE, bias_E, valid_T, token_T, ids_TK, spec):
    return logits_TE.new_empty(logits_TE.shape)


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.spec = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_TK, _ids):
    return route_backward(grad_TK, *ctx.saved_tensors, ctx.spec), None, None, None, None


route.register_autograd(_backward, setup_context=_setup)


# -- steps


def check(logits_TE, bias_E, valid_T, token_T, s: RouteSpec) -> None:
    if logits_TE.ndim != 2 or logits_TE.shape[1] != s.num_experts:
        raise MoecError(f"logits {tuple(logits_TE.shape)} for {s.num_experts} experts", where="moec::route")
    T, E = logits_TE.shape
    for name, x, shape in (("bias", bias_E, (E,)), ("valid", valid_T, (T,)), ("token", token_T, (T,))):
        if x is not None and tuple(x.shape) != shape:
            raise MoecError(f"{name} {tuple(x.shape)} beside logits {(T, E)}", where="moec::route")
    if s.force and token_T is None:
        raise MoecError(f"force={s.force!r} needs the numbers of the tokens", where="moec::route")


def pairs(
    scores_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, token_T: Tensor | None, s: RouteSpec
) -> tuple[Tensor, Tensor]:
    """Weights and ids."""
    ids_TK = choose(scores_TE, bias_E, token_T, s)
    weights_TK = weigh(scores_TE.gather(1, ids_TK), s)
    if valid_T is not None:
        ids_TK = ids_TK.masked_fill(~valid_T[:, None], -1)
        weights_TK = weights_TK.masked_fill(~valid_T[:, None], 0)
    if s.capacity_factor is not None:
        gone_TK = dropped(weights_TK, ids_TK, s)
        return weights_TK.masked_fill(gone_TK, 0), ids_TK.masked_fill(gone_TK, -1)
    return weights_TK.contiguous(), ids_TK.contiguous()


def logits_grad(
    grad_TK: Tensor,
    z_TE: Tensor,
    scores_TE: Tensor,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    token_T: Tensor | None,
    ids_TK: Tensor,
    s: RouteSpec,
) -> Tensor:
    """The gradient of ``z`` from that of the weights."""
    chosen_TK = ids_TK.clamp(min=0)
    if s.capacity_factor is not None:  # a dropped choice is still in the sum that the others were divided by
        chosen_TK = choose(scores_TE, bias_E, token_T, s)
    grad_TK = grad_TK.to(z_TE.dtype).masked_fill(ids_TK < 0, 0) * s.scaling
    raw_TK = scores_TE.gather(1, chosen_TK)
    if s.score == "softmax_post":
        raw_TK = raw_TK.softmax(1)
    if s.normalize and s.top_k > 1:  # w = s / sum
        total_T1 = raw_TK.sum(1, keepdim=True) + EPSILON
        grad_TK = (grad_TK - (grad_TK * (raw_TK / total_T1)).sum(1, keepdim=True)) / total_T1
    if s.score == "softmax_post":
        grad_TK = raw_TK * (grad_TK - (grad_TK * raw_TK).sum(1, keepdim=True))
    grad_TE = score_backward(grad_TK, z_TE, scores_TE, chosen_TK, s.score)
    if valid_T is not None:  # whatever the logits of padding are
        grad_TE = grad_TE.masked_fill(~valid_T[:, None], 0)
    return grad_TE


def routed_logits(logits_TE: Tensor, token_T: Tensor | None, s: RouteSpec) -> Tensor:
    z_TE = logits_TE.to(accumulator(logits_TE.dtype))
    if s.force is None:
        return z_TE
    assert token_T is not None
    return _random(token_T, s).to(z_TE.dtype) if s.force == "random" else torch.zeros_like(z_TE)


def choose(scores_TE: Tensor, bias_E: Tensor | None, token_T: Tensor | None, s: RouteSpec) -> Tensor:
    if s.force == "round_robin":
        assert token_T is not None
        first_T1 = (token_T % s.num_experts * s.top_k)[:, None]
        return ((first_T1 + torch.arange(s.top_k, device=token_T.device)) % s.num_experts).sort(1)[0]
    by_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    if s.groups > 1:
        # The worst that a kept expert can score is still above −inf.
        by_TE = by_TE.clamp(min=torch.finfo(by_TE.dtype).min).masked_fill(~_kept_groups(by_TE, s), -torch.inf)
    return best(by_TE, s.top_k)


def _kept_groups(by_TE: Tensor, s: RouteSpec) -> Tensor:
    """bool [T, E]: experts that lie in the best groups of their token."""
    T, size = by_TE.shape[0], s.num_experts // s.groups
    by_TGS = by_TE.reshape(T, s.groups, size)
    summed = {"max": 1, "top2": 2, "topk": s.top_k // s.kept_groups}[s.group_score]
    first_TG, *rest = by_TGS.topk(summed, dim=2)[0].unbind(2)
    group_TG = sum(rest, first_TG)  # the largest first, on every device
    kept = best(group_TG, s.kept_groups)
    mask_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, kept, True)
    return mask_TG.repeat_interleave(size, 1)


def weigh(chosen_TK: Tensor, s: RouteSpec) -> Tensor:
    if s.score == "softmax_post":
        chosen_TK = chosen_TK.softmax(1)
    if s.normalize and s.top_k > 1:
        chosen_TK = chosen_TK / (chosen_TK.sum(1, keepdim=True) + EPSILON)
    return chosen_TK * s.scaling


def _random(token_T: Tensor, s: RouteSpec) -> Tensor:
    """fp32 [T, E] on a grid of 2^-23, equal bits on every device: murmur3's finaliser over 32-bit words."""
    low = 0xFFFFFFFF

    def mix(h: Tensor) -> Tensor:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low
        return h ^ (h >> 16)

    expert_E = torch.arange(s.num_experts, device=token_T.device)
    h_T = mix(torch.full_like(token_T, (s.seed * 0x9E3779B9 + 1) & low))
    h_T = mix(mix(h_T ^ (token_T & low)) ^ ((token_T >> 32) & low))
    return (mix(h_T[:, None] ^ mix(expert_E + 1)) >> 8).to(torch.float32) * 2.0**-23 - 1
