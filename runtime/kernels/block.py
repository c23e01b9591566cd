"""Every kernel with products that a step of one block launches, as specs: what is compiled ahead of time and listed.

Legend: K choices per token, E experts, H hidden, M columns of a first product, A of all of them, I columns of the
body's result, C columns of the second product.

``experts.py`` launches the same specs one by one; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..body import Body
from . import experts_backward, experts_forward, grouped_gemm, grouped_outer, grouped_rows
from .grouped_gemm import GroupedGemm
from .grouped_outer import GroupedOuter, Rows
from .tiles import Shape, Tile, default

Strides = tuple[int, int, int]


@dataclass(frozen=True)
class Block:
    """``choices``: K of ``moec::experts``; 0 for ``moec::experts_rows``, whose rows lie by expert already.
    ``rows``: that an expert gets on average."""

    body: str
    experts: int
    hidden: int
    widths: tuple[int, ...]
    columns: int
    strides_in: tuple[Strides, ...]
    strides_out: Strides
    bias_in: bool
    bias_out: bool
    dtype: torch.dtype
    choices: int
    rows: int


def specs(b: Block, arch: str) -> dict[str, GroupedGemm | GroupedOuter]:
    """Name -> kernel, with the tiles that ``arch`` gets without a table."""
    body, E, H, C, K, A = Body.parse(b.body), b.experts, b.hidden, b.columns, b.choices, sum(b.widths)
    I, dtype, pairs = body.width(b.widths), b.dtype, bool(b.choices)  # noqa: E741
    back = tuple((e, m, h) for e, h, m in b.strides_in)
    steps = len(body.derivative(value=True).steps)

    def tile(family: str, columns: int, depth: int) -> Tile:
        return default(family, Shape(columns, depth, b.rows, dtype, steps if family == "experts_backward" else 0), arch)

    def rows(title: str, columns: int, depths: Sequence[int], strides: Sequence[Strides], bias: bool) -> GroupedGemm:
        forward = title.endswith("second product.")
        return grouped_rows.spec(
            title, E, columns, depths, strides, dtype, tile("grouped_rows", columns, sum(depths)), K, bias,
            pairs and forward,
        )  # fmt: skip

    def outer(a: Rows, of: Rows, strides: Strides) -> GroupedOuter:
        title = "moec::experts, backward: gradient of a weight."
        return GroupedOuter(title, E, a, of, strides, dtype, tile("grouped_outer", of.width, a.width), K)

    found: dict[str, GroupedGemm | GroupedOuter] = {
        "first": experts_forward.spec(
            body, b.widths, E, H, b.strides_in, b.bias_in, dtype, tile("experts_forward", I, H), K
        ),
        "second": rows("moec::experts, forward: second product.", C, (I,), (b.strides_out,), b.bias_out),
        "activation's gradient": experts_backward.spec(
            body, b.widths, E, C, b.strides_out, dtype, tile("experts_backward", I, C), K
        ),
        "rows' gradient": rows("moec::experts, backward: gradient of the rows.", H, b.widths, back, False),
    }
    offset = 0
    for n, (width, strides) in enumerate(zip(b.widths, b.strides_in, strict=True)):
        name = "first weight's gradient" if len(b.widths) == 1 else f"first weight's gradient, {n}"
        found[name] = outer(Rows(H, H, gathered=pairs), Rows(width, A, offset), strides)
        offset += width
    found["second weight's gradient"] = outer(Rows(I, I), Rows(C, C, gathered=pairs), b.strides_out)
    return found


def source(spec: GroupedGemm | GroupedOuter) -> str:
    return grouped_gemm.source(spec) if isinstance(spec, GroupedGemm) else grouped_outer.source(spec)


def pointers(spec: GroupedGemm | GroupedOuter) -> list[str]:
    return grouped_gemm.pointers(spec) if isinstance(spec, GroupedGemm) else grouped_outer.pointers(spec)
