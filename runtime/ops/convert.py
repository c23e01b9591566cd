"""Typed conversions: one op ``moec::<kind>(x, dim, size, group)`` for every kind of ``collectives.CONVERSIONS`` and
``MAXIMA``.

``s_to_s`` has one dim more: ``moec::s_to_s(x, dim, to_dim, size, group)`` gathers ``dim`` and scatters ``to_dim``.

* ``size`` is the number of ranks of ``group``; ``dim`` is ignored by identity and all-reduce kinds.
* Backward is the dual of the table, launched *and waited for*; forward of a start op has its wait as a separate node.
* A dim that is dealt out must be divisible by ``size`` (MoecError).  Symbolic dims are not guarded here: the pass that
  inserts a conversion guards them once.
* A gather along a dim other than 0 returns a tensor in whose memory that dim is outermost: rearranging it would have to
  come after the wait.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import CONVERSIONS, MAXIMA, TABLE
from ..errors import MoecError
from ..peers import Pair, both_ways, start_all_gather, start_all_to_all, start_reduce_scatter
from ..torch_compat import on_wait, wait


def convert(kind: str, x: Tensor, dim: int, to_dim: int, size: int, group: str) -> Tensor:
    """Call the op of ``kind`` and wait for it if it is a start op (``to_dim`` matters to s_to_s only)."""
    dims = (dim, to_dim) if kind == "s_to_s" else (dim,)
    y = TABLE[kind].op(x, *dims, size, group)
    return wait(y) if TABLE[kind].needs_wait else y


def part_of(x: Tensor, dim: int, size: int, kind: str) -> int:
    """Length of one of ``size`` equal parts of dim ``dim``."""
    whole = x.shape[dim]
    if isinstance(whole, int) and whole % size:
        raise MoecError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has size {whole}, which {size} ranks do not divide",
            where=f"moec::{kind}",
            way_out="pad the dim or choose a degree that divides it",
        )
    return whole // size


# --- What the ranks do: a function per primitive, (x, dim, to_dim, size, kind, groups) -> tensor. -------------------


def _slice(x: Tensor, dim: int, to_dim: int, size: int, kind: str, groups: Pair) -> Tensor:
    part = part_of(x, dim, size, kind)
    return x.narrow(dim, groups[0].rank() * part, part).clone(memory_format=torch.contiguous_format)


def _zero_pad(x: Tensor, dim: int, to_dim: int, size: int, kind: str, groups: Pair) -> Tensor:
    shape, part = list(x.shape), x.shape[dim]
    shape[dim] = size * part
    out = x.new_zeros(shape)
    out.narrow(dim, groups[0].rank() * part, part).copy_(x)
    return out


def _all_reduce(x: Tensor, dim: int, to_dim: int, size: int, kind: str, groups: Pair) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    on_wait(out, dist.all_reduce(out.data, group=groups[0], async_op=True))
    return out


def _all_reduce_max(x: Tensor, dim: int, to_dim: int, size: int, kind: str, groups: Pair) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    on_wait(out, dist.all_reduce(out.data, dist.ReduceOp.MAX, group=groups[0], async_op=True))
    return out


def _all_gather(x: Tensor, dim: int, to_dim: int, size: int, kind: str, groups: Pair) -> Tensor:
    out, flat = _dim_outermost(x, _gathered(x, dim, size), dim)
    for work in start_all_gather(flat, x.movedim(dim, 0).contiguous(), *groups):
        on_wait(out, work)
    return out


def _reduce_scatter(x: Tensor, dim: int, to_dim: int, size: int, kind: str, groups: Pair) -> Tensor:
    out, flat = _dim_outermost(x, _scattered(x, dim, size, kind), dim)
    for work in start_reduce_scatter(flat, x.movedim(dim, 0).contiguous(), *groups):
        on_wait(out, work)
    return out


def _all_to_all(x: Tensor, dim: int, to_dim: int, size: int, kind: str, groups: Pair) -> Tensor:
    # What goes to one rank lies together, ``dim`` first: [size * dim, ..., part of to_dim, ...].
    chunks = torch.cat([c.movedim(dim, 0) for c in x.split(part_of(x, to_dim, size, kind), to_dim)])
    out, flat = _dim_outermost(x, _moved(x, dim, to_dim, size, kind), dim)
    recv, send = [flat.shape[0] // size] * size, [chunks.shape[0] // size] * size
    for work in start_all_to_all(flat, chunks, recv, send, *groups):
        on_wait(out, work)
    return out


_RUN = {
    "slice": _slice,
    "zero_pad": _zero_pad,
    "all_reduce": _all_reduce,
    "all_reduce_max": _all_reduce_max,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


# --- Shapes and strides, of results and of fakes. --------------------------------------------------------------------


def _gathered(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = shape[dim] * size
    return shape


def _scattered(x: Tensor, dim: int, size: int, kind: str) -> list[int]:
    shape = list(x.shape)
    shape[dim] = part_of(x, dim, size, kind)
    return shape


def _moved(x: Tensor, dim: int, to_dim: int, size: int, kind: str) -> list[int]:
    shape = _gathered(x, dim, size)
    shape[to_dim] = part_of(x, to_dim, size, kind)
    return shape


def _dim_outermost(x: Tensor, shape: list[int], dim: int) -> tuple[Tensor, Tensor]:
    """A new tensor of ``shape`` in whose memory ``dim`` is outermost, and a contiguous alias with ``dim`` in front.

    The collective gets the alias: what the op returns must be no view, and the backend's thread, which may write while
    autograd is already looking at the result, must not touch its version counter (hence ``data``).
    """
    order = [dim, *(d for d in range(x.ndim) if d != dim)]
    out = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)
    return out, out.data.movedim(dim, 0)


def _fake(primitive: str, x: Tensor, dim: int, to_dim: int, size: int, kind: str) -> Tensor:
    match primitive:
        case "identity":
            return torch.empty_like(x)
        case "all_reduce" | "all_reduce_max":
            return x.new_empty(x.shape)
        case "slice":
            return x.new_empty(_scattered(x, dim, size, kind))
        case "zero_pad":
            return x.new_empty(_gathered(x, dim, size))
        case "all_gather":
            return _dim_outermost(x, _gathered(x, dim, size), dim)[0]
        case "reduce_scatter":
            return _dim_outermost(x, _scattered(x, dim, size, kind), dim)[0]
        case "all_to_all":
            return _dim_outermost(x, _moved(x, dim, to_dim, size, kind), dim)[0]
    raise AssertionError(primitive)


# --- One op per kind. ----------------------------------------------------------------------------------------------


def _define(kind: str) -> Callable:
    entry = TABLE[kind]
    two_dims = kind == "s_to_s"
    schema = "(Tensor x, int dim, int to_dim, int size, str group) -> Tensor"
    if not two_dims:
        schema = schema.replace(" int to_dim,", "")

    def dims_of(x: Tensor, args: tuple) -> tuple[int, int, int, str]:
        dim, to_dim, size, group = args if two_dims else (args[0], args[0], *args[1:])
        n = max(x.ndim, 1)
        if two_dims and dim % n == to_dim % n:
            raise MoecError(f"dim and to_dim are both {dim}", where=f"moec::{kind}", way_out="name two different dims")
        return dim % n, to_dim % n, size, group

    def kernel(x: Tensor, *args) -> Tensor:
        dim, to_dim, size, group = dims_of(x, args)
        if entry.primitive == "identity":
            return x.clone()  # a custom op may not return its input
        groups = both_ways(group)
        if groups[0].size() != size:
            raise MoecError(f"size is {size} but group {group!r} has {groups[0].size()} ranks", where=f"moec::{kind}")
        return _RUN[entry.primitive](x, dim, to_dim, size, kind, groups)

    def fake(x: Tensor, *args) -> Tensor:
        dim, to_dim, size, _ = dims_of(x, args)
        return _fake(entry.primitive, x, dim, to_dim, size, kind)

    def setup(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.args = dims_of(inputs[0], inputs[1:])

    def backward(ctx, grad: Tensor):
        dim, to_dim, size, group = ctx.args
        if two_dims:
            dim, to_dim = to_dim, dim  # what was scattered is gathered, and the other way round
        grad = convert(entry.dual, grad, dim, to_dim, size, group)
        return (grad, None, None, None, None) if two_dims else (grad, None, None, None)

    op = torch.library.custom_op(f"moec::{kind}", kernel, mutates_args=(), schema=schema)
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)
    return op


OPS = {kind: _define(kind) for kind in (*CONVERSIONS, *MAXIMA)}
