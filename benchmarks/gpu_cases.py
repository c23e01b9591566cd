"""What benchmarks/gpu.py checks: one case an op (or two that belong together), on inputs that are drawn on the CPU.

Legend: T tokens, K choices per token, E experts, H hidden, I expert width, N rows, V vocabulary.

A case gives tensors and a function of them that returns tensors.  Floating-point inputs are cast to the dtype that is
checked; all outputs, and the gradients of those that have any, are compared.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ops = torch.ops.moec
SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"
TWO = "g = whole(h0); u = whole(h1); t0 = silu(g); t1 = mul(t0, u); return t1"
GELU = "x = whole(h0); t0 = gelu_tanh(x); return t0"


@dataclass(frozen=True)
class Case:
    name: str
    covers: tuple[str, ...]
    """Names of ops, their backwards being included."""
    run: Callable[..., Any]
    inputs: tuple[Tensor | None, ...]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    limit: float | None = None
    """Of the error, where it is not that of the dtype; the reference then computes in the dtype too."""


def cases(tiny: bool) -> list[Case]:
    """``tiny``: sizes for an interpreter."""
    gen = torch.Generator().manual_seed(0)
    T, K, E, H, I, V = (13, 2, 5, 32, 16, 37) if tiny else (777, 6, 24, 256, 192, 1001)  # noqa: E741

    def x(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen)

    def small(*shape: int) -> Tensor:
        return x(*shape) * shape[-1] ** -0.5

    def in_bytes(a: Tensor, b: Tensor) -> list[Tensor]:
        flat = ops.pack_bytes([a.detach(), b.detach()], [True, False])
        names = ",".join(str(t.dtype).removeprefix("torch.") for t in (a, b))
        return ops.unpack_bytes(flat, 1, [1, 0], [True, False], [2, *a.shape, 2, *b.shape], names)

    def largest(a: Tensor, payload: str) -> Tensor | None:
        return a.detach().float().abs().amax().view(1, 1) if payload in ("current", "delayed") else None

    def sent(move: str, a: Tensor, *rest: Any, payload: str = "blockwise") -> list[Tensor]:
        """Rows as a payload through a move and back."""
        carrier, data = ops.encode_rows(a, most := largest(a, payload), payload, "rows")
        if move == "rows":
            data, _, at = ops.permute(data, *rest)
            rest = (at,)
        elif move != "home":
            data = getattr(ops, {"sorted": "sort_chunks", "swapped": "swap_chunks", "aligned": "align_rows"}[move])(
                data, *rest
            )
        carrier = getattr(ops, f"carry_{move}")(carrier, data, *rest)
        return ops.decode_rows(data, carrier, most, payload, "rows")

    def operand(a: Tensor, c: Tensor | None, payload: str) -> list[Tensor]:
        carrier, data = ops.encode_rows(a.detach(), most := largest(a, payload), payload, "rows")
        return [t.float() for t in ops.decode_operand(data, carrier, most, most, c, payload, True)[1:]]

    ids = torch.stack([torch.randperm(E - 1, generator=gen)[:K] for _ in range(T)])  # the last expert gets nothing
    holes = ids.masked_fill(torch.rand(T, K, generator=gen) < 0.2, -1)
    weights = torch.rand(T, K, generator=gen) + 0.1
    _, counts, row_of = ops.permute(x(T, 1), ids, E)
    _, fewer, row_of_holes = ops.permute(x(T, 1), holes, E)
    labels = torch.randint(0, V, (T,), generator=gen)
    labels[::5] = -100
    vocab = torch.arange(100, 100 + V)
    numbers = torch.randint(90, 110 + V, (T, 1), generator=gen)
    valid = torch.rand(T, generator=gen) > 0.2
    chunks = torch.randint(0, 9, (4, 3), generator=gen)

    def spec(**fields: Any) -> str:
        return json.dumps({"num_experts": E, "top_k": K} | fields)

    sigmoid = {"score": "sigmoid", "normalize": True, "scaling": 2.5}
    routers = {
        "softmax": (spec(normalize=True), None, None),
        "chosen": (spec(score="softmax_post"), None, None),
        "sigmoid with a bias": (spec(**sigmoid), x(E) * 0.1, valid),
        "groups": (spec(num_experts=4 * E, groups=4, kept_groups=2, group_score="top2", **sigmoid), x(4 * E) / 9, None),
        "sqrtsoftplus": (spec(score="sqrtsoftplus", normalize=True), None, valid),
        "capacity": (spec(normalize=True, capacity_factor=0.7), None, None),
    }
    found = []
    for name, (text, bias, padding) in routers.items():
        logits = x(T, json.loads(text)["num_experts"])
        found.append(Case(f"route, {name}", ("route",), lambda z, b, v, text=text: ops.route(z, b, v, None, text),
                          (logits, bias, padding), ("float32",)))  # fmt: skip
        found.append(Case(f"route_counted, {name}", ("route_counted",),
                          lambda z, b, v, text=text: ops.route_counted(z, b, v, None, v, text, True),
                          (logits, bias, padding), ("float32",)))  # fmt: skip
    for name, chosen, at in (("", ids, row_of), (", holes", holes, row_of_holes)):
        rows = x(T * K, H)
        found += [
            Case(f"permute{name}", ("permute",), lambda a, i: ops.permute(a, i, E), (x(T, H), chosen)),
            Case(f"permute_kept{name}", ("permute_kept",), lambda a, i: ops.permute_kept(a, i, E), (x(T, H), chosen)),
            Case(f"permute_aligned{name}", ("permute_aligned",),
                 lambda a, i: ops.permute_aligned(a, i, E, 16, "none"), (x(T, H), chosen)),
            Case(f"unpermute{name}", ("unpermute",), ops.unpermute, (rows, weights, at)),
            Case(f"unpermute_add{name}", ("unpermute_add",),
                 lambda a, r, w, i: ops.unpermute_add([a], r, w, i), (x(T, H), rows, weights, at)),
        ]  # fmt: skip
    # A quotient that is rounded otherwise may become the neighbouring fp8 number; powers of two divide exactly.
    for kind, limit in (("row", 0.08), ("block", 0.0)):
        found.append(Case(f"permute_aligned, {kind} scales", ("permute_aligned",),
                          lambda a, i, kind=kind: ops.permute_aligned(a.detach(), i, E, 16, kind), (x(T, H), ids),
                          limit=limit))  # fmt: skip
    for name, body, inner, biases in (("swiglu", SWIGLU, [2 * I], False), ("two weights", TWO, [I, I], False),
                                      ("gelu, biases", GELU, [I], True)):  # fmt: skip
        w_in, b_in = [small(E, m, H) for m in inner], [x(E, m) for m in inner] if biases else []
        w_out, b_out = small(E, H, I), x(E, H) if biases else None
        n = len(inner)

        def experts(a, w, i, *rest, body=body, n=n, biases=biases):
            first, b = [t.transpose(1, 2) for t in rest[:n]], list(rest[n : 2 * n]) if biases else []
            return ops.experts(a, i, w, first, b, rest[-2].transpose(1, 2), rest[-1], body, False)

        def experts_rows(a, c, *rest, body=body, n=n, biases=biases):
            first, b = [t.transpose(1, 2) for t in rest[:n]], list(rest[n : 2 * n]) if biases else []
            return ops.experts_rows(a, c, first, b, rest[-2].transpose(1, 2), rest[-1], body)

        for which, chosen, each in (("", ids, counts), (", holes", holes, fewer)):
            found.append(Case(f"experts, {name}{which}", ("experts",), experts,
                              (x(T, H), weights, chosen, *w_in, *b_in, w_out, b_out)))  # fmt: skip
            found.append(Case(f"experts_rows, {name}{which}", ("experts_rows",), experts_rows,
                              (x(T * K, H), each, *w_in, *b_in, w_out, b_out)))  # fmt: skip
    found += [
        Case("grouped_mm", ("grouped_mm", "grouped_mm_wgrad"), lambda a, w, c: ops.grouped_mm(a, w.transpose(1, 2), c),
             (x(T * K, H), small(E, I, H), fewer)),
        Case("grouped_mm, not transposed", ("grouped_mm", "grouped_mm_wgrad"), ops.grouped_mm,
             (x(T * K, H), small(E, H, I), counts)),
        Case("grouped_add", ("grouped_add", "grouped_sum"), ops.grouped_add, (x(T * K, H), x(E, H), fewer)),
        Case("rms_norm", ("rms_norm",), lambda a, w: ops.rms_norm(a, [H], w, 1e-5), (x(T, H), x(H)), ("float32",)),
        *(Case(f"cross_entropy, {name}", ("cross_entropy",),
               lambda z, y, s=s, r=r: ops.cross_entropy(z, y, -100, s, r), (x(T, V) * 3, labels))
          for name, s, r in (("mean", 0.0, 1), ("sum, smoothed", 0.1, 2), ("none", 0.0, 0))),
        Case("logsumexp_pick", ("logsumexp_pick",), lambda z, v, i: ops.logsumexp_pick(z, v, i, 1),
             (x(T, V) * 3, vocab, numbers)),
        Case("blocked_logsumexp", ("blocked_logsumexp",), lambda z: ops.blocked_logsumexp(z, 3), (x(T, 3 * V),)),
        Case("pick", ("pick",), ops.pick, (x(T, V), vocab, numbers)),
        Case("lookup", ("lookup",), lambda w, v, i: ops.lookup(w, v, i, -1), (x(V, H), vocab, numbers)),
        Case("balance", ("balance",), lambda z, v: ops.balance(z, v, K, "softmax_pre"), (x(T, E), valid), ("float32",)),
        Case("tally", ("tally",), lambda z, i, v: ops.tally(i, None, z.detach(), v, E, "sigmoid"),
             (x(T, E), holes, valid), ("float32",)),
        Case("drop", ("drop",), lambda w, i: ops.drop(w, i, spec(capacity_factor=0.7)), (weights, ids), ("float32",)),
        Case("inject, boundary", ("inject", "boundary"), lambda a, b: ops.inject(ops.boundary(a, "layer"), b.sum()),
             (x(T, H), x(1))),
        Case("sort_chunks", ("sort_chunks",), lambda a, c: ops.sort_chunks(a, c, False),
             (x(int(chunks.sum()), H), chunks)),
        Case("place_rows", ("place_rows",), lambda a, i: ops.place_rows(a, i, T * K), (x(T, H), row_of_holes)),
        Case("add_rows", ("add_rows",), ops.add_rows, (x(T * K, H), row_of_holes)),
        Case("slots", ("slots",), lambda a, i: ops.slots(a, i, T, spec(capacity_factor=float(E))), (x(T, H), holes)),
        Case("split_tokens", ("split_tokens", "join_tokens"),
             lambda a: ops.join_tokens([2 * c for c in ops.split_tokens(a, 3, 2, 2)], [5, 12], 2), (x(5, 12, H),)),
        Case("split_tokens, sequences", ("split_tokens", "join_tokens"),
             lambda a: ops.join_tokens([2 * c for c in ops.split_tokens(a, 3, 1, 12)], [60], 12), (x(60, H),)),
        Case("swap_chunks", ("swap_chunks",), lambda a: ops.swap_chunks(a, 3, 4), (x(12 * 5, H),)),
        Case("equal_counts", ("equal_counts",), lambda a: ops.equal_counts(a, 4), (x(12, H),)),
        Case("destinations", ("destinations",), lambda i: ops.destinations(i, 2 * E, 2), (holes,)),
        Case("own_ids", ("own_ids",), ops.own_ids, (holes, torch.arange(2, 4))),
        Case("pad_rows", ("pad_rows",), lambda a: ops.pad_rows(a, 8, 2.0), (x(T, H),)),
        Case("take_rows", ("take_rows",), lambda a: ops.take_rows(a, T - 3), (x(T, H),)),
        Case("pack", ("pack", "unpack"), lambda a, b: ops.unpack(ops.pack([a, b], 2, [0, 1]) * 2, 2, [0, 1],
             [2, 4, 6, 2, 3, 8]), (x(4, 6), x(3, 8))),
        Case("pack_empty", ("pack_empty",), lambda a, b: ops.pack_empty([a, b], 1, [0, 1]), (x(4, 6), x(3, 8))),
        Case("pack_bytes", ("pack_bytes", "unpack_bytes"), in_bytes, (x(4, 6), x(3, 8))),
        Case("turn", ("turn",), lambda a: ops.turn(a.detach().to(torch.float8_e4m3fn), "weight").float(), (x(T, H),)),
        *(Case(f"payload, {move}", ("encode_rows", "decode_rows", f"carry_{move}"),
               lambda a, *rest, move=move, more=more: sent(move, a, *rest, *more), inputs, limit=0.08)
          for move, inputs, more in (
              ("rows", (x(T, H), ids), (E,)), ("sorted", (x(int(chunks.sum()), H), chunks), (False,)),
              ("swapped", (x(12 * 5, H),), (3, 4)), ("aligned", (x(T * K, H), fewer), (16,)),
              ("home", (x(T, H),), ("",)),
          )),
        # Powers of two divide exactly; of other scales a number may become the neighbouring one.
        *(Case(f"payload, {payload}", ("encode_rows", "decode_rows", "carry_home"),
               lambda a, payload=payload: sent("home", a, "", payload=payload), (x(T, H + 1),),
               limit=0.0 if payload in ("blockwise", "mxfp8") else 0.08)
          for payload in ("current", "delayed", "rowwise", "blockwise", "mxfp8")),
        *(Case(f"decode_operand, {payload}{', experts' if c is not None else ''}", ("decode_operand",),
               lambda a, c, payload=payload: operand(a, c, payload), (x(256, H + 1), c),
               limit=0.0 if payload in ("blockwise", "mxfp8") else 0.08)
          for payload in ("current", "delayed", "rowwise", "blockwise", "mxfp8")
          for c in (None, torch.tensor([100, 5]))),
        Case("fan_max", ("fan_max",), lambda a: ops.fan_max(a, 2), (x(1, 1),)),
        Case("past_amax", ("past_amax",), lambda h, a: ops.past_amax(h, 0, a, "delayed", "rows"),
             (x(3, 5).abs(), x(T, H))),
        Case("note_amax", ("note_amax",), ops.note_amax, (x(3, 5).abs(), x(1, 1).abs(), x(1, 1).abs()), ("float32",)),
        Case("align_rows", ("align_rows", "unalign_rows"),
             lambda a, c: (b := ops.align_rows(a, c, 16), ops.unalign_rows(b, c, 16, T * K)), (x(T * K, H), fewer)),
    ]  # fmt: skip
    for recipe, alignment in (("current", 16), ("rowwise", 16), ("blockwise", 128), ("mxfp8", 32)):

        def linear(a, w, recipe=recipe, by=ops):
            def quantised(t: Tensor, role: str) -> list[Tensor]:
                amax = ops.amax(t.detach(), None, recipe, role, False) if whole(recipe) else None
                return ops.quantise(t, amax, None, None, recipe, role, True)

            p, q = quantised(a, "rows"), quantised(w, "weight")
            y, *taps = by.fp8_linear(p[0], q[0], *p[1:3], *q[1:3], *p[3:], *q[3:], None, recipe, whole(recipe))
            values = ops.dequantise(p[1], p[2], recipe, "rows", False, torch.float32)
            return (ops.grad_amax(y, *taps, None, recipe) if whole(recipe) else y), values

        def product(a, w, c, recipe=recipe, alignment=alignment, by=ops):
            a = ops.align_rows(a, c, alignment)
            p = ops.quantise(a, None, None, c, recipe, "rows", True)
            q = ops.quantise(w.transpose(1, 2), None, None, None, recipe, "stack", True)
            return by.fp8_grouped_mm(p[0], q[0], c, *p[1:3], *q[1:3], *p[3:], *q[3:], None, recipe, False)[0]

        def permuted(a, i, recipe=recipe):
            carrier, *q, counts, at = ops.permute_quantised(a, i, E, None, None, recipe, True)
            layouts = zip(q[::2], q[1::2], (False, True), strict=True)
            return *(ops.dequantise(v, s, recipe, "rows", t, torch.float32) for v, s, t in layouts), carrier, counts, at

        def act(a, w, c, recipe=recipe, alignment=alignment):
            a = ops.align_rows(a, c, alignment)
            p = ops.quantise(a, None, None, c, recipe, "rows", True)
            q = [[t] for t in ops.quantise(w.transpose(1, 2), None, None, None, recipe, "stack", True)]
            y, *made, h = ops.fp8_grouped_act(p[0], q[0], [], c, *p[1:3], *q[1:3], *p[3:], *q[3:], SWIGLU, recipe, True)
            layouts = zip(made[::2], made[1::2], (False, True), strict=True)
            return *(ops.dequantise(v, s, recipe, "rows", t, torch.float32) for v, s, t in layouts), y, h

        found += [
            # A sum that is rounded otherwise may become the neighbouring FP8 number, and so may what follows from it.
            Case(f"fp8_grouped_act, {recipe}", ("fp8_grouped_act", "quantise_act", "quantise_act_grad"), act,
                 (x(T * K, H), small(E, 2 * I, H), fewer), limit=0.13),
            Case(f"permute_quantised, {recipe}", ("permute_quantised",), permuted, (x(T, H), holes), limit=0.08),
            Case(f"fp8_linear, {recipe}", ("quantise", "dequantise", "amax", "grad_amax", "fp8_linear", "fp8_wgrad",
                 "fp8_dgrad"), linear, (x(16 * (T // 16 + 1), H), small(I, H)), limit=0.01),
            Case(f"fp8_grouped_mm, {recipe}", ("fp8_grouped_mm", "fp8_grouped_wgrad", "fp8_grouped_dgrad"), product,
                 (x(T * K, H), small(E, I, H), fewer), limit=0.01),
        ]  # fmt: skip
        for make, rows, counts in ((linear, (T // 128 + 1) * 128, None), (product, T * K, fewer)):
            found += by_transformer_engine(recipe, make, rows, counts)
    return found


def by_transformer_engine(recipe: str, make: Callable[..., Any], rows: int, counts_E: Tensor | None) -> list[Case]:
    """``make``'s product by ``moec_te::`` ops on a GPU, against moec's on the CPU; none where Transformer Engine cannot
    be imported, or has not this recipe on this GPU.  Of widths that all recipes take."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception:  # not there, or its Python without its compiled part
        return []
    from moec.runtime.fp8 import Recipe
    from moec.runtime.transformer_engine_fp8 import refused

    K, M = 256, 384
    if refused(Recipe.parse(recipe), (K, M), (torch.bfloat16, torch.float32)):
        return []
    gen = torch.Generator().manual_seed(1)
    experts = () if counts_E is None else (len(counts_E),)
    x, w = torch.randn((rows, K), generator=gen), torch.randn((*experts, M, K), generator=gen) * K**-0.5

    def run(*inputs: Tensor) -> Any:
        return make(*inputs, by=torch.ops.moec_te if inputs[0].is_cuda else ops)

    inputs = (x, w) if counts_E is None else (x, w, counts_E)
    kind = "fp8_linear" if counts_E is None else "fp8_grouped_mm"
    return [Case(f"{kind} by Transformer Engine, {recipe}", (), run, inputs, limit=0.01)]


