"""The gate: every kernel of the list compiles for every target, spills nothing and fits into shared memory.

The table is left in build/kernels.json.
"""

import dataclasses
import json

import pytest

pytest.importorskip("triton")

import aot

from moec.runtime.kernels import catalog
from moec.runtime.kernels.entry import Entry

GEMM = '''"""C = A·B of square matrices, one tile a program."""

import triton
import triton.language as tl


@triton.jit
def gemm(a_ptr, b_ptr, c_ptr, size, TILE: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    k = tl.arange(0, DEPTH)
    c = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, size, DEPTH):
        a = tl.load(a_ptr + row * size + start + k[None, :])
        b = tl.load(b_ptr + (start + k[:, None]) * size + column)
        c = tl.dot(a, b, c)
    tl.store(c_ptr + row * size + column, c)
'''


def gemm(tile: int, depth: int, **options) -> Entry:
    arguments = (("a_ptr", "*bf16:16"), ("b_ptr", "*bf16:16"), ("c_ptr", "*fp32:16"), ("size", "i32:16"))
    constexprs = {"TILE": tile, "DEPTH": depth}
    return Entry(f"gemm {tile} {depth} {options}", GEMM, "gemm", arguments, constexprs, **options)


CENTRE = '''"""Every number of a row minus their sum."""

import triton
import triton.language as tl


@triton.jit
def centre(x_ptr, y_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(y_ptr + n, x - tl.sum(x))
'''


def gate(work, cache=aot.BUILD / "aot") -> list[aot.Row]:
    rows = aot.compile_all(work, cache)
    print(aot.table(rows))
    assert not (failed := [problem for row in rows for problem in row.problems()]), "\n".join(failed)
    return rows


@pytest.mark.timeout(600)
def test_the_list():
    rows = gate({arch: [e for e in catalog.entries(arch) if not e.nightly] for arch in aot.TARGETS})
    aot.write_artifact(rows)


@pytest.mark.nightly
def test_the_long_list():
    aot.write_artifact(gate({arch: catalog.entries(arch) for arch in aot.TARGETS}))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_the_gate_refuses(arch):
    """A tile that fits, one that wants too much shared memory, a row that no register file holds, a kernel that does
    not compile: each is seen, and the others are compiled all the same."""
    fits, oversized = gemm(64, 32), gemm(128, 128, warps=8, stages=5)
    spills = Entry("spills", CENTRE, "centre", (("x_ptr", "*fp32:16"), ("y_ptr", "*fp32:16")), {"N": 32768}, warps=1)
    broken = Entry("broken", GEMM.replace("tl.dot", "tl.dat"), "gemm", fits.arguments, fits.constexprs)
    rows = aot.compile_all({arch: [fits, oversized, broken, spills]}, cache=None)
    assert rows[0].problems() == [] and rows[0].registers > 0 and 0 < rows[0].shared < 65536
    assert any("bytes of shared memory" in p for p in rows[1].problems())
    assert any("does not compile" in p for p in rows[2].problems())
    assert any("spills registers" in p for p in rows[3].problems())


def test_who_killed_the_compiler(monkeypatch, tmp_path):
    """A worker that dies is not a pass: the kernel it died of is named, those behind it count as failed."""
    script = tmp_path / "worker.py"
    row = json.dumps(dataclasses.asdict(aot.Row("first", "sm_90", 1, 0, 0)))
    script.write_text(f"import os\nprint({row!r}, flush=True)\nos.abort()\n")
    monkeypatch.setattr(aot, "__file__", str(script))
    rows = aot.compile_in_process("sm_90", [gemm(64, 32, stages=n) for n in (1, 2, 3)])
    assert [row.error is None for row in rows] == [True, False, False]
    assert "the compiler died" in rows[1].problems()[0] and "not compiled, after that" in rows[2].problems()[0]
