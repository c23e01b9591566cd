"""``moec::split_tokens`` and ``moec::join_tokens``: the tokens of one rank as chunks, and the chunks as tokens.

Legend: T tokens of this rank, N chunks, t tokens of one chunk, B batch, b its part in one chunk, S sequence, G blocks.

Chunk i of T tokens has tokens ⌊i·T/N⌋ … ⌊(i+1)·T/N⌋: chunks differ by at most one token, and are empty where T < N.
What follows the tokens' dims is kept.  Of ``x``

* ``[T, …]`` (``lead`` 1) chunks are ``[t, …]``;
* ``[B·G, …]`` (``lead`` 1, ``blocks`` G), where G neighbours stay together, they are ``[b·G, …]``;
* ``[B, S, …]`` (``lead`` 2), T = B·S, they are ``[t, 1, …]``;
* ``[B, G·S, …]`` (``lead`` 2, ``blocks`` G), where G ranks' tokens have been gathered along the sequence, a block each,
  they are ``[t, G, …]``: token t of every block.

``split_tokens(x, count, lead, blocks) -> chunks``; ``join_tokens(chunks, sizes, blocks) -> x``, where ``sizes`` are x's
``lead`` leading sizes.  Each is the other's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import MoecError


def bounds(tokens: int, count: int) -> list[int]:
    """The first token of each chunk, and the number of tokens."""
    return [i * tokens // count for i in range(count + 1)]


@torch.library.custom_op("moec::split_tokens", mutates_args=(), device_types=("cpu", "cuda"))
def split_tokens(x: Tensor, count: int, lead: int, blocks: int) -> list[Tensor]:
    if lead == 2:
        if x.shape[1] % blocks:
            raise MoecError(f"dim 1 of shape {tuple(x.shape)} is not {blocks} blocks", where="moec::split_tokens")
        x = x.unflatten(1, (blocks, x.shape[1] // blocks)).transpose(1, 2).flatten(0, 1)
    at = _rows(x.shape[0], count, lead, blocks, "moec::split_tokens")
    return [x[a:b].clone(memory_format=torch.contiguous_format) for a, b in pairwise(at)]


def _rows(rows: int, count: int, lead: int, blocks: int, where: str) -> list[int]:
    """The first row of each chunk, and the number of rows."""
    together = blocks if lead == 1 else 1
    if rows % together:
        raise MoecError(f"{rows} rows do not consist of blocks of {together}", where=where)
    return [together * a for a in bounds(rows // together, count)]


@torch.library.custom_op("moec::join_tokens", mutates_args=(), device_types=("cpu", "cuda"))
def join_tokens(chunks: Sequence[Tensor], sizes: Sequence[int], blocks: int) -> Tensor:
    rows = torch.cat(list(chunks))
    at = _rows(rows.shape[0], len(chunks), len(sizes), blocks, "moec::join_tokens")
    if [len(c) for c in chunks] != [b - a for a, b in pairwise(at)]:
        raise MoecError(f"{[len(c) for c in chunks]} are not the tokens of equal chunks", where="moec::join_tokens")
    if len(sizes) == 1:
        return rows
    B, S = sizes[0], sizes[1] // blocks
    if blocks == 1:
        return rows.view(B, S, *rows.shape[2:])
    return rows.unflatten(0, (B, S)).transpose(1, 2).reshape(B, blocks * S, *rows.shape[2:])


@split_tokens.register_fake
def _(x, count, lead, blocks):
    if lead == 1:
        return [x.new_empty((blocks * (b - a), *x.shape[1:])) for a, b in pairwise(bounds(x.shape[0] // blocks, count))]
    at = bounds(x.shape[0] * (x.shape[1] // blocks), count)
    return [x.new_empty((b - a, blocks, *x.shape[2:])) for a, b in pairwise(at)]


@join_tokens.register_fake
def _(chunks, sizes, blocks):
    return chunks[0].new_empty((*sizes, *chunks[0].shape[len(sizes) :]))


def _setup_split(ctx, inputs, output) -> None:
    x, _, lead, ctx.blocks = inputs
    ctx.sizes = x.shape[:lead]


def _setup_join(ctx, inputs, output) -> None:
    chunks, sizes, ctx.blocks = inputs
    ctx.count, ctx.lead = len(chunks), len(sizes)


split_tokens.register_autograd(
    lambda ctx, gs: (join_tokens(gs, ctx.sizes, ctx.blocks), None, None, None), setup_context=_setup_split
)
join_tokens.register_autograd(
    lambda ctx, g: (split_tokens(g, ctx.count, ctx.lead, ctx.blocks), None, None), setup_context=_setup_join
)
