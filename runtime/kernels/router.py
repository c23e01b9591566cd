"""The router: logits to ids, weights, and what is counted of them, in one kernel.

Legend: T tokens, E experts, K choices, B programs.

A program has a few tokens at a time, with all their experts in registers: softmax or another score, bias, groups, the
K best, weights.  Where something is counted it goes on to the next few, until it has had so many that the sums it
stores are little beside them; the sums of programs are added in order, without atomics:

* ``sums [B, 1]``, ``[B, 1 + E]`` for a balancing loss: entropies, and probabilities by expert;
* ``counts [B, E + 2]``, ``[B, 2 E + 2]`` (int32): choices of counted tokens by expert, pairs of counted tokens that are
  padding, counted tokens, and what ``moec::balance`` counts.

A capacity is a second step (``ops/drop.py``): whom it drops depends on all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..ops import route as route_op
from ..ops.drop import dropped
from ..ops.route_counted import balance_choices_are_routes, route_counted
from ..ops.rows import accumulator
from ..ops.tally import tally as tally_op
from ..route_spec import RouteSpec
from . import router_text as text
from .expressions import computing
from .router_text import pad
from .source import load
from .template import fill

ELEMENTS = 1024
"""Tokens times experts that a program has at a time."""
COUNTED = 32
"""Tokens of which a program stores one sum, at least."""


@dataclass(frozen=True)
class Router:
    """What a kernel is generated for; ``counted``: whether sums and counts are formed at all."""

    spec: RouteSpec
    dtype: torch.dtype
    biased: bool = False
    padded: bool = False
    counted: bool = False
    some: bool = False
    """Of counted tokens: an operand says which."""
    balanced: bool = False

    @property
    def tile(self) -> int:
        """How many tokens a program has at a time."""
        return max(1, min(64, ELEMENTS // pad(self.spec.num_experts)))

    @property
    def steps(self) -> int:
        return max(1, COUNTED // self.tile) if self.counted else 1

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of sums and of counts."""
        more = self.spec.num_experts if self.balanced else 0
        return 1 + more, self.spec.num_experts + 2 + more


TEMPLATE = '''"""Router: <spec>."""

import triton
import triton.language as tl


<functions>
@triton.jit
def router(
    logits_ptr, bias_ptr, valid_ptr, token_ptr, counted_ptr, weights_ptr, ids_ptr, sums_ptr, counts_ptr, num_tokens
):
    program = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, <experts_pad>)
    choice = tl.arange(0, <choices_pad>)
    real_E, real_K = expert < <experts>, choice < <choices>
    <start>
    for step in range(<steps>):
        token = (program * <steps> + step) * <tile> + tl.arange(0, <tile>)
        real_T = token < num_tokens
        real_TE = real_T[:, None] & real_E[None, :]
        own = tl.load(logits_ptr + token[:, None] * <experts> + expert[None, :], mask=real_TE, other=0.0).to(<math>)
        <routed>
        <scores>
        <choices_of>
        raw = taken(scores, ids, expert, choice, <choices>)
        <weights>
        <valid>
        at = token[:, None] * <choices> + choice[None, :]
        real_TK = real_T[:, None] & real_K[None, :]
        tl.store(weights_ptr + at, raw, mask=real_TK)
        tl.store(ids_ptr + at, ids.to(tl.int64), mask=real_TK)
        <counting>
    <end>
'''


@cache
def source(r: Router) -> str:
    """The text of the kernel."""
    s = r.spec
    lowest = str(torch.finfo(accumulator(r.dtype)).min)
    weights = text.weights(s, "raw")
    if s.normalize and s.top_k > 1:
        weights.append("raw = raw / total")
    weights.append(f"raw = raw * {float(s.scaling)}")
    valid = [
        "valid = tl.load(valid_ptr + token, mask=real_T, other=0) != 0",
        "raw = tl.where(valid[:, None], raw, 0.0)",
        "ids = tl.where(valid[:, None], ids, -1)",
    ]
    return fill(
        TEMPLATE, spec=s.text().replace('"', "'"), functions=text.functions(s, False), tile=r.tile, steps=r.steps,
        experts=s.num_experts, experts_pad=pad(s.num_experts), choices=s.top_k, choices_pad=pad(s.top_k),
        math=computing(r.dtype), routed=text.routed(s), scores=text.scores(s, "z", "scores"),
        choices_of=[line.replace("<lowest>", lowest) for line in text.choices(s, r.biased)],
        weights=weights, valid=valid if r.padded else [], counting=_counting(r) if r.counted else [],
        start=_start(r) if r.counted else [], end=_end(r) if r.counted else [],
    )  # fmt: skip


def _start(r: Router) -> list[str]:
    numbers, vector = ("tokens", "padding"), f"tl.zeros(({pad(r.spec.num_experts)},), "
    lines = [f"entropies = tl.zeros((), {computing(r.dtype)})", *(f"{n} = tl.zeros((), tl.int32)" for n in numbers)]
    lines.append(f"chosen = {vector}tl.int32)")
    if r.balanced:
        lines += [f"probabilities = {vector}{computing(r.dtype)})", f"likely = {vector}tl.int32)"]
    return lines


