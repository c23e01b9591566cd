"""The router's and the rows' kernels of the list that is compiled ahead of time.

Legend: E experts, K choices per token, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from ..body import Body
from ..fp8 import Recipe
from ..route_spec import RouteSpec
from . import amax as largest
from . import (
    decode,
    decode_operand,
    encode,
    permute,
    quantise_act,
    router,
    router_backward,
    softmax_rows,
    turn,
    unpermute,
    unpermute_backward,
)
from . import quantise as by_tiles
from .entry import Entry
from .experts_catalog import CLAMPED, GELU, SEPARATE, SWIGLU
from .router import Router

TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip

ROUTERS = {
    "qwen3_moe": Router(RouteSpec(128, 8, normalize=True), torch.float32, counted=True),
    "deepseek_v3": Router(
        RouteSpec(256, 8, "sigmoid", True, 2.5, groups=8, kept_groups=4, group_score="top2"), torch.float32,
        biased=True, padded=True, counted=True, some=True, balanced=True,
    ),
    "mixtral": Router(RouteSpec(8, 2, normalize=True), torch.bfloat16, counted=True, some=True, balanced=True),
    "gpt_oss": Router(RouteSpec(32, 4, "softmax_post"), torch.bfloat16),
    "sqrtsoftplus": Router(RouteSpec(100, 6, "sqrtsoftplus", True, capacity_factor=1.0), torch.float32),
    "random": Router(RouteSpec(64, 6, force="random"), torch.float32),
}  # fmt: skip
DAILY = ("qwen3_moe", "deepseek_v3")
WIDTHS = {"qwen3_moe": (8, 2048), "deepseek_v3": (8, 7168), "gpt_oss": (4, 2880)}
BF16 = torch.bfloat16


def entries(arch: str) -> list[Entry]:
    """``arch`` decides about one thing: float8_e4m3fn is not what gfx942 computes with."""
    return [*_routers(), *_rows(arch), *_logits(), *_payloads(arch),
            *([*_quantised(), *_activations(), *_largest()] if arch != "gfx942" else [])]  # fmt: skip


def _routers() -> list[Entry]:
    found = []
    for name, r in ROUTERS.items():
        logits, nightly = f"*{TYPES[r.dtype]}:16", name not in DAILY
        bias = ("bias_ptr", "*fp32:16" if r.biased else "*i64:16")
        used = (("valid_ptr", r.padded), ("counted_ptr", r.some))
        masks = [(m, "*u8:16" if given else "*i64:16") for m, given in used]
        given = (bias, masks[0], ("token_ptr", "*i64:16"), masks[1])
        out = (("weights_ptr", "*fp32:16"), ("ids_ptr", "*i64:16"), ("sums_ptr", "*fp32:16"), ("counts_ptr", "*i32:16"))
        arguments = (("logits_ptr", logits), *given, *out, ("num_tokens", "i32:16"))
        found.append(Entry(f"router {name}", router.source(r), "router", arguments, nightly=nightly))
        grads = (("grad_ptr", "*fp32:16"), ("sums_grad_ptr", "*fp32:16"), ("logits_ptr", logits))
        arguments = (*grads, *given, ("ids_ptr", "*i64:16"), ("out_ptr", logits), ("num_tokens", "i32:16"))
        source = router_backward.source(r)
        found.append(Entry(f"router_backward {name}", source, "router_backward", arguments, nightly=nightly))
    return found


def _rows(arch: str) -> list[Entry]:
    found = []
    sizes = (("num_tokens", "i32:16"), ("num_rows", "i32:16"))
    for name, (K, H) in WIDTHS.items():
        nightly = name != "qwen3_moe"
        fp8 = () if arch == "gfx942" else permute.QUANTISE[1:]
        for what, dtype, rows in (
            ("none", BF16, "*bf16:16"), ("bytes", torch.uint8, "*u8:16"), *((q, BF16, "*fp8e4nv:16") for q in fp8),
        ):  # fmt: skip
            arguments: tuple[tuple[str, str], ...] = (
                ("x_ptr", f"*{TYPES[dtype]}:16"), ("row_of_ptr", "*i64:16"), ("named_ptr", "*u8:16"),
                ("rows_ptr", rows), ("scales_ptr", "*fp32:16"), *sizes,
            )  # fmt: skip
            source = permute.source(K, H, dtype, what if what in fp8 else "none")
            warps = permute.warps(H)
            found.append(Entry(f"permute {name} {what}", source, "permute", arguments, warps=warps, nightly=nightly))
        for addends, weights in ((0, None), (0, torch.float32), (1, torch.float32)):
            arguments = (
                ("rows_ptr", "*bf16:16"), ("weights_ptr", "*fp32:16" if weights else "*i64:16"),
                ("row_of_ptr", "*i64:16"), *((f"addend_{i}_ptr", "*bf16:16") for i in range(addends)),
                ("y_ptr", "*bf16:16"),
            )  # fmt: skip
            what = f"unpermute {name}{'' if weights else ' unweighted'}{' add' if addends else ''}"
            source = unpermute.source(K, H, BF16, weights, addends)
            found.append(
                Entry(what, source, "unpermute", arguments, warps=unpermute.warps(H), nightly=nightly or not addends)
            )
        arguments = (
            ("grad_ptr", "*bf16:16"), ("rows_ptr", "*bf16:16"), ("weights_ptr", "*fp32:16"), ("row_of_ptr", "*i64:16"),
            ("named_ptr", "*u8:16"), ("rows_grad_ptr", "*bf16:16"), ("weights_grad_ptr", "*fp32:16"), *sizes,
        )  # fmt: skip
        source = unpermute_backward.source(K, H, BF16, torch.float32)
        warps = unpermute_backward.warps(H)
        found.append(
            Entry(f"unpermute_backward {name}", source, "unpermute_backward", arguments, warps=warps, nightly=nightly)
        )
    return found


def _quantised() -> list[Entry]:
    found = []
    sizes = tuple((name, "i32:16") for name in ("rows", "columns")) + (("row_tiles", "i32"), ("column_tiles", "i32"))
    for name in ("blockwise", "mxfp8", "current", "rowwise"):
        recipe = Recipe.parse(name)
        scale = "*u8:16" if recipe.scales == "e8m0" else "*fp32:16"
        for what in ("rows", "weight", "stack", "permuted rows", *(["grad"] if name == "current" else [])):
            role, masked, gathered = what.removeprefix("permuted "), what == "rows", what == "permuted rows"
            numbers = "*fp8e5:16" if role == "grad" else "*fp8e4nv:16"
            given = ((("real_ptr", "*u8:16"),) if masked else ()) + ((("source_ptr", "*i64:16"),) if gathered else ())
            arguments = (
                ("x_ptr", "*bf16:16"), *given, ("q_ptr", numbers), ("scale_ptr", scale), ("qt_ptr", numbers),
                ("scalet_ptr", scale), *sizes,
            )  # fmt: skip
            source = by_tiles.source(recipe, role, BF16, True, masked, gathered)
            warps = by_tiles.warps(recipe)
            nightly = (name, what) not in (("blockwise", "rows"), ("blockwise", "permuted rows"))
            found.append(Entry(f"quantise {name} {what}", source, "quantise", arguments, warps=warps, nightly=nightly))
    return found


def _largest() -> list[Entry]:
    found = []
    sizes = (("rows", "i32:16"), ("columns", "i32:16"), ("row_squares", "i32"), ("column_squares", "i32"))
    for kinds, masked in ((("rows", "columns"), True), (("all",), False)):
        given = [(p, "*u8:16" if p == "real_ptr" else "*fp32:16") for p in largest.pointers(kinds, masked)]
        arguments = (("x_ptr", "*bf16:16"), *given, *sizes)
        source = largest.source(kinds, BF16, masked)
        found.append(Entry(f"amax {' '.join(kinds)}", source, "amax", arguments, warps=8, nightly=masked))
    arguments = (("x_ptr", "*u8:16"), ("y_ptr", "*u8:16"), *sizes[:2])
    return [*found, Entry("turn", turn.SOURCE, "turn", arguments, nightly=True)]


def _payloads(arch: str) -> list[Entry]:
    """Conversions alone, which gfx942 has too."""
    found = []
    for name, (_, H) in WIDTHS.items():
        for payload in ("current", "rowwise", "blockwise", "mxfp8"):
            recipe = Recipe.parse(payload)
            nightly = (name, payload) != ("qwen3_moe", "blockwise")
            given = ("scale_ptr", "*fp32:16")
            for kernel, source, ends in (
                ("encode", encode.source(payload, H, BF16), (("x_ptr", "*bf16:16"), given, ("data_ptr", "*u8:16"))),
                ("decode", decode.source(payload, H, BF16), (("data_ptr", "*u8:16"), given, ("y_ptr", "*bf16:16"))),
            ):
                title = f"{kernel} {payload} {name}"
                found.append(Entry(title, source, kernel, ends, warps=permute.warps(H), nightly=nightly))
            if arch == "gfx942":
                continue
            scale = "*u8:16" if recipe.scales == "e8m0" else "*fp32:16"
            kinds = {"data_ptr": "*u8:16", "real_ptr": "*u8:16", "q_ptr": "*u8:16", "qt_ptr": "*fp8e4nv:16"}
            arguments = tuple((p, kinds.get(p, scale)) for p in decode_operand.pointers(recipe, True, True))
            source = decode_operand.source(payload, H, BF16, True, True)
            found.append(
                Entry(f"decode_operand {payload} {name}", source, "decode_operand", (*arguments, ("rows", "i32:16")),
                      warps=decode_operand.warps(recipe), nightly=nightly)
            )  # fmt: skip
    return found


ACTIVATIONS = {"qwen3_moe": (SWIGLU, (1536,)), "two_weights": (SEPARATE, (3584, 3584)), "gelu": (GELU, (3072,)),
               "gpt_oss": (CLAMPED, (5760,))}  # fmt: skip


def _activations() -> list[Entry]:
    found = []
    for name in ("blockwise", "mxfp8"):
        recipe = Recipe.parse(name)
        for model, (body, widths) in ACTIVATIONS.items():
            for grad in (False, True):
                spec = quantise_act.Spec(Body.parse(body), widths, recipe, BF16, True, grad, grad and model == "gelu")
                if not quantise_act.fits(spec):
                    continue
                kinds = {"real": "*u8", "scale": "*u8" if recipe.scales == "e8m0" else "*fp32", "q": "*fp8e4nv"}
                kinds |= {f"{n}t": kinds[n] for n in ("q", "scale")}
                arguments = tuple(
                    (p, kinds.get(p.removesuffix("_ptr").rstrip("0123456789"), "*bf16") + ":16")
                    for p in quantise_act.pointers(spec)
                )
                title = f"quantise_act {name} {model}{' grad' if grad else ''}"
                nightly = (name, model) != ("blockwise", "qwen3_moe")
                found.append(
                    Entry(title, quantise_act.source(spec), "quantise_act", (*arguments, ("rows", "i32:16")),
                          warps=spec.warps, nightly=nightly)
                )  # fmt: skip
    return found


def _logits() -> list[Entry]:
    found = []
    for V, dtype in ((151936, BF16), (32000, torch.float32)):
        x, nightly = ("x_ptr", f"*{TYPES[dtype]}:16"), dtype != BF16
        floats = [(f"{n}_ptr", "*fp32:16") for n in ("lse", "picked", "total", "a", "b", "c")]
        place, stride = ("place_ptr", "*i64:16"), ("stride", "i32:16")
        source, warps = softmax_rows.source(V, dtype), softmax_rows.warps(V)
        sums = (x, place, *floats[:3], stride)
        grads = (x, place, floats[0], *floats[3:], ("out_ptr", x[1]), stride)
        for kernel, arguments in (("row_sums", sums), ("row_grads", grads)):
            name = f"{kernel} {TYPES[dtype]} V{V}"
            found.append(Entry(name, source, kernel, arguments, warps=warps, nightly=nightly))
    return found
