"""What the router's kernels share: Triton functions, and the lines that a ``RouteSpec`` asks for.

Legend: T tokens of a program, E experts, K choices, G groups, X any of them; E, K and G rounded up to powers of two.

Where lines are put, the kernel has ``expert``, ``choice`` and ``token`` (numbers), ``real_T``, ``real_E``, ``real_TE``
(which of them exist) and ``own`` (the logits, widened).  ``runtime/route_spec.py`` and ``runtime/ops/route.py`` say
what is computed; of equal scores the lowest index wins here too.
"""

from __future__ import annotations

from ..ops.scores import EPSILON, SMALL
from ..route_spec import RouteSpec

LOW = 0xFFFFFFFF

FUNCTIONS = '''
@triton.jit
def best(by, free, index, slot, count: tl.constexpr):
    """[T, K]: where the largest of ``by`` [T, X] that are free lie, falling, of equal ones the lowest first; and what
    stays free."""
    ids = tl.zeros((by.shape[0], slot.shape[0]), tl.int32)
    for k in range(count):
        left = tl.where(free, by, float("-inf"))
        found = free & (left == tl.max(left, 1)[:, None])
        at = tl.min(tl.where(found, index[None, :], by.shape[1]), 1)
        free = free & (index[None, :] != at[:, None])
        ids = tl.where(slot[None, :] == k, at[:, None], ids)
    return ids, free


@triton.jit
def taken(values, ids, index, slot, count: tl.constexpr):
    """[T, K]: ``values`` [T, X] at ``ids``; 0 behind the last."""
    out = tl.zeros((values.shape[0], slot.shape[0]), values.dtype)
    for k in range(count):
        here = index[None, :] == tl.sum(tl.where(slot[None, :] == k, ids, 0), 1)[:, None]
        out = tl.where(slot[None, :] == k, tl.sum(tl.where(here, values, 0.0), 1)[:, None], out)
    return out
'''

SPREAD = '''
@triton.jit
def spread(values, ids, index, slot, count: tl.constexpr):
    """[T, X]: ``values`` [T, K] put to ``ids``, which are distinct; 0 elsewhere."""
    out = tl.zeros((values.shape[0], index.shape[0]), values.dtype)
    for k in range(count):
        here = index[None, :] == tl.sum(tl.where(slot[None, :] == k, ids, 0), 1)[:, None]
        out = tl.where(here, tl.sum(tl.where(slot[None, :] == k, values, 0.0), 1)[:, None], out)
    return out
'''

GROUPS = '''
@triton.jit
def group_scores(by, real, index, group, groups: tl.constexpr, size: tl.constexpr, summed: tl.constexpr):
    """[T, G]: the sum of each group's best, the largest first."""
    out = tl.full((by.shape[0], group.shape[0]), float("-inf"), by.dtype)
    for g in range(groups):
        free = real & (index[None, :] // size == g)
        total = tl.zeros((by.shape[0],), by.dtype)
        for _ in range(summed):
            left = tl.where(free, by, float("-inf"))
            top = tl.max(left, 1)
            at = tl.min(tl.where(free & (left == top[:, None]), index[None, :], by.shape[1]), 1)
            free = free & (index[None, :] != at[:, None])
            total += top
        total = tl.where(total == total, total, float("inf"))
        out = tl.where(group[None, :] == g, total[:, None], out)
    return out


@triton.jit
def members(ids, index, slot, size: tl.constexpr, count: tl.constexpr):
    """[T, X]: whether an expert's group is among ``ids`` [T, G]."""
    out = tl.zeros((ids.shape[0], index.shape[0]), tl.int32)
    for k in range(count):
        g = tl.sum(tl.where(slot[None, :] == k, ids, 0), 1)
        out = tl.where(index[None, :] // size == g[:, None], 1, out)
    return out != 0
'''

MIX = '''
@triton.jit
def mix(h):
    """murmur3's finaliser: 32 bits, kept in 64."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)
'''

SOFTPLUS = '''
@triton.jit
def softplus(z):
    """log(1 + exp(z)), where 1 + exp(z) alone would lose the last bits of exp(z) (Kahan); z itself above 20."""
    u = tl.exp(tl.minimum(z, 20.0))
    w = 1.0 + u
    small = w == 1.0
    return tl.where(z > 20.0, z, tl.where(small, u, tl.log(w) * (u / tl.where(small, 1.0, w - 1.0))))
'''


def functions(s: RouteSpec, backward: bool) -> list[str]:
    """The Triton functions that a kernel needs, with two empty lines behind each."""
    text = FUNCTIONS + (SPREAD if backward else "") + (GROUPS if s.groups > 1 else "")
    text += (MIX if s.force == "random" else "") + (SOFTPLUS if s.score == "sqrtsoftplus" else "")
    return [*text.strip("\n").replace("\n\n@", "\n\n\n@").replace("\n\n\n\n@", "\n\n\n@").splitlines(), "", ""]


