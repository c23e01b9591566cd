"""Narrow copies of parameters: cast once after every change of a parameter, not once in every forward.

A graph reads a bf16 copy of an fp32 parameter through ``narrow(copies, x, name, dtype)``, where ``x`` is the parameter
(this rank's part), ``copies`` what ``NarrowCopies`` holds, and the gradient of the copy is widened for ``x``.

A copy is current as long as the parameter is the same tensor, in the same memory, at the same version, and no optimizer
made a step: PyTorch counts a version up with every change in place (``copy_``, ``load_state_dict``), but fused and
foreach optimizers change parameters behind it, so every step of any ``torch.optim.Optimizer`` is heard.  What bypasses
both, a write to ``parameter.data``, is not seen: write to the parameter under ``torch.no_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .optimizer_steps import hear_steps

NARROW = "narrow"
"""Name of the placeholder of a graph that takes the copies of a run, by parameter placeholder."""


def narrow_copy(name: str) -> str:
    """How scheduled graphs call the copy of the parameter whose placeholder is ``name``."""
    return f"{NARROW}_{name}"


def narrow(copies: Mapping[str, Tensor] | None, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``: the copy of that name, or one made now where there are no ``copies``."""
    return x.to(dtype) if copies is None else _Narrow.apply(x, copies[name])


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


@dataclass(frozen=True)
class _Made:
    """A copy, and what it was made of; ``part`` keeps that memory from being given to another tensor."""

    copy: Tensor
    owner: Tensor
    part: Tensor
    versions: tuple[int, int]

    def current(self, owner: Tensor, part: Tensor) -> bool:
        same = self.owner is owner and self.part.data_ptr() == part.data_ptr() and self.part.shape == part.shape
        return same and self.part.device == part.device and self.versions == (owner._version, part._version)


class NarrowCopies:
    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}
        self._stale: set[str] = set()
        self.casts = 0
        """How many parameters were cast so far."""
        hear_steps(self)

    def expire(self) -> None:
        """Every parameter may have changed."""
        self._stale = set(self._made)

    def copy(self, name: str, owner: Tensor, part: Tensor, enter: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
        """The copy of ``enter()``, the form in which a graph takes ``part``, this rank's part of the parameter
        ``owner``.  (A change of a DTensor counts its own version, one of its part that of the part.)"""
        known = self._made.get(name)
        if name in self._stale or known is None or known.copy.dtype != dtype or not known.current(owner, part):
            self._stale.discard(name)
            with torch.inference_mode(False), torch.no_grad():  # a copy serves with and without gradients
                made = enter().to(dtype)
            known = self._made[name] = _Made(made, owner, part, (owner._version, part._version))
            self.casts += 1
        return known.copy
