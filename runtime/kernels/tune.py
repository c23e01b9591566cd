"""Which tiles are fastest: every family of the experts' kernels is timed at the shapes of one block, or those of its
FP8 products (``scaled_tune.py``).

Legend: T tokens, K choices per token, N = T · K rows, E experts, H hidden, I columns of the body's result, A columns of
the first products.

1. Operands are drawn; every expert gets the same number of rows, as ``tiles.Shape`` assumes.
2. For every kernel of a step the candidates are tried; one that does not compile, or does not fit, drops out.
3. The fastest is what ``found`` holds; the caller records it (``tiles.record``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MoecError
from ..fp8 import Recipe
from . import experts, scaled_tune
from .experts import Weights
from .grouped_outer import Rows
from .order import of_ids
from .tiles import Shape, Tile

SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"
CANDIDATES = tuple(
    Tile(m, n, k, warps, stages, programs=2 if warps == 4 else 1)
    for m, n, k, warps in (
        (128, 128, 64, 8), (128, 64, 64, 8), (128, 64, 64, 4), (64, 128, 64, 8), (64, 128, 64, 4), (64, 64, 64, 4),
        (128, 128, 32, 8), (128, 256, 64, 8), (256, 128, 64, 8), (32, 128, 64, 4), (32, 64, 128, 4),
    )
    for stages in (2, 3, 4)
)  # fmt: skip

Measure = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Block:
    """The block of a model whose kernels are tuned: SwiGLU with one packed first weight, as it is stored by most."""

    experts: int
    hidden: int
    width: int
    top_k: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    fp8: str | None = None
    """A recipe: its products are tuned, and not those in ``dtype``."""


@dataclass(frozen=True)
class Found:
    family: str
    shape: Shape
    tile: Tile
    milliseconds: float
    tried: int


def tune(
    block: Block, device: torch.device, candidates: Sequence[Tile] | None = None, measure: Measure | None = None
) -> list[Found]:
    """The fastest of ``candidates`` for every kernel of a step.  ``measure(run)`` gives milliseconds; by default those
    of the GPU.  Raises MoecError where no candidate runs."""
    if measure is None:
        measure = on_gpu
    found = []
    if block.fp8:
        recipe = Recipe.parse(block.fp8)
        sizes = block.experts, block.hidden, block.width, block.tokens * block.top_k
        problems = scaled_tune.problems(*sizes, block.dtype, recipe, device)
        candidates = candidates or scaled_tune.candidates(recipe, device)
    else:
        problems = _problems(block, device)
    for family, shape, run in problems:
        times: dict[Tile, float] = {}
        why = "no candidates"
        for tile in candidates or CANDIDATES:
            try:
                times[tile] = measure(lambda run=run, tile=tile: run(tile))  # type: ignore[misc]
            except MoecError:
                raise
            except Exception as e:  # what the compiler or the driver has against this tile
                why = f"{type(e).__name__}: {e}"
        if not times:
            raise MoecError(f"no tile runs; the last one: {why}", where=f"kernel {family}")
        best = min(times, key=lambda tile: times[tile])
        found.append(Found(family, shape, best, times[best], len(times)))
    return found


def on_gpu(run: Callable[[], Any], repeats: int = 10) -> float:
    """Median milliseconds of a launch, after two that warm up."""
    run(), run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def _problems(b: Block, device: torch.device) -> list[tuple[str, Shape, Callable[[Tile], Any]]]:
    """``(family, shape, run)`` of the kernels of a step whose shapes differ."""
    T, K, E, H, I, A = b.tokens, b.top_k, b.experts, b.hidden, b.width, 2 * b.width  # noqa: E741
    N = T * K

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=b.dtype)

    x_TH, grad_TH = draw(T, H), draw(T, H)
    w_in, w_out = draw(E, A, H).transpose(1, 2), draw(E, H, I).transpose(1, 2)
    h_NA, act_NI, d_NA, y_NH = draw(N, A), draw(N, I), draw(N, A), draw(N, H)
    weights_P = torch.rand(N, device=device)
    ids_TK = (torch.arange(N, device=device) % E).view(T, K)
    order = of_ids(ids_TK, E, "experts")
    offset, pair = order.offset_E1, order.pair_P

    def with_tile(tile: Tile) -> Weights:
        return Weights(x_TH, [w_in], [], w_out, None, SWIGLU, tile)

    def first(tile: Tile) -> Any:
        return experts.first(with_tile(tile), x_TH, offset, pair, N, K)

    def second(tile: Tile) -> Any:
        return experts.second(with_tile(tile), act_NI, offset, y_NH, (pair, K, weights_P))

    def activation(tile: Tile) -> Any:
        return experts.activation_gradient(
            with_tile(tile), grad_TH, h_NA, offset, (pair, K, weights_P), need_d=True, need_act=True, need_share=True
        )

    def rows(tile: Tile) -> Any:
        return experts.rows_gradient(with_tile(tile), d_NA, offset, y_NH, (pair, K))

    def weight_in(tile: Tile) -> Any:
        of_x, of_d = Rows(H, H, gathered=True), Rows(A, A)
        return experts.weight_gradient(with_tile(tile), offset, pair, K, N, w_in, x_TH, of_x, d_NA, of_d)

    def weight_out(tile: Tile) -> Any:
        of_act, of_grad = Rows(I, I), Rows(H, H, gathered=True)
        return experts.weight_gradient(with_tile(tile), offset, pair, K, N, w_out, act_NI, of_act, grad_TH, of_grad)

    def shape(columns: int, depth: int) -> Shape:
        return Shape(columns, depth, -(-N // E), b.dtype)

    return [
        ("experts_forward", shape(I, H), first),
        ("grouped_rows", shape(H, I), second),
        ("experts_backward", shape(I, H), activation),
        ("grouped_rows", shape(H, A), rows),
        ("grouped_outer", shape(A, H), weight_in),
        ("grouped_outer", shape(H, I), weight_out),
    ]
