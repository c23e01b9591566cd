"""Transformer Engine multiplies what ``moec::quantise`` made: the ``moec::`` FP8 products as ``moec_te::`` ops of the
same operands and results (``Plan(backend="te")`` with an FP8 recipe; passes/use_transformer_engine.py puts them in).

Legend: N rows, E experts, K and M in and out features; R rows and D depth of an operand, D being summed over.

Who does what: numbers and scales are moec's, in the graph and in the backward, since TE's quantizers take a scale of
what one rank has (moec's is that of all ranks that share a tile), divide in another order, and know neither payloads
nor weights kept for a step.  They are handed over as what TE's quantizers return (its public ``…Storage`` classes), and
TE's ``general_gemm`` and ``general_grouped_gemm`` multiply.  So grids and scales are those of the ``moec::`` op, to the
bit; only sums are rounded in another order.

How operands are handed over: every product is TE's layout TN of two operands whose memory is contiguous along D, which
is how ``moec::quantise`` writes both layouts, and the one layout that FP8 has on every GPU.  Scales become:

============  =================================  ==========================================================
recipe        storage                            scales of an operand [R, D]
============  =================================  ==========================================================
``delayed``   ``Float8TensorStorage``            fp32 [1]
``current``   ``Float8TensorStorage``            fp32 [1]
``blockwise`` ``Float8BlockwiseQTensorStorage``  weights: fp32 [R / 128, D / 128 to a multiple of 4]
                                                 others: fp32 [D / 128, R to a multiple of 4]
``mxfp8``     ``MXFP8TensorStorage``             bytes [R to a multiple of 128, D / 32 to a multiple of 4]
============  =================================  ==========================================================

``rowwise``: TE has no scales of whole rows; its products stay ``moec::`` ops.  ``refused`` says so, and what else.

Requires, guarantees: as transformer_engine.py.  TE 2.14 to 2.20 have these names and parameters; 2.20 is what
``moec[te]`` asks for and what tests read.  Sums are kept in fp32 (``use_split_accumulator``).
Sizes that FP8 tensor cores do not take (``fits``: the number of tokens is known when a product runs) are multiplied by
the ``moec::`` op, which has the same operands.  Sizes of experts' groups are read on the host, as TE wants them there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import MoecError
from .fp8 import Recipe
from .ops import fp8_grouped_mm as grouped
from .ops import fp8_linear as linear
from .ops.align_rows import padded
from .ops.fp8_linear import taps
from .ops.quantise import quantise
from .transformer_engine import DTYPES, imported

USED: dict[str, dict[str, tuple[str, ...]]] = {
    "pytorch/constants.py": {"TE_DType": ()},
    "pytorch/quantization.py": {
        "is_fp8_available": ("return_reason",),
        "is_fp8_block_scaling_available": ("return_reason",),
        "is_mxfp8_available": ("return_reason",),
    },
    "pytorch/tensor/storage/float8_tensor_storage.py": {
        "Float8TensorStorage": ("data", "fp8_scale_inv", "fp8_dtype"),
    },
    "pytorch/tensor/storage/float8_blockwise_tensor_storage.py": {
        "Float8BlockwiseQTensorStorage": (
            "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype", "quantizer",
            "is_2D_scaled",
        ),
    },
    "pytorch/tensor/storage/mxfp8_tensor_storage.py": {
        "MXFP8TensorStorage": (
            "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype", "quantizer",
            "with_gemm_swizzled_scales",
        ),
    },
    "pytorch/cpp_extensions/gemm.py": {
        "general_gemm": ("A", "B", "out_dtype", "layout", "use_split_accumulator"),
        "general_grouped_gemm": (
            "A", "B", "out", "quantization_params", "out_dtype", "layout", "m_splits", "single_output",
            "use_split_accumulator",
        ),
    },
}  # fmt: skip
"""File of TE -> function, class or constant -> the parameters that are passed."""

AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Recipe -> what TE answers, whether this GPU has it."""


def found(name: str) -> Any:
    """What ``USED`` names.  Raises MoecError where Transformer Engine cannot be imported, or lacks it."""
    return imported(next(file for file, names in USED.items() if name in names), name)


