"""Rows of experts that have a fixed number of slots each, used or not: sizes that no routing changes.

Legend: T tokens, K choices per token, E experts, C slots of an expert, N = E*C rows, H hidden.

* ``slots(x_TH, ids_TK, tokens, spec) -> (rows_NH, row_of_TK)``: row ``e*C + j`` is expert e's j-th pair in order of
  (token, choice), unused ones are zeros.  ``C = slots_of(spec, T, tokens)``: as many as the T tokens here may send an
  expert of which ``spec`` (a ``RouteSpec``) lets pairs of ``tokens`` compete for its capacity.  So pairs that a router
  with this capacity kept always fit.  More are an error, never dropped: who drops is the router, which counts it.
  Backward: ``permute_backward``.
* ``swap_chunks(x_NH, outer, inner) -> y_NH``: rows as [outer, inner, …] become [inner, outer, …]; backward the inverse.
* ``equal_counts(x_NH, num_experts) -> counts_E``: an equal share of the rows each.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from ..errors import MoecError
from ..route_spec import RouteSpec
from ..torch_compat import assert_on_device
from .permute import permute_backward


def slots_of(spec: RouteSpec, here: int, tokens: int) -> int:
    """Slots that ``here`` tokens need of an expert whose capacity ``tokens`` tokens share."""
    if spec.capacity_factor is None:
        raise MoecError("a router without a capacity fills any number of slots", where="moec::slots")
    tokens = tokens // spec.shards
    if isinstance(here, int) and isinstance(tokens, int):
        capacity = spec.capacity(tokens)
        assert capacity is not None
        return min(here, capacity)
    # Fakes alone have symbolic sizes: a float's rounding would not show in them.
    per_token = (Fraction(spec.capacity_factor) * spec.top_k / spec.num_experts).limit_denominator(10**6)
    wanted = -(-tokens * per_token.numerator // per_token.denominator)
    return torch.sym_min(here, torch.sym_min(tokens, torch.sym_max(spec.min_capacity, wanted)))


@torch.library.custom_op("moec::slots", mutates_args=(), device_types=("cpu", "cuda"))
def slots(x_TH: Tensor, ids_TK: Tensor, tokens: int, spec: str) -> tuple[Tensor, Tensor]:
    s = RouteSpec.parse(spec)
    E, (T, K) = s.num_experts, ids_TK.shape
    C = slots_of(s, T, tokens)
    key_N = torch.where(ids_TK < 0, E, ids_TK).reshape(-1)
    counts_E = key_N.new_zeros(E + 1).scatter_add_(0, key_N, torch.ones_like(key_N))
    if T and key_N.device.type != "cpu":
        assert_on_device((counts_E[:E] <= C).all(), "moec::slots: an expert has more pairs than slots")
    elif T and (most := int(counts_E[:E].max())) > C:
        raise MoecError(
            f"{most} pairs for an expert that has {C} slots for {T} tokens: the router kept too many",
            where="moec::slots",
        )
    order_N = key_N.argsort(stable=True)
    expert_N = key_N[order_N]
    first_E = counts_E.cumsum(0) - counts_E
    place_N = expert_N * C + torch.arange(T * K, device=key_N.device) - first_E[expert_N]
    row_of_N = torch.empty_like(key_N)
    row_of_N[order_N] = place_N.masked_fill(expert_N == E, -1)
    rows_NH = x_TH.new_zeros((E * C + 1, x_TH.shape[1]))
    rows_NH[row_of_N] = x_TH.repeat_interleave(K, 0)  # pairs without an expert: to the end, which is cut off
    return rows_NH[:-1], row_of_N.view(T, K)


@slots.register_fake
def _(x_TH, ids_TK, tokens, spec):
    s = RouteSpec.parse(spec)
    rows = s.num_experts * slots_of(s, x_TH.shape[0], tokens)
    return x_TH.new_empty((rows, x_TH.shape[1])), ids_TK.new_empty(ids_TK.shape, dtype=torch.int64)


def _setup_slots(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _slots_backward(ctx, grad_NH, _row_of):
    return permute_backward(grad_NH, *ctx.saved_tensors), None, None, None


slots.register_autograd(_slots_backward, setup_context=_setup_slots)


@torch.library.custom_op("moec::swap_chunks", mutates_args=(), device_types=("cpu", "cuda"))
def swap_chunks(x_NH: Tensor, outer: int, inner: int) -> Tensor:
    N, H = x_NH.shape
    if N % (outer * inner):
        raise MoecError(f"{N} rows are not {outer} times {inner} equal chunks", where="moec::swap_chunks")
    return x_NH.reshape(outer, inner, N // (outer * inner), H).transpose(0, 1).reshape(N, H).clone()


@swap_chunks.register_fake
def _(x_NH, outer, inner):
    return x_NH.new_empty(x_NH.shape)


def _setup_swap(ctx, inputs, output) -> None:
    _, ctx.outer, ctx.inner = inputs


swap_chunks.register_autograd(
    lambda ctx, grad: (swap_chunks(grad, ctx.inner, ctx.outer), None, None), setup_context=_setup_swap
)


@torch.library.custom_op("moec::equal_counts", mutates_args=(), device_types=("cpu", "cuda"))
def equal_counts(x_NH: Tensor, num_experts: int) -> Tensor:
    return torch.full((num_experts,), x_NH.shape[0] // num_experts, dtype=torch.int64, device=x_NH.device)


@equal_counts.register_fake
def _(x_NH, num_experts):
    return x_NH.new_empty((num_experts,), dtype=torch.int64)
