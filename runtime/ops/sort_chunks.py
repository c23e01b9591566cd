"""``moec::sort_chunks``: from source-rank-major to expert-major order, and back.

Legend: R source ranks, E experts of this rank, N = sum(counts_RE) rows, H hidden.

``sort_chunks(x_NH, counts_RE, inverse) -> y_NH``: rows arrive as chunks (rank major, expert minor) of
``counts_RE[r, e]`` rows; they leave expert major, rank minor.  ``inverse`` undoes it; each is the other's backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError


@torch.library.custom_op("moec::sort_chunks", mutates_args=(), device_types=("cpu", "cuda"))
def sort_chunks(x_NH: Tensor, counts_RE: Tensor, inverse: bool) -> Tensor:
    counts_AB = counts_RE.t() if inverse else counts_RE  # chunks lie A major, and leave B major
    A, B = counts_AB.shape
    sizes = counts_AB.flatten().tolist()
    if sum(sizes) != x_NH.shape[0] or min(sizes, default=0) < 0:
        raise MoecError(f"chunks {counts_RE.tolist()} for {x_NH.shape[0]} rows", where="moec::sort_chunks")
    if not x_NH.shape[0]:
        return x_NH.new_empty(x_NH.shape)
    chunks = x_NH.split(sizes)
    return torch.cat([chunks[a * B + b] for b in range(B) for a in range(A)])


@sort_chunks.register_fake
def _(x_NH, counts_RE, inverse):
    return x_NH.new_empty(x_NH.shape)


def _setup(ctx, inputs, output) -> None:
    _, counts_RE, ctx.inverse = inputs
    ctx.save_for_backward(counts_RE)


def _backward(ctx, grad_NH):
    (counts_RE,) = ctx.saved_tensors
    return sort_chunks(grad_NH, counts_RE, not ctx.inverse), None, None


sort_chunks.register_autograd(_backward, setup_context=_setup)
