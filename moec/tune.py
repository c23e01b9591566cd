"""``moec.tune``: the fastest tiles of the experts' generated kernels for one block, on the GPU of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe
from moec.runtime.kernels import tiles
from moec.runtime.kernels import tune as kernels
from moec.runtime.kernels.tiles import Tile
from moec.runtime.kernels.tune import Block, Found

DTYPES = ("bfloat16", "float16", "float32")


def tune(
    *, experts: int, hidden: int, width: int, top_k: int, tokens: int, dtype: str = "bfloat16",
    fp8: str | None = None, table: str | Path | None = None, candidates: Sequence[Tile] | None = None,
) -> list[Found]:  # fmt: skip
    """Time every kernel of a step of one block (SwiGLU experts) and record the fastest tiles.

    Args:
        experts, hidden, width, top_k: of the block; ``width`` is that of one expert.
        tokens: of a step, of all experts together; tiles are chosen by the rows that an expert gets on average.
        dtype: bfloat16, float16 or float32.
        fp8: a recipe, whose generated FP8 products are timed; None: the kernels of ``dtype``.
        table: the JSON file that is written to; by default the user's, which kernels look into first.

    Returns what was found, kernel by kernel.  Raises MoecError without a GPU, for what is no recipe, or where nothing
    runs.
    """
    if dtype not in DTYPES:
        raise MoecError(f"dtype={dtype!r}", where="tune", way_out=f"one of {', '.join(DTYPES)}")
    if min(experts, hidden, width, top_k, tokens) < 1 or top_k > experts:
        sizes = f"experts={experts}, hidden={hidden}, width={width}, top_k={top_k}, tokens={tokens}"
        raise MoecError(f"{sizes} is no block", where="tune")
    if fp8 is not None:
        Recipe.parse(fp8)
    if not torch.cuda.is_available():
        raise MoecError(
            "there is no GPU to time kernels on", where="tune",
            way_out="run `moec tune` on the machine that will train; without it kernels use defaults",
        )  # fmt: skip
    block = Block(experts, hidden, width, top_k, tokens, getattr(torch, dtype), fp8)
    found = kernels.tune(block, torch.device("cuda", torch.cuda.current_device()), candidates)
    path, arch = Path(table or tiles.user_table()), tiles.architecture(torch.cuda.current_device())
    for f in found:
        tiles.record(path, arch, f.family, f.shape, f.tile)
    return found