def _counting(r: Router) -> list[str]:
    s = r.spec
    lines = ["of = real_T"]
    if r.some:
        lines = ["of = real_T & (tl.load(counted_ptr + token, mask=real_T, other=0) != 0)"]
    lines += ["own_scores = scores"] if s.force is None else text.scores(s, "own", "own_scores")
    lines += text.probabilities(s, "own_scores", "p")
    tiny = torch.finfo(accumulator(r.dtype)).tiny
    lines += [
        f"entropy = -tl.sum(tl.where(real_E[None, :], p * tl.log(tl.maximum(p, {tiny})), 0.0), 1)",
        "entropies += tl.sum(tl.where(of, entropy, 0.0), 0)",
        f"hot = real_TE & ~free & {'(of & valid)' if r.padded else 'of'}[:, None]",
        "chosen += tl.sum(tl.where(hot, 1, 0), 0)",
        "tokens += tl.sum(tl.where(of, 1, 0), 0)",
    ]
    if r.padded:
        lines.append(f"padding += tl.sum(tl.where(of & ~valid, {s.top_k}, 0), 0)")
    if not r.balanced:
        return lines
    lines.append("probabilities += tl.sum(tl.where(of[:, None], p, 0.0), 0)")
    if not balance_choices_are_routes(s, r.biased, r.padded):
        lines += [
            'by = tl.where(p == p, p, float("inf"))',
            f"_, free = best(by, real_TE, expert, choice, {s.top_k})",
            "hot = real_TE & ~free & of[:, None]",
        ]
    return [*lines, "likely += tl.sum(tl.where(hot, 1, 0), 0)"]


def _end(r: Router) -> list[str]:
    (of_sums, of_counts), E = r.widths, r.spec.num_experts
    lines = [
        f"sums_ptr += program * {of_sums}",
        f"counts_ptr += program * {of_counts}",
        "tl.store(sums_ptr, entropies)",
        "tl.store(counts_ptr + expert, chosen, mask=real_E)",
        f"tl.store(counts_ptr + {E}, padding)",
        f"tl.store(counts_ptr + {E + 1}, tokens)",
    ]
    if not r.balanced:
        return lines
    return [
        *lines,
        "tl.store(sums_ptr + 1 + expert, probabilities, mask=real_E)",
        f"tl.store(counts_ptr + {E + 2} + expert, likely, mask=real_E)",
    ]


@cache
def kernel(r: Router) -> Any:
    return load(source(r), "router").router


def launch(
    r: Router, logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, token_T: Tensor | None,
    counted_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``(weights_TK, ids_TK, sums, counts)`` before any capacity; the last two are empty where nothing is counted."""
    T, K = logits_TE.shape[0], r.spec.top_k
    programs = -(-T // (r.tile * r.steps))
    weights_TK = logits_TE.new_empty((T, K), dtype=accumulator(logits_TE.dtype))
    ids_TK = logits_TE.new_empty((T, K), dtype=torch.int64)
    of_sums, of_counts = r.widths
    sums = weights_TK.new_empty((programs if r.counted else 0, of_sums))
    counts = ids_TK.new_empty((programs if r.counted else 0, of_counts), dtype=torch.int32)
    if T:
        given = (given_or(x, ids_TK) for x in (bias_E, mask(valid_T), token_T, mask(counted_T)))
        out = (weights_TK, ids_TK, sums, counts)
        kernel(r)[(programs,)](logits_TE.contiguous(), *given, *out, T, num_warps=4)
    return weights_TK, ids_TK, sums, counts


def mask(x: Tensor | None) -> Tensor | None:
    """Bools as bytes."""
    return None if x is None else x.contiguous().view(torch.uint8)


def given_or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is not read, for what is not given."""
    return other if x is None else x.contiguous()


def route(
    logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, token_T: Tensor | None, spec: str
) -> tuple[Tensor, Tensor]:
    """``moec::route``."""
    s = RouteSpec.parse(spec)
    route_op.check(logits_TE, bias_E, valid_T, token_T, s)
    r = Router(s, logits_TE.dtype, bias_E is not None, valid_T is not None)
    weights_TK, ids_TK, _, _ = launch(r, logits_TE, bias_E, valid_T, token_T, None)
    return with_capacity(weights_TK, ids_TK, s)


def with_capacity(weights_TK: Tensor, ids_TK: Tensor, s: RouteSpec) -> tuple[Tensor, Tensor]:
    if s.capacity_factor is None:
        return weights_TK, ids_TK
    gone_TK = dropped(weights_TK, ids_TK, s)
    return weights_TK.masked_fill(gone_TK, 0), ids_TK.masked_fill(gone_TK, -1)


def counted(
    logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, token_T: Tensor | None, counted_T: Tensor | None,
    spec: str, balanced: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``moec::route_counted``."""
    s, E = RouteSpec.parse(spec), logits_TE.shape[1]
    route_op.check(logits_TE, bias_E, valid_T, token_T, s)
    given = (bias_E is not None, valid_T is not None, True, counted_T is not None, balanced)
    weights_TK, ids_TK, sums, counts = launch(
        Router(s, logits_TE.dtype, *given), logits_TE, bias_E, valid_T, token_T, counted_T
    )
    weights_TK, ids_TK = with_capacity(weights_TK, ids_TK, s)
    total, number = sums.double().sum(0), counts.sum(0)
    if s.capacity_factor is None:
        tally = torch.cat([number[: E + 2], total[:1]])
    else:  # counted anew, of what was kept
        tally = torch.cat([tally_op(ids_TK, None, None, counted_T, E, s.score), total[:1]])
    return weights_TK, ids_TK, tally, total[1:].to(sums.dtype), number[E + 2 :]


route_op.route.register_kernel("cuda")(route)
route_counted.register_kernel("cuda")(counted)
