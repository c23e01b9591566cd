"""What each primitive of the table of collectives computes, written over the values of all ranks of a group at once.

These are the lockstep world's collectives.  They share no code with the ops that talk to ``torch.distributed``, and
the tests compare the two.  Every function takes the ranks' tensors in group order and returns their results in group
order; no result is, or views, an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import MoecError

Tensors = Sequence[Tensor]


def identity(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    return [x.clone() for x in xs]


def all_reduce(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    total = torch.stack(list(xs)).sum(0, dtype=xs[0].dtype)
    return [total.clone() for _ in xs]


def all_reduce_max(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    most = torch.stack(list(xs)).amax(0)
    return [most.clone() for _ in xs]


def all_gather(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    whole = torch.cat(list(xs), dim)
    return [whole.clone() for _ in xs]


def reduce_scatter(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    return [part.clone() for part in _parts(torch.stack(list(xs)).sum(0, dtype=xs[0].dtype), len(xs), dim)]


def slice_(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    return [_parts(x, len(xs), dim)[i].clone() for i, x in enumerate(xs)]


def zero_pad(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    zeros = torch.zeros_like(xs[0])
    return [torch.cat([x if i == j else zeros for j in range(len(xs))], dim) for i, x in enumerate(xs)]


def all_to_all(xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    parts = [_parts(x, len(xs), to_dim) for x in xs]
    return [torch.cat([parts[source][me] for source in range(len(xs))], dim) for me in range(len(xs))]


def exchange(xs: Tensors, sends: Tensors, recvs: Tensors, rows: Sequence[int | None]) -> list[Tensor]:
    """Uneven exchange of rows; rank i's result has ``rows[i]`` rows, zeros at the end (None: just what it receives)."""
    sent = [s.tolist() for s in sends]
    for me, recv in enumerate(recvs):
        expected = [sent[source][me] for source in range(len(xs))]
        if recv.tolist() != expected:
            raise MoecError(f"rank {me} of the group expects {recv.tolist()} rows, but {expected} are sent to it")
    chunks = [x[: sum(s)].split(s) for x, s in zip(xs, sent, strict=True)]
    got = [torch.cat([chunks[source][me] for source in range(len(xs))]) for me in range(len(xs))]
    return [
        y if n is None else torch.cat([y, y.new_zeros((n - y.shape[0], *y.shape[1:]))])
        for y, n in zip(got, rows, strict=True)
    ]


def counts(xs: Tensors) -> list[Tensor]:
    """From each rank its counts for the experts of rank i: the transposition of [rank, rank, expert]."""
    return list(torch.stack(list(xs)).unflatten(1, (len(xs), -1)).transpose(0, 1).clone())


CONVERT: dict[str, Callable[[Tensors, int, int], list[Tensor]]] = {
    "identity": identity,
    "all_reduce": all_reduce,
    "all_reduce_max": all_reduce_max,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "slice": slice_,
    "zero_pad": zero_pad,
    "all_to_all": all_to_all,
    "equal": all_to_all,
}


def convert(primitive: str, xs: Tensors, dim: int, to_dim: int) -> list[Tensor]:
    """A typed conversion's primitive.  Ranks of a group must hold equal shapes."""
    if len({(tuple(x.shape), x.dtype) for x in xs}) > 1:
        raise MoecError(f"the ranks of a group hold different shapes: {[(tuple(x.shape), x.dtype) for x in xs]}")
    return CONVERT[primitive](xs, dim, to_dim)


def sent(primitive: str, x: Tensor, size: int, rows: Sequence[int] | None = None) -> list[int]:
    """Bytes that a rank with ``x`` sends each of the ``size`` members of its group (itself too), if every part goes
    straight to the rank that needs it.  ``rows``: of an uneven exchange."""
    if rows is not None:
        return [n * (x.nbytes // len(x) if len(x) else 0) for n in rows]
    whole = {"all_gather": x.nbytes, "all_reduce": 2 * x.nbytes // size,
             "all_reduce_max": 2 * x.nbytes // size}
    part = dict.fromkeys(("reduce_scatter", "all_to_all", "equal", "counts"), x.nbytes // size)
    return [(whole | part).get(primitive, 0)] * size


def _parts(x: Tensor, size: int, dim: int) -> tuple[Tensor, ...]:
    if x.shape[dim] % size:
        raise MoecError(f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be dealt to {size} ranks")
    return x.split(x.shape[dim] // size, dim) if x.shape[dim] else (x,) * size
