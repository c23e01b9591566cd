"""What ``moec::experts`` and ``moec::experts_rows`` compute on a CPU: tiles of rows that stay in a core's cache.

Legend: S rows of the source (tokens, or the rows themselves), N rows by expert, E experts, R rows of a tile, B rows of
a block, H hidden, M columns of a first product, A columns of all of them, I columns of the body's result.

The body is one pass over a tile in C where that can be compiled (``kernels/c_body.py``), else PyTorch's, step by step.
So are products, on one thread (``kernels/c_products.py``); else each is a product of PyTorch's for each expert.

A tile is a run of rows: those of several experts with few rows each, or a part of one with many.  For every tile the
rows are gathered into one small buffer, multiplied expert by expert, taken through the body in one go, and multiplied
again.  All buffers are reused; of full length are only results, the first products (which the backward needs) and
the rows that a sum over K follows.

Forward, for each tile:  1. x_RH ← rows of the source    2. h_RA ← x w_in (+ b_in)    3. a_RI ← body(h)
                         4. y_RH ← a w_out (+ b_out)
Backward, for each tile: 1. g_RH, x_RH ← rows of the sources    2. d_RI ← g w_outᵀ
                         3. a_RI and dh_RA ← body and derivative of h and d · weight; dweight ← a · d (+ g · b_out)
                         4. dw_out ← (a · weight)ᵀ g, db_out ← weightᵀ g    5. dw_in ← xᵀ dh, db_in ← 1ᵀ dh
                         6. dx_RH ← dh w_inᵀ
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..body import Body, Buffers
from ..kernels import c_body, c_products
from .rows import accumulator

TILE = 1024
"""Rows: PyTorch's products of fewer are slower, buffers of more leave the cache."""
COMPILED_TILE = 512
"""Rows of a tile whose products are all compiled."""
BLOCK = 1 << 18
"""Elements of the first products that the body is computed for at a time."""


@dataclass(frozen=True)
class Tile:
    """Rows ``start`` … ``end``: the next ``lengths[i]`` belong to ``experts[i]``, and are (``first``) its first."""

    start: int
    end: int
    experts: list[int]
    lengths: list[int]
    first: bool = True

    @property
    def rows(self) -> int:
        return self.end - self.start

    @cached_property
    def groups(self) -> c_products.Groups:
        return c_products.Groups(self.experts, self.lengths)


