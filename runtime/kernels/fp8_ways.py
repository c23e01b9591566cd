"""Which FP8 products torch computes on which GPU: one table; what is in none of its lines is numbers times scales,
multiplied in bf16 or fp32 (the ops' ``on_any_device``).

``tensor``: ``torch.nn.functional.scaled_mm`` with one scale an operand; ``rows``: with one for each row and column;
``grouped``: ``torch_compat.SCALED_GROUPED_MM``, which has that of rows and columns alone.  Not in the table:

* tiles of 1 x 128 in linears: torch wants their scales transposed and padded, and has them on compute capability 9.0
  alone; in groups it has none;
* tiles of 1 x 32: torch wants their scales swizzled, and does not check their shapes without a GPU;
* gradients in E5M2 in groups; AMD's GPUs, the older of which have other FP8 formats.

Numbers times powers of two are exact in bf16, so the recipes of tiles lose memory traffic there, but no accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Product = Literal["forward", "dgrad", "wgrad"]
Capability = tuple[int, int]
BF16, FP32 = torch.bfloat16, torch.float32
ALL: tuple[Product, ...] = ("forward", "dgrad", "wgrad")
MULTIPLE = 16
"""Every dim of an operand is a multiple of it."""


@dataclass(frozen=True)
class Way:
    name: Literal["tensor", "rows", "grouped"]
    recipes: tuple[str, ...]
    products: tuple[Product, ...]
    since: Capability
    until: Capability
    dtypes: tuple[torch.dtype, ...]
    """Of the result."""


LINEARS = (
    Way("tensor", ("delayed", "current"), ALL, (8, 9), (99, 0), (BF16, FP32)),
    Way("rows", ("rowwise",), ALL, (8, 9), (99, 0), (BF16,)),
)
GROUPS = (
    Way("grouped", ("rowwise",), ALL, (9, 0), (9, 0), (BF16,)),
    Way("grouped", ("delayed", "current"), ("forward",), (9, 0), (9, 0), (BF16,)),
)


def way(
    ways: tuple[Way, ...], recipe: str, product: Product, dtype: torch.dtype, at: Capability | None
) -> Way | None:
    """The line of the table, None where there is none.  ``at``: of the device, None for one that is no NVIDIA GPU."""
    found = (w for w in ways if recipe in w.recipes and product in w.products and dtype in w.dtypes)
    return next((w for w in found if at is not None and w.since <= at <= w.until), None)


def capability(x: Tensor) -> Capability | None:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda and torch.version.hip is None else None


def fit(*sizes: int) -> bool:
    """Are these dims such as torch's kernels take?"""
    return all(n and n % MULTIPLE == 0 for n in sizes)
