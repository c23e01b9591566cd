"""Running a Program on a simulated world in one process: parameters cut, ranks in lockstep, gradients reassembled.

What a real world does with processes (each rank its part of the parameters and of the batch, the gradient epilogue at
the end of the backward) this does with the same graph and :class:`moec.runtime.world.LockstepWorld`.  Used by ``moec
check`` and the tests; a captured, not yet sharded program is a world of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moec import shards
from moec.program import Program
from moec.runtime.mesh import Mesh
from moec.runtime.world import Event, LockstepWorld


@dataclass
class Result:
    """Global outputs (by path) and full gradients (by placeholder), with the largest difference between ranks that
    should hold the same value (0 when all is well)."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    disagreement: float
    log: list[Event]
    statistics: dict[str, Tensor]
    """Summed over the ranks."""


def run(
    program: Program,
    params: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    world: LockstepWorld | None = None,
) -> Result:
    """One forward and backward.

    Args:
        params: full tensors by placeholder name.
        inputs: global tensors by placeholder name.
        cotangents: gradient of every differentiable output, global, by output path; outputs without one get none.
        world: a world to run in (tests pass sabotaged ones).
    """
    sharded = "sharded" in program.facts
    mesh = program.mesh if sharded else Mesh()
    world = world or LockstepWorld(mesh)
    ranks = range(mesh.world)
    locals_ = [_rank_values(program, params, inputs, mesh, r) for r in ranks]
    order = [n.name for n in program.placeholders()]
    results = world.run(program.module, [[v[name] for name in order] for v in locals_])

    disagreement = 0.0
    outputs: dict[str, Tensor] = {}
    roots: list[Tensor] = []
    grads_in: list[Tensor] = []
    for spec in program.outputs:
        if spec.index is None:
            continue
        values = [results[r][spec.index] for r in ranks]
        outputs[spec.path], diff = _assemble([v.detach() for v in values], spec.types, mesh)
        disagreement = max(disagreement, diff)
        if spec.path in cotangents and values[0].requires_grad:
            roots += values
            grads_in += [shards.cut(cotangents[spec.path], spec.types, mesh, r).to(values[r].dtype) for r in ranks]
    if roots:
        torch.autograd.backward(roots, grads_in)
    grads: dict[str, Tensor | None] = {}
    for name, param in program.params.items():
        parts = [locals_[r][name].grad for r in ranks]
        if any(p is None for p in parts):
            grads[name] = None
            continue
        if param.history:  # what moec.delayed does
            parts = [torch.stack(parts).amax(0)] * mesh.world
        if key := program.grad_reductions.get(name):
            parts = _reduce(parts, key, mesh)
        parts = [shards.trim(p, param.shape, param.types, mesh, r) for r, p in zip(ranks, parts, strict=True)]
        grads[name], diff = _assemble(parts, param.types, mesh)
        disagreement = max(disagreement, diff)
    statistics = {}
    for name, s in program.statistics.items():
        statistics[name], diff = _total([results[r][s.index] for r in ranks], s.pending, mesh)
        disagreement = max(disagreement, diff)
    return Result(outputs, grads, disagreement, world.log, statistics)


def _rank_values(program: Program, params, inputs, mesh: Mesh, rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, spec in program.params.items():
        local = shards.cut(params[name].detach(), spec.types, mesh, rank)
        local = shards.pad(local, spec.shape, spec.types, mesh).clone()
        out[name] = local.requires_grad_(spec.differentiable)
    dp = mesh.role("dp")
    for name, ispec in program.inputs.items():
        x = inputs[name]
        if ispec.batch_dim is not None and dp:
            x = x.chunk(mesh.size(dp), ispec.batch_dim)[mesh.index(rank, dp)]
        out[name] = x
    return out


def _assemble(parts: list[Tensor], types, mesh: Mesh) -> tuple[Tensor, float]:
    """The global tensor, and how far ranks that hold the same part are apart (relative to its size)."""
    key = shards.sharding(types, mesh)
    if not key:
        whole, groups = parts[0], [[p] for p in parts]
    else:
        groups = [[parts[r] for r in g] for g in mesh.groups(key)]
        whole = shards.join(groups[0], types, mesh)
    apart = 0.0
    for g in groups[1:]:
        for a, b in zip(groups[0], g, strict=True):
            if a.is_floating_point() and a.numel():
                apart = max(apart, float((a - b).abs().max() / a.abs().max().clamp_min(1e-300)))
    return whole, apart


def _reduce(parts: list[Tensor], key: str, mesh: Mesh) -> list[Tensor]:
    out = list(parts)
    for g in mesh.groups(key):
        total = torch.stack([parts[r] for r in g]).sum(0)
        for r in g:
            out[r] = total
    return out


def _total(parts: list[Tensor], pending: tuple[str, ...], mesh: Mesh) -> tuple[Tensor, float]:
    """The sum over the axes on which it is pending, and how far ranks that have the same sum are apart."""
    totals = _reduce(parts, mesh.key(pending), mesh) if pending else parts
    scale = totals[0].abs().max().clamp_min(1e-300)
    return totals[0], max(float((t - totals[0]).abs().max() / scale) for t in totals)