def tiles(counts: list[int], dtype: torch.dtype, most: int | None = None) -> list[Tile]:
    """All rows that experts own, in order, about ``most`` (``TILE``) in each tile."""
    found, start, most = list[Tile](), 0, TILE if most is None else most
    for e, count in enumerate(counts):
        if count > most and dtype == accumulator(dtype):
            # Sums over the rows of these are formed piece by piece.  In bf16 each piece would be rounded.
            pieces = -(-count // most)
            cuts = [start + count * i // pieces for i in range(pieces + 1)]
            found += [Tile(a, b, [e], [b - a], a == start) for a, b in pairwise(cuts)]
        elif count and found and found[-1].first and start + count - found[-1].start <= most:
            last = found[-1]
            found[-1] = Tile(last.start, start + count, [*last.experts, e], [*last.lengths, count])
        elif count:
            found.append(Tile(start, start + count, [e], [count]))
        start += count
    return found


def forward(
    x_SH: Tensor, source_N: Tensor | None, counts: list[int], total: int, w_in: list[Tensor], b_in: list[Tensor],
    w_out: Tensor, b_out: Tensor | None, body: Body,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(y [total, H], h_NA [total, A])``; row n is row ``source_N[n]`` of ``x_SH`` (row n without a source).  Rows
    that no expert owns are zeros."""
    widths, owned = [w.shape[2] for w in w_in], sum(counts)
    y_NH, h_NA = x_SH.new_empty((total, w_out.shape[2])), x_SH.new_empty((total, sum(widths)))
    y_NH[owned:].zero_()
    h_NA[owned:].zero_()
    compiled, kernels = c_body.of(body, x_SH.dtype), c_products.of(x_SH.dtype)
    biases: Sequence[Tensor | None] = b_in or [None] * len(w_in)
    into = [_Weight(kernels, w, b) for w, b in zip(w_in, biases, strict=True)]
    out_of = _Weight(kernels, w_out, b_out)
    plan = tiles(counts, x_SH.dtype, _most_rows(*into, out_of))
    rows, a_RI, buffers = _Rows(x_SH, source_N, plan), _buffer(x_SH, plan, body.width(widths)), Buffers()
    for tile in plan:
        x_RH, h_RA, a = rows.of(tile), h_NA[tile.start : tile.end], a_RI[: tile.rows]  # 1
        for i, h_RM in enumerate(_columns(h_RA, widths)):
            into[i].multiply(tile, x_RH, h_RM)  # 2
        if compiled is not None:  # 3
            compiled.forward(h_RA, a)
        else:
            for h, a_block in _blocks(h_RA, a):
                body.run(_columns(h, widths), out=[a_block], buffers=buffers)
        out_of.multiply(tile, a, y_NH[tile.start : tile.end])  # 4
    return y_NH, h_NA


def backward(
    grad_SH: Tensor, x_SH: Tensor, source_N: Tensor | None, weight_N: Tensor | None, counts: list[int],
    w_in: list[Tensor], b_in: list[Tensor], w_out: Tensor, b_out: Tensor | None, h_NA: Tensor, body: Body,
    need: list[bool],
) -> tuple[Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """``(gradients of the rows by expert [N, H], of weight_N, [of w_in…, b_in…, w_out, b_out])``.

    The gradient of row n of the result is row ``source_N[n]`` of ``grad_SH``, times ``weight_N[n]``.  ``need``: of the
    rows, of ``weight_N``, of each of the weights and biases; what is not needed is not computed, and empty."""
    widths, owned = [w.shape[2] for w in w_in], sum(counts)
    need_x, need_weight, *need_rest = need
    operands = [*w_in, *b_in, w_out, *([] if b_out is None else [b_out])]
    # With the strides of the weights, so that parameters get their gradients without a copy.
    found = [torch.empty_like(t) if n else t.new_empty(0) for t, n in zip(operands, need_rest, strict=True)]
    for t in (t for t in found if t.numel()):
        if idle := [e for e, count in enumerate(counts) if not count]:
            t[idle] = 0
    dw_in, db_in = found[: len(w_in)], found[len(w_in) : len(w_in) + len(b_in)]
    dw_out, db_out = found[len(w_in) + len(b_in)], found[-1] if b_out is not None else None
    need_h = need_x or any(t.numel() for t in (*dw_in, *db_in))
    need_a = need_weight or dw_out.numel() > 0

    dx_NH = x_SH.new_empty((x_SH.shape[0] if source_N is None else owned, x_SH.shape[1] if need_x else 0))
    dx_NH[owned:].zero_()
    dweight_N = torch.empty(owned, dtype=weight_N.dtype) if weight_N is not None and need_weight else None
    kernels = c_products.of(x_SH.dtype)
    into, out_of = [_Weight(kernels, w.mT) for w in w_in], _Weight(kernels, w_out.mT)
    dw_into, dw_out_of = [_Weight(kernels, dw) for dw in dw_in], _Weight(kernels, dw_out)
    plan = tiles(counts, x_SH.dtype, _most_rows(*into, out_of))
    grads, rows = _Rows(grad_SH, source_N, plan), _Rows(x_SH, source_N, plan)
    inner = body.width(widths)
    d_RI, a_RI, dh_RA = (_buffer(x_SH, plan, n) for n in (inner, inner, sum(widths)))
    compiled = c_body.of(body, x_SH.dtype) if need_h else None
    activation = _Activation(body, widths, need_h)

    for tile in plan:
        lines = slice(tile.start, tile.end)
        weight = None if weight_N is None else weight_N[lines]
        dweight = None if dweight_N is None else dweight_N[lines]
        g_RH, h_RA, d, a, dh = (grads.of(tile), h_NA[lines], *(t[: tile.rows] for t in (d_RI, a_RI, dh_RA)))  # 1
        if need_a or need_h:
            out_of.multiply(tile, g_RH, d)  # 2
            if compiled is not None:  # 3
                compiled.backward(h_RA, d, weight, dweight, a, dh)
            else:
                for block in _blocks(h_RA, d, a, dh, weight, dweight):
                    activation(*block)
        if dweight is not None and b_out is not None:
            for e, dweight_e, g in _by_expert(tile, dweight, g_RH):
                dweight_e += g.to(dweight.dtype) @ b_out[e].to(dweight.dtype)
        if dw_out.numel():  # 4; the activation is weighted by now
            _add_weight_gradients(tile, a, g_RH, dw_out_of)
        if db_out is not None and db_out.numel():
            _add_sums(tile, g_RH, weight, db_out)
        x_RH = rows.of(tile) if any(t.numel() for t in dw_in) else g_RH
        for i, dh_RM in enumerate(_columns(dh, widths)):
            if dw_in[i].numel():  # 5
                _add_weight_gradients(tile, x_RH, dh_RM, dw_into[i])
            if b_in and db_in[i].numel():
                _add_sums(tile, dh_RM, None, db_in[i])
            if need_x:  # 6
                into[i].multiply(tile, dh_RM, dx_NH[lines], add=i > 0)
    return dx_NH, dweight_N, found


class _Activation:
    """Step 3 of the backward for a block of rows: the activation (weighted), the gradient of the first products, and
    that of the rows' weights."""

    def __init__(self, body: Body, widths: list[int], need_h: bool) -> None:
        self.widths, self.inputs, self.need_h = widths, body.inputs, need_h
        self.body = body.derivative(value=True) if need_h else body
        self.buffers, self.weighted, self.products = Buffers(), Buffers(), Buffers()
        self.covers = body.covers()

    def __call__(
        self, h_BA: Tensor, d_BI: Tensor, a_BI: Tensor, dh_BA: Tensor, weight_B: Tensor | None, dweight_B: Tensor | None
    ) -> None:
        h, dh = _columns(h_BA, self.widths), _columns(dh_BA, self.widths)
        scaled_BI, (B, I) = d_BI, d_BI.shape  # noqa: E741
        if weight_B is not None:
            scaled_BI = torch.mul(d_BI, weight_B[:, None], out=self.weighted.at(0, (B, I), d_BI.dtype))
        if not self.need_h:
            self.body.run(h, out=[a_BI], buffers=self.buffers)
        elif self.covers:  # each column of dh is written once
            out = [i.of(dh[i.source]) for i in self.inputs]
            self.body.run(h, grad=scaled_BI, out=[a_BI, *out], buffers=self.buffers)
        else:
            value, *gradients = self.body.run(h, grad=scaled_BI, buffers=self.buffers)
            a_BI.copy_(value)
            dh_BA.zero_()
            for i, gradient in zip(self.inputs, gradients, strict=True):
                i.of(dh[i.source]).add_(gradient)
        if dweight_B is not None:
            wide = accumulator(d_BI.dtype)
            product = self.products.at(0, (B, I), wide)
            torch.sum(torch.mul(a_BI.to(wide), d_BI.to(wide), out=product), 1, out=dweight_B)
        if weight_B is not None:
            a_BI.mul_(weight_B[:, None])


class _Weight:
    """A weight of every expert (and a bias), or the gradient of one."""

    def __init__(self, kernels: c_products.CProducts | None, w_EKM: Tensor, b_EM: Tensor | None = None) -> None:
        self.w_EKM, self.of_E = w_EKM, w_EKM.unbind(0)
        self.b_E = None if b_EM is None else b_EM.unbind(0)
        self.multiplies = kernels if kernels is not None and kernels.can_multiply(w_EKM) else None
        self.adds_outers = kernels if kernels is not None and kernels.can_add_outers(w_EKM) else None

    def multiply(self, tile: Tile, a_RK: Tensor, out_RM: Tensor, add: bool = False) -> None:
        """``out = a w (+ b)`` of each expert; with ``add`` it is added to ``out``."""
        if self.multiplies is not None:
            if self.b_E is not None:
                for e, out in _by_expert(tile, out_RM):
                    out.copy_(self.b_E[e])
            self.multiplies.multiply(tile.groups, a_RK, self.w_EKM, out_RM, add or self.b_E is not None)
            return
        for e, a, out in _by_expert(tile, a_RK, out_RM):
            if add:
                out.addmm_(a, self.of_E[e])
            elif self.b_E is None:
                torch.mm(a, self.of_E[e], out=out)
            else:
                torch.addmm(self.b_E[e], a, self.of_E[e], out=out)


def _most_rows(*weights: _Weight) -> int:
    return COMPILED_TILE if all(w.multiplies is not None for w in weights) else TILE


class _Rows:
    """Rows of a source, gathered tile by tile into one buffer."""

    def __init__(self, source_SH: Tensor, source_N: Tensor | None, plan: list[Tile]) -> None:
        self.source_SH, self.source_N = source_SH.contiguous() if source_N is None else source_SH, source_N
        self.buffer_RH = _buffer(source_SH, plan, source_SH.shape[1]) if source_N is not None else source_SH

    def of(self, tile: Tile) -> Tensor:
        if self.source_N is None:
            return self.source_SH[tile.start : tile.end]
        index = self.source_N[tile.start : tile.end]
        return torch.index_select(self.source_SH, 0, index, out=self.buffer_RH[: tile.rows])


def _buffer(like: Tensor, plan: list[Tile], columns: int) -> Tensor:
    return like.new_empty((max((t.rows for t in plan), default=0), columns))


def _blocks(first: Tensor, *others: Tensor | None) -> Iterator[tuple]:
    """The tensors in blocks of rows; themselves, if one will do."""
    R, rows = first.shape[0], max(1, BLOCK // max(1, first.shape[1]))
    if rows >= R:
        yield (first, *others)
        return
    for start in range(0, R, rows):
        lines = slice(start, min(start + rows, R))
        yield tuple(None if t is None else t[lines] for t in (first, *others))


def _by_expert(tile: Tile, *tensors: Tensor) -> Iterable[tuple]:
    """``(expert, its rows of each tensor)`` of a tile."""
    if len(tile.experts) == 1:
        return ((tile.experts[0], *tensors),)
    return zip(tile.experts, *[t.split_with_sizes(tile.lengths) for t in tensors], strict=True)


def _columns(t: Tensor, widths: list[int]) -> Sequence[Tensor]:
    """Each first product, of all of them side by side."""
    return (t,) if len(widths) == 1 else t.split_with_sizes(widths, 1)


def _add_weight_gradients(tile: Tile, a_RK: Tensor, g_RM: Tensor, dw: _Weight) -> None:
    if dw.adds_outers is not None:
        dw.adds_outers.add_outers(tile.groups, a_RK, g_RM, dw.w_EKM, not tile.first)
        return
    for e, a, g in _by_expert(tile, a_RK, g_RM):
        if tile.first:
            torch.mm(a.t(), g, out=dw.of_E[e])
        else:
            dw.of_E[e].addmm_(a.t(), g)


def _add_sums(tile: Tile, g_RM: Tensor, weight_R: Tensor | None, db_EM: Tensor) -> None:
    """Sums over the rows of each expert, of ``weight`` each."""
    wide = accumulator(g_RM.dtype)
    weight_R = g_RM.new_ones((tile.rows,)) if weight_R is None else weight_R
    for e, g, weight in _by_expert(tile, g_RM, weight_R):
        total = weight.to(wide) @ g.to(wide)
        db_EM[e] = total if tile.first else db_EM[e] + total
