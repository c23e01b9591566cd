"""Histories: what the FP8 recipe ``delayed`` remembers, and how a step adds to it.

Every weight that is read in FP8 has a buffer [3, 1 + H] (``passes/fp8_delayed.py``): the largest magnitudes of its
products' activations, of itself and of their gradients, column 0 of the step under way, the others of the H steps
before it, the newest first.

* A forward makes its scales from the steps *before* the one that it belongs to, so all micro-batches of an optimizer
  step have the same; evaluation makes them from the H newest steps.  Without any history scales are 1.
* Magnitudes arrive when a backward ends, all at once, as gradients of the histories: one reduction takes the maximum
  over all ranks, and only then is anything written.  So forwards change nothing, evaluation and recomputation neither,
  and every rank has the same history: that of one rank, whatever the plan.
* Which step a backward belongs to the accounts know (``Accounts.steps``).  The first of a step moves the columns on,
  later ones add to column 0.  A history that was loaded (or written by whoever) is complete: the next backward begins a
  column of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Histories:
    """Of one parallel module, on ``world`` ranks."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._step = -1
        """What column 0 is of."""
        self._written: tuple[tuple[int, int], ...] = ()
        """The buffers as they were left, by identity and version."""

    def enter(self, buffers: Mapping[str, Tensor], step: int, training: bool) -> dict[str, Tensor]:
        """What the graph reads, by the same names: histories whose column 0 does not count.

        In training with gradients enabled, what a backward gives them as gradients is recorded."""
        if not buffers:
            return {}
        histories = torch.stack(list(buffers.values()))
        if not (training and self._under_way(buffers, step)):
            histories = _moved_on(histories)
        values = list(histories.unbind())
        if training and torch.is_grad_enabled():
            leaves = [v.detach().requires_grad_() for v in values]
            values = list(_Noted.apply(lambda now: self._record(buffers, step, now), *leaves))
        return dict(zip(buffers, values, strict=True))

    def _under_way(self, buffers: Mapping[str, Tensor], step: int) -> bool:
        return step <= self._step and _versions(buffers) == self._written

    def _record(self, buffers: Mapping[str, Tensor], step: int, now: list[Tensor | None]) -> None:
        """``now``: a step's magnitudes [3] on this rank, or None of what the backward did not reach.  Collective."""
        histories = torch.stack(list(buffers.values()))
        zero = histories.new_zeros(histories.shape[1])
        found_N3 = torch.stack([zero if x is None else x for x in now])
        if self._world > 1:
            dist.all_reduce(found_N3, dist.ReduceOp.MAX)
        if self._under_way(buffers, step):
            found_N3 = torch.maximum(histories[:, :, 0], found_N3)
        else:
            histories = _moved_on(histories)
            self._step = step
        histories[:, :, 0] = found_N3
        for buffer, value in zip(buffers.values(), histories, strict=True):
            buffer.copy_(value)
        self._written = _versions(buffers)


def _moved_on(histories_N3H: Tensor) -> Tensor:
    """When a step begins."""
    return histories_N3H.roll(1, -1)


def _versions(buffers: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((id(b), b._version) for b in buffers.values())


class _Noted(torch.autograd.Function):
    """The identity, whose backward hands column 0 of the gradients on, once all of them have arrived."""

    @staticmethod
    def forward(ctx, record: Callable[[list[Tensor | None]], None], *histories: Tensor) -> tuple[Tensor, ...]:
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in histories)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.record([None if g is None else g[:, 0] for g in grads])
        return (None,) * (1 + len(grads))
