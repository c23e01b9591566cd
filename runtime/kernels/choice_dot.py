"""What a bias of the second product gives to the gradient of the routing weights.

Legend: T tokens, K choices, E experts, C columns.

``share[token, k] = grad[token] · bias[expert of the choice]``, in fp32; 0 for a dropped pair (id −1).  A program reads
the gradient of its token once for all choices.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .expressions import computing
from .source import load
from .template import fill

BLOCK = 1024

TEMPLATE = '''"""grad[token] · bias[expert], for each of a token's <choices> choices."""

import triton
import triton.language as tl


@triton.jit
def choice_dot(expert_ptr, grad_ptr, bias_ptr, share_ptr):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, <padded>)
    expert = tl.load(expert_ptr + token * <choices> + k, mask=k < <choices>, other=-1).to(tl.int64)
    total = tl.zeros((<padded>,), <math>)
    for first in range(0, <columns>, <block>):
        column = first + tl.arange(0, <block>)
        grad = tl.load(grad_ptr + token * <columns> + column, mask=column < <columns>, other=0.0).to(<math>)
        ok = (expert >= 0)[:, None] & (column < <columns>)[None, :]
        bias = tl.load(bias_ptr + expert[:, None] * <columns> + column[None, :], mask=ok, other=0.0).to(<math>)
        total += tl.sum(bias * grad[None, :], 1)
    tl.store(share_ptr + token * <choices> + k, total, mask=k < <choices>)
'''


def source(choices: int, columns: int, dtype: torch.dtype) -> str:
    """The text of the kernel."""
    padded = 1 << (choices - 1).bit_length()
    return fill(
        TEMPLATE, choices=choices, padded=padded, columns=columns, math=computing(dtype),
        block=max(16, min(BLOCK, 4096 // padded, 1 << (columns - 1).bit_length())),
    )  # fmt: skip


@cache
def kernel(choices: int, columns: int, dtype: torch.dtype) -> Any:
    return load(source(choices, columns, dtype), "choice_dot").choice_dot


def launch(expert_TK: Tensor, grad_TC: Tensor, bias_EC: Tensor) -> Tensor:
    """``[T, K]`` in the computing dtype."""
    (T, K), C = expert_TK.shape, grad_TC.shape[1]
    share_TK = grad_TC.new_empty((T, K), dtype=torch.float64 if grad_TC.dtype == torch.float64 else torch.float32)
    if T and K:
        kernel(K, C, grad_TC.dtype)[(T,)](expert_TK, grad_TC, bias_EC, share_TK, num_warps=4)
    return share_TK
