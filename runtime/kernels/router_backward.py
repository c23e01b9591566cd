"""The router's backward: the gradient of the logits, in one kernel, from the logits anew.

Legend: T tokens, E experts, K choices.

A program has a few tokens, as in ``router.py``.  It forms their scores again, weighs the gradient of the K weights back
through scaling, normalisation and scores, and adds the gradient of the probabilities that a balancing loss sums.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops.route import route_backward
from ..ops.route_counted import route_counted_backward
from ..ops.rows import accumulator
from ..route_spec import RouteSpec
from . import router_text as text
from .expressions import TRITON, computing
from .router import Router, given_or, mask
from .router_text import pad
from .source import load
from .template import fill

TEMPLATE = '''"""Router, backward: <spec>."""

import triton
import triton.language as tl


<functions>
@triton.jit
def router_backward(
    grad_ptr, sums_grad_ptr, logits_ptr, bias_ptr, valid_ptr, token_ptr, counted_ptr, ids_ptr, out_ptr, num_tokens
):
    program = tl.program_id(0).to(tl.int64)
    token = program * <tile> + tl.arange(0, <tile>)
    expert = tl.arange(0, <experts_pad>)
    choice = tl.arange(0, <choices_pad>)
    real_T, real_E, real_K = token < num_tokens, expert < <experts>, choice < <choices>
    real_TE = real_T[:, None] & real_E[None, :]
    real_TK = real_T[:, None] & real_K[None, :]
    own = tl.load(logits_ptr + token[:, None] * <experts> + expert[None, :], mask=real_TE, other=0.0).to(<math>)
    <routed>
    <scores>
    at = token[:, None] * <choices> + choice[None, :]
    kept = tl.load(ids_ptr + at, mask=real_TK, other=-1).to(tl.int32)
    grad = tl.load(grad_ptr + at, mask=real_TK, other=0.0).to(<math>)
    grad = tl.where(kept < 0, 0.0, grad) * <scaling>
    <choices_of>
    raw = taken(scores, ids, expert, choice, <choices>)
    <weights>
    <back>
    grad = tl.where(real_K[None, :], grad, 0.0)
    out = spread(grad, ids, expert, choice, <choices>)
    <through>
    <valid>
    <balance>
    tl.store(out_ptr + token[:, None] * <experts> + expert[None, :], out.to(<storage>), mask=real_TE)
'''


@cache
def source(r: Router) -> str:
    """The text of the kernel."""
    s = r.spec
    lowest = str(torch.finfo(accumulator(r.dtype)).min)
    ids = ["ids = tl.maximum(kept, 0)"]
    if s.capacity_factor is not None:  # a dropped choice is still in the sum that the others were divided by
        ids = [line.replace("<lowest>", lowest) for line in text.choices(s, r.biased)]
    back = []
    if s.normalize and s.top_k > 1:  # w = s / total
        back.append("grad = (grad - tl.sum(grad * (raw / total), 1)[:, None]) / total")
    if s.score == "softmax_post":
        back.append("grad = raw * (grad - tl.sum(grad * raw, 1)[:, None])")
    through = [f"out = out * {text.slope(s, 'z', 'scores')}"]
    if s.score == "softmax_pre":
        through = ["out = scores * (out - tl.sum(out * scores, 1)[:, None])"]
    valid = [
        "valid = tl.load(valid_ptr + token, mask=real_T, other=0) != 0",
        "out = tl.where(valid[:, None], out, 0.0)",
    ]
    return fill(
        TEMPLATE, spec=s.text().replace('"', "'"), functions=text.functions(s, True), tile=r.tile,
        experts=s.num_experts, experts_pad=pad(s.num_experts), choices=s.top_k, choices_pad=pad(s.top_k),
        math=computing(r.dtype), storage=TRITON[r.dtype], scaling=str(float(s.scaling)), routed=text.routed(s),
        scores=text.scores(s, "z", "scores"), choices_of=ids, weights=text.weights(s, "raw"), back=back,
        through=through, valid=valid if r.padded else [], balance=_balance(r) if r.balanced else [],
    )  # fmt: skip


def _balance(r: Router) -> list[str]:
    s = r.spec
    lines = ["of = real_T"]
    if r.some:
        lines = ["of = real_T & (tl.load(counted_ptr + token, mask=real_T, other=0) != 0)"]
    lines += ["own_scores = scores"] if s.force is None else text.scores(s, "own", "own_scores")
    lines += text.probabilities(s, "own_scores", "p")
    lines += [
        f"more = tl.load(sums_grad_ptr + expert, mask=real_E, other=0.0).to({computing(r.dtype)})[None, :]",
        "more = more - tl.sum(tl.where(real_E[None, :], more * p, 0.0), 1)[:, None]",
    ]
    if s.score.startswith("softmax"):
        lines.append("more = more * p")
    else:  # p = s / sum
        divisor = f"(tl.sum(own_scores, 1)[:, None] + {text.EPSILON})"
        lines.append(f"more = more * {text.slope(s, 'own', 'own_scores')} / {divisor}")
    return [*lines, "out = out + tl.where(of[:, None], more, 0.0)"]


@cache
def kernel(r: Router) -> Any:
    return load(source(r), "router_backward").router_backward


def launch(
    r: Router, grad_TK: Tensor, grad_E: Tensor | None, logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None,
    token_T: Tensor | None, counted_T: Tensor | None, ids_TK: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the logits, in their dtype."""
    T = logits_TE.shape[0]
    out_TE = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    if T:
        grads = grad_TK.contiguous(), given_or(grad_E, grad_TK)
        given = [given_or(x, grad_TK) for x in (bias_E, mask(valid_T), token_T, mask(counted_T))]
        inputs = *grads, logits_TE.contiguous(), *given, ids_TK.contiguous()
        kernel(r)[(-(-T // r.tile),)](*inputs, out_TE, T, num_warps=4)
    return out_TE


def backward(
    grad_TK: Tensor, logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, token_T: Tensor | None,
    ids_TK: Tensor, spec: str,
) -> Tensor:  # fmt: skip
    """``moec::route_backward``."""
    r = Router(RouteSpec.parse(spec), logits_TE.dtype, bias_E is not None, valid_T is not None)
    return launch(r, grad_TK, None, logits_TE, bias_E, valid_T, token_T, None, ids_TK)


def counted_backward(
    grad_TK: Tensor, grad_E: Tensor, logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None,
    token_T: Tensor | None, counted_T: Tensor | None, ids_TK: Tensor, spec: str, balanced: bool,
) -> Tensor:  # fmt: skip
    """``moec::route_counted_backward``."""
    given = (bias_E is not None, valid_T is not None, True, counted_T is not None, balanced)
    r = Router(RouteSpec.parse(spec), logits_TE.dtype, *given)
    return launch(r, grad_TK, grad_E, logits_TE, bias_E, valid_T, token_T, counted_T, ids_TK)


route_backward.register_kernel("cuda")(backward)
route_counted_backward.register_kernel("cuda")(counted_backward)
