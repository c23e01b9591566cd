"""GradEpilogue: one autograd node through which all parameters enter the graph, and all gradients leave it.

Forward hands the graph this rank's part of every trainable parameter (padded, where FSDP cut it into unequal parts).
The graph's backward yields, for each of them, the gradient that *this rank's* work gives.  Autograd runs a node's
backward once every use of its outputs has been heard, so this node sees all gradients of a step together, after the
last of them: an epilogue.  It sums each over the group that ``program.grad_reductions`` names, one all-reduce for each
(group, dtype), and returns DTensors with the parameters' own placements.  Accumulation is autograd's own: every
backward call adds a finished gradient.

A parameter that nothing used gets None, as in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moec.runtime.groups import Groups
from moec.runtime.torch_compat import local_of


@dataclass(frozen=True)
class Reduction:
    """One parameter's way in (its part as the graph takes it) and its gradient's way out: summed over the group ``key``
    (empty: not at all), then wrapped."""

    key: str
    unwrap: Callable[[Tensor], Tensor]
    wrap: Callable[[Tensor], Tensor]


def enter(params: list[Tensor], reductions: list[Reduction], groups: Groups | None) -> list[Tensor]:
    """Local tensors of ``params`` whose gradients arrive reduced; the order is that of the buckets on every rank."""
    if not params:
        return []
    return list(_GradEpilogue.apply(reductions, groups, *params))


def to_local(param: Tensor) -> Tensor:
    """This rank's part, without gradient; shares memory."""
    return local_of(param).detach()


class _GradEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reductions: list[Reduction], groups: Groups | None, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.reductions, ctx.groups = reductions, groups
        ctx.set_materialize_grads(False)
        return tuple(r.unwrap(p) for r, p in zip(reductions, params, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        summed = list(grads)
        buckets: dict[tuple[str, torch.dtype], dict[int, Tensor]] = {}
        for i, (r, g) in enumerate(zip(ctx.reductions, grads, strict=True)):
            if g is not None and r.key:
                buckets.setdefault((r.key, g.dtype), {})[i] = g
        for (key, _), members in buckets.items():
            for i, g in zip(members, _sum(list(members.values()), key, ctx.groups), strict=True):
                summed[i] = g
        out = [None if g is None else r.wrap(g.contiguous()) for r, g in zip(ctx.reductions, summed, strict=True)]
        return (None, None, *out)


def _sum(grads: list[Tensor], key: str, groups: Groups) -> list[Tensor]:
    """All-reduce of one bucket; the results are views of it."""
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=groups.group(key))
    return [part.view(g.shape) for part, g in zip(flat.split([g.numel() for g in grads]), grads, strict=True)]
