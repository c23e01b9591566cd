"""The first products of the experts and the body behind them, in one kernel.

Legend: N rows, E experts, H hidden, M columns of a first product, A columns of all of them, I columns of the result.

``h[row] = x[row or its token] @ w_in[expert] (+ b_in[expert])``, rounded and stored: the pre-activations, all that the
backward needs beside the inputs.  ``act[row] = body(h[row])``, computed from the rounded ones, as the backward will.
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


def spec(
    body: Body, widths: Sequence[int], experts: int, hidden: int, strides: Sequence[tuple[int, ...]], biases: bool,
    dtype: torch.dtype, tile: Tile, choices: int = 0,
) -> GroupedGemm:  # fmt: skip
    """Tensors of ``launch``: offsets, pairs [N] (with ``choices``: K), x [T or N, H], every w_in [E, H, M] (of these
    ``strides``), with ``biases`` every b_in [E, M], h [N, A], act [N, I]."""
    found, columns, total = blocks(body, widths), body.width(widths), sum(widths)
    storage, math = TRITON[dtype], computing(dtype)
    weights, epilogue = [], []
    for b in found:
        e, k, n = strides[b.product]
        weights.append(Weight(f"w{b.product}_ptr", f"acc_{b.name}", (e, k, n), b.columns))
        value = f"acc_{b.name}"
        if biases:
            existing = f", mask={'wide' if b.wide else 'column'} < {columns * len(b.inputs)}"
            where = existing if columns % tile.n else ""
            epilogue.append(f"bias = tl.load(b{b.product}_ptr + expert * {widths[b.product]} + {b.columns}{where})")
            value = f"({value} + bias.to({math})[None, :])"
        epilogue += [
            f"h_{b.name} = {value}.to({storage})",
            f"tl.store(h_ptr + {b.place(total)}, h_{b.name}, mask={b.ok})",
            *split(b, f"h_{b.name}", tile.m, tile.n),
        ]
    of_body, (result,) = lines(
        body, inputs(found, "h_{}", math), dtype, NAMES | identifiers("\n".join(epilogue)) | {"act"},
        f"tl.zeros(({tile.m}, {tile.n}), {math})",
    )  # fmt: skip
    store = f"tl.store(act_ptr + {place(columns)}, act.to({storage}), mask=ok)"
    return GroupedGemm(
        "experts_forward",
        "moec::experts, forward: first products and body.",
        listing(body),
        experts, columns, dtype, tile,
        (Product("x_ptr", hidden, tuple(weights), hidden, gathered=bool(choices)),),
        (*(f"b{n}_ptr" for n in range(len(widths) if biases else 0)), "h_ptr", "act_ptr"),
        (*epilogue, *of_body, f"act = {result}", store),
        choices,
    )  # fmt: skip
