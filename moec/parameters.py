"""Parameters: those of a compiled program as a tree of modules with the model's own names.

Each parameter and buffer is a ``Slot``: where it lives in the tree, and how it lies on the ranks.  With several ranks
parameters are DTensors on one device mesh and hold this rank's part; with one rank they are plain tensors.  Values are
copied from the source model, tied ones once; what a pass added (an expert bias, running counts) is made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moec import shards
from moec.accounts import AUX_COUNTS
from moec.epilogue import to_local
from moec.placement import Types, local_shape, show
from moec.preflight import require_same
from moec.program import ParamSpec, Program
from moec.runtime.errors import MoecError
from moec.runtime.groups import Groups
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import placed_like
from moec.tree import container, initial, named_tensors, unused


@dataclass
class Slot:
    """Where one parameter or buffer lives in the module tree, and how it is laid out."""

    name: str
    home: nn.Module
    attribute: str
    spec: ParamSpec
    types: Types
    largest: tuple[int, ...]
    """Shape of the largest part of any rank, which graphs are given."""
    own: tuple[int, ...]
    """Shape of this rank's part."""

    @property
    def value(self) -> Tensor:
        found = self.home._parameters.get(self.attribute)  # what ``getattr`` of a module finds last
        return getattr(self.home, self.attribute) if found is None else found

    @property
    def running(self) -> bool:
        """Does it hold the running counts of a global balancing loss?"""
        return self.spec.initial is not None and self.attribute == AUX_COUNTS


class Parameters(nn.Module):
    """``ParallelModule`` is one that runs programs.

    Args:
        mesh: of the program.
        groups: process groups of the mesh; None with one rank.
        rank: of this process.
    """

    def __init__(self, mesh: Mesh, groups: Groups | None, rank: int) -> None:
        super().__init__()
        self._mesh, self._groups, self._rank = mesh, groups, rank
        self._slots: dict[str, Slot] = {}
        self._names: dict[str, tuple[str, int | None]] = {}
        """Name in the source model -> name of the slot, and which of its members it is."""
        self.register_state_dict_post_hook(_state_dict_hook)

    def _build_tree(self, source: nn.Module, program: Program) -> None:
        specs = {name: spec for spec in program.params.values() for name in (spec.name, *spec.aliases)}
        specs |= {m: spec for spec in program.params.values() for m in spec.members}
        tensors = {name: tensor for name, tensor, _ in named_tensors(source)}
        made: dict[int, nn.Parameter] = {}  # id of the source's tensor or of the spec -> parameter, so ties stay tied
        for name, tensor, persistent in named_tensors(source):
            spec = specs.get(name) or unused(name, tensor, persistent)
            member = spec.members.index(name) if name in spec.members else None
            own = spec.name if member is not None else name
            if persistent:
                self._names[name] = (own, member)
            if own in self._slots:
                continue
            shards.check_types(own, spec.shape, spec.types, self._mesh)
            home, attribute = container(self, own)
            tie = id(spec) if spec.placeholder else id(tensor)
            full = torch.stack([tensors[m].detach() for m in spec.members]) if spec.members else tensor.detach()
            if isinstance(tensor, nn.Parameter):
                if tie not in made:
                    made[tie] = self._parameter(full, spec)
                home.register_parameter(attribute, made[tie])
            elif shards.sharding(spec.types, self._mesh):
                raise MoecError(f"a buffer cannot be sharded ({show(spec.types)})", where=own)
            else:
                home.register_buffer(attribute, full.clone(), persistent=persistent)
            self._slots[own] = self._slot(own, home, attribute, spec)
        for spec in program.params.values():
            if spec.initial is not None:
                home, attribute = container(self, spec.name)
                device = next(iter(self._slots.values())).value.device
                home.register_buffer(attribute, initial(spec, device), persistent=spec.persistent)
                self._slots[spec.name] = self._slot(spec.name, home, attribute, spec)
                if spec.persistent:
                    self._names[spec.name] = (spec.name, None)
        missing = sorted({s.name for s in program.params.values()} - self._slots.keys())
        if missing:
            raise MoecError(f"the program has parameters that the model lacks: {', '.join(missing)}", where="model")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Casts and moves.  Buffers that a pass made keep their dtype: in bfloat16 an expert bias would stand still."""
        made = {s.name: s.value for s in self._slots.values() if s.spec.initial is not None}
        super()._apply(fn, recurse)
        for name, value in made.items():
            slot, device = self._slots[name], self._slots[name].value.device
            anew = value.is_meta and device.type != "meta"
            setattr(slot.home, slot.attribute, initial(slot.spec, device) if anew else value.to(device))
        return self

    def _parameter(self, full: Tensor, spec: ParamSpec) -> nn.Parameter:
        if tuple(full.shape) != tuple(spec.shape):
            raise MoecError(f"shape {tuple(full.shape)}, the program has {tuple(spec.shape)}", where=spec.name)
        if self._mesh.world == 1:
            return nn.Parameter(full.clone(), requires_grad=spec.requires_grad)
        # A view of the source would keep the full tensor alive.
        local = shards.cut(full, spec.types, self._mesh, self._rank).clone(memory_format=torch.contiguous_format)
        return nn.Parameter(self.place(local, spec.shape, spec.types), requires_grad=spec.requires_grad)

    def place(self, local: Tensor, shape: tuple[int, ...], types: Types) -> Tensor:
        """This rank's part as what users see: a DTensor, or with one rank the tensor itself."""
        if self._mesh.world == 1:
            return local
        assert self._groups is not None and self._groups.device_mesh is not None
        return shards.distribute(local, shape, types, self._mesh, self._groups.device_mesh)

    def _slot(self, name: str, home: nn.Module, attribute: str, spec: ParamSpec) -> Slot:
        largest = local_shape(spec.shape, spec.types, self._mesh)
        own = local_shape(spec.shape, spec.types, self._mesh, self._rank)
        return Slot(name, home, attribute, spec, spec.types, largest, own)

    def _enter(self, slot: Slot, value: Tensor) -> Tensor:
        """The parameter ``value`` as the graph takes it: this rank's part, padded where parts are of unequal sizes."""
        return shards.pad_to(to_local(value), slot.largest)

    def _leave(self, slot: Slot, grad: Tensor) -> Tensor:
        """The gradient that the graph gives, as the parameter lies."""
        part, value = shards.trim_to(grad, slot.own).contiguous(), slot.value
        return placed_like(part, value) if isinstance(value, DTensor) else part

    def _check_same_values(self, source: nn.Module) -> None:
        """Collective: each rank cuts its part from its own copy, so the copies must be equal."""
        if self._mesh.world > 1:
            require_same({name: t for name, t, _ in named_tensors(source)}, self._mesh.world, "model")


def _state_dict_hook(module: Parameters, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Packed parameters leave in a form that torch.distributed.checkpoint stores rightly."""
    for slot in module._slots.values():
        value = state.get(prefix + slot.name)
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            state[prefix + slot.name] = shards.checkpointable(value, slot.types, module._mesh)
