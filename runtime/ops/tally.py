"""``moec::tally``: what is counted of a router's choices, for people; no gradient.

Legend: T tokens, E experts, K choices per token.

``tally(chosen_TK, kept_TK, logits_TE, valid_T, num_experts, score)`` -> float64 (exact for counts), E + 3 long, without
logits E + 2:

* ``[:E]``: pairs that chose each expert; what padding chose (``valid_T``, bool, is False) is not counted.
* ``[E]``: pairs of real tokens that were dropped: of id -1 in ``kept``, or, where all there is to see is what was kept
  (None), in ``chosen``.
* ``[E + 1]``: real tokens.
* ``[E + 2]``: the sum over them of the entropy, in nats, of the probabilities that ``moec::balance`` sums.

Every entry is a sum over tokens, so what ranks count of their own tokens adds up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from .balance import probabilities


@torch.library.custom_op("moec::tally", mutates_args=())
def tally(
    chosen_TK: Tensor,
    kept_TK: Tensor | None,
    logits_TE: Tensor | None,
    valid_T: Tensor | None,
    num_experts: int,
    score: str,
) -> Tensor:
    T, E = chosen_TK.shape[0], num_experts
    for name, x in (("kept", kept_TK), ("logits", logits_TE), ("valid", valid_T)):
        if x is not None and x.shape[0] != T:
            raise MoecError(f"{name} has {x.shape[0]} tokens, chosen has {T}", where="moec::tally")
    gone_TK = chosen_TK < 0 if kept_TK is None else (chosen_TK >= 0) & (kept_TK < 0)
    # Pairs without an expert count as of an expert E.  Nothing here asks a GPU for a size, as bincount would.
    of_TK = torch.where(chosen_TK < 0, E, chosen_TK)
    if valid_T is not None:
        of_TK, gone_TK = of_TK.masked_fill(~valid_T[:, None], E), gone_TK & valid_T[:, None]
    out = torch.zeros(E + 2 + (logits_TE is not None), dtype=torch.float64, device=chosen_TK.device)
    out[: E + 1].scatter_add_(0, of_TK.reshape(-1), torch.ones_like(of_TK, dtype=torch.float64).reshape(-1))
    out[E] = gone_TK.sum()
    out[E + 1] = T if valid_T is None else valid_T.sum()
    if logits_TE is not None:
        entropy_T = torch.special.entr(probabilities(logits_TE.double(), score)).sum(1)
        out[E + 2] = (entropy_T if valid_T is None else entropy_T.masked_fill(~valid_T, 0)).sum()
    return out


@tally.register_fake
def _(chosen_TK, kept_TK, logits_TE, valid_T, num_experts, score):
    return chosen_TK.new_empty((num_experts + 2 + (logits_TE is not None),), dtype=torch.float64)
