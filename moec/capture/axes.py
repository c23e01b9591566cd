"""Axes: which axis of a value counts features, and how the same rows lie in another shape.

Experts may be written for the rows of one expert ``[n, H]``, for all tokens ``[T, E, H]``, for pairs ``[T, K, H]``, for
padded slots ``[E, C, H]``.  In each of them one axis counts features and all others count rows.  A body is replayed on
N rows in a shape of the *same rank*: the feature axis where it was, N on the first of the others, 1 on the rest.  So
steps that name an axis, or broadcast, or cut the features, run as they were written.

How a step moves axes is not read off its name but off numbers: its operand is filled with a vector that varies along
one axis only, and the axis along which the result varies is the new one (``follow``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .observe import Call, Tape
from .owners import walk
from .steps import substitute


@dataclass(frozen=True)
class Layout:
    """Of a value whose axes other than ``feature`` all count rows."""

    rank: int
    feature: int

    def aligned(self, rank: int) -> Layout:
        """The layout of that rank that broadcasts against this one."""
        return Layout(rank, self.feature - self.rank + rank)


def spread(rows_NF: Tensor, layout: Layout) -> Tensor:
    """``[N, F]`` in a shape of that rank: features on their axis, N on the first other, 1 on the rest."""
    if (layout.rank, layout.feature) == (2, 1):
        return rows_NF
    shape = [1] * layout.rank
    shape[1 if layout.feature == 0 else 0] = -1
    shape[layout.feature] = rows_NF.shape[1]
    return (rows_NF.t() if layout.feature == 0 else rows_NF).reshape(shape)


def rows_of(value: Tensor, feature: int) -> Tensor:
    """``[N, F]``: the rows of a value, in order of its other axes."""
    if (value.dim(), feature) == (2, 1):
        return value
    return value.movedim(feature, -1).reshape(-1, value.shape[feature])


@dataclass(frozen=True)
class Followed:
    """Where the axis went in one result: ``axis`` is None when it is gone or cannot be told; ``kept`` says which of its
    entries the result has, in order, or is None when they were computed with."""

    axis: int | None
    kept: slice | int | None
    size: int

    @property
    def whole(self) -> bool:
        return isinstance(self.kept, slice) and self.kept == slice(0, self.size, 1)


def follow(tape: Tape, call: Call, axes: dict[int, int], ones: Sequence[int] = ()) -> list[Followed]:
    """Where the step takes ``axes`` (operand -> its axis), one answer for every tensor that it makes.

    Operands in ``ones`` are replaced by ones, all others keep their recorded values.
    """
    env: dict[int, Any] = {v: tape.values[v] for v in call.reads}
    first: Tensor | None = None
    for i, v in enumerate(dict.fromkeys(axes)):
        shape = tape.held(v).shape
        tag = _vector(shape[axes[v]]).roll(i)
        first = tag if first is None else first
        view = [1] * len(shape)
        view[axes[v]] = -1
        env[v] = tag.view(view).expand(shape)
        if call.overwrites:
            env[v] = env[v].clone()
    for v in ones:
        env[v] = torch.ones_like(tape.held(v), dtype=torch.float32)
    args, kwargs = substitute(call, env)
    made = list(walk(call.func(*args, **kwargs)))
    assert first is not None
    return [_followed(t, first if len(axes) == 1 else None, first.shape[0]) for t in made]


def _vector(size: int) -> Tensor:
    """Distinct entries of both signs, 0.1 to 10,000: no activation, clamp or norm leaves all of them as they are."""
    return torch.logspace(-1, 4, size) * (1 - 2 * (torch.arange(size) % 2))


def _followed(t: Tensor, tag: Tensor | None, size: int) -> Followed:
    t = t.nan_to_num() if t.is_floating_point() else t
    varying = [a for a in range(t.dim()) if any(bool((_line(t, a, c) != _line(t, a, c)[0]).any()) for c in (0, -1))]
    if len(varying) > 1 or not t.numel():
        return Followed(None, None, size)
    if not varying:
        at = (tag == t.flatten()[0]).nonzero().flatten().tolist() if tag is not None else []
        return Followed(None, at[0] if len(at) == 1 else None, size)
    return Followed(varying[0], _kept(_line(t, varying[0], 0), tag), size)


def _line(t: Tensor, axis: int, corner: int) -> Tensor:
    index: list[slice | int] = [corner] * t.dim()
    index[axis] = slice(None)
    return t[tuple(index)]


def _kept(line: Tensor, tag: Tensor | None) -> slice | None:
    if tag is None:
        return None
    entries = {x: i for i, x in enumerate(tag.tolist())}
    where = [entries.get(x, -1) for x in line.tolist()]
    if min(where) < 0:
        return None
    step = where[1] - where[0] if len(where) > 1 else 1
    found = slice(where[0], where[0] + step * (len(where) - 1) + 1, step)
    return found if step > 0 and list(range(*found.indices(len(tag)))) == where else None
