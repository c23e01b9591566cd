"""Experts' activations, and their derivative, on a GPU by the recipes of tiles: from pre-activations to FP8 in one
kernel, both layouts.

Legend: N rows, A columns of all first products, M of one of them, I of the body's result, B the recipe's block.

A program has B x B elements of the body's result, and whatever of the products belongs to them.  It goes over them in
strips of rows twice: first each row's tiles are complete in a strip, and the largest magnitudes of the columns' tiles
are collected; then, with these, the other layout is written.  The body is computed again for that (its operands are in
the cache by then): kept, a block of it would not fit into the registers.

The derivative's tiles are those of a product's columns.  Where these are not the result's, beginning at a multiple of B
(columns taken alternately, say), and for recipes whose scales depend on whole dims, it is ordinary torch code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..body import Body
from ..fp8 import Recipe
from ..fp8.recipes import E8M0
from ..fp8.tiles import num_tiles
from ..ops import quantise_act as op
from ..ops.align_rows import real_rows
from ..ops.quantise import nothing
from .expressions import TRITON, lines, listing
from .pre_activations import blocks, inputs, place, split
from .quantise import EXPONENT, NUMBERS, numbers, stored_scale, text
from .source import load
from .template import fill, identifiers, plus

TEMPLATE = '''"""<title>

<about>
"""

import triton
import triton.language as tl


@triton.jit
def quantise_act(<arguments>, rows):
    top = tl.program_id(1) * <block>
    column = tl.program_id(0) * <block> + tl.arange(0, <block>)
    <starts>
    for step in range(0, <block>, <strip>):
        <strips>
        <first>
    <between>
    <second>
'''
STRIP = """
line = step + tl.arange(0, <strip>)
inside = top + line < rows
ok = inside[:, None]<even>
<wide>
real = tl.load(real_ptr + top + line, mask=inside, other=0) != 0
"""
VALUES = """
x = tl.where(real[:, None], <value>.to(<storage>).to(tl.float32), 0.0)
finite = tl.abs(x) < float("inf")
"""
BY_ROWS = """
<values>
size = tl.where(finite & ok, tl.abs(x), 0.0)
<largest> = tl.maximum(<largest>, tl.max(size, 0))
largest = tl.max(size, 1)
<exponent>
<numbers>
tl.store(q<n>_ptr + <at>, q, mask=ok)
tl.store(scale<n>_ptr + (top + line).to(tl.int64) * <tiles> + <tile>, <stored>, mask=inside)
"""
BY_COLUMNS = """
<values>
<numbers>
tl.store(qt<n>_ptr + (<columns>)[None, :].to(tl.int64) * rows + (top + line)[:, None], q, mask=ok)
"""
SCALES_T = """
<exponent>
tl.store(scalet<n>_ptr + tl.program_id(1).to(tl.int64) * <width> + <columns>, <stored><mask>)
"""
NAMES = identifiers(TEMPLATE + STRIP + VALUES + BY_ROWS + BY_COLUMNS + SCALES_T + EXPONENT + NUMBERS) | {"wide_ok"}


@dataclass(frozen=True)
class Out:
    """Columns of something that is quantised: ``number`` of the tensors that come out, which has ``width`` columns, and
    the first of these columns."""

    name: str
    number: int
    width: int
    value: str
    offset: int = 0


@dataclass(frozen=True)
class Spec:
    body: Body
    widths: tuple[int, ...]
    recipe: Recipe
    dtype: torch.dtype
    both: bool
    grad: bool = False
    """Of the derivative, for every product; else of the body's result."""
    wide: bool = False
    """The derivative is stored in the storage dtype too."""

    @property
    def columns(self) -> int:
        return self.body.width(self.widths)

    @property
    def out_widths(self) -> tuple[int, ...]:
        return self.widths if self.grad else (self.columns,)

    @property
    def strip(self) -> int:
        return min(32, self.recipe.block)

    @property
    def warps(self) -> int:
        return 8 if self.recipe.block > 32 else 4


def fits(spec: Spec) -> bool:
    """Whether there is a kernel."""
    if spec.recipe.reads_whole or spec.dtype not in TRITON or spec.dtype.itemsize > 4:
        return False
    if not spec.grad:
        return True
    found = blocks(spec.body, spec.widths)
    begins = all(b.columns.startswith("column") and "*" not in b.columns for b in found)
    return begins and (len(found) == len(spec.widths) or spec.columns % spec.recipe.block == 0)


