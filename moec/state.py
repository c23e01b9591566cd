"""Full tensors of a parallel model under the original names: parameters, gradients, loading, batches.

``full_state_dict``, ``full_grads`` and ``load_full_state_dict`` are **collective**: every rank calls them.  They speak
the names of the user's model: experts of a ``ModuleList`` one by one, tied weights under each of their names,
persistent buffers included.  ``shard_batch`` communicates nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from moec import shards
from moec.epilogue import to_local
from moec.module import ParallelModule
from moec.preflight import Report, require_same
from moec.program import HISTORY
from moec.runtime.errors import MoecError


def shard_batch(batch: Any, model: ParallelModule) -> Any:
    """This rank's dp slice (dim 0) of a global tensor, or of every tensor in a list, tuple or dict."""
    return pytree.tree_map_only(Tensor, lambda x: _slice(x, model.dp_rank, model.dp_size), batch)


def full_state_dict(model: ParallelModule) -> dict[str, Tensor]:
    """Full parameters and persistent buffers, on every rank, by original name.  They are copies."""
    return _named(model, {name: _gather(model, name, slot.value) for name, slot in _distinct(model).items()})


def full_grads(model: ParallelModule) -> dict[str, Tensor | None]:
    """Full gradients on every rank by original name; None where a parameter has none.  Buffers are left out."""
    grads = {
        name: None if slot.value.grad is None else _gather(model, name, slot.value.grad)
        for name, slot in _distinct(model).items()
        if not slot.spec.buffer
    }
    return _named(model, grads)


def load_full_state_dict(model: ParallelModule, state: Mapping[str, Tensor]) -> None:
    """Copy full tensors by original name into this rank's parts.

    Everything is checked first, on all ranks, and every problem is reported at once; nothing is changed unless all is
    well.  Of tied names one suffices; where several are given they must agree.  FP8's histories may be missing, and
    those of products that are not FP8 here are passed over.
    """
    problems = _problems(model, state)
    model._agree(Report("", "load_full_state_dict", problems))
    if model._mesh.world > 1:
        require_same(state, model._mesh.world, "state dict")
    members: dict[str, dict[int | None, Tensor]] = {}
    first = _first_names(model)
    for name, (own, member) in model._names.items():
        if name in state:
            members.setdefault(first[own], {})[member] = state[name]
    with torch.no_grad():
        for own, found in members.items():
            slot = model._slots[own]
            full = found[None] if None in found else torch.stack([found[i] for i in range(len(found))])
            local = to_local(slot.value)
            local.copy_(shards.cut(full, slot.types, model._mesh, model._rank))


def checkpointable(model: ParallelModule, state: Any) -> Any:
    """``state`` (for example an optimizer's state dict) with every packed DTensor in a form that
    ``torch.distributed.checkpoint`` stores rightly.  ``model.state_dict()`` is in that form already."""
    dtensors = [(s.value, s.types) for s in model._slots.values() if isinstance(s.value, DTensor)]
    by_layout = {(tuple(x.placements), tuple(x.shape)): types for x, types in dtensors}

    def convert(x: DTensor) -> DTensor:
        types = by_layout.get((tuple(x.placements), tuple(x.shape)))
        return x if types is None else shards.checkpointable(x, types, model._mesh)

    return pytree.tree_map_only(DTensor, convert, state)


def _slice(x: Tensor, index: int, size: int) -> Tensor:
    if x.ndim == 0 or x.shape[0] % size:
        raise MoecError(
            f"a tensor of shape {tuple(x.shape)} cannot be cut into {size} equal parts along dim 0",
            where="shard_batch",
            way_out=f"choose a global batch size that dp={size} divides",
        )
    return x.chunk(size)[index] if size > 1 else x


def _first_names(model: ParallelModule) -> dict[str, str]:
    """Own name -> the first own name of the same Parameter (they differ where weights are tied)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(slot.value), name) for name, slot in model._slots.items()}


def _distinct(model: ParallelModule) -> dict[str, Any]:
    return {name: model._slots[name] for name in dict.fromkeys(_first_names(model).values())}


def _gather(model: ParallelModule, name: str, value: Tensor) -> Tensor:
    slot = model._slots[name]
    return shards.gather(to_local(value), slot.spec.shape, slot.types, model._mesh, model._groups)


def _named(model: ParallelModule, full: Mapping[str, Tensor | None]) -> dict[str, Any]:
    first = _first_names(model)
    out = {}
    for name, (own, member) in model._names.items():
        if first[own] in full:
            value = full[first[own]]
            out[name] = value if member is None or value is None else value[member]
    return out


def _problems(model: ParallelModule, state: Mapping[str, Tensor]) -> list[str]:
    first = _first_names(model)
    problems = []
    seen: dict[tuple[str, int | None], str] = {}
    for name, (own, member) in model._names.items():
        slot = model._slots[own]
        shape = tuple(slot.spec.shape if member is None else slot.spec.shape[1:])
        x = state.get(name)
        if x is None:
            continue
        tie = seen.setdefault((first[own], member), name)
        if not isinstance(x, Tensor):
            problems.append(f"{name}: expected a tensor, found {type(x).__name__}")
        elif tuple(x.shape) != shape:
            problems.append(f"{name}: shape {tuple(x.shape)}, expected {shape}")
        elif x.dtype.is_floating_point != slot.spec.dtype.is_floating_point:
            problems.append(f"{name}: dtype {x.dtype}, expected {slot.spec.dtype}")
        elif slot.value.device.type == "meta":
            problems.append(f"{name}: the parameter is on the meta device; call model.to_empty(device=...) first")
        elif tie != name and not torch.equal(x, state[tie]):
            problems.append(f"{name} and {tie} are one tied parameter, but their values differ")
    # The user's own model has no buffers that a pass made.
    missing = [
        n
        for n, (own, member) in model._names.items()
        if (first[own], member) not in seen and model._slots[own].spec.initial is None
    ]
    problems += [f"{name}: missing" for name in missing]
    for name in state:
        if name not in model._names and not name.endswith(HISTORY):  # of another recipe or plan
            near = difflib.get_close_matches(name, missing, n=1)
            problems.append(f"{name}: unknown" + (f" (did you mean {near[0]!r}?)" if near else ""))
    return problems
