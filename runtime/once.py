"""What is computed of parameters once an optimizer step, not once in every forward: FP8 weights.

A graph is cut in two (``passes/once.py``): one computes FP8 numbers and scales of parameters, collectives for their
largest magnitudes included; the other reads them.  ``Once`` keeps what the first one made for as long as no parameter
changed, by the rules of ``narrow.py``: the same tensors, in the same memory, at the same versions, and no step of any
optimizer.  Ranks make it anew together, or collectives would not meet: whoever runs the graph asks all of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .ops.convert import convert
from .optimizer_steps import hear_steps

ONCE = "once"
"""Name of the placeholder of a graph that takes a tuple: what the other graph made."""

Source = tuple[Tensor, Tensor]
"""A parameter, and this rank's part of it, detached: a tensor of its own, which shows what memory was read."""


class Once:
    def __init__(self) -> None:
        self._made: tuple[Tensor, ...] = ()
        self._of: tuple[str, list[tuple[Tensor, Tensor, tuple[int, int]]]] | None = None
        self.runs = 0
        """How often it was made."""
        hear_steps(self)

    def expire(self) -> None:
        """Every parameter may have changed."""
        self._of = None

    def current(self, graph: str, sources: Sequence[Source]) -> bool:
        """Is what is there that of this graph and of these parameters as they are now?"""
        if self._of is None or self._of[0] != graph or len(self._of[1]) != len(sources):
            return False
        return all(
            owner is known and part.data_ptr() == was.data_ptr() and part.shape == was.shape
            and part.device == was.device and versions == (owner._version, part._version)
            for (owner, part), (known, was, versions) in zip(sources, self._of[1], strict=True)
        )  # fmt: skip

    def get(self, graph: str, sources: Sequence[Source], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if not self.current(graph, sources):
            self._made, self._of = (), None  # let go of the old ones first
            with torch.inference_mode(False), torch.no_grad():  # they serve with and without gradients
                self._made = make()
            self._of = graph, [(owner, part, (owner._version, part._version)) for owner, part in sources]
            self.runs += 1
        return self._made


def maxima(xs: Sequence[Tensor], size: int, group: str) -> list[Tensor]:
    """The largest numbers over the ranks of ``group``, of all tensors by one collective."""
    flat = convert("m_to_i", torch.cat([x.reshape(-1) for x in xs]), 0, 0, size, group)
    return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in xs]), xs, strict=True)]


def carrier(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x``'s shape in ``dtype`` without memory; its gradient is that of ``x``."""
    return _Carrier.apply(x, dtype)


class _Carrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.new_zeros((), dtype=dtype).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
