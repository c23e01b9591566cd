"""Which FP8 products a GPU computes how; and what torch is given for experts on one, without it.

Legend: N rows, E experts, K and M in and out features.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moec.runtime.fp8 import RECIPES, Recipe
from moec.runtime.kernels import fp8_ways, scaled_grouped_mm
from moec.runtime.torch_compat import SCALED_GROUPED_MM

ops = torch.ops.moec
K, M = 32, 48
COUNTS = torch.tensor([3, 0, 17])
SCHEMA = (
    "aten::_scaled_grouped_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? offs=None, Tensor? "
    "bias=None, Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor"
)


def test_the_schema():
    """What ``scaled_grouped_mm.py`` calls: a torch that changes it fails here, not on a GPU."""
    assert SCALED_GROUPED_MM is torch._scaled_grouped_mm
    assert str(torch.ops.aten._scaled_grouped_mm.default._schema) == SCHEMA


def reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype) -> Tensor:
    """Written from torch's documentation.  First torch's own kernel for shapes has its say about layouts, dtypes and
    sizes."""
    meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (a, b, scale_a, scale_b)]
    shaped = SCALED_GROUPED_MM(*meta, offs=offs.to("meta"), out_dtype=out_dtype)
    assert offs.dtype == torch.int32 and not (offs % fp8_ways.MULTIPLE).any()
    starts = [0, *offs.tolist()]
    wide_a, wide_b = a.float(), b.float()
    if b.ndim == 3:
        y = torch.full(shaped.shape, torch.nan)  # memory as it was
        for e, (start, end) in enumerate(pairwise(starts)):
            y[start:end] = wide_a[start:end] @ wide_b[e] * scale_a[start:end, None] * scale_b[e]
    else:
        y = torch.empty(shaped.shape)
        for e, (start, end) in enumerate(pairwise(starts)):
            each = scale_a.view(len(offs), -1)[e, :, None] * scale_b.view(len(offs), -1)[e]
            y[e] = wide_a[:, start:end] @ wide_b[start:end] * each if end > start else torch.nan
    return y.to(out_dtype)


@pytest.mark.parametrize("recipe", ["rowwise", "current", "blockwise", "mxfp8"])
def test_products_are_the_cpu_ops(monkeypatch, recipe):
    """In the layouts that the three products have, by torch and by generated kernels; rows of nobody, and experts
    without rows, give zeros."""
    repaired = pytest.importorskip("interpreter", exc_type=ImportError).repaired
    calls = []
    monkeypatch.setattr(scaled_grouped_mm, "capability", lambda x: (9, 0))
    monkeypatch.setattr(scaled_grouped_mm, "SCALED_GROUPED_MM", lambda *a, **k: calls.append(a) or reference(*a, **k))
    alignment = Recipe.parse(recipe).alignment
    x, g = (ops.align_rows(torch.randn(20, n), COUNTS, alignment).bfloat16() for n in (K, M))
    w = torch.randn(3, M, K).bfloat16().transpose(1, 2)
    a = ops.quantise(x, None, None, COUNTS, recipe, "rows", True)
    b = ops.quantise(w, None, None, None, recipe, "stack", True)
    c = ops.quantise(g, None, None, COUNTS, recipe, "grad", True)
    args = (a[0], b[0], COUNTS, *a[1:3], *b[1:3], *a[3:], *b[3:], None, recipe, False)
    more = (COUNTS, recipe, torch.bfloat16)
    with repaired() as traffic:
        made = (
            (scaled_grouped_mm.forward(*args)[0], ops.fp8_grouped_mm(*args)[0]),
            (scaled_grouped_mm.dgrad(*c[1:3], *b[3:], *more), ops.fp8_grouped_dgrad(*c[1:3], *b[3:], *more)),
            (scaled_grouped_mm.wgrad(*a[3:], *c[3:], *more), ops.fp8_grouped_wgrad(*a[3:], *c[3:], *more)),
        )
    for got, want in made:
        assert got.shape == want.shape and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-2)
    assert len(calls) == {"rowwise": 3, "current": 1}.get(recipe, 0)
    assert len([launch for launch in traffic.launches if launch.name.startswith("scaled_")]) == 3 - len(calls)


def test_the_table():
    def way(ways, recipe, product, dtype, at):
        found = fp8_ways.way(ways, recipe, product, dtype, at)
        return found and found.name

    bf16, fp32 = torch.bfloat16, torch.float32
    assert way(fp8_ways.LINEARS, "current", "wgrad", fp32, (8, 9)) == "tensor"
    assert way(fp8_ways.LINEARS, "rowwise", "wgrad", bf16, (10, 0)) == "rows"
    assert way(fp8_ways.LINEARS, "rowwise", "wgrad", fp32, (9, 0)) == "generated"
    assert way(fp8_ways.LINEARS, "rowwise", "wgrad", fp32, (8, 9)) is None
    assert way(fp8_ways.GROUPS, "rowwise", "dgrad", bf16, (9, 0)) == "grouped"
    assert way(fp8_ways.GROUPS, "rowwise", "dgrad", bf16, (8, 9)) is None
    assert way(fp8_ways.GROUPS, "current", "dgrad", bf16, (9, 0)) == "generated", "its gradients are E5M2"
    for recipe in RECIPES:
        for ways in (fp8_ways.LINEARS, fp8_ways.GROUPS):
            for product in fp8_ways.ALL:
                assert all(way(ways, recipe, product, bf16, at) for at in ((9, 0), (10, 0), (10, 3), "gfx950"))
                assert way(ways, recipe, product, bf16, "gfx942") is None, "it has other FP8 numbers"
        for at in ((8, 9), (12, 0)):
            assert way(fp8_ways.GROUPS, recipe, "forward", bf16, at) is None
    assert way(fp8_ways.LINEARS, "blockwise", "forward", torch.float64, (9, 0)) is None
    assert way(fp8_ways.LINEARS, "current", "forward", bf16, None) is None


@pytest.mark.parametrize(
    ("ways", "recipe", "names"),
    [(fp8_ways.LINEARS, "current", {(8, 6): None, (8, 9): "tensor", (9, 0): "tensor", (12, 0): "tensor"}),
     (fp8_ways.LINEARS, "blockwise", {(8, 9): None, (9, 0): "generated", (10, 3): "generated", (12, 0): None}),
     (fp8_ways.GROUPS, "rowwise", {(8, 9): None, (9, 0): "grouped", (10, 0): "generated", (12, 0): None}),
     (fp8_ways.GROUPS, "delayed", {(8, 9): None, (9, 0): "grouped", (10, 0): "generated", (12, 0): None})],
)  # fmt: skip
def test_a_line_begins_and_ends_with_a_gpu(ways, recipe, names):
    """A kernel that a GPU lacks is an error there and nowhere else."""
    found = {at: fp8_ways.way(ways, recipe, "forward", torch.bfloat16, at) for at in names}
    assert {at: line and line.name for at, line in found.items()} == names


def test_what_a_gpu_is_called_and_which_sizes_fit(monkeypatch):
    amd = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=None))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(fp8_ways, "architecture", lambda index: f"gfx95{index}")
    assert fp8_ways.capability(torch.zeros(1)) is None and fp8_ways.capability(amd) == "gfx950"
    assert fp8_ways.fit(16, 4096) and not fp8_ways.fit(16, 24) and not fp8_ways.fit(0, 16)
