"""Grouped products whose results are rows: plain ones, the second product of the experts, gradients of rows.

Legend: N rows, E experts, D depth, C columns.

``y = Σ_j a_j @ w_j[expert] (+ bias[expert]) (· weight of the pair)``, in fp32, rounded once.  The rows of y lie like
those of a, or (``scatter``) each at the place of its pair, ready for the sum over a token's choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .expressions import TRITON, computing
from .grouped_gemm import GroupedGemm, Product, Weight
from .tiles import Tile


def spec(
    title: str, experts: int, columns: int, depths: Sequence[int], strides: Sequence[tuple[int, ...]],
    dtype: torch.dtype, tile: Tile, choices: int = 0, bias: bool = False, weigh: bool = False,
) -> GroupedGemm:  # fmt: skip
    """Tensors of ``launch``: offsets, pairs [N] (with ``choices``, and y then lies by pair), rows [N, Σ depths], every
    weight [E, D, C] (of these ``strides``), with ``bias`` [E, C], with ``weigh`` weights [pairs], y."""
    products, offset = [], 0
    for n, (depth, (e, k, c)) in enumerate(zip(depths, strides, strict=True)):
        weight = Weight(f"w{n}_ptr", "y", (e, k, c))
        products.append(Product("x_ptr", depth, (weight,), sum(depths), offset))
        offset += depth
    math = computing(dtype)
    epilogue = []
    if bias:
        where = f", mask=column < {columns}" if columns % tile.n else ""
        epilogue.append(f"y += tl.load(bias_ptr + expert * {columns} + column{where}).to({math})[None, :]")
    if weigh:
        epilogue.append(f"y *= tl.load(weight_ptr + pair).to({math})[:, None]")
    to = "pair" if choices else "row"
    epilogue.append(
        f"tl.store(y_ptr + {to}[:, None] * {columns} + column[None, :], y.to({TRITON[dtype]}), mask=ok)"
    )
    arguments = [*(["bias_ptr"] if bias else []), *(["weight_ptr"] if weigh else []), "y_ptr"]
    return GroupedGemm(
        "grouped_rows", title, (), experts, columns, dtype, tile, tuple(products), tuple(arguments), tuple(epilogue),
        choices,
    )  # fmt: skip
