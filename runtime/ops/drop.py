"""``moec::drop``: the capacity of experts, on (token, choice) pairs.

Legend: T tokens, K choices per token, N = T*K pairs, E experts, C capacity, D runs of tokens that compete apart.

``drop(weights_TK, ids_TK, spec) -> (weights_TK, ids_TK)``: the rule of step 6 of ``route_spec``.  Each expert takes C
pairs; the others get id -1 and weight 0.  Pairs that are -1 already take no place.  Without a capacity nothing happens.
``moec::route`` calls the same function; it is an op of its own because tokens that compete with each other may lie on
several ranks, and pairs are less to gather than logits.

Backward: the gradient of what was kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MoecError
from ..route_spec import RouteSpec


def dropped(weights_TK: Tensor, ids_TK: Tensor, spec: RouteSpec) -> Tensor:
    """bool [T, K]: the pairs for which no place is left.

    1. Pairs in order of priority: by falling weight (the first of equal ones first), or as they come.
    2. Sorted by (run, expert), stably: a pair's place is how far it lies behind the first pair of its expert.
    """
    (T, K), E, D = ids_TK.shape, spec.num_experts, spec.shards
    if T % D:
        raise MoecError(f"{T} tokens are not {D} equal runs", where="moec::drop")
    capacity_C = spec.capacity(T // D)
    if capacity_C is None or not T:
        return torch.zeros_like(ids_TK, dtype=torch.bool)
    ids_N = ids_TK.reshape(-1)
    run_N = torch.arange(T, device=ids_N.device).div_(T // D, rounding_mode="floor").repeat_interleave(K)
    key_N = torch.where(ids_N < 0, D * E, run_N * E + ids_N)
    if spec.drop == "probs":  # 1
        first_N = weights_TK.reshape(-1).argsort(stable=True, descending=True)
    else:
        first_N = torch.arange(T * K, device=ids_N.device)
    pair_N = first_N[key_N[first_N].argsort(stable=True)]  # 2
    counts = key_N.new_zeros(D * E + 1).scatter_add_(0, key_N, torch.ones_like(key_N))
    start_N = (counts.cumsum(0) - counts)[key_N[pair_N]]
    late_N = torch.arange(T * K, device=ids_N.device) - start_N >= capacity_C
    out_N = torch.empty_like(late_N)
    out_N[pair_N] = late_N
    return out_N.view(T, K)


@torch.library.custom_op("moec::drop", mutates_args=())
def drop(weights_TK: Tensor, ids_TK: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    if weights_TK.shape != ids_TK.shape:
        raise MoecError(f"weights {tuple(weights_TK.shape)} for ids {tuple(ids_TK.shape)}", where="moec::drop")
    gone_TK = dropped(weights_TK, ids_TK, RouteSpec.parse(spec))
    return weights_TK.masked_fill(gone_TK, 0), ids_TK.masked_fill(gone_TK, -1)


@drop.register_fake
def _(weights_TK, ids_TK, spec):
    return torch.empty_like(weights_TK), torch.empty_like(ids_TK)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_TK, _ids):
    (ids_TK,) = ctx.saved_tensors
    return grad_TK.masked_fill(ids_TK < 0, 0), None, None


drop.register_autograd(_backward, setup_context=_setup)
