"""Resharding: gathered parameters are not kept for the backward, but gathered again when it needs them.

Autograd saves tensors for the backward, whole parameters among them.  Around one run of a graph

    resharding = Resharding()
    with resharding.hooks():
        results = module(resharding, *operands)

every gather of the graph is followed by a call of ``gathered``, and

1. ``gathered`` notes the storage of the whole parameter, without keeping it alive, and how it was made;
2. a tensor that autograd saves and that lies in such a storage is replaced by a handle: where in it the tensor lay;
3. the first handle that a backward opens gathers what was gathered with that parameter again (as far as it is saved),
   the last one of each parameter lets go of it.

Backwards run the same nodes in the same order on every rank, so ranks gather in the same order.  Whoever changes a
saved tensor or a parameter between forward and backward is told so, as autograd does where there are no hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import MoecError
from .ops.convert import convert
from .ops.pack import flatten_shapes, pack, unpack

RESHARDING = "resharding"
"""Name of the placeholder of a graph that takes the ``Resharding`` of a run, or None."""

Runs = tuple[tuple[int, int], ...]


def gathered(
    resharding: Resharding | None, whole: Tensor, unit: str, local: Tensor, dim: int, size: int, group: str, runs: Runs
) -> Tensor:
    """``whole``, gathered from ``local`` by the collective ``unit``; without a ``resharding`` nothing else."""
    if resharding is not None:
        resharding.note(whole, unit, local.detach(), dim, size, group, runs)
    return whole


def unpadded(padded: Tensor, dim: int, runs: Runs) -> Tensor:
    """The runs (start, end) of ``dim`` side by side; a view if there is one run only, ``padded`` if there is none."""
    parts = [padded[(slice(None),) * dim + (slice(a, b),)] for a, b in runs]
    return padded if not parts else parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _as_bytes(x: Tensor) -> Tensor:
    """FP8 as bytes, which every backend knows; anything else as it is."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.is_floating_point() else x


@dataclass
class _Unit:
    """Parameters that one collective gathers, at first and again."""

    size: int
    group: str
    parameters: list[_Parameter] = field(default_factory=list)
    ready: dict[int, Tensor] = field(default_factory=dict)
    """Gathered and not yet fetched, by position."""

    def fetch(self, parameter: _Parameter) -> Tensor:
        if parameter.position not in self.ready:
            needed = [p for p in self.parameters if p.handles]
            self.ready = {p.position: x for p, x in zip(needed, self._gather(needed), strict=True)}
        return self.ready.pop(parameter.position)

    def _gather(self, needed: list[_Parameter]) -> list[Tensor]:
        parts = [_as_bytes(p.local) for p in needed]
        if len(parts) == 1:
            return [convert("s_to_r", parts[0], needed[0].dim, 0, self.size, self.group)]
        dims, shapes = [p.dim for p in needed], [list(p.local.shape) for p in needed]
        for shape, dim in zip(shapes, dims, strict=True):
            shape[dim] *= self.size
        flat = convert("s_to_r", pack(parts, 1, dims), 0, 0, self.size, self.group)
        return unpack(flat, self.size, dims, flatten_shapes(shapes))


@dataclass
class _Parameter:
    unit: _Unit
    position: int
    local: Tensor
    owner: Tensor
    """What the user holds and may change: of a DTensor's part only the DTensor counts versions."""
    version: int
    dim: int
    runs: Runs
    stride: tuple[int, ...]
    offset: int
    """How the whole lay in memory, which is how autograd reads it."""
    handles: int = 0
    """How many tensors autograd saves of it."""
    opened: int = 0
    whole: Tensor | None = None

    def open(self) -> Tensor:
        check_version(self.owner, self.version)
        whole = self.whole
        if whole is None:
            with torch.no_grad():
                whole = unpadded(self.unit.fetch(self), self.dim, self.runs)
                if whole.stride() != self.stride:  # gathered alone, a parameter may lie otherwise than among others
                    whole = whole.new_empty_strided(whole.shape, self.stride).copy_(whole)
                whole = whole.view(self.local.dtype)
        self.opened = (self.opened + 1) % self.handles
        self.whole = whole if self.opened else None
        return whole


@dataclass(frozen=True)
class _Handle:
    parameter: _Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Kept:
    """What autograd saves besides; its own check of versions is off where there are hooks."""

    tensor: Tensor
    version: int


class Resharding:
    """The gathers of one run of a graph.

    ``owners``: this rank's part of each parameter, and the parameter itself.
    """

    def __init__(self, owners: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._owners = {StorageWeakRef(local.untyped_storage()): owner for local, owner in owners}
        self._units: dict[str, _Unit] = {}
        self._parameters: dict[StorageWeakRef, _Parameter] = {}

    def hooks(self) -> AbstractContextManager:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def note(self, whole: Tensor, unit: str, local: Tensor, dim: int, size: int, group: str, runs: Runs) -> None:
        owner = self._owners.get(StorageWeakRef(local.untyped_storage()), local)  # a padded part is a copy
        of = self._units.setdefault(unit, _Unit(size, group))
        parameter = _Parameter(
            of, len(of.parameters), local, owner, owner._version, dim, runs, whole.stride(), int(whole.storage_offset())
        )
        of.parameters.append(parameter)
        self._parameters[StorageWeakRef(whole.untyped_storage())] = parameter

    def _pack(self, saved: Tensor) -> _Kept | _Handle:
        parameter = None
        if saved.layout == torch.strided:
            parameter = self._parameters.get(StorageWeakRef(saved.untyped_storage()))
        if parameter is None or saved.dtype != parameter.local.dtype:
            return _Kept(saved, saved._version)
        parameter.handles += 1
        return _Handle(parameter, saved.shape, saved.stride(), int(saved.storage_offset()))

    def _unpack(self, packed: _Kept | _Handle) -> Tensor:
        if isinstance(packed, _Handle):
            whole = packed.parameter.open()
            offset = packed.offset - packed.parameter.offset + int(whole.storage_offset())
            return whole.as_strided(packed.shape, packed.stride, offset)
        check_version(packed.tensor, packed.version)
        return packed.tensor


def check_version(tensor: Tensor, version: int) -> None:
    """Raise MoecError if ``tensor``, which a backward needs, is not what it was at ``version``."""
    if tensor._version != version:
        raise MoecError(
            f"a tensor of shape {tuple(tensor.shape)} that the gradient needs was changed between forward and backward",
            where="backward",
            way_out="call optimizer.step() after backward, and change no parameter or input in place before it",
        )