def refused(recipe: Recipe, features: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why TE cannot compute the three products of a weight with these in and out features, or None.

    ``dtypes``: of the results."""
    if recipe.name not in AVAILABLE:
        return f"it has no scales of whole rows, and {recipe.name} has no others"
    there, reason = found(AVAILABLE[recipe.name])(return_reason=True)
    if not there:
        return f"it has no {recipe.name} on this machine: {reason}"
    if wrong := [str(d).removeprefix("torch.") for d in dtypes if d not in DTYPES]:
        return f"it computes no {wrong[0]}"
    if not all(fits(recipe, n, n) for n in features):
        sizes = " x ".join(map(str, features))
        return f"{sizes} features, and {recipe.name} wants multiples of {step(recipe)}"
    return None


def step(recipe: Recipe) -> int:
    """The depth of a product is a multiple of it."""
    return max(16, recipe.block)


def fits(recipe: Recipe, depth: int, *outer: int) -> bool:
    """Do FP8 tensor cores, and TE's checks of them, take a product of this depth with these other dims?"""
    of_outer = 32 if recipe.scales == "e8m0" else 16
    return all(n and n % m == 0 for n, m in [(depth, step(recipe)), *((n, of_outer) for n in outer)])


# -- operands and products


def operand(q_RD: Tensor, scale: Tensor, recipe: Recipe, square: bool) -> Any:
    """What TE's quantizer for ``recipe`` would return of an operand: ``q_RD`` fp8 [R, D] and its scales [R / tile,
    D / tile] (of ``moec::quantise``; of a transposed layout the transposes).

    ``square``: it is a weight; of blocks both dims then share scales."""
    data = q_RD.view(torch.uint8).contiguous()
    dtype = found("TE_DType")[q_RD.dtype]
    if recipe.shared == "tensor":
        return found("Float8TensorStorage")(data=data, fp8_scale_inv=scale.reshape(1), fp8_dtype=dtype)
    rest = {"columnwise_data": None, "columnwise_scale_inv": None, "fp8_dtype": dtype, "quantizer": None}
    if recipe.scales == "e8m0":
        scale = to_multiples(scale.view(torch.uint8), 128, 4)
        return found("MXFP8TensorStorage")(
            rowwise_data=data, rowwise_scale_inv=scale, with_gemm_swizzled_scales=False, **rest
        )
    scale = to_multiples(scale if square else scale.t(), 1, 4)
    return found("Float8BlockwiseQTensorStorage")(
        rowwise_data=data, rowwise_scale_inv=scale, is_2D_scaled=square, **rest
    )


def to_multiples(x: Tensor, rows: int, columns: int) -> Tensor:
    """Contiguous, with zeros behind."""
    return F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)).contiguous()


def multiply(a: Any, b: Any, dtype: torch.dtype) -> Tensor:
    """b · aᵀ [N, M] of operands a [M, K] and b [N, K]."""
    return found("general_gemm")(A=a, B=b, out_dtype=dtype, layout="TN", use_split_accumulator=True)[0]


def multiply_all(a: list[Any], b: list[Any], out: list[Tensor], sizes: list[int], single: bool) -> None:
    """``multiply`` of each pair into ``out``, or, ``single``, one below the other into its only tensor."""
    found("general_grouped_gemm")(
        A=a, B=b, out=out, quantization_params=[None] * len(a), out_dtype=out[0].dtype, layout="TN", m_splits=sizes,
        single_output=single, use_split_accumulator=True,
    )  # fmt: skip


# -- linears


def _register(name: str, like: Callable, fake: Callable) -> Callable[[Callable], Any]:
    """A decorator: the function as the op ``moec_te::name``, with the signature of ``like``."""
    schema = torch.library.infer_schema(like, mutates_args=())

    def register(kernel: Callable) -> Any:
        op = torch.library.custom_op(f"moec_te::{name}", kernel, mutates_args=(), schema=schema)
        op.register_fake(fake)
        return op

    return register


@_register("fp8_dgrad", linear.dgrad_on_any_device, linear.dgrad_fake)
def fp8_dgrad(g_q, g_s, w_qT, w_sT, recipe, dtype):
    how, g_NM = Recipe.parse(recipe), g_q.reshape(-1, g_q.shape[-1])
    if dtype not in DTYPES or not fits(how, g_NM.shape[1], g_NM.shape[0], w_qT.shape[1]):
        return linear.fp8_dgrad(g_q, g_s, w_qT, w_sT, recipe, dtype)
    a, b = operand(w_qT.t(), w_sT.t(), how, True), operand(g_NM, _flat(g_s), how, False)
    return multiply(a, b, dtype).view(*g_q.shape[:-1], w_qT.shape[1])


@_register("fp8_wgrad", linear.wgrad_on_any_device, linear.wgrad_fake)
def fp8_wgrad(g_qT, g_sT, x_qT, x_sT, recipe, dtype):
    how = Recipe.parse(recipe)
    if dtype not in DTYPES or not fits(how, g_qT.shape[0], g_qT.shape[1], x_qT.shape[1]):
        return linear.fp8_wgrad(g_qT, g_sT, x_qT, x_sT, recipe, dtype)
    return multiply(operand(x_qT.t(), x_sT.t(), how, False), operand(g_qT.t(), g_sT.t(), how, False), dtype)