def pointers(spec: Spec) -> list[str]:
    """The kernel's arguments but for the number of rows, in order."""
    names = ["q", "scale", *(["qt", "scalet"] if spec.both else [])]
    out = [f"{name}{n}_ptr" for n in range(len(spec.out_widths)) for name in names]
    d = [f"d{n}_ptr" for n in range(len(spec.out_widths))] if spec.wide else []
    return ["h_ptr", *(["grad_ptr"] if spec.grad else []), "real_ptr", *out, *d]


@cache
def source(spec: Spec) -> str:
    """The text of the kernel."""
    block, columns = spec.recipe.block, spec.columns
    even = "" if columns % block == 0 else f" & (column < {columns})[None, :]"
    load, evaluate, outs = _evaluated(spec)
    strips = text(STRIP, strip=spec.strip, even=even, wide=_wide(spec)) + load + evaluate
    first: list[str] = []
    between: list[str] = []
    again: list[str] = []
    for o in outs:
        at_columns = plus("column", o.offset)
        values = text(VALUES, value=o.value, storage=TRITON[spec.dtype])
        if spec.wide:
            at = f"d{o.number}_ptr + {place(o.width, at_columns)}"
            values.append(f"tl.store({at}, x.to({TRITON[spec.dtype]}), mask=ok)")
        first += text(
            BY_ROWS, values=values, largest=f"largest_{o.name}", at=place(o.width, at_columns), n=o.number,
            exponent=text(EXPONENT, largest="largest", scale="scale"), numbers=numbers("scale[:, None]"),
            tiles=num_tiles(o.width, block), tile=plus("tl.program_id(0)", o.offset // block),
            stored=stored_scale(spec.recipe, "scale"),
        )  # fmt: skip
        scale = f"scale_{o.name}"
        between += text(
            SCALES_T, exponent=text(EXPONENT, largest=f"largest_{o.name}", scale=scale), n=o.number, width=o.width,
            columns=at_columns, stored=stored_scale(spec.recipe, scale),
            mask=f", mask=column < {columns}" if even else "",
        )  # fmt: skip
        again += text(
            BY_COLUMNS, values=text(VALUES, value=o.value, storage=TRITON[spec.dtype]), n=o.number, columns=at_columns,
            numbers=numbers(f"{scale}[None, :]"),
        )  # fmt: skip
    loop = [f"for step in range(0, {block}, {spec.strip}):", *("    " + line for line in (*strips, *again))]
    of = spec.body.derivative() if spec.grad else spec.body
    what = "derivative of the experts' activation" if spec.grad else "experts' activation"
    return fill(
        TEMPLATE, title=f"The {what}, quantised ({spec.recipe.name}{', both layouts' if spec.both else ''}).",
        about=listing(of), arguments=", ".join(pointers(spec)), block=block, strip=spec.strip,
        starts=[f"largest_{o.name} = tl.zeros(({block},), tl.float32)" for o in outs], strips=strips, first=first,
        between=between if spec.both else [], second=loop if spec.both else [],
    )  # fmt: skip


def _wide(spec: Spec) -> list[str]:
    """Two columns side by side for each of the result's."""
    if not any(b.wide for b in blocks(spec.body, spec.widths)):
        return []
    block, columns = spec.recipe.block, spec.columns
    there = "" if columns % block == 0 else f" & (wide < {2 * columns})[None, :]"
    return [f"wide = tl.program_id(0) * {2 * block} + tl.arange(0, {2 * block})", f"wide_ok = inside[:, None]{there}"]


def _evaluated(spec: Spec) -> tuple[list[str], list[str], list[Out]]:
    """Loads, steps, and what comes out."""
    found, total, columns = blocks(spec.body, spec.widths), sum(spec.widths), spec.columns
    zeros = f"tl.zeros(({spec.strip}, {spec.recipe.block}), tl.float32)"
    load: list[str] = []
    for b in found:
        load.append(f"h_{b.name} = tl.load(h_ptr + {b.place(total)}, mask={b.ok}, other=0.0)")
        load += split(b, f"h_{b.name}", spec.strip, spec.recipe.block)
    known = inputs(found, "h_{}", "tl.float32")
    if not spec.grad:
        taken = NAMES | identifiers("\n".join(load))
        steps, (value,) = lines(spec.body, known, spec.dtype, taken, zeros)
        return load, steps, [Out("act", 0, columns, f"({value})")]
    load.append(f"grad = tl.load(grad_ptr + {place(columns)}, mask=ok, other=0.0).to(tl.float32)")
    derivative = spec.body.derivative()
    known |= {derivative.inputs[-1].name: "grad"}
    outs: list[Out] = []
    taken = NAMES | identifiers("\n".join(load)) | {f"{a}_{b.name}" for b in found for a in ("largest", "scale")}
    steps, gradients = lines(derivative, known, spec.dtype, taken, zeros)
    of = dict(zip((i.name for i in spec.body.inputs), gradients, strict=True))
    for b in found:
        (name,) = b.inputs
        offset = int(b.columns.partition(" + ")[2] or 0)
        outs.append(Out(b.name, b.product, spec.widths[b.product], f"({of[name] if name else zeros})", offset))
    return load, steps, outs


@cache
def kernel(spec: Spec) -> Any:
    return load(source(spec), "quantise_act").quantise_act


def launch(spec: Spec, h_NA: Tensor, counts_E: Tensor, *grad: Tensor) -> list[Tensor]:
    """``[q, scale, q_T, scale_T]`` of every output, without the last two if not ``both``; with ``wide`` then [N, M]
    each."""
    N, block = h_NA.shape[0], spec.recipe.block
    role = "grad" if spec.grad else "rows"
    kept = torch.uint8 if spec.recipe.scales == "e8m0" else torch.float32
    made: list[Tensor] = []
    for M in spec.out_widths:
        for order, scales in (((0, 1), (N, num_tiles(M, block))), ((1, 0), (num_tiles(N, block), M)))[: 1 + spec.both]:
            made.append(torch.empty_permuted((N, M), order, dtype=spec.recipe.format(role), device=h_NA.device))
            made.append(torch.empty(scales, dtype=kept, device=h_NA.device))
    made += [h_NA.new_empty((N, M)) for M in spec.out_widths] if spec.wide else []
    if N:
        real_N = real_rows(counts_E, N, spec.recipe.alignment, "quantise_act").to(torch.uint8)
        grid = num_tiles(spec.columns, block), num_tiles(N, block)
        given = (h_NA.contiguous(), *(g.contiguous() for g in grad), real_N)
        kernel(spec)[grid](*given, *made, N, num_warps=spec.warps)
    return [t.view(E8M0) if t.dtype == torch.uint8 else t for t in made]


def quantise_act(
    h_NA: Tensor, widths: Sequence[int], counts_E: Tensor, body: str, recipe: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``moec::quantise_act``."""
    spec = Spec(Body.parse(body), tuple(widths), Recipe.parse(recipe), h_NA.dtype, both)
    if not fits(spec):
        return op.act_on_any_device(h_NA, list(widths), counts_E, body, recipe, both)
    made = launch(spec, h_NA, counts_E) + ([] if both else nothing(h_NA, spec.recipe, "rows"))
    q, scale, q_T, scale_T = made
    return q, scale, q_T, scale_T


def quantise_act_grad(
    grad_NI: Tensor, h_NA: Tensor, widths: Sequence[int], counts_E: Tensor, body: str, recipe: str, both: bool,
    wide: bool,
) -> list[Tensor]:  # fmt: skip
    """``moec::quantise_act_grad``."""
    spec = Spec(Body.parse(body), tuple(widths), Recipe.parse(recipe), h_NA.dtype, both, grad=True, wide=wide)
    if not fits(spec):
        return op.act_grad_on_any_device(grad_NI, h_NA, list(widths), counts_E, body, recipe, both, wide)
    made = launch(spec, h_NA, counts_E, grad_NI)
    d = made[len(made) - len(widths) :] if wide else []
    quantised = made[: len(made) - len(d)]
    if both:
        return made
    none = nothing(h_NA, spec.recipe, "grad")
    return [t for n in range(len(widths)) for t in (*quantised[2 * n : 2 * n + 2], *none)] + d


op.quantise_act.register_kernel("cuda")(quantise_act)
op.quantise_act_grad.register_kernel("cuda")(quantise_act_grad)
