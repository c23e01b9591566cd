"""The gradient of the experts' activation, and what follows from it in the same tile.

Legend: N rows, P pairs, E experts, H columns of the second product, A columns of all first products, I of the body's
result.

``back = grad[row or its token] @ w_outᵀ[expert]`` is never stored.  With it and the pre-activations h (from which the
body is computed again)

* ``d[row]``, the gradient of the pre-activations: the body's derivative of ``weight · back``;
* ``act[row]``, the activation times the pair's weight: what the gradient of ``w_out`` is made of;
* ``share[pair, tile]``, the sum over the tile's columns of activation · back: added up, the gradient of the weight.

Without routing weights (rows between exchanges) act is the activation itself, and there are no shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..body import Body
from .expressions import TRITON, computing, lines, listing
from .grouped_gemm import NAMES, GroupedGemm, Product, Weight
from .pre_activations import blocks, inputs, place, split
from .template import identifiers, times
from .tiles import Tile


def spec(
    body: Body, widths: Sequence[int], experts: int, hidden: int, strides: tuple[int, ...], dtype: torch.dtype,
    tile: Tile, choices: int = 0, need_d: bool = True, need_act: bool = True, need_share: bool = True,
) -> GroupedGemm:  # fmt: skip
    """Tensors of ``launch``: offsets, pairs [N] (with ``choices``: K), grad [T or N, H], w_out [E, I, H] (of these
    ``strides``), h [N, A], and, where needed, weights [P] (with ``choices``), d [N, A], act [N, I], and share
    [P, tiles] in the computing dtype (with ``choices``)."""
    found, columns, total = blocks(body, widths), body.width(widths), sum(widths)
    storage, math = TRITON[dtype], computing(dtype)
    zeros = f"tl.zeros(({tile.m}, {tile.n}), {math})"
    tiles = -(-columns // tile.n)
    need_share = need_share and bool(choices)
    load, weigh, store = [], [], []
    for b in found:
        load += [
            f"h_{b.name} = tl.load(h_ptr + {b.place(total)}, mask={b.ok}, other=0.0)",
            *split(b, f"h_{b.name}", tile.m, tile.n),
        ]
    if choices:
        weigh = [f"weight = tl.load(weight_ptr + pair).to({math})[:, None]", "weighted = back * weight"]
    derivative = body.derivative(value=True)
    grad = derivative.inputs[-1].name
    known = inputs(found, "h_{}", math) | {grad: "weighted" if choices else "back"}
    taken = NAMES | identifiers("\n".join([*load, *weigh])) | {"back", "act", "joined", "d", "share", "mask"}
    of_body, (value, *gradients) = lines(derivative, known, dtype, taken, zeros)
    gradient = dict(zip((i.name for i in body.inputs), gradients, strict=True))
    if need_act or need_share:
        store.append(f"act = {value}.to({storage})")
    if need_share:
        product = f"act.to({math}) * back"
        if columns % tile.n:
            product = f"tl.where(ok, {product}, 0.0)"
        store.append(f"share = tl.sum({product}, 1)")
        store.append(f"tl.store(share_ptr + {times('pair', tiles)} + tile_n, share, mask=inside)")
    if need_act:
        if choices:
            store.append(f"act = (act.to({math}) * weight).to({storage})")
        store.append(f"tl.store(act_ptr + {place(columns)}, act, mask=ok)")
    for b in found if need_d else ():
        parts = [gradient[name] if name else zeros for name in b.inputs]
        if b.wide:
            store.append(f"joined = tl.join({parts[0]}, {parts[1]})")
            parts = [f"tl.reshape(joined, ({tile.m}, {2 * tile.n}))"]
        store.append(f"d = {parts[0]}.to({storage})")
        store.append(f"tl.store(d_ptr + {b.place(total)}, d, mask={b.ok})")
    of_expert, of_k, of_column = strides[0], strides[2], strides[1]
    optional = [("weight_ptr", bool(choices)), ("d_ptr", need_d), ("act_ptr", need_act), ("share_ptr", need_share)]
    return GroupedGemm(
        "experts_backward",
        "moec::experts, backward: gradient of the activation, of the pre-activations and of the weights.",
        listing(derivative),
        experts, columns, dtype, tile,
        (Product("grad_ptr", hidden, (Weight("w_ptr", "back", (of_expert, of_k, of_column)),), hidden,
                 gathered=bool(choices)),),
        ("h_ptr", *(name for name, there in optional if there)),
        (*load, *weigh, *of_body, *store),
        choices,
    )  # fmt: skip
