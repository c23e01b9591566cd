"""moec.runtime.fp8: FP8 recipes: what is quantised how.  Pure PyTorch on any device; it *defines* what kernels must
give.

``recipes``   the five recipes by name: formats, tiles that share a scale, kinds of scales, alignment
``tiles``     numbers <-> float8 and scales, for any tiling
``payload``   rows as the bytes that travel, scales among them
"""

from .recipes import RECIPES, ROLES, Recipe
from .tiles import amax, dequantised, quantised

__all__ = ["RECIPES", "ROLES", "Recipe", "amax", "dequantised", "quantised"]