@_register("fp8_linear", linear.on_any_device, linear.fake)
def fp8_linear(x, w, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared):
    linear.check(x, w, x_q, w_q)
    how, x_NK = Recipe.parse(recipe), x_q.reshape(-1, x_q.shape[-1])
    if x.dtype not in DTYPES or not fits(how, x_NK.shape[1], x_NK.shape[0], w_q.shape[0]):
        return linear.fp8_linear(x, w, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared)
    y_NM = multiply(operand(w_q, w_s, how, True), operand(x_NK, _flat(x_s), how, False), x.dtype)
    y = y_NM.view(*x.shape[:-1], w.shape[0])
    return y, *taps(y, recipe, shared)


fp8_linear.register_autograd(linear.backward_by(fp8_dgrad, fp8_wgrad), setup_context=linear.setup)


def _flat(scale: Tensor) -> Tensor:
    return scale.reshape(-1, scale.shape[-1])


# -- experts


def _groups(counts_E: Tensor, rows: int, recipe: Recipe) -> list[tuple[int, slice]]:
    """Experts with rows, and where these are, gaps included.  Raises MoecError where they cannot be."""
    at, groups = 0, []
    for e, n in enumerate(padded(counts_E, recipe.alignment).tolist()):
        if n:
            groups.append((e, slice(at, at + n)))
        at += n
    if rows % recipe.alignment or at > rows:
        raise MoecError(
            f"{rows} rows are not those of experts with {counts_E.tolist()} rows that begin at multiples of "
            f"{recipe.alignment}",
            where="moec_te::fp8_grouped_mm",
            way_out="moec::align_rows or moec::permute_aligned with the recipe's alignment",
        )
    return groups


