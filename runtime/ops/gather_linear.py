"""``moec::gather_linear`` and ``moec::linear_scatter``: tensor parallelism's transfers, run beside their own products.

Legend: R ranks of the group, K and N columns, ``…`` dims of which ``dim`` is one (never the last).

* ``gather_linear(x […, K], ws, dim, size, group) -> [whole, y, …]``: ``whole`` is ``x`` of all ranks side by side along
  ``dim``; each ``y […, N]`` is ``linear(whole, w [N, K])`` for a ``w`` of ``ws``.
* ``linear_scatter(x […, K], w [N, K], dim, size, group) -> y […, N]``: ``linear(x, w)``, summed over the ranks, of
  which each gets its part of ``dim``.

Both are over when they return: there is no wait.  Each is the other's backward, as an all-gather and a reduce-scatter
are: the gradient of ``x`` is a ``linear_scatter`` by the weights side by side (one product and one transfer, however
many ``ws`` there are), or a ``gather_linear`` by ``wᵀ``, whose ``whole`` is what ``w``'s gradient reads.  ``whole`` is
kept for the gradients of ``ws``, as the products by themselves would keep what they read.

On a GPU they are torch's ``symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``: ranks read each
other's part over NVLink, part by part, while the part before is multiplied.  On a CPU the transfer comes first, or
last.  ``whole`` lies in memory with ``dim`` outermost, as it arrives; every other result is contiguous, for which
torch's are copied if there is a dim of more than one index before ``dim``.  (What torch's own operators make of other
layouts is not always what their fakes say, and a traced graph counts on that.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..errors import MoecError
from ..torch_compat import SYMM_MEM, process_group, use_symmetric_memory
from .convert import convert, part_of


@torch.library.custom_op("moec::gather_linear", mutates_args=(), device_types="cpu")
def gather_linear(x: Tensor, ws: Sequence[Tensor], dim: int, size: int, group: str) -> list[Tensor]:
    _check(x, ws, dim, size, group, "gather_linear")
    whole = convert("s_to_r", x, dim, 0, size, group)
    return [whole, *(F.linear(whole, w).contiguous() for w in ws)]


@torch.library.custom_op("moec::linear_scatter", mutates_args=(), device_types="cpu")
def linear_scatter(x: Tensor, w: Tensor, dim: int, size: int, group: str) -> Tensor:
    _check(x, [w], dim, size, group, "linear_scatter")
    return convert("p_to_s", F.linear(x, w), dim, 0, size, group).contiguous()


@gather_linear.register_kernel("cuda")
def _(x, ws, dim, size, group):
    _check(x, ws, dim, size, group, "gather_linear")
    use_symmetric_memory(group)
    x = _outermost(x, dim)
    whole, ys = SYMM_MEM.fused_all_gather_matmul(x, [w.t() for w in ws], dim, group, return_A=True)
    return [_outermost(whole, dim), *(y.contiguous() for y in ys)]


@linear_scatter.register_kernel("cuda")
def _(x, w, dim, size, group):
    _check(x, [w], dim, size, group, "linear_scatter")
    part_of(x, dim, size, "linear_scatter")
    use_symmetric_memory(group)
    return SYMM_MEM.fused_matmul_reduce_scatter(_outermost(x, dim), w.t(), "sum", dim, group).contiguous()


def _outermost(x: Tensor, dim: int) -> Tensor:
    """``x`` in memory with ``dim`` outermost; itself where it lies so."""
    return x.movedim(dim, 0).contiguous().movedim(0, dim)


def _check(x: Tensor, ws: Sequence[Tensor], dim: int, size: int, group: str, op: str) -> None:
    pg: dist.ProcessGroup = process_group(group)
    if pg.size() != size:
        raise MoecError(f"size is {size} but group {group!r} has {pg.size()} ranks", where=f"moec::{op}")
    if not 0 <= dim < x.ndim - 1:
        raise MoecError(f"dim {dim} of shape {tuple(x.shape)} is multiplied, or none", where=f"moec::{op}")
    for w in ws:
        if w.ndim != 2 or w.shape[1] != x.shape[-1] or w.dtype != x.dtype:
            raise MoecError(
                f"no product of {x.dtype}{list(x.shape)} and {w.dtype}{list(w.shape)}: a weight is [N, K]",
                where=f"moec::{op}",
            )


@gather_linear.register_fake
def _(x, ws, dim, size, group):
    shape = list(x.shape)
    shape[dim] = shape[dim] * size
    order = [dim, *(d for d in range(x.ndim) if d != dim)]
    whole = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)
    return [whole, *(x.new_empty([*shape[:-1], w.shape[0]]) for w in ws)]


@linear_scatter.register_fake
def _(x, w, dim, size, group):
    shape = [*x.shape[:-1], w.shape[0]]
    shape[dim] = part_of(x, dim, size, "linear_scatter")
    return x.new_empty(shape)


def _setup_gather(ctx, inputs, output) -> None:
    _, ws, *ctx.args = inputs
    ctx.set_materialize_grads(False)  # nobody but this backward reads ``whole``, as a rule
    ctx.save_for_backward(output[0], *ws)


def _backward_gather(ctx, grads: Sequence[Tensor | None]):
    whole, *ws = ctx.saved_tensors
    dim, size, group = ctx.args
    needs_x, needs_ws = ctx.needs_input_grad[:2]
    of_whole, *gs = grads
    there = [(g, w) for g, w in zip(gs, ws, strict=True) if g is not None]
    gx = None
    if needs_x and there:
        g, w = there[0]
        if len(there) > 1:
            g, w = torch.cat([g for g, _ in there], -1), torch.cat([w for _, w in there])
        gx = torch.ops.moec.linear_scatter(g, w.t(), dim, size, group)
    if needs_x and of_whole is not None:
        own = convert("p_to_s", of_whole, dim, 0, size, group)
        gx = own if gx is None else gx + own
    gws: list[Tensor | None] = [None] * len(ws)
    if any(needs_ws):
        rows = _matrix(whole)
        gws = [_matrix(g).t() @ rows if n and g is not None else None for n, g in zip(needs_ws, gs, strict=True)]
    return gx, gws, None, None, None


def _setup_scatter(ctx, inputs, output) -> None:
    x, w, *ctx.args = inputs
    ctx.save_for_backward(x, w)


def _backward_scatter(ctx, g: Tensor):
    x, w = ctx.saved_tensors
    dim, size, group = ctx.args
    needs_x, needs_w, *_ = ctx.needs_input_grad
    if needs_x:
        whole, gx = torch.ops.moec.gather_linear(g, [w.t()], dim, size, group)
    else:
        whole, gx = convert("s_to_r", g, dim, 0, size, group), None
    return gx, _matrix(whole).t() @ _matrix(x) if needs_w else None, None, None, None


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


gather_linear.register_autograd(_backward_gather, setup_context=_setup_gather)
linear_scatter.register_autograd(_backward_scatter, setup_context=_setup_scatter)
