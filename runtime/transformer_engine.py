"""Transformer Engine computes what ``moec::`` ops do: route, permute, unpermute and the grouped products, as
``moec_te::`` ops of the same operands and results (``Plan(backend="te")``; passes/use_transformer_engine.py puts them
in).

Legend: T tokens, K choices per token, E experts, N = T*K rows, H hidden, K and M in and out features of a product.

Requires: ``transformer_engine.pytorch`` can be imported and tensors are on a GPU; ids are all experts (no −1).
Guarantees: nothing of TE is called but the functions of ``USED``, none of them private
(tests/test_transformer_engine.py holds names and arguments against TE's source).  ``refused`` says what TE cannot
express.  ``require`` raises where TE is missing or computes something else on this GPU.
Never: FP8, which is transformer_engine_fp8.py's; this file is TE's bf16, fp16 and fp32.

What differs from the ``moec::`` ops, and why it may:

* ``map_TK`` takes the place of ``row_of_TK``: TE's own numbering, which only ``moec_te`` ops read;
* of equal scores TE may choose another expert;
* splits of the products are read on the host, as TE wants them there.

How TE's router is asked: its ``softmax`` is over all experts before the choice (``use_pre_softmax``, never normalised)
or over the chosen ones; ``sigmoid`` and ``sqrtsoftplus`` always divide by their sum + 1e-20 if K > 1.  Softmax over
all, divided by the sum of the chosen, is softmax over the chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .errors import MoecError
from .ops.route import route_backward
from .ops.scores import score
from .route_spec import RouteSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

USED: dict[str, dict[str, tuple[str, ...]]] = {
    "pytorch/router.py": {
        "fused_topk_with_score_function": (
            "logits", "topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function",
            "expert_bias",
        ),
    },
    "pytorch/permutation.py": {
        "moe_permute": ("inp", "routing_map", "num_out_tokens", "map_type"),
        "moe_permute_index_map_backward": ("grad_permuted_act", "row_id_map", "num_tokens", "topK"),
        "moe_unpermute": ("inp", "row_id_map", "merging_probs", "map_type"),
        "moe_unpermute_index_map_backward": ("unpermuted_act_grad", "fwd_input", "row_id_map", "probs"),
    },
    "pytorch/cpp_extensions/gemm.py": {
        "general_grouped_gemm": (
            "A", "B", "out", "quantization_params", "out_dtype", "layout", "m_splits", "single_output",
        ),
    },
}  # fmt: skip
"""File of TE -> function -> the parameters that are passed."""


def function(name: str) -> Callable[..., Any]:
    """A function of ``USED``.  Raises MoecError where Transformer Engine cannot be imported, or lacks it."""
    return imported(next(file for file, functions in USED.items() if name in functions), name)


def imported(file: str, name: str) -> Any:
    """What a file of TE defines.  Raises MoecError where Transformer Engine cannot be imported, or lacks it."""
    try:
        module = "transformer_engine." + file.removesuffix(".py").replace("/", ".")
        return getattr(importlib.import_module(module), name)
    except Exception as e:  # TE raises many things where a library is missing or of another version
        raise MoecError(
            f"{name} of transformer_engine cannot be imported ({type(e).__name__}: {e})",
            where="backend='te'",
            way_out="pip install moec[te] on a machine with CUDA, or leave Plan.backend alone",
        ) from None


def refused(spec: RouteSpec, biased: bool) -> str | None:
    """Why TE cannot express a router, or None."""
    if spec.force is not None:
        return f"force={spec.force!r}"
    if spec.capacity_factor is not None:
        return "a capacity"
    if biased and spec.score.startswith("softmax"):
        return f"a bias of the selection beside {spec.score} scores"
    if spec.score in ("sigmoid", "sqrtsoftplus") and spec.top_k > 1 and not spec.normalize:
        return f"{spec.score} scores that are not normalised"
    if spec.groups > 1:
        best = {"max": 1, "top2": 2, "topk": spec.top_k // spec.kept_groups}[spec.group_score]
        if best != spec.top_k // spec.kept_groups:
            return f"groups scored by {spec.group_score}, not by their best {spec.top_k // spec.kept_groups}"
        if spec.score == "softmax_pre" and spec.normalize:
            return "groups scored by softmax, with normalised weights"
    return None


# -- route


def _probabilities(logits_TE: Tensor, bias_E: Tensor | None, s: RouteSpec) -> tuple[Tensor, Tensor]:
    """Weights at the chosen experts and 0 elsewhere, and where they are: [T, E] both."""
    grouped = s.groups > 1
    return function("fused_topk_with_score_function")(
        logits=logits_TE, topk=s.top_k,
        use_pre_softmax=s.score == "softmax_pre" and not (s.normalize and s.top_k > 1),
        num_groups=s.groups if grouped else None, group_topk=s.kept_groups if grouped else None,
        scaling_factor=s.scaling, score_function="softmax" if s.score.startswith("softmax") else s.score,
        expert_bias=bias_E,
    )  # fmt: skip


@torch.library.custom_op("moec_te::route", mutates_args=())
def route(
    logits_TE: Tensor, bias_E: Tensor | None, valid_T: Tensor | None, token_T: Tensor | None, spec: str
) -> tuple[Tensor, Tensor]:
    s = RouteSpec.parse(spec)
    z_TE, bias_E = logits_TE.float(), None if bias_E is None else bias_E.float()
    probs_TE, map_TE = _probabilities(z_TE, bias_E, s)
    by_TE = score(z_TE, s.score) if bias_E is None else score(z_TE, s.score) + bias_E
    by_TE = by_TE.clamp(min=torch.finfo(by_TE.dtype).min).masked_fill(~map_TE.bool(), -torch.inf)
    ids_TK = by_TE.sort(dim=1, descending=True, stable=True)[1][:, : s.top_k].contiguous()
    return probs_TE.float().gather(1, ids_TK), ids_TK


@route.register_fake
def _(logits_TE, bias_E, valid_T, token_T, spec):
    shape = (logits_TE.shape[0], RouteSpec.parse(spec).top_k)
    return logits_TE.new_empty(shape, dtype=torch.float32), logits_TE.new_empty(shape, dtype=torch.int64)


def _route_setup(ctx, inputs, output) -> None:
    logits_TE, bias_E, _, _, ctx.spec = inputs
    ctx.save_for_backward(logits_TE, bias_E, output[1])
    ctx.mark_non_differentiable(output[1])


def _route_backward(ctx, grad_TK, _ids):
    # moec's: it asks for the logits alone, where TE's keeps [T, E] numbers of its forward.
    logits_TE, bias_E, ids_TK = ctx.saved_tensors
    return route_backward(grad_TK, logits_TE, bias_E, None, None, ids_TK, ctx.spec), None, None, None, None


route.register_autograd(_route_backward, setup_context=_route_setup)


# -- permute, unpermute


def _opaque(row_id_map: Tensor, like_TK: tuple[int, int]) -> Tensor:
    return row_id_map.to(torch.int64).reshape(like_TK)


def _own(map_TK: Tensor) -> Tensor:
    return map_TK.reshape(-1).to(torch.int32)


@torch.library.custom_op("moec_te::permute", mutates_args=())
def permute(x_TH: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    T, K = ids_TK.shape
    counts_E = ids_TK.new_zeros(num_experts).scatter_add_(0, ids_TK.reshape(-1), torch.ones_like(ids_TK).reshape(-1))
    if not T:
        return x_TH.new_empty((0, x_TH.shape[1])), counts_E, torch.empty_like(ids_TK)
    rows_NH, row_id_map = function("moe_permute")(
        inp=x_TH.contiguous(), routing_map=ids_TK.to(torch.int32), num_out_tokens=T * K, map_type="index"
    )
    return rows_NH, counts_E, _opaque(row_id_map, (T, K))


@permute.register_fake
def _(x_TH, ids_TK, num_experts):
    T, K = ids_TK.shape
    return x_TH.new_empty((T * K, x_TH.shape[1])), ids_TK.new_empty((num_experts,)), ids_TK.new_empty((T, K))


@torch.library.custom_op("moec_te::permute_backward", mutates_args=())
def permute_backward(grad_rows_NH: Tensor, map_TK: Tensor) -> Tensor:
    T, K = map_TK.shape
    if not T:
        return grad_rows_NH.new_empty((0, grad_rows_NH.shape[1]))
    return function("moe_permute_index_map_backward")(
        grad_permuted_act=grad_rows_NH.contiguous(), row_id_map=_own(map_TK), num_tokens=T, topK=K
    )


@permute_backward.register_fake
def _(grad_rows_NH, map_TK):
    return grad_rows_NH.new_empty((map_TK.shape[0], grad_rows_NH.shape[1]))


def _permute_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _permute_backward(ctx, grad_rows_NH, _counts, _map):
    return permute_backward(grad_rows_NH, *ctx.saved_tensors), None, None


permute.register_autograd(_permute_backward, setup_context=_permute_setup)


@torch.library.custom_op("moec_te::unpermute", mutates_args=())
def unpermute(rows_NH: Tensor, weights_TK: Tensor, map_TK: Tensor) -> Tensor:
    if not map_TK.numel():
        return rows_NH.new_empty((0, rows_NH.shape[1]))
    return function("moe_unpermute")(
        inp=rows_NH.contiguous(), row_id_map=_own(map_TK), merging_probs=weights_TK.float().contiguous(),
        map_type="index",
    )  # fmt: skip


@unpermute.register_fake
def _(rows_NH, weights_TK, map_TK):
    return rows_NH.new_empty((map_TK.shape[0], rows_NH.shape[1]))


@torch.library.custom_op("moec_te::unpermute_backward", mutates_args=())
def unpermute_backward(
    grad_TH: Tensor, rows_NH: Tensor, weights_TK: Tensor, map_TK: Tensor
) -> tuple[Tensor, Tensor]:
    if not map_TK.numel():
        return torch.zeros_like(rows_NH), torch.zeros_like(weights_TK)
    grad_rows_NH, grad_weights_TK = function("moe_unpermute_index_map_backward")(
        unpermuted_act_grad=grad_TH.contiguous(), fwd_input=rows_NH.contiguous(), row_id_map=_own(map_TK),
        probs=weights_TK.float().contiguous(),
    )  # fmt: skip
    return grad_rows_NH, grad_weights_TK.to(weights_TK.dtype)


@unpermute_backward.register_fake
def _(grad_TH, rows_NH, weights_TK, map_TK):
    return rows_NH.new_empty(rows_NH.shape), weights_TK.new_empty(weights_TK.shape)


def _unpermute_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_backward(ctx, grad_TH):
    return *unpermute_backward(grad_TH, *ctx.saved_tensors), None


unpermute.register_autograd(_unpermute_backward, setup_context=_unpermute_setup)


# -- grouped products


def _gemm(
    a: list[Tensor], b: list[Tensor], out: list[Tensor], layout: str, splits: list[int], single: bool
) -> None:
    # The splits are asked for where nothing is split, too: TE's compiled part takes no None.
    function("general_grouped_gemm")(
        A=a, B=b, out=out, quantization_params=[None] * len(a), out_dtype=out[0].dtype, layout=layout,
        m_splits=splits, single_output=single,
    )  # fmt: skip


@torch.library.custom_op("moec_te::grouped_mm", mutates_args=())
def grouped_mm(x_NK: Tensor, w_EKM: Tensor, counts_E: Tensor) -> Tensor:
    splits = counts_E.tolist()
    y_NM = x_NK.new_zeros((x_NK.shape[0], w_EKM.shape[2]))
    total = sum(splits)
    if not total:
        return y_NM
    if w_EKM.stride(1) == 1:  # a transposed view of weights [M, K], as nn.Linear has them
        layout, weights = "TN", [w_KM.t().contiguous() for w_KM in w_EKM]
    else:
        layout, weights = "NN", [w_KM.contiguous() for w_KM in w_EKM]
    rows = list(x_NK[:total].contiguous().split(splits))
    _gemm(weights, rows, [y_NM[:total]], layout, splits, single=True)
    return y_NM


@grouped_mm.register_fake
def _(x_NK, w_EKM, counts_E):
    return x_NK.new_empty((x_NK.shape[0], w_EKM.shape[2]))


@torch.library.custom_op("moec_te::grouped_mm_wgrad", mutates_args=())
def grouped_mm_wgrad(x_NK: Tensor, g_NM: Tensor, counts_E: Tensor) -> Tensor:
    splits = counts_E.tolist()
    dw_EKM = x_NK.new_zeros((len(splits), x_NK.shape[1], g_NM.shape[1]))
    used = [e for e, n in enumerate(splits) if n]
    if used:
        total = sum(splits)
        rows, grads = (list(t[:total].contiguous().split(splits)) for t in (x_NK, g_NM))
        a, b, out = ([t[e] for e in used] for t in (grads, rows, dw_EKM))
        _gemm(a, b, out, "NT", [splits[e] for e in used], single=False)
    return dw_EKM


@grouped_mm_wgrad.register_fake
def _(x_NK, g_NM, counts_E):
    return x_NK.new_empty((counts_E.shape[0], x_NK.shape[1], g_NM.shape[1]))


def _mm_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _mm_backward(ctx, g_NM):
    x_NK, w_EKM, counts_E = ctx.saved_tensors
    dx_NK = grouped_mm(g_NM, w_EKM.transpose(1, 2), counts_E) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return dx_NK, None, None
    if w_EKM.stride(1) == 1:
        return dx_NK, grouped_mm_wgrad(g_NM, x_NK, counts_E).transpose(1, 2), None
    return dx_NK, grouped_mm_wgrad(x_NK, g_NM, counts_E), None


grouped_mm.register_autograd(_mm_backward, setup_context=_mm_setup)


# -- is it the same?


def require() -> None:
    """Raises MoecError where TE is missing, or computes something else than the ``moec::`` ops on this GPU."""
    for name in [name for functions in USED.values() for name in functions]:
        function(name)
    if torch.cuda.is_available():
        prove(torch.cuda.current_device(), torch.bfloat16)


@cache
def prove(device: Any, dtype: torch.dtype, ulp: float = 2**-7) -> None:
    """Compares every op, forward and backward, with ``moec::`` on the CPU in fp64: a relative error of one or two
    roundings (``ulp``) of positive numbers.  Raises MoecError."""
    gen = torch.Generator().manual_seed(0)
    T, K, E, H, M = 24, 4, 8, 64, 32

    def draw(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=gen) + 0.5).to(dtype)

    def run(ops: Any, device: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        x_TH, w_EMH, z_TE = (t.detach().to(device, dtype).requires_grad_() for t in (x0, w0, z0))
        spec = RouteSpec(num_experts=E, top_k=K, score="sigmoid", normalize=True).text()
        weights_TK, ids_TK = ops.route(z_TE, None, None, None, spec)
        rows_NH, counts_E, map_TK = ops.permute(x_TH, ids_TK, E)
        y_NM = ops.grouped_mm(rows_NH, w_EMH.transpose(1, 2), counts_E)
        y_TM = ops.unpermute(y_NM, weights_TK, map_TK)
        (y_TM * c0.to(device, dtype)).sum().backward()
        grads = {"d route": z_TE.grad, "d permute": x_TH.grad, "d grouped_mm": w_EMH.grad}
        found = {"route": weights_TK, "permute": rows_NH, "grouped_mm": y_NM, "unpermute": y_TM, **grads}
        return {name: t.detach().double().cpu() for name, t in found.items() if t is not None}

    x0, w0, c0 = draw(T, H), draw(E, M, H), draw(T, M)
    # Logits far enough from each other that no rounding changes the choice.
    z0 = torch.stack([torch.randperm(E, generator=gen) for _ in range(T)]).to(dtype) / 2
    ours, theirs = run(torch.ops.moec, "cpu", torch.float64), run(torch.ops.moec_te, device, dtype)
    for name, exact in ours.items():
        # Gradients of a normalised router are differences: of the size of the largest, not of themselves.
        size = exact.abs().max() if name == "d route" else exact.abs()
        worst = float(((theirs[name] - exact).abs() / (size + 1e-30)).max())
        if not worst < (8 if name.startswith("d ") else 4) * ulp:
            raise MoecError(
                f"Transformer Engine's {name} differs from moec's by {worst:.1e} of its size",
                where="backend='te'",
                way_out="leave Plan.backend alone; this Transformer Engine is not the one that moec was written for",
            )