def _part(scale: Tensor, at: slice, recipe: Recipe, transposed: bool) -> Tensor:
    """The scales of an expert's rows."""
    tile = recipe.tile("rows", transposed)[0]
    return scale[at.start // tile : at.stop // tile] if tile else scale


def _rows(
    a_q: Tensor, a_s: Tensor, b_EMK: Tensor, b_s: Tensor, counts_E: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """a_q [N, K] · b_EMK[e]ᵀ of every expert [N, M]; b's scales are [E, M / tile, K / tile]."""
    groups = _groups(counts_E, a_q.shape[0], recipe)
    y_NM = a_q.new_empty((a_q.shape[0], b_EMK.shape[1]), dtype=dtype)
    total = groups[-1][1].stop if groups else 0
    y_NM[total:].zero_()
    if groups:
        a = [operand(b_EMK[e], b_s[e], recipe, True) for e, _ in groups]
        b = [operand(a_q[at], _part(a_s, at, recipe, False), recipe, False) for _, at in groups]
        multiply_all(a, b, [y_NM[:total]], [at.stop - at.start for _, at in groups], single=True)
    return y_NM


@_register("fp8_grouped_dgrad", grouped.dgrad_on_any_device, grouped.dgrad_fake)
def fp8_grouped_dgrad(g_q, g_s, w_qT, w_sT, counts_E, recipe, dtype):
    how = Recipe.parse(recipe)
    if dtype not in DTYPES or not fits(how, g_q.shape[1], how.alignment, w_qT.shape[1]):
        return grouped.fp8_grouped_dgrad(g_q, g_s, w_qT, w_sT, counts_E, recipe, dtype)
    return _rows(g_q, g_s, w_qT, w_sT, counts_E, how, dtype)


@_register("fp8_grouped_wgrad", grouped.wgrad_on_any_device, grouped.wgrad_fake)
def fp8_grouped_wgrad(x_qT, x_sT, g_qT, g_sT, counts_E, recipe, dtype):
    how = Recipe.parse(recipe)
    if dtype not in DTYPES or not fits(how, how.alignment, x_qT.shape[1], g_qT.shape[1]):
        return grouped.fp8_grouped_wgrad(x_qT, x_sT, g_qT, g_sT, counts_E, recipe, dtype)
    groups = _groups(counts_E, x_qT.shape[0], how)
    dw_EMK = g_qT.new_zeros((counts_E.shape[0], g_qT.shape[1], x_qT.shape[1]), dtype=dtype)
    if groups:
        # Contiguous along all rows is not contiguous along an expert's: bytes are copied, which TE's products want.
        a, b = (
            [operand(q[at].t(), _part(s, at, how, True).t(), how, False) for _, at in groups]
            for q, s in ((x_qT, x_sT), (g_qT, g_sT))
        )
        multiply_all(a, b, [dw_EMK[e] for e, _ in groups], [at.stop - at.start for _, at in groups], single=False)
    return dw_EMK


@_register("fp8_grouped_mm", grouped.on_any_device, grouped.fake)
def fp8_grouped_mm(x, w, counts_E, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared):
    grouped.check(x, w, counts_E, x_q, w_q)
    how = Recipe.parse(recipe)
    if x.dtype not in DTYPES or not fits(how, x_q.shape[1], how.alignment, w_q.shape[2]):
        return grouped.fp8_grouped_mm(
            x, w, counts_E, x_q, x_s, w_q, w_s, x_qT, x_sT, w_qT, w_sT, grad_amax, recipe, shared
        )
    y = _rows(x_q, x_s, w_q.transpose(1, 2), w_s.transpose(1, 2), counts_E, how, x.dtype)
    return y, *taps(y, recipe, shared)


fp8_grouped_mm.register_autograd(
    grouped.backward_by(fp8_grouped_dgrad, fp8_grouped_wgrad), setup_context=grouped.setup
)


# -- is it the same?


def require(recipe: str) -> None:
    """Raises MoecError where TE is missing, or, on a GPU that has the recipe by its own account, computes something
    else than the ``moec::`` ops."""
    for name in [name for names in USED.values() for name in names]:
        found(name)
    how = Recipe.parse(recipe)
    there = how.name in AVAILABLE and found(AVAILABLE[how.name])(return_reason=True)[0]
    if there and torch.cuda.is_available():
        prove(torch.cuda.current_device(), recipe)


@cache
def prove(device: Any, recipe: str) -> None:
    """Compares the six products, in bf16, with ``moec::`` ops on the CPU, of the same FP8 numbers: a relative error of
    one or two roundings, the numbers being positive.  Every tile has a scale of its own size, so that a scale in
    another's place shows.  Raises MoecError."""
    gen = torch.Generator().manual_seed(0)
    N, K, M, E = 384, 256, 128, 3
    counts_E = torch.tensor([N // 2, 0, N // 4])

    def draw(*shape: int) -> Tensor:
        sizes = [2.0 ** torch.randint(0, 5, (*shape[:-2], n, 1), generator=gen) for n in shape[-2:]]
        return (torch.rand(shape, generator=gen) + 0.5) * sizes[0] * sizes[1].transpose(-1, -2)

    x_NK, g_NM, w_MK, w_EMK = draw(N, K), draw(N, M), draw(M, K), draw(E, M, K)
    w_EKM = w_EMK.transpose(1, 2)
    of = {
        name: quantise(t, None, None, counts, recipe, role, True)[1:]
        for name, t, counts, role in (
            ("x", x_NK, None, "rows"), ("g", g_NM, None, "grad"), ("w", w_MK, None, "weight"),
            ("xe", x_NK, counts_E, "rows"), ("ge", g_NM, counts_E, "grad"), ("we", w_EKM, None, "stack"),
        )
    }  # fmt: skip

    def run(ops: Any, device: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        t = {name: [v.to(device) for v in values] for name, values in of.items()}
        x, w, we = (v.to(device, dtype) for v in (x_NK, w_MK, w_EKM))
        counts = counts_E.to(device)
        (x_q, x_s, *xT), (w_q, w_s, *wT) = t["x"], t["w"]
        (xe_q, xe_s, *xeT), (we_q, we_s, *weT) = t["xe"], t["we"]
        result = {
            "fp8_linear": ops.fp8_linear(x, w, x_q, x_s, w_q, w_s, *xT, *wT, None, recipe, False)[0],
            "fp8_dgrad": ops.fp8_dgrad(*t["g"][:2], *wT, recipe, dtype),
            "fp8_wgrad": ops.fp8_wgrad(*t["g"][2:], *xT, recipe, dtype),
            "fp8_grouped_mm": ops.fp8_grouped_mm(
                x, we, counts, xe_q, xe_s, we_q, we_s, *xeT, *weT, None, recipe, False
            )[0],
            "fp8_grouped_dgrad": ops.fp8_grouped_dgrad(*t["ge"][:2], *weT, counts, recipe, dtype),
            "fp8_grouped_wgrad": ops.fp8_grouped_wgrad(*xeT, *t["ge"][2:], counts, recipe, dtype),
        }
        return {name: v.double().cpu() for name, v in result.items()}

    ours, theirs = run(torch.ops.moec, "cpu", torch.float32), run(torch.ops.moec_te, device, torch.bfloat16)
    for name, exact in ours.items():
        worst = float(((theirs[name] - exact).abs() / (exact.abs() + 1e-30)).max())
        if not worst < 2 * 2**-8:
            raise MoecError(
                f"Transformer Engine's {name} of the recipe {recipe} differs from moec's by {worst:.1e} of its size",
                where="backend='te'",
                way_out="leave Plan.backend alone; this Transformer Engine is not the one that moec was written for",
            )
