"""The exchange of rows that the routing deals out, and the exchange of their counts.  All are start ops.

Legend: N rows, H hidden, R ranks of the group, E experts (E/R live on each rank).

* ``moec::all_to_all(x_NH, send_R, recv_R, size, group) -> y``: the first ``send_R[0]`` rows go to rank 0 of the group,
  the next ``send_R[1]`` to rank 1, ...; ``y`` has ``sum(recv_R)`` rows, by source rank.  Rows past ``sum(send_R)``
  (pairs that ``permute`` dropped) stay at home.
* ``moec::all_to_all_rows(x_NH, send_R, recv_R, rows, size, group) -> y``: the same with exactly ``rows`` rows of
  output, zeros past ``sum(recv_R)``.  Backward of both: the gradient has as many rows as ``x`` had, so it needs no
  data-dependent size.
* ``moec::all_to_all_equal(x_NH, size, group) -> y_NH``: an equal share of the rows to every rank; its own backward.
* ``moec::exchange_counts(counts_E, size, group) -> [R, E/R]``: from each rank its counts for this rank's experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import TABLE
from ..errors import MoecError
from ..peers import both_ways, start_all_to_all
from ..torch_compat import on_wait, wait
from .convert import part_of


def _splits(x_NH: Tensor, send_R: Tensor, recv_R: Tensor, size: int, kind: str) -> tuple[list[int], list[int]]:
    if send_R.shape != (size,) or recv_R.shape != (size,):
        raise MoecError(
            f"splits of shapes {tuple(send_R.shape)} and {tuple(recv_R.shape)} for {size} ranks", where=f"moec::{kind}"
        )
    send, recv = torch.stack([send_R, recv_R]).tolist()
    if min(send + recv) < 0 or sum(send) > x_NH.shape[0]:
        raise MoecError(f"cannot send {send} and receive {recv} rows: x has {x_NH.shape[0]}", where=f"moec::{kind}")
    return send, recv


def _start(x_NH: Tensor, send: list[int], recv: list[int], out: Tensor, size: int, group: str, kind: str) -> Tensor:
    pg, back = both_ways(group)
    if pg.size() != size:
        raise MoecError(f"size is {size} but group {group!r} has {pg.size()} ranks", where=f"moec::{kind}")
    mine = x_NH[: sum(send)].contiguous()
    # ``data``: the backend's thread must not touch the version counter of the result.
    for work in start_all_to_all(out.data[: sum(recv)], mine, recv, send, pg, back):
        on_wait(out, work)
    return out


@torch.library.custom_op("moec::all_to_all", mutates_args=())
def all_to_all(x_NH: Tensor, send_R: Tensor, recv_R: Tensor, size: int, group: str) -> Tensor:
    send, recv = _splits(x_NH, send_R, recv_R, size, "all_to_all")
    out = x_NH.new_empty((sum(recv), *x_NH.shape[1:]))
    return _start(x_NH, send, recv, out, size, group, "all_to_all")


@all_to_all.register_fake
def _(x_NH, send_R, recv_R, size, group):
    return x_NH.new_empty((torch.library.get_ctx().new_dynamic_size(), *x_NH.shape[1:]))


@torch.library.custom_op("moec::all_to_all_rows", mutates_args=())
def all_to_all_rows(x_NH: Tensor, send_R: Tensor, recv_R: Tensor, rows: int, size: int, group: str) -> Tensor:
    send, recv = _splits(x_NH, send_R, recv_R, size, "all_to_all_rows")
    if sum(recv) > rows:
        raise MoecError(f"cannot receive {recv} rows into {rows}", where="moec::all_to_all_rows")
    out = x_NH.new_empty((rows, *x_NH.shape[1:]))
    out[sum(recv) :].zero_()
    return _start(x_NH, send, recv, out, size, group, "all_to_all_rows")


@all_to_all_rows.register_fake
def _(x_NH, send_R, recv_R, rows, size, group):
    return x_NH.new_empty((rows, *x_NH.shape[1:]))


def _setup(ctx, inputs, output) -> None:
    x_NH, send_R, recv_R, *_, size, group = inputs
    ctx.save_for_backward(send_R, recv_R)
    ctx.args = (x_NH.shape[0], size, group)


def _backward(kind: str, num_inputs: int):
    def backward(ctx, grad: Tensor):
        send_R, recv_R = ctx.saved_tensors
        grad = wait(TABLE[TABLE[kind].dual].op(grad, recv_R, send_R, *ctx.args))
        return (grad, *[None] * (num_inputs - 1))

    return backward


all_to_all.register_autograd(_backward("all_to_all", 5), setup_context=_setup)
all_to_all_rows.register_autograd(_backward("all_to_all_rows", 6), setup_context=_setup)


@torch.library.custom_op("moec::all_to_all_equal", mutates_args=())
def all_to_all_equal(x_NH: Tensor, size: int, group: str) -> Tensor:
    splits = [part_of(x_NH, 0, size, "all_to_all_equal")] * size
    return _start(x_NH, splits, splits, x_NH.new_empty(x_NH.shape), size, group, "all_to_all_equal")


@all_to_all_equal.register_fake
def _(x_NH, size, group):
    return x_NH.new_empty(x_NH.shape)


def _setup_equal(ctx, inputs, output) -> None:
    _, *ctx.args = inputs


def _backward_equal(ctx, grad: Tensor):
    return wait(TABLE[TABLE["all_to_all_equal"].dual].op(grad, *ctx.args)), None, None


all_to_all_equal.register_autograd(_backward_equal, setup_context=_setup_equal)


@torch.library.custom_op("moec::exchange_counts", mutates_args=())
def exchange_counts(counts_E: Tensor, size: int, group: str) -> Tensor:
    out = counts_E.new_empty((size, part_of(counts_E, 0, size, "exchange_counts")))
    splits = [out.shape[1]] * size
    _start(counts_E, splits, splits, out.view(-1), size, group, "exchange_counts")
    return out


@exchange_counts.register_fake
def _(counts_E, size, group):
    return counts_E.new_empty((size, part_of(counts_E, 0, size, "exchange_counts")))