def whole(recipe: str) -> bool:
    """Do scales depend on whole dims?"""
    return recipe in ("current", "rowwise")


def outputs(case: Case, device: Any, dtype: torch.dtype, drawn: torch.dtype) -> list[Tensor]:
    """Outputs and gradients on ``device``, computed in ``dtype`` of inputs that were rounded to ``drawn``."""
    leaves, inputs = [], []
    for t in case.inputs:
        if t is not None and t.is_floating_point():
            t = t.to(drawn).to(device, dtype).requires_grad_()
            leaves.append(t)
        inputs.append(t if t is None else t.to(device) if not t.is_floating_point() else t)
    out = case.run(*inputs)
    out = [out] if isinstance(out, Tensor) else list(out)
    gen = torch.Generator().manual_seed(1)
    total: Tensor | None = None
    for y in out:
        if y.requires_grad:
            g = torch.randn(y.shape, generator=gen).to(drawn).to(device, y.dtype)
            total = (y * g).sum() if total is None else total + (y * g).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if total is not None else []
    return [t.detach().cpu() for t in (*out, *(g for g in grads if g is not None))]


def bits(t: Tensor) -> Tensor:
    return t.new_empty(t.numel()).copy_(t.reshape(-1)).view(torch.uint8)


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference, in units of the largest number of a tensor; integers must be equal (else infinite)."""
    worst = 0.0
    for a, b in zip(got, exact, strict=True):
        if a.shape != b.shape or (not b.is_floating_point() and not torch.equal(a, b)):
            return float("inf")
        if not b.is_floating_point() or not b.numel():
            continue
        a, b = a.double(), b.double()
        if not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        size = float(b.nan_to_num().abs().max())
        worst = max(worst, float((a - b).nan_to_num().abs().max()) / (size or 1.0))
    return worst


LIMIT = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Of ``error``: a few roundings of results, each a sum whose terms are rounded to the dtype."""