def routed(s: RouteSpec) -> list[str]:
    """``z``: the logits that are routed."""
    if s.force is None:
        return ["z = own"]
    number = "number = tl.load(token_ptr + token, mask=real_T, other=0)"
    if s.force == "round_robin":
        return [number, "z = tl.zeros_like(own)"]
    return [
        number,
        f"h = mix((number & {LOW}) ^ {_mixed(s.seed * 0x9E3779B9 + 1)})",
        f"h = mix(h ^ ((number >> 32) & {LOW}))",
        "h = mix(h[:, None] ^ mix(expert.to(tl.int64) + 1)[None, :]) >> 8",
        "z = h.to(own.dtype) * (2.0 ** -23) - 1.0",
    ]


def scores(s: RouteSpec, z: str, name: str) -> list[str]:
    """``name``: the scores of the logits ``z``."""
    if s.score == "softmax_pre":
        return softmax(z, name, "real_E")
    if s.score == "softmax_post":
        return [f"{name} = {z}"]
    formula = f"1.0 / (1.0 + tl.exp(-{z}))"
    if s.score == "sqrtsoftplus":
        formula = f"tl.where({z} < {SMALL}, tl.exp({z} / 2), tl.sqrt(softplus({z})))"
    return [f"{name} = tl.where(real_E[None, :], {formula}, 0.0)"]


def slope(s: RouteSpec, z: str, of: str) -> str:
    """The derivative of a score ``of`` its logit, where it depends on no other."""
    if s.score == "sigmoid":
        return f"({of} * (1.0 - {of}))"
    if s.score == "sqrtsoftplus":
        inner = f"tl.where({z} > 20.0, 1.0, 1.0 / (1.0 + tl.exp(-{z})))"
        divisor = f"tl.where({of} > 0.0, 2 * {of}, 1.0)"  # no expert, no score
        return f"tl.where({z} < {SMALL}, {of} / 2, {inner} / {divisor})"
    return "1.0"


def softmax(z: str, name: str, real: str) -> list[str]:
    """``name``: softmax over the last dim, of what is ``real``."""
    return [
        f'{name} = tl.where({real}[None, :], {z}, float("-inf"))',
        f"{name} = tl.exp({name} - tl.max({name}, 1)[:, None])",
        f"{name} = {name} / tl.sum({name}, 1)[:, None]",
    ]


def probabilities(s: RouteSpec, of: str, name: str) -> list[str]:
    """``name``: what ``moec::balance`` sums, from the scores ``of``."""
    if s.score == "softmax_post":
        return softmax(of, name, "real_E")
    if s.score == "softmax_pre":
        return [f"{name} = {of}"]
    return [f"{name} = {of} / (tl.sum({of}, 1)[:, None] + {EPSILON})"]


def choices(s: RouteSpec, biased: bool) -> list[str]:
    """``ids`` [T, K]; ``free`` [T, E], what was not chosen."""
    E, K, G = s.num_experts, s.top_k, s.groups
    if s.force == "round_robin":
        return [
            f"first = (number % {E} * {K} % {E}).to(tl.int32)[:, None]",
            f"past = tl.maximum(first + {K - E}, 0)",  # how many go past the last expert, to the first ones
            "ids = tl.where(choice[None, :] < past, choice[None, :], first - past + choice[None, :])",
            "free = real_TE",
            f"for k in range({K}):",
            "    free = free & (expert[None, :] != tl.sum(tl.where(choice[None, :] == k, ids, 0), 1)[:, None])",
        ]
    lines = ["by = scores"]
    if biased:
        lines = ["by = scores + tl.load(bias_ptr + expert, mask=real_E, other=0.0).to(scores.dtype)[None, :]"]
    lines.append('by = tl.where(by == by, by, float("inf"))  # NaN is above everything')
    if G > 1:
        summed = {"max": 1, "top2": 2, "topk": K // s.kept_groups}[s.group_score]
        lines += [
            f"group = tl.arange(0, {pad(G)})",
            f"kept = group_scores(by, real_TE, expert, group, {G}, {E // G}, {summed})",
            f"kept, _ = best(kept, real_T[:, None] & (group < {G})[None, :], group, group, {s.kept_groups})",
            f"kept = members(kept, expert, group, {E // G}, {s.kept_groups})",
            # The worst that a kept expert can score is still above -inf.
            "by = tl.where(kept, tl.maximum(by, <lowest>), float(\"-inf\"))",
        ]
    return [*lines, f"ids, free = best(by, real_TE, expert, choice, {K})"]


def weights(s: RouteSpec, raw: str) -> list[str]:
    """``raw`` [T, K] (the chosen scores, then what the weights are made of), in place; and ``total`` [T, 1]."""
    lines = softmax(raw, raw, "real_K") if s.score == "softmax_post" else []
    if s.normalize and s.top_k > 1:
        lines.append(f"total = tl.sum({raw}, 1)[:, None] + {EPSILON}")
    return lines


def pad(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _mixed(h: int) -> int:
    h &= LOW
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & LOW
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & LOW
    return h ^ (h >> 16)
