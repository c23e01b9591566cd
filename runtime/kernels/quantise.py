"""Quantise on a GPU: a matrix is read once, both layouts are written.  With ``permute_quantised`` the matrix is the
permuted rows, which are gathered as they are read and exist nowhere else.

Legend: L leading dims as one (experts), R rows, C columns, B the recipe's block.

A program has B x B elements.  By the recipes of tiles (blockwise, mxfp8) these are whole tiles of every kind (1 x B,
B x 1, B x B): nothing is read twice and no program waits for another one.  By those whose scales depend on whole dims
(rowwise, current, delayed) the scales are known before: from the largest magnitudes that are given, or from one more
read of the matrix (``amax.py``).  Every number is that of the CPU op: a quotient is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..fp8 import Recipe
from ..fp8.recipes import E4M3, E5M2, E8M0, LARGEST, Tile
from ..fp8.tiles import num_tiles, scale_of
from ..ops import permute_quantised as permute_op
from ..ops import quantise as op
from ..ops.align_rows import real_rows
from ..ops.permute_aligned import RECIPE_OF, num_rows
from . import amax as largest
from . import permute
from .expressions import TRITON
from .source import load
from .template import fill

TEMPLATE = '''"""Quantise <what> of <dtype>, in tiles of <block>."""

import triton
import triton.language as tl


@triton.jit
def quantise(<pointers>, rows, columns, row_tiles, column_tiles):
    place = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * <block> + tl.arange(0, <block>)
    column = tl.program_id(0).to(tl.int64) * <block> + tl.arange(0, <block>)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    <source>
    x = tl.load(x_ptr + (place * rows + <from>[:, None]) * columns + column[None, :], mask=<there>, other=0.0)
    x = x.to(tl.float32)
    <real_rows>
    size = tl.abs(x)
    finite = size < float("inf")
    size = tl.where(finite, size, 0.0)
    <layouts>
'''

EXPONENT = """
bits = <largest>.to(tl.int32, bitcast=True)  # 448 is 1.75 times 2 to the 8
exponent = tl.maximum((bits >> 23) - 135 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0), -126)
exponent = tl.where(<largest> > 0.0, exponent, 0)
<scale> = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
"""
"""The scale of the largest magnitudes of tiles."""
NUMBERS = """
q = tl.clamp(tl.div_rn(x, <spread>), -<limit>, <limit>)
q = tl.where(finite, q, float("nan")).to(<format>)
"""
FORMATS = {E4M3: "tl.float8e4nv", E5M2: "tl.float8e5"}
LAYOUT = """
largest = <largest>
<exponent>
<numbers>
tl.store(<q>_ptr + <at>, q, mask=inside)
tl.store(<s>_ptr + <scale_at>, <stored><scale_mask>)
"""
GIVEN = """
scale = tl.load(<s>_ptr + <scale_at><scale_mask>)
<numbers>
tl.store(<q>_ptr + <at>, q, mask=inside)
"""
"""A layout whose scales are known."""
KINDS = {
    "row": ("tl.max(size, 1)", "scale[:, None]",
            "(place * rows + row) * column_tiles + tl.program_id(0)", ", mask=row < rows"),
    "column": ("tl.max(size, 0)", "scale[None, :]",
               "(place * row_tiles + tl.program_id(1)) * columns + column", ", mask=column < columns"),
    "square": ("tl.max(tl.max(size, 1), 0)", "scale",
               "(place * row_tiles + tl.program_id(1)) * column_tiles + tl.program_id(0)", ""),
}  # fmt: skip
GIVEN_KINDS = {
    "row": ("scale[:, None]", "place * rows + row", ", mask=row < rows, other=1.0"),
    "column": ("scale[None, :]", "place * columns + column", ", mask=column < columns, other=1.0"),
    "square": ("scale", "place", ""),
}
AT = {
    -1: "(place * rows + row[:, None]) * columns + column[None, :]",
    -2: "(place * columns + column[None, :]) * rows + row[:, None]",
}
"""Where elements lie in memory that is contiguous along a dim."""


def kind(tile: Tile) -> str:
    return "square" if tile[0] == tile[1] else "row" if tile[0] == 1 else "column"


def text(template: str, **values: Any) -> list[str]:
    return fill(template.strip(), **values).splitlines()


def numbers(spread: str, dtype: torch.dtype = E4M3) -> list[str]:
    """Lines that make ``q`` of x, ``finite`` where x is."""
    return text(NUMBERS, spread=spread, limit=LARGEST[dtype], format=FORMATS[dtype])


def side(recipe: Recipe) -> int:
    """Of a program's square."""
    return recipe.block or 64


def stored_scale(recipe: Recipe, scale: str) -> str:
    """A scale, of which ``exponent`` is the exponent, as it is kept."""
    return "(exponent + 127).to(tl.uint8)" if recipe.scales == "e8m0" else scale


