"""Fit: which ``RouteSpec``, if any, computes what a region computes.

Legend: T tokens, E experts, K choices.

1. The region runs on draws of logits [T, E] and vectors [E].  What it chose and weighed is laid out over experts
   (``mask_TE``, ``weights_TE``), so that the order of choices does not matter; the gradient of Σ weights · random
   shows what is detached.
2. Specs that choose as it does on the first draw, by score function, bias, groups and score of groups; their numbers
   are those that stand in the region.
3. Of these, raw or normalised, with the constant ratio as scaling, the ones that agree on all draws: the same experts
   for every token, weights to 1e-12 and gradients to 1e-11 of the largest.
4. No two specs that are tried are the same function, but one pair: where no bias and no sum over groups decides,
   ``softmax_post`` is ``softmax_pre`` normalised.  The one that is written as the model writes it is taken.

The reason why nothing fits names the nearest spec and how far off it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moec.passes.raise_router.region import MIN_TOKENS, Region, Unfit
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import GROUP_SCORES, SCORES, RouteSpec

WEIGHTS, GRADS = 1e-12, 1e-11
"""Tolerances in float64, relative; clean fits stay below 1e-14, an epsilon of 1e-9 that no spec has is above."""

DRAWS = ((1.5, 0.0, 0.3, 0.0), (1.0, -4.0, 0.02, -2.0), (4.0, 0.0, 1.0, 0.0), (0.1, 0.0, 0.1, 0.0))
"""Scale and shift of logits, scale and shift of vectors; the last is skewed: all tokens prefer the same experts.
Where a value is clamped or compared with a number beyond these, another draw goes that far."""


@dataclass(frozen=True)
class Fit:
    spec: RouteSpec
    bias: int | None
    """Which of the region's vectors is the selection bias."""
    in_order: bool
    """It hands over the choices of a token in the order of ``moec::route``."""


@dataclass(frozen=True)
class Seen:
    """One draw and what the region made of it."""

    logits_TE: Tensor
    vectors: tuple[Tensor, ...]
    ids_TK: Tensor
    mask_TE: Tensor
    weights_TE: Tensor
    cotangent_TE: Tensor
    grad_TE: Tensor


@dataclass(frozen=True, order=True)
class Distance:
    """How far a spec is from a region; ordered by what matters first."""

    chosen: float
    """Share of tokens with other experts."""
    weights: float
    grads: float

    @property
    def fits(self) -> bool:
        return self.chosen == 0 and self.weights <= WEIGHTS and self.grads <= GRADS

    def __str__(self) -> str:
        if self.chosen:
            return f"other experts for {self.chosen:.1%} of the tokens"
        if not self.weights <= WEIGHTS:
            return f"weights that differ by {self.weights:.2g} (relative)"
        return f"gradients that differ by {self.grads:.2g} (relative)"


def fit(region: Region) -> Fit:
    """Raises ``Unfit`` with the reason."""
    if problem := region.problem():
        raise Unfit(problem, (-1.0,))
    seen = observe(region)  # 1
    top_k = seen[0].ids_TK.shape[1]
    nearest: tuple[Distance, RouteSpec] | None = None
    fits: list[Fit] = []
    for base, bias in _selections(region, top_k):  # 2
        ids_TK, raw_TE = _route(base, bias, seen[0])
        if wrong := _share(ids_TK, seen[0]):
            distance, spec = Distance(wrong, math.inf, math.inf), base
            nearest = min(nearest or (distance, spec), (distance, spec), key=lambda x: x[0])
            continue
        for normalize in (False, True):  # 3
            if normalize and (top_k == 1 or base.score == "softmax_post" or _sums_to_one(base)):
                continue
            spec = replace(base, normalize=normalize)
            if normalize:
                _, raw_TE = _route(spec, bias, seen[0])
            spec = replace(spec, scaling=_scaling(raw_TE, seen[0]))
            distance = max(compare(spec, bias, s) for s in seen)
            nearest = min(nearest or (distance, spec), (distance, spec), key=lambda x: x[0])
            if distance.fits:
                in_order = all(torch.equal(_route(spec, bias, s)[0], s.ids_TK) for s in seen)
                fits.append(Fit(spec, bias, in_order and not region.unsorted()))
    if not fits:
        assert nearest is not None
        raise Unfit(
            f"the nearest spec, {nearest[1].text()}, has {nearest[0]}",
            (0.0, nearest[0].chosen, nearest[0].weights, nearest[0].grads),
        )
    return _as_written(fits, region)


