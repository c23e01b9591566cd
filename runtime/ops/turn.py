"""``moec::turn``: an operand as the other product reads it, where both read the same numbers.

``turn(q, role) -> q_T``: of an operand both of whose layouts have the same tiles (the tensor, or squares), q's numbers
to the bit, lying in memory as ``moec::quantise`` lays its ``q_T``.  Its ``scale_T`` is ``scale``.  No gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantise import as_matrix, no_gradient, none


@torch.library.custom_op("moec::turn", mutates_args=(), device_types="cpu")
def turn(q: Tensor, role: str) -> Tensor:
    q_T = as_matrix(q, role, True)
    out = torch.empty_permuted(q_T.shape, order(q_T.ndim, role), dtype=torch.uint8, device=q.device)
    return out.copy_(q_T.view(torch.uint8)).view(q.dtype)  # a copy in any case: a custom op may not return its input


def order(ndim: int, role: str) -> list[int]:
    """Dims from the outermost to the innermost, which is what the transposed product sums over."""
    order = list(range(ndim))
    if role != "stack":
        order[-2:] = order[-1], order[-2]
    return order


@turn.register_fake
def _(q, role):
    q_T = as_matrix(q, role, True)
    return torch.empty_permuted(q_T.shape, order(q_T.ndim, role), dtype=q.dtype, device=q.device)


turn.register_autograd(none, setup_context=no_gradient)