@cache
def source(recipe: Recipe, role: str, dtype: torch.dtype, both: bool, masked: bool, gathered: bool = False) -> str:
    """The text of the kernel, for a matrix in memory row by row.  ``gathered``: whose row r is row ``source[r]`` of x,
    zeros where that is -1."""
    stored = stored_scale(recipe, "scale")
    layouts: list[str] = []
    pointers = ["x_ptr", *(["source_ptr"] if gathered else []), *(["real_ptr"] if masked else []), "q_ptr", "scale_ptr"]
    find = ["source = tl.load(source_ptr + row, mask=row < rows, other=-1)"]
    for transposed in (False, True) if both else (False,):
        tiles = kind(recipe.tile(role, transposed))
        *found, spread, scale_at, mask = (GIVEN_KINDS if recipe.reads_whole else KINDS)[tiles]
        along = -2 if transposed != (role == "stack") else -1
        values: dict[str, Any] = {
            "numbers": numbers(spread, recipe.format(role)), "at": AT[along], "scale_at": scale_at, "scale_mask": mask,
            "q": "qt" if transposed else "q", "s": "scalet" if transposed else "scale",
        }  # fmt: skip
        if found:
            (largest,) = found
            values |= {"largest": largest, "exponent": text(EXPONENT, largest="largest", scale="scale")}
            layouts += text(LAYOUT, stored=stored, **values)
        else:
            layouts += text(GIVEN, **values)
        pointers += ["qt_ptr", "scalet_ptr"] if transposed else []
    real = ["real = tl.load(real_ptr + row, mask=row < rows, other=0) != 0", "x = tl.where(real[:, None], x, 0.0)"]
    return fill(
        TEMPLATE, what=f"{recipe.name} {role}{', both layouts' if both else ''}", dtype=TRITON[dtype],
        block=side(recipe), pointers=", ".join(pointers), real_rows=real if masked else [], layouts=layouts,
        source=find if gathered else [], there="inside & (source >= 0)[:, None]" if gathered else "inside",
        **{"from": "source" if gathered else "row"},
    )  # fmt: skip


@cache
def kernel(recipe: Recipe, role: str, dtype: torch.dtype, both: bool, masked: bool, gathered: bool) -> Any:
    return load(source(recipe, role, dtype, both, masked, gathered), "quantise").quantise


def warps(recipe: Recipe) -> int:
    return {32: 1, 64: 8, 128: 16}[side(recipe)]


