"""The gradient of the experts' activation, and what follows from it in the same tile.

Legend: N rows, P pairs, E experts, H columns of the second product, A columns of all first products, I of the body's
result.

``back = grad[row or its token] @ w_outᵀ[expert]`` is never stored.  With it and the pre-activations h (from which the
body is computed again)

* ``d[row]``, the gradient of the pre-activations: the body's derivative of ``weight · back``;
* ``act[row]``, the activation times the pair's weight: what the gradient of ``w_out`` is made of;
* ``share[pair, half of a tile]``, the sum over its columns of activation · back: added up, the gradient of the weight.

Without routing weights (rows between exchanges) act is the activation itself, and there are no shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..body import Body
from .expressions import TRITON, computing, lines, listing
from .grouped_gemm import NAMES, GroupedGemm, Product, Weight
from .pre_activations import blocks, inputs, place, split
from .template import identifiers
from .tiles import Tile


def shares(columns: int, tile: Tile) -> int:
    """How many shares a pair has: one for each half of a tile."""
    return 2 * -(-columns // tile.n)


def spec(
    body: Body, widths: Sequence[int], experts: int, hidden: int, strides: tuple[int, ...], dtype: torch.dtype,
    tile: Tile, choices: int = 0, need_d: bool = True, need_act: bool = True, need_share: bool = True,
) -> GroupedGemm:  # fmt: skip
    """Tensors of ``launch``: offsets, pairs [N] (with ``choices``: K), grad [T or N, H], w_out [E, I, H] (of these
    ``strides``), h [N, A], and, where needed, weights [P] (with ``choices``), d [N, A], act [N, I], and share
    [P, shares] in the computing dtype (with ``choices``)."""
    columns, total = body.width(widths), sum(widths)
    storage, math = TRITON[dtype], computing(dtype)
    n, found = tile.n // 2, blocks(body, widths)
    zeros = f"tl.zeros(({tile.m}, {n}), {math})"
    need_share = need_share and bool(choices)
    load, store = [], []
    for b in found:
        load += [
            f"h_{b.name} = tl.load(h_ptr + {b.place(total)}, mask={b.ok}, other=0.0)",
            *split(b, f"h_{b.name}", tile.m, n),
        ]
    if choices:
        load += [f"weight = tl.load(weight_ptr + pair).to({math})[:, None]", "weighted = back * weight"]
    halves = _halves(tile, columns, any(b.wide for b in found))
    derivative = body.derivative(value=True)
    known = inputs(found, "h_{}", math) | {derivative.inputs[-1].name: "weighted" if choices else "back"}
    taken = NAMES | identifiers("\n".join([*halves, *load])) | {"act", "d", "joined", "share", "mask"}
    of_body, (value, *gradients) = lines(derivative, known, dtype, taken, zeros)
    gradient = dict(zip((i.name for i in body.inputs), gradients, strict=True))
    if need_act or need_share:
        store.append(f"act = {value}.to({storage})")
    if need_share:
        product = f"act.to({math}) * back"
        if columns % tile.n:
            product = f"tl.where(ok, {product}, 0.0)"
        store.append(f"share = tl.sum({product}, 1)")
        store.append(f"tl.store(share_ptr + pair * {shares(columns, tile)} + tile_n * 2 + half, share, mask=inside)")
    if need_act:
        if choices:
            store.append(f"act = (act.to({math}) * weight).to({storage})")
        store.append(f"tl.store(act_ptr + {place(columns)}, act, mask=ok)")
    for b in found if need_d else ():
        parts = [gradient[name] if name else zeros for name in b.inputs]
        if b.wide:
            store.append(f"joined = tl.join({parts[0]}, {parts[1]})")
            parts = [f"tl.reshape(joined, ({tile.m}, {2 * n}))"]
        store.append(f"d = {parts[0]}.to({storage})")
        store.append(f"tl.store(d_ptr + {b.place(total)}, d, mask={b.ok})")
    optional = [("weight_ptr", bool(choices)), ("d_ptr", need_d), ("act_ptr", need_act), ("share_ptr", need_share)]
    of_expert, of_column, of_k = strides
    weight = Weight("w_ptr", "back", (of_expert, of_k, of_column))
    return GroupedGemm(
        "experts_backward",
        "moec::experts, backward: gradient of the activation, of the pre-activations and of the weights.",
        listing(derivative),
        experts, columns, dtype, tile,
        (Product("grad_ptr", hidden, (weight,), hidden, gathered=bool(choices)),),
        ("h_ptr", *(name for name, there in optional if there)),
        (*halves, *("    " + line for line in (*load, *of_body, *store))),
        choices,
    )  # fmt: skip


def _halves(tile: Tile, columns: int, wide: bool) -> list[str]:
    """One half of the tile's columns after the other: what the derivative computes is alive for half of them only,
    which is the difference between no spilled registers and hundreds of bytes."""
    n, even = tile.n // 2, columns % tile.n == 0
    out = [
        f"left, right = tl.split(tl.permute(tl.reshape(back, ({tile.m}, 2, {n})), (0, 2, 1)))",
        "for half in tl.static_range(2):",
        "    back = left if half == 0 else right",
        f"    column = tile_n * {tile.n} + half * {n} + tl.arange(0, {n})",
        "    ok = inside[:, None]" + ("" if even else f" & (column < {columns})[None, :]"),
    ]
    if wide:
        out += [
            f"    wide = tile_n * {2 * tile.n} + half * {2 * n} + tl.arange(0, {2 * n})",
            "    wide_ok = inside[:, None]" + ("" if even else f" & (wide < {2 * columns})[None, :]"),
        ]
    return out
