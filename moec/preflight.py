"""Preflight: no rank enters the graph's collectives unless every rank's call fits.

1. Each rank examines its own call (``local_problems``): inputs there, their dims, sizes, dtypes and devices, aliasing,
   and integer values that a lookup in the graph could not take.
2. One all-gather of a few integers over the world tells every rank whether all are well, and whether the calls agree:
   the same program on all ranks, the same batch size (the global batch is cut evenly) and the same scalar inputs on all
   ranks, and within a group over tp and cp the same shapes and the same integer values (token ids, labels).  Sequence
   lengths may differ between dp ranks.
3. If not, a second exchange collects the details and all ranks raise the *same* MoecError.  Ranks take this branch on
   the gathered integers alone, so they all take it.

With one rank only the first step runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moec.program import InputSpec
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh


@dataclass
class Report:
    """What a rank has to say about its own call."""

    key: str
    where: str = "forward"
    problems: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    batch: dict[str, int] = field(default_factory=dict)
    """Input path -> size of its batch dim."""
    values: int = 0
    """Digest of the integer inputs."""
    scalars: dict[str, float] = field(default_factory=dict)
    """Inputs of no dim (a number of items to divide by): they speak of the global batch."""
    anew: bool = False
    """Has a parameter changed since something was computed of it (``runtime.once``)?  Ranks compute it together."""
    equal_lengths: bool = False
    """The program computes with the global number of tokens: shapes must be equal on all ranks."""

    def vector(self) -> list[int]:
        alike = digest((self.batch, self.scalars, self.shapes if self.equal_lengths else None))
        return [int(not self.problems), digest(self.key), alike, digest(self.shapes), self.values, int(self.anew)]


def local_problems(
    specs: Iterable[tuple[str, InputSpec]], tensors: Mapping[str, Tensor], params: Mapping[str, Tensor], world: int
) -> list[str]:
    """What is wrong with this rank's inputs.  ``specs`` are (path, spec); ``params`` this rank's parts by name."""
    problems = []
    device = next((p.device for p in params.values()), None)
    found = {}
    for path, spec in specs:
        x = tensors.get(path)
        if x is None:
            problems.append(f"input {path!r} is missing")
            continue
        found[path] = x
        if x.dtype != spec.dtype:
            problems.append(f"input {path!r} has dtype {x.dtype}, the program was compiled for {spec.dtype}")
        if device is not None and x.ndim and x.device != device:
            problems.append(f"input {path!r} is on {x.device}, the parameters are on {device}")
        if x.ndim != spec.ndim:
            problems.append(f"input {path!r} has shape {tuple(x.shape)}, the program was compiled for {spec.ndim} dims")
            continue
        for dim, size in enumerate(spec.static):
            if size is not None and x.shape[dim] != size:
                problems.append(f"input {path!r} has size {x.shape[dim]} in dim {dim}, it must be {size}")
        if spec.batch_dim is not None and x.shape[spec.batch_dim] == 0:
            problems.append(f"input {path!r} has an empty batch: shape {tuple(x.shape)}")
        if x.dtype == spec.dtype:
            problems += [f"input {path!r} {wrong}" for b in spec.bounds if (wrong := b.problem(x))]
        if world > 1 and x.requires_grad:
            problems.append(
                f"input {path!r} requires a gradient, which is a pending sum over ranks here: pass x.detach(), "
                "or make what it comes from part of the model"
            )
    return problems + _aliases(found, params)


def exchange(report: Report, mesh: Mesh, device: torch.device) -> bool:
    """Collective over the world: return if every rank's call fits and all agree, else raise the same error on all.

    Returns whether some rank has something to compute ``anew``."""
    mine = torch.tensor(report.vector(), dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(mesh.world)]
    dist.all_gather(gathered, mine)
    rows = torch.stack(gathered).tolist()
    same = mesh.groups(mesh.role("cp") + mesh.role("tp"))  # ranks that are to pass identical tensors
    if (
        all(row[0] for row in rows)
        and all(row[1:3] == rows[0][1:3] for row in rows)
        and all(rows[rank][3:5] == rows[group[0]][3:5] for group in same for rank in group)
    ):
        return any(row[5] for row in rows)
    reports: list[Report] = [report] * mesh.world
    dist.all_gather_object(reports, report)
    raise _verdict(reports, same, "tp and cp" if mesh.role("cp") else "tp")


def agree(key: str, error: Exception | None, where: str) -> None:
    """Collective over the world, needs no mesh yet: return if no rank has an error and all keys are equal.

    Else every rank raises: its own error where all have the same one, an account of the ranks where they differ.
    """
    text = None if error is None else str(error) if isinstance(error, MoecError) else f"{type(error).__name__}: {error}"
    mine = (key, text)
    gathered: list[tuple[str, str | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    errors = _by_value([e for _, e in gathered])
    if len(errors) == 1 and error is not None:
        raise error
    way_out = "every rank passes the same model, plan and kind of examples"
    if len(errors) > 1:
        raise _error([f"{_ranks(ranks)}: {e}" for e, ranks in errors if e is not None], where, way_out) from error
    if len(keys := _by_value([k for k, _ in gathered])) > 1:
        raise _error([f"the ranks differ: {_listed(keys)}"], where, way_out)


def require_same(tensors: Mapping[str, Tensor], world: int, where: str) -> None:
    """Collective over the world: raise the same MoecError on all ranks unless names, shapes and values are equal."""
    mine = {name: (tuple(t.shape), str(t.dtype), _checksum(t)) for name, t in tensors.items()}
    gathered: list[dict[str, Any]] = [mine] * world
    dist.all_gather_object(gathered, mine)
    first = gathered[0]
    for rank, other in enumerate(gathered):
        if other.keys() != first.keys():
            odd = sorted(other.keys() ^ first.keys())
            raise MoecError(f"rank {rank} and rank 0 differ in their tensors: {', '.join(odd[:5])}", where=where)
        differ = [name for name in first if other[name] != first[name]]
        if differ:
            raise MoecError(
                f"{len(differ)} of {len(first)} tensors differ between rank {rank} and rank 0, the first being "
                f"{differ[0]!r}",
                where=where,
                way_out="build the same model on every rank: the same seed, or the same checkpoint",
            )


def _checksum(t: Tensor) -> int:
    """Position-dependent sum of the bits; 0 on the meta device, where there are none."""
    if t.device.type == "meta" or not t.numel():
        return 0
    flat = (torch.view_as_real(t) if t.is_complex() else t).detach().reshape(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    head = words[: words.numel() // 4096 * 4096].view(-1, 4096)
    rows = torch.cat([head.sum(1, dtype=torch.int64), words[head.numel() :].sum(dtype=torch.int64).view(1)])
    return int((rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum())


def values_digest(tensors: Iterable[Tensor]) -> int:
    """One number for the values of all integer tensors (position-dependent); floating-point ones are left out."""
    total = 0
    for x in tensors:
        if x.dtype.is_floating_point or x.dtype.is_complex:
            continue
        flat = x.detach().reshape(-1).to(torch.int64)
        weights = torch.arange(flat.numel(), device=flat.device).remainder_(65521).add_(1)
        total = (total * 31 + int((flat * weights).sum())) % 2**61
    return total


def alone(report: Report) -> None:
    """The same verdict where there is one rank only."""
    if report.problems:
        raise _error(report.problems, report.where, "")


def _verdict(reports: list[Report], same: tuple[tuple[int, ...], ...], of: str) -> MoecError:
    own = [f"{_ranks(ranks)}: {p}" for what, ranks in _by_value([r.problems for r in reports]) for p in what]
    if own:
        return _error(own, reports[0].where, "")
    problems = []
    if len(calls := _by_value([r.key for r in reports])) > 1:
        problems.append("the ranks make different calls: " + _listed(calls))
    elif len(batches := _by_value([r.batch for r in reports])) > 1:
        problems.append("the batch size differs between ranks: " + _listed(batches))
    elif len(scalars := _by_value([r.scalars for r in reports])) > 1:
        problems.append("a number that is one for the global batch differs between ranks: " + _listed(scalars))
    elif reports[0].equal_lengths and len(all_shapes := _by_value([r.shapes for r in reports])) > 1:
        problems.append(
            "shapes differ between ranks, and this model computes with the number of tokens, so that all ranks need "
            "the same: " + _listed(all_shapes)
        )
    for group in same:
        if len(shapes := _by_value([reports[r].shapes for r in group], group)) > 1:
            problems.append(f"shapes differ inside the {of} group {list(group)}: {_listed(shapes)}")
        elif len({reports[r].values for r in group}) > 1:
            problems.append(f"token ids or other integer inputs differ inside the {of} group {list(group)}")
    return _error(
        problems,
        reports[0].where,
        "every rank makes the same call with its own dp slice of the global batch; ranks that differ only in tp and cp "
        "pass identical tensors (moec.shard_batch cuts a global tensor)",
    )


def _error(problems: list[str], where: str, way_out: str) -> MoecError:
    text = problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} problems", *problems])
    return MoecError(text, where=where, way_out=way_out)


def _by_value(values: list, ranks: Iterable[int] | None = None) -> list[tuple]:
    out: list[tuple] = []
    for rank, value in zip(ranks if ranks is not None else range(len(values)), values, strict=True):
        for known, members in out:
            if known == value:
                members.append(rank)
                break
        else:
            out.append((value, [rank]))
    return out


def _listed(values: list[tuple]) -> str:
    return "; ".join(f"{_ranks(ranks)}: {_show(value)}" for value, ranks in values)


def _show(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}={list(v) if isinstance(v, tuple) else v}" for k, v in value.items())
    return str(value)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def digest(value: object) -> int:
    raw = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little", signed=True)


def _aliases(inputs: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> list[str]:
    """Inputs that share memory with a parameter, or partly with each other (one tensor passed twice is fine)."""
    problems = []
    of_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, p in params.items():
        if p.device.type != "meta" and p.numel():
            of_storage.setdefault(p.untyped_storage().data_ptr(), []).append((name, p))
    for path, x in inputs.items():
        if x.device.type == "meta" or not x.numel():
            continue
        for name, _ in of_storage.get(x.untyped_storage().data_ptr(), ()):
            problems.append(f"input {path!r} shares memory with parameter {name!r}: pass a clone")
    items = list(inputs.items())
    for i, (path, x) in enumerate(items):
        for other, y in items[:i]:
            if _partly_shared(x, y):
                problems.append(f"inputs {other!r} and {path!r} overlap in memory: pass clones")
    return problems


def _partly_shared(x: Tensor, y: Tensor) -> bool:
    if "meta" in (x.device.type, y.device.type) or not x.numel() or not y.numel():
        return False
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    if (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype):
        return False
    if x.dtype != y.dtype:
        return True  # two readings of the same bytes
    return bool(torch.isin(_addresses(x), _addresses(y)).any())


def _addresses(x: Tensor) -> Tensor:
    """Storage offset of every element."""
    at = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = at.unsqueeze(-1) + torch.arange(size) * stride
    return at.reshape(-1)