def launch(
    x: Tensor, real_R: Tensor | None, recipe: Recipe, role: str, both: bool, source_R: Tensor | None = None,
    given: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """``[q, scale, q_T, scale_T]`` of ``x [L, R, C]``, without the last two if not ``both``; role ``rows`` or ``grad``:
    L is 1.  ``source_R`` (int64): of the matrix whose rows are these rows of x, zeros for -1.  ``given``: the scales of
    the layouts, where they depend on whole dims."""
    x = x.contiguous()
    L, R, C = x.shape
    R = R if source_R is None else source_R.shape[0]
    scales = torch.uint8 if recipe.scales == "e8m0" else torch.float32
    made: list[Tensor] = []
    for transposed in (False, True) if both else (False,):
        tile = recipe.tile(role, transposed)
        shape = (L, *(n if s == 1 else num_tiles(n, s) for n, s in zip((R, C), tile, strict=True)))
        order = (0, 2, 1) if transposed != (role == "stack") else (0, 1, 2)
        made.append(torch.empty_permuted((L, R, C), order, dtype=recipe.format(role), device=x.device))
        made.append(given[transposed] if given else torch.empty(shape, dtype=scales, device=x.device))
    if L * R * C:
        tiles = num_tiles(R, side(recipe)), num_tiles(C, side(recipe))
        which = [] if source_R is None else [source_R]
        which += [] if real_R is None else [real_R.to(torch.uint8)]
        kernel(recipe, role, x.dtype, both, real_R is not None, source_R is not None)[tiles[1], tiles[0], L](
            x, *which, *made, R, C, *tiles, num_warps=warps(recipe)
        )
    return [t.view(E8M0) if t.dtype == torch.uint8 else t for t in made]


def scales_of(
    x: Tensor, real_R: Tensor | None, recipe: Recipe, role: str, amaxes: Sequence[Tensor | None]
) -> list[Tensor]:
    """The scales of the layouts of ``x [L, R, C]``, by a recipe whose scales depend on whole dims; what is not given of
    the largest magnitudes is found, all of it in one read."""
    kinds = [largest.kind(recipe.tile(role, transposed)) for transposed in (False, True)[: len(amaxes)]]
    wanted = tuple(dict.fromkeys(k for k, given in zip(kinds, amaxes, strict=True) if given is None))
    found = dict(zip(wanted, largest.launch(x, real_R, wanted), strict=True)) if wanted else {}
    most = LARGEST[recipe.format(role)]
    return [
        scale_of(found[k] if given is None else given, most, recipe.scales, recipe.margin).contiguous()
        for k, given in zip(kinds, amaxes, strict=True)
    ]


def quantise(
    x: Tensor, amax: Tensor | None, amax_T: Tensor | None, counts_E: Tensor | None, recipe: str, role: str, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``moec::quantise``."""
    found = Recipe.parse(recipe)
    if not known(x.dtype):
        return op.on_any_device(x, amax, amax_T, counts_E, recipe, role, both)
    amaxes = [amax, amax_T] if both else [amax]
    shapes = [op.checked_shape(x, given, found, role, t == 1) for t, given in enumerate(amaxes)]
    real_N = None if counts_E is None else real_rows(counts_E, x.shape[0], found.alignment, "quantise")
    lies = role == "stack" and x.stride(-2) == 1 and x.stride(-1) != 1  # [E, M, K] in memory: a stack of weights [M, K]
    if lies:
        x, role, amaxes = x.transpose(1, 2), "weight", [None if a is None else a.transpose(1, 2) for a in amaxes]
    matrix = x.reshape(-1, *x.shape[-2:]) if role in ("weight", "stack") else x.reshape(1, -1, x.shape[-1])
    given = scales_of(matrix, real_N, found, role, amaxes) if found.reads_whole else ()
    made = launch(matrix, real_N, found, role, both, given=given)
    if lies:
        x, made = x.transpose(1, 2), [_contiguous(t.transpose(1, 2)) if i % 2 else t.transpose(1, 2)
                                      for i, t in enumerate(made)]  # fmt: skip
    elif role != "stack":
        made = [t.view(t.shape[-2:]) for t in made]
    if role in ("rows", "grad"):
        made[0] = made[0].view(x.shape)
    made[1::2] = [t.view(shape) for t, shape in zip(made[1::2], shapes, strict=True)]
    made += op.nothing(x, found, role) if not both else []
    q, scale, q_T, scale_T = made
    return op.carrier(x), q, scale, q_T, scale_T


def known(dtype: torch.dtype) -> bool:
    return dtype in TRITON and dtype.itemsize <= 4


def permute_quantised(
    x_TH: Tensor, ids_TK: Tensor, num_experts: int, amax: Tensor | None, amax_T: Tensor | None, recipe: str, both: bool
) -> permute_op.Result:
    """``moec::permute_quantised``.  Of rows that nothing will differentiate one layout is wanted: then each token is
    read once, and not once for each choice (``permute.py``)."""
    found, kind = Recipe.parse(recipe), {recipe: way for way, recipe in RECIPE_OF.items()}.get(recipe)
    alignment, given = found.alignment, [amax, amax_T] if both else [amax]
    if not known(x_TH.dtype):
        return permute_op.in_two_steps(x_TH, ids_TK, num_experts, amax, amax_T, recipe, both)
    if kind is not None and amax is None and not both:
        q, scale, counts_E, row_of_TK = permute.aligned(x_TH, ids_TK, num_experts, alignment, kind)
        made = [q, scale, *op.nothing(x_TH, found, "rows")]
    elif found.reads_whole and None in given:  # which are those of the rows
        rows_NH, _, counts_E, row_of_TK = permute.aligned(x_TH, ids_TK, num_experts, alignment, "none")
        return *quantise(rows_NH, amax, amax_T, counts_E, recipe, "rows", both), counts_E, row_of_TK
    else:
        scales = scales_of(x_TH, None, found, "rows", given) if found.reads_whole else ()
        counts_E, row_of_TK = permute.places(x_TH, ids_TK, num_experts, alignment, "permute_quantised")
        source_N = sources(row_of_TK, num_rows(ids_TK, num_experts, alignment))
        made = [t.view(t.shape[-2:]) for t in launch(x_TH[None], None, found, "rows", both, source_N, scales)]
        made += op.nothing(x_TH, found, "rows") if not both else []
    q, scale, q_T, scale_T = made
    return op.carrier(x_TH.new_empty(()).expand(q.shape)), q, scale, q_T, scale_T, counts_E, row_of_TK


def sources(row_of_TK: Tensor, N: int) -> Tensor:
    """int64 [N]: the token of each row, -1 for rows of none."""
    T, K = row_of_TK.shape
    token_P = torch.arange(T, device=row_of_TK.device).repeat_interleave(K)
    place_P = torch.where(row_of_TK < 0, N, row_of_TK).reshape(-1)
    return token_P.new_full((N + 1,), -1).scatter_(0, place_P, token_P)[:N]


def _contiguous(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).contiguous().view(scale.dtype) if scale.dtype == E8M0 else scale.contiguous()


op.quantise.register_kernel("cuda")(quantise)
permute_op.permute_quantised.register_kernel("cuda")(permute_quantised)
