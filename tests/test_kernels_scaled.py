"""Generated FP8 products, interpreted, against values in float64: every recipe, both ways of every layout.

Legend: N rows, E experts, K and M in and out features.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from interpreter import repaired

from moec.runtime.fp8 import Recipe, dequantised
from moec.runtime.kernels import order, scaled, scaled_catalog
from moec.runtime.kernels.tiles import Tile, default
from moec.runtime.ops.align_rows import padded

ops = torch.ops.moec
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
WAYS = [("blockwise", "promoted"), ("mxfp8", "promoted"), ("mxfp8", "native"), ("rowwise", "whole"),
        ("current", "whole")]  # fmt: skip
FEW = settings(max_examples=settings.default.max_examples // 20)


def drawn(*shape: int, seed: int) -> Tensor:
    """Blocks of very different sizes, so that each needs its own scale."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.ones(())
    for dim, n in enumerate(shape):
        each = torch.randint(-6, 7, (n // 16 + 1,), generator=gen).repeat_interleave(16)[:n]
        size = size * (2.0**each).view([-1 if d == dim else 1 for d in range(len(shape))])
    return torch.randn(shape, generator=gen) * size


def close(got: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, terms: int) -> None:
    """``got`` is a · b, whose fp32 sums of so many terms may be rounded in any order, and once to the dtype."""
    exact, size = a @ b, a.abs() @ b.abs()
    limit = (terms + 2) * 2.0**-23 * size + EPS[dtype] * exact.abs()
    assert got.dtype == dtype and got.shape == exact.shape
    assert ((got.double() - exact).abs() <= limit).all()


def quantised(
    t: Tensor, recipe: Recipe, role: str, counts: Tensor | None = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """``(q, scales, values in float64)``, as they lie for both products."""
    q, s, q_T, s_T = ops.quantise(t, None, None, counts, recipe.text(), role, True)[1:]
    wide = (dequantised(n, m, recipe, role, t, torch.float32) for n, m, t in ((q, s, False), (q_T, s_T, True)))
    return [(n, m, v.double()) for (n, m), v in zip(((q, s), (q_T, s_T)), wide, strict=True)]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@FEW
@given(
    counts=st.lists(st.sampled_from([0, 1, 31, 32, 100, 140]), min_size=1, max_size=2),
    spare=st.booleans(), K=st.sampled_from([16, 32, 120, 128, 208, 256]), M=st.sampled_from([16, 37, 129, 200]),
    sizes=st.sampled_from([(32, 128), (64, 128), (128, 64), (64, 256)]), dtype=st.sampled_from(list(EPS)),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_experts(way, counts, spare, K, M, sizes, dtype, seed):
    recipe, how = Recipe.parse(way[0]), way[1]
    counts_E, E, A = torch.tensor(counts), len(counts), recipe.alignment
    ends = padded(counts_E, A).cumsum(0).tolist()
    N, dims = ends[-1] + spare * A, (K, M)
    tile = Tile(*sizes, {"promoted": recipe.block, "native": 64, "whole": 32}[how])
    x, g = (torch.zeros(N, n) for n in dims)
    for start, n in zip([0, *ends], counts, strict=False):
        x[start : start + n], g[start : start + n] = drawn(n, K, seed=seed), drawn(n, M, seed=seed + 1)
    w = drawn(E, M, K, seed=seed + 2).transpose(1, 2)
    a, a_T = quantised(x, recipe, "rows", counts_E)
    b, b_T = quantised(w, recipe, "stack")
    c, c_T = quantised(g, recipe, "grad", counts_E)
    offset = order.offsets(padded(counts_E, A))
    with repaired():
        y = scaled.rows(*a[:2], *b[:2], offset, recipe, dtype, tile=tile, way=how)
        dx = scaled.rows(*c[:2], *(t.transpose(1, 2) for t in b_T[:2]), offset, recipe, dtype, tile=tile, way=how)
        dw = scaled.outer(*c_T[:2], *a_T[:2], offset, A, recipe, dtype, tile=tile, way=how)
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        close(y[start:end], a[2][start:end], b[2][e], dtype, K)
        close(dx[start:end], c[2][start:end], b_T[2][e].t(), dtype, M)
        close(dw[e], c_T[2][start:end].t(), a_T[2][start:end], dtype, end - start)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@FEW
@given(
    N=st.sampled_from([1, 16, 77, 144, 256]), K=st.sampled_from([16, 128, 160, 200]),
    M=st.sampled_from([16, 37, 144]), dtype=st.sampled_from(list(EPS)), seed=st.integers(0, 99),
)  # fmt: skip
def test_linears(way, N, K, M, dtype, seed):
    """One group, of any number of rows."""
    recipe, how = Recipe.parse(way[0]), way[1]
    x, w, g = drawn(N, K, seed=seed), drawn(M, K, seed=seed + 1), drawn(N, M, seed=seed + 2)
    (a, a_T), (b, b_T), (c, c_T) = (quantised(t, recipe, r) for t, r in ((x, "rows"), (w, "weight"), (g, "grad")))
    with repaired(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled, "how", lambda *_: how)
        y = scaled.linear_rows(*a[:2], *b[:2], recipe, dtype)
        dx = scaled.linear_rows(*c[:2], *(t.t() for t in b_T[:2]), recipe, dtype)
        dw = scaled.linear_outer(*c_T[:2], *a_T[:2], recipe, dtype)
    close(y, a[2], b[2].t(), dtype, K)
    close(dx, c[2], b_T[2], dtype, M)
    close(dw, c_T[2].t(), a_T[2], dtype, N)


@pytest.mark.parametrize("way", WAYS[:3], ids=" ".join)
def test_wrong_scales_are_seen(way):
    """Sabotage: scales of rows or of weights a block off, transposed scales, scales applied twice, each alone."""
    recipe, how = Recipe.parse(way[0]), way[1]
    B, dims = recipe.block, (2 * recipe.block, 2 * recipe.block)
    a, a_T = quantised(drawn(*dims, seed=1), recipe, "rows", counts := torch.tensor([dims[0]]))
    b, _ = quantised(drawn(1, *dims, seed=2), recipe, "stack")
    _, c_T = quantised(drawn(*dims, seed=3), recipe, "grad", counts)
    offset, tile = order.offsets(counts), Tile(128, 128, B if how == "promoted" else 64)

    def double(scale: Tensor) -> Tensor:
        return scale * scale if scale.dtype == torch.float32 else (2 * u8(scale).int() - 127).to(torch.uint8)

    def off(scale: Tensor, dim: int) -> Tensor:
        return u8(scale).roll(1, dim) if scale.dtype != torch.float32 else scale.roll(1, dim)

    def turned(scale: Tensor) -> Tensor:
        return (u8(scale) if scale.dtype != torch.float32 else scale).reshape(-1).view(scale.mT.shape).mT

    def rows(a_s: Tensor, b_s: Tensor) -> None:
        y = scaled.rows(a[0], a_s, b[0], b_s, offset, recipe, torch.float32, tile=tile, way=how)
        close(y, a[2], b[2][0], torch.float32, dims[1])

    def outer(c_s: Tensor, a_s: Tensor) -> None:
        dw = scaled.outer(c_T[0], c_s, a_T[0], a_s, offset, B, recipe, torch.float32, tile=tile, way=how)
        close(dw[0], c_T[2].t(), a_T[2], torch.float32, dims[0])

    wrong = [(off(a[1], 1), b[1]), (a[1], off(b[1], 1)), (turned(a[1]), b[1]), (a[1], turned(b[1]))]
    wrong += [(double(a[1]), b[1]), (a[1], double(b[1]))]
    wrong_T = [(off(c_T[1], 0), a_T[1]), (c_T[1], off(a_T[1], 0)), (turned(c_T[1]), a_T[1]), (c_T[1], double(a_T[1]))]
    with repaired():
        rows(a[1], b[1])
        outer(c_T[1], a_T[1])
        for run, cases in ((rows, wrong), (outer, wrong_T)):
            for scales in cases:
                with pytest.raises(AssertionError):
                    run(*scales)


def u8(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "rowwise", "current"])
def test_the_compiled_list_has_what_is_launched(monkeypatch, name):
    recipe, (E, K, M) = Recipe.parse(name), (2, 256, 384)
    launched = []
    for module in (scaled.scaled_rows, scaled.scaled_outer):
        monkeypatch.setattr(module, "launch", lambda spec, *_: launched.append(spec))
    arch = "sm_100"
    monkeypatch.setattr(scaled, "arch_of", lambda _: arch)
    monkeypatch.setattr(scaled, "choose", lambda family, shape, _: default(family, shape, arch))
    monkeypatch.setattr(scaled.zero_tail, "launch", lambda offset, y: y)
    counts = torch.tensor([recipe.alignment, recipe.alignment])
    x, g, w = torch.randn(int(counts.sum()), K), torch.randn(int(counts.sum()), M), torch.randn(E, M, K).mT
    a, a_T = quantised(x, recipe, "rows", counts)
    b, b_T = quantised(w, recipe, "stack")
    c, c_T = quantised(g, recipe, "grad", counts)
    more = (counts, recipe, torch.bfloat16)
    scaled.grouped_rows(*a[:2], *b[:2], *more)
    scaled.grouped_rows(*c[:2], *(t.mT for t in b_T[:2]), *more)
    scaled.grouped_outer(*c_T[:2], *a_T[:2], *more)
    v, v_T = quantised(torch.randn(M, K), recipe, "weight")
    scaled.linear_rows(*a[:2], *v[:2], *more[1:])
    scaled.linear_rows(*c[:2], *(t.t() for t in v_T[:2]), *more[1:])
    scaled.linear_outer(*c_T[:2], *a_T[:2], *more[1:])
    wanted, rest = [], (torch.bfloat16, recipe.alignment)
    for experts, way_round in ((E, False), (1, True)):
        wanted += [
            scaled_catalog.rows_spec(recipe, arch, experts, K, M, way_round, *rest),
            scaled_catalog.rows_spec(recipe, arch, experts, M, K, not way_round, *rest),
            scaled_catalog.outer_spec(recipe, arch, experts, M, K, 0),
        ]
    assert [scaled_catalog.source(spec) for spec in launched] == [scaled_catalog.source(spec) for spec in wanted]
    assert [spec.tile for spec in launched] == [spec.tile for spec in wanted]