def observe(region: Region) -> list[Seen]:
    """What the region makes of every draw.  Raises ``Unfit`` where it cannot run or chooses unlike any spec."""
    sizes, E = region.sizes(), region.num_experts
    shape = region.shape(sizes)
    T = math.prod(shape[:-1])
    generator = torch.Generator().manual_seed(4)
    seen = []
    draws = [*DRAWS, *((bound, 0.0, 0.1, 0.0) for bound in region.bounds())]
    for scale, shift, spread, offset in draws * max(1, -(-MIN_TOKENS // max(T, 1))):
        z_TE = torch.randn(T, E, generator=generator, dtype=torch.float64)
        if scale < 1:
            z_TE = 2 * torch.randn(E, generator=generator, dtype=torch.float64) + scale * z_TE
        else:
            z_TE = scale * z_TE + shift
        z_TE.requires_grad_()
        vectors = []
        for v in region.vectors:
            drawn = torch.randn(v.meta["val"].shape, generator=generator, dtype=torch.float64)
            vectors.append((offset + spread * drawn).requires_grad_())
        cotangent_TE = torch.randn(T, E, generator=generator, dtype=torch.float64)
        try:
            with torch.enable_grad():
                ids, weights = region.run(z_TE.reshape(shape), vectors, sizes)
            seen.append(_seen(z_TE, vectors, ids.reshape(T, -1), weights.reshape(T, -1), cotangent_TE))
        except Unfit:
            raise
        except Exception as e:
            raise Unfit(f"it does not run on drawn logits: {type(e).__name__}: {str(e).splitlines()[0]}", (2.0,)) from e
    return seen


def _seen(z_TE: Tensor, vectors: list[Tensor], ids_TK: Tensor, weights_TK: Tensor, cotangent_TE: Tensor) -> Seen:
    if ids_TK.shape != weights_TK.shape:
        raise Unfit(f"{ids_TK.shape[1]} experts and {weights_TK.shape[1]} weights a token", (2.0,))
    if bool((ids_TK < 0).any()):
        raise Unfit("how many experts a token takes depends on data", (-1.0,))
    mask_TE = torch.zeros_like(z_TE, dtype=torch.bool).scatter_(1, ids_TK, True)
    if not bool((mask_TE.sum(1) == ids_TK.shape[1]).all()):
        raise Unfit("a token takes one expert twice", (2.0,))
    grads: list[Tensor | None] = [None] * (1 + len(vectors))
    if weights_TK.requires_grad:
        total = (weights_TK * cotangent_TE.gather(1, ids_TK)).sum()
        grads = list(torch.autograd.grad(total, [z_TE, *vectors], allow_unused=True))
    if any(g is not None and bool(g.any()) for g in grads[1:]):
        raise Unfit("its weights depend on a vector [E]", (2.0,))
    grad_TE = torch.zeros_like(z_TE) if grads[0] is None else grads[0]
    weights_TE = torch.zeros_like(z_TE).scatter(1, ids_TK, weights_TK.detach())
    flat = tuple(v.detach().reshape(-1) for v in vectors)
    return Seen(z_TE.detach(), flat, ids_TK, mask_TE, weights_TE.detach(), cotangent_TE, grad_TE)


def compare(spec: RouteSpec, bias: int | None, seen: Seen) -> Distance:
    """``moec::route`` itself on what the region was given."""
    z_TE = seen.logits_TE.clone().requires_grad_()
    with torch.enable_grad():
        bias_E = None if bias is None else seen.vectors[bias]
        weights_TK, ids_TK = torch.ops.moec.route(z_TE, bias_E, None, None, spec.text())
        total = (weights_TK * seen.cotangent_TE.gather(1, ids_TK)).sum()
        (grad_TE,) = torch.autograd.grad(total, z_TE)
    if wrong := _share(ids_TK, seen):
        return Distance(wrong, math.inf, math.inf)
    weights_TE = torch.zeros_like(seen.weights_TE).scatter(1, ids_TK, weights_TK.detach())
    off_T = (weights_TE - seen.weights_TE).abs().amax(1) / seen.weights_TE.abs().amax(1).clamp_min(1e-300)
    off = float((grad_TE - seen.grad_TE).abs().max() / seen.grad_TE.abs().max().clamp_min(1e-300))
    return Distance(0.0, _finite(float(off_T.max())), _finite(off))


def _selections(region: Region, top_k: int) -> Iterator[tuple[RouteSpec, int | None]]:
    """What can choose, simple ones first; no two are the same function."""
    E = region.num_experts
    numbers = region.numbers()
    # A group's best expert is above all that its token drops if K groups or more are kept.
    groupings = [(1, 1, "max")] + [
        (groups, kept, group_score)
        for groups in sorted(n for n in numbers if 1 < n < E and E % n == 0)
        for kept in sorted(n for n in numbers if 1 <= n < groups)
        for group_score in GROUP_SCORES
        if not (group_score == "max" and kept >= top_k)
        and not (group_score == "topk" and top_k // kept in (1, 2))
    ]
    biases: list[int | None] = [None, *(range(len(region.vectors)) if top_k < E else ())]
    for groups, kept, group_score in groupings:
        for bias in biases:
            for score in SCORES:
                try:
                    spec = RouteSpec(E, top_k, score, groups=groups, kept_groups=kept, group_score=group_score)
                except MoecError:
                    continue  # has no meaning
                yield spec, bias


def _sums_to_one(spec: RouteSpec) -> bool:
    return spec.score == "softmax_pre" and spec.top_k == spec.num_experts


def _as_written(fits: list[Fit], region: Region) -> Fit:
    """4"""
    scores = {f.spec.score: f for f in fits}
    if len(fits) == 1:
        return fits[0]
    if len(fits) == 2 and set(scores) == {"softmax_pre", "softmax_post"}:
        widths = region.softmax_over()
        written = "softmax_post" if widths and region.num_experts not in widths else "softmax_pre"
        return scores[written]
    raise Unfit(f"several specs fit: {', '.join(f.spec.text() for f in fits)}", (1.0,))


def _route(spec: RouteSpec, bias: int | None, seen: Seen) -> tuple[Tensor, Tensor]:
    bias_E = None if bias is None else seen.vectors[bias]
    weights_TK, ids_TK = torch.ops.moec.route(seen.logits_TE, bias_E, None, None, spec.text())
    return ids_TK, torch.zeros_like(seen.logits_TE).scatter(1, ids_TK, weights_TK)


def _share(ids_TK: Tensor, seen: Seen) -> float:
    """Share of tokens whose experts are others."""
    return float((~seen.mask_TE.gather(1, ids_TK).all(1)).double().mean())


def _scaling(raw_TE: Tensor, seen: Seen) -> float:
    """The ratio of what is and what a spec without scaling makes of it: the shortest number that says it.  1 where it
    is none."""
    ratios = seen.weights_TE[seen.mask_TE] / raw_TE[seen.mask_TE]
    ratio = float(ratios.median())
    if not math.isfinite(ratio) or ratio == 0 or not float((ratios / ratio - 1).abs().max()) < 1e-9:
        return 1.0
    short = (float(f"{ratio:.{digits}g}") for digits in range(1, 17))
    return next((x for x in short if abs(x - ratio) <= 1e-14 * abs(ratio)), ratio)


def _finite(x: float) -> float:
    return math.inf if x != x else x
