"""Kernels of the ops that stay unfused, sizes that pass 2³¹, and what all sources of the fixed list have in common."""

import ast
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from interpreter import repaired

from moec import MoecError
from moec.runtime.body import Body
from moec.runtime.kernels import (
    experts_catalog,
    experts_forward,
    grouped,
    grouped_gemm,
    grouped_outer,
    grouped_rows,
    grouped_sum,
    scaled_catalog,
)
from moec.runtime.kernels.grouped_outer import GroupedOuter, Rows
from moec.runtime.kernels.tiles import Tile

EPS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def close(got, wanted, dtype):
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    scale = wanted.abs().max().clamp(min=1e-3) if wanted.numel() else 1
    assert ((got.double() - wanted).abs() <= 2 * EPS[dtype] * scale).all()


def each(counts):
    end = 0
    for e, n in enumerate(counts):
        yield e, slice(end, end + n)
        end += n


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=4), spare=st.integers(0, 3), K=st.integers(1, 40),
    M=st.integers(1, 40), transposed=st.booleans(), dtype=st.sampled_from(list(EPS)), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=8)
def test_ops_that_stay_unfused(counts, spare, K, M, transposed, dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    N, E, tile = sum(counts) + spare, len(counts), Tile(32, 32, 32)
    x, g = torch.randn(N, K, generator=draw).to(dtype), torch.randn(N, M, generator=draw).to(dtype)
    w = torch.randn(E, M, K, generator=draw).to(dtype)
    w = w.transpose(1, 2) if transposed else w.transpose(1, 2).contiguous()
    b, counts_E = torch.randn(E, M, generator=draw).to(dtype), torch.tensor(counts)
    with repaired():
        y, dw = grouped.mm(x, w, counts_E, tile=tile), grouped.mm_wgrad(x, g, counts_E, tile=tile)
        biased, db = grouped.add(g, b, counts_E), grouped.sum_rows(g, counts_E)
    want_y, want_dw = torch.zeros(N, M).double(), torch.zeros(E, K, M).double()
    want_biased, want_db = g.double(), torch.zeros(E, M).double()
    for e, s in each(counts):
        want_y[s] = x[s].double() @ w[e].double()
        want_dw[e] = x[s].double().T @ g[s].double()
        want_biased[s] = g[s].double() + b[e].double()
        want_db[e] = g[s].double().sum(0)
    close(y, want_y, dtype)
    close(dw, want_dw, dtype)
    close(biased, want_biased, dtype)
    close(db, want_db, dtype)
    assert not y[sum(counts) :].any()
    if dtype != torch.float16:  # and the CPU kernels of the ops
        ops = torch.ops.moec
        close(y, ops.grouped_mm(x, w, counts_E).double(), dtype)
        close(dw, ops.grouped_mm_wgrad(x, g, counts_E).double(), dtype)
        close(biased, ops.grouped_add(g, b, counts_E).double(), dtype)
        close(db, ops.grouped_sum(g, counts_E).double(), dtype)


def test_what_is_refused():
    x, w, counts = torch.randn(4, 3), torch.randn(2, 3, 5), torch.tensor([1, 2])
    with pytest.raises(MoecError, match="do not fit"):
        grouped.mm(x[:, :2], w, counts)
    with pytest.raises(MoecError, match="float64"):
        grouped.mm(x.double(), w.double(), counts)
    with pytest.raises(RuntimeError, match="counts do not fit 4 rows"), repaired():
        grouped.mm(x, w, counts * 2)


def test_weights_beyond_32_bits():
    """Experts whose strides pass 2³¹ elements: memory that is asked for, and touched at both ends only."""
    stride, K, M = 2**31 - 2**6, 16, 16
    memory = torch.empty(stride * 2 + K * M, dtype=torch.bfloat16)
    w = memory.as_strided((3, K, M), (stride, M, 1))
    w.copy_(torch.randn(3, K, M))
    x, counts = torch.randn(9, K).bfloat16(), torch.tensor([3, 2, 4])
    with repaired(overflow=True) as traffic:
        y = grouped.mm(x, w, counts, tile=Tile(16, 16, 16))
        loaded, _ = traffic.launches[0].offsets(w)
    assert loaded.max() > 2 * (2**32 - 2**7)
    wanted = torch.cat([x[s].double() @ w[e].double() for e, s in each([3, 2, 4])])
    close(y, wanted, torch.bfloat16)


def test_rows_beyond_32_bits():
    """Tokens times columns past 2³¹, gathered and scattered by pair: only the last token is touched."""
    T, K, H, C, tile = 2**21 + 1, 2, 1024, 512, Tile(16, 16, 256)
    x, pair = torch.empty(T, H, dtype=torch.bfloat16), torch.tensor([2 * T - 2, 2 * T - 1])
    x[-1] = torch.randn(H)
    offset, weight = torch.tensor([0, 2], dtype=torch.int32), torch.ones(2 * T)
    w, w_out = torch.randn(1, H, 16).bfloat16(), torch.randn(1, 16, C).bfloat16()
    h, act, y = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((2, 16), (2, 16), (2 * T, C)))
    dw, db = torch.empty_like(w), torch.empty(1, H).bfloat16()
    body = Body.parse("x = whole(h0); y = mul(x, 2.0); return y")
    first = experts_forward.spec(body, (16,), 1, H, (w.stride(),), False, x.dtype, tile, K)
    second = grouped_rows.spec("second", 1, C, (16,), (w_out.stride(),), x.dtype, Tile(16, 256, 16), K)
    tall = Tile(256, 16, 16)
    outer = GroupedOuter("gradient", 1, Rows(H, H, gathered=True), Rows(16, 16), w.stride(), x.dtype, tall, K)
    with repaired(overflow=True):
        grouped_gemm.launch(first, 2, offset, pair, x, w, h, act)
        grouped_gemm.launch(second, 2, offset, pair, act, w_out, y)
        grouped_outer.launch(outer, offset, pair, x, act, dw)
        grouped_sum.launch(1, H, K, offset, pair, weight, x, db)
    bf16, last = torch.bfloat16, x[-1:].double()
    close(h, (last @ w[0].double()).expand(2, -1), bf16)
    close(act, 2 * h.double(), bf16)
    close(y[-2:], act.double() @ w_out[0].double(), bf16)
    close(dw[0], last.expand(2, -1).T @ act.double(), bf16)
    close(db, 2 * last, bf16)


def test_every_source_is_deterministic_formatted_and_says_what_it_is(tmp_path):
    seen = {}
    for arch in ("sm_90", "gfx942"):
        entries = [*experts_catalog.entries(arch), *scaled_catalog.entries(arch)]
        assert entries == [*experts_catalog.entries(arch), *scaled_catalog.entries(arch)]
        for n, entry in enumerate(entries):
            assert len(ast.get_docstring(ast.parse(entry.source)) or "") > 20, entry.name
            seen[f"{arch}_{n}.py"] = entry.source
    for name, text in seen.items():
        (tmp_path / name).write_text(text)
    # Long lines are left to the reader's editor.
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "format", "--diff", "--line-length", "320", str(tmp_path)], check=True)
    subprocess.run([*ruff, "check", "--isolated", "--line-length", "320", str(tmp_path)], check=True)


def test_the_ops_have_cuda_kernels():
    names = ("grouped_mm", "grouped_mm_wgrad", "grouped_add", "grouped_sum", "experts", "experts_rows",
             "experts_backward", "experts_rows_backward")  # fmt: skip
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moec::{name}", "CUDA"), name
