"""The five FP8 recipes.

A recipe says which elements share a scale, what numbers scales are, and which format is whose:

============  ===========================  ==========================  ========  =========  =========
recipe        activations, gradients       weights                     scales    gradients  alignment
============  ===========================  ==========================  ========  =========  =========
``delayed``   the tensor, of past steps    the tensor, of past steps   fp32      E5M2       16
``current``   the tensor                   the tensor                  fp32      E5M2       16
``rowwise``   a vector along the product   a vector along the product  fp32      E4M3       16
``blockwise`` 1 x 128 along the product    128 x 128                   2^n       E4M3       128
``mxfp8``     1 x 32 along the product     1 x 32 along the product    E8M0      E4M3       32
============  ===========================  ==========================  ========  =========  =========

For ``delayed`` a stack of experts is one tensor, for ``current`` it is one for each expert.
Whatever is not a gradient is E4M3.  "Along the product": along the dim that is summed over.  An operand of two products
with different such dims is quantised twice, both times from its high-precision value (the second time ``transposed``).

The arithmetic of a tile, all in fp32 (fp64 is rounded to fp32 first), IEEE rounding to nearest even:

1. a = the largest magnitude of its *finite* elements.
2. scale = 1 if a is 0, else
   fp32: max(a / largest, 2^-126) · 2^margin, where ``largest`` is the format's (448, 57344; margin: ``delayed``);
   2^n and E8M0: the smallest power of two, at least 2^-126, with a / scale ≤ largest.
3. q = (x / scale) clamped to ±largest, cast; what is not finite becomes NaN, in its own place alone: it passes through
   a product as it would without FP8.
4. The value is q · scale.

So q · scale is at most half a unit of the format off: 2^-4 of the value for E4M3, 2^-3 for E5M2, or half the smallest
subnormal (2^-10, 2^-17) times the scale, unless ``delayed`` clamps.

Sources: Micikevicius et al. 2022 (formats, delayed scaling), DeepSeek-V3 2024 (1 x 128 and 128 x 128), OCP MX 1.0
(1 x 32, E8M0; scales are rounded up, as Transformer Engine does, so that nothing saturates), torchao (rowwise).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..errors import MoecError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

ROLES = ("rows", "grad", "weight", "stack")
"""What an operand is: activations [..., K] and their gradients [..., M], whose last dim the first product sums over; a
weight [M, K], likewise; a stack of experts' weights [E, K, M], whose first product sums over K, each expert by
itself."""

Tile = tuple[int, int]
"""Rows and columns that share a scale; 0: all of them."""


@dataclass(frozen=True)
class Recipe:
    name: str
    shared: Literal["tensor", "vector", "block"]
    """Which elements share a scale."""
    scales: Literal["fp32", "power", "e8m0"]
    gradients: torch.dtype
    alignment: int
    """The rows of every expert are padded to a multiple of it, and so its products' kernels want them."""
    block: int = 0
    square_weights: bool = False
    margin: int = 0

    def text(self) -> str:
        return f"{self.name}+{self.margin}" if self.margin else self.name

    @staticmethod
    def parse(text: str) -> Recipe:
        """Inverse of ``text``.  Raises MoecError for what is no recipe."""
        name, plus, margin = text.partition("+")
        if name not in RECIPES or (plus and not (margin.isdecimal() and name == "delayed")):
            raise MoecError(f"{text!r} is no FP8 recipe", where="fp8", way_out=f"recipes are {', '.join(RECIPES)}")
        return replace(RECIPES[name], margin=int(margin or 0))

    def format(self, role: str) -> torch.dtype:
        return self.gradients if role == "grad" else E4M3

    def tile(self, role: str, transposed: bool) -> Tile:
        """The elements that share a scale, of the last two dims (of ``rows`` and ``grad`` of all leading dims as one).

        ``transposed``: for the product that sums over the other of the two."""
        if role not in ROLES:
            raise MoecError(f"{role!r} is no role of an operand", where="fp8", way_out=f"roles are {', '.join(ROLES)}")
        if self.shared == "tensor":
            return 0, 0
        if self.square_weights and role in ("weight", "stack"):
            return self.block, self.block
        along_columns = transposed == (role == "stack")
        return (1, self.block) if along_columns else (self.block, 1)

    @property
    def reads_whole(self) -> bool:
        """Does a scale depend on elements of a whole dim, which several ranks may share?"""
        return self.shared != "block"


RECIPES = {
    r.name: r
    for r in (
        Recipe("delayed", "tensor", "fp32", E5M2, 16),
        Recipe("current", "tensor", "fp32", E5M2, 16),
        Recipe("rowwise", "vector", "fp32", E4M3, 16),
        Recipe("blockwise", "block", "power", E4M3, 128, block=128, square_weights=True),
        Recipe("mxfp8", "block", "e8m0", E4M3, 32, block=32),
    )
}
