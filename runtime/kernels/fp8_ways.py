"""Which FP8 products are computed by what on which GPU: one table; what is in none of its lines is numbers times
scales, multiplied in bf16 or fp32 (the ops' ``on_any_device``).

``tensor``: ``torch.nn.functional.scaled_mm`` with one scale an operand; ``rows``: with one for each row and column;
``grouped``: ``torch_compat.SCALED_GROUPED_MM``, which has that of rows and columns alone; ``generated``: moec's own
kernels (``scaled.py``), which have all recipes, E5M2 gradients too.  The first line that fits is taken.  So every
recipe's products run on FP8 tensor cores from compute capability 9.0 to 10.3 and on gfx950.  Not in the table:

* generated kernels where they were not compiled ahead of time: 8.9 and 12.0, which have less shared memory than their
  tiles want;
* gfx942, whose FP8 numbers are others (E4M3 without zero's sign, with another bias); torch's functions on AMD's GPUs.

How ``generated`` applies scales: ``whole`` ones (``rowwise``, ``current``, ``delayed``) to the sums; ``blockwise``
block by block, in fp32 registers; ``mxfp8`` in tensor cores that have scales of 32 elements (10.0, 10.3, gfx950), on
9.0 block by block too, which costs as much as the product itself, or more.  None has been timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..fp8 import RECIPES
from .tiles import architecture

Product = Literal["forward", "dgrad", "wgrad"]
Capability = tuple[int, int] | str
"""NVIDIA's two numbers, or AMD's name (``gfx950``)."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL: tuple[Product, ...] = ("forward", "dgrad", "wgrad")
MULTIPLE = 16
"""Every dim of an operand is a multiple of it."""


@dataclass(frozen=True)
class Way:
    name: Literal["tensor", "rows", "grouped", "generated"]
    recipes: tuple[str, ...]
    products: tuple[Product, ...]
    since: tuple[int, int]
    until: tuple[int, int]
    dtypes: tuple[torch.dtype, ...]
    """Of the result."""
    amd: tuple[str, ...] = ()

    def on(self, at: Capability) -> bool:
        return at in self.amd if isinstance(at, str) else self.since <= at <= self.until


GENERATED = Way("generated", tuple(RECIPES), ALL, (9, 0), (10, 3), (BF16, FP16, FP32), ("gfx950",))
LINEARS = (
    Way("tensor", ("delayed", "current"), ALL, (8, 9), (99, 0), (BF16, FP32)),
    Way("rows", ("rowwise",), ALL, (8, 9), (99, 0), (BF16,)),
    GENERATED,
)
GROUPS = (
    Way("grouped", ("rowwise",), ALL, (9, 0), (9, 0), (BF16,)),
    Way("grouped", ("delayed", "current"), ("forward",), (9, 0), (9, 0), (BF16,)),
    GENERATED,
)


def way(
    ways: tuple[Way, ...], recipe: str, product: Product, dtype: torch.dtype, at: Capability | None
) -> Way | None:
    """The line of the table, None where there is none.  ``at``: of the device, None for one that is no GPU."""
    found = (w for w in ways if recipe in w.recipes and product in w.products and dtype in w.dtypes)
    return next((w for w in found if at is not None and w.on(at)), None)


def capability(x: Tensor) -> Capability | None:
    if not x.is_cuda:
        return None
    return architecture(x.device.index or 0) if torch.version.hip else torch.cuda.get_device_capability(x.device)


def fit(*sizes: int) -> bool:
    """Are these dims such as torch's kernels take, and such as generated ones read 16 bytes at a time?"""
    return all(n and n % MULTIPLE == 0 for n in sizes)
