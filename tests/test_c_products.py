"""Products of groups of rows in C: exact for whole numbers, the same wherever a row is; and what happens without.

Legend: R rows, E experts, K columns of x, N columns of the result, M columns of a.
"""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.runtime.kernels import c_library, c_products
from moec.runtime.kernels.c_products_text import DEPTH, LANES, RUN, SLAB, c_text
from moec.runtime.kernels.source import cache_directory
from moec.runtime.ops import experts_cpu

SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"
TWO = "g = whole(h0); u = whole(h1); a = silu(g); y = mul(a, u); return y"
MOST = c_products._lanes(c_library.processor()) or 0

needs_kernels = pytest.mark.skipif(c_library.compiler() is None or not MOST, reason="no C compiler, or no vectors")
every_width = pytest.mark.parametrize("lanes", [n for n in LANES if n <= MOST])


@pytest.fixture(autouse=True, scope="module")
def kernels(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEC_KERNELS", str(tmp_path_factory.mktemp("kernels")))
        yield


def compiled(lanes):
    return c_products.compiled(lanes, c_library.compiler(), cache_directory())


def whole(*shape):
    """Whole numbers, so that sums are exact in any order, inside of a tensor whose other elements are NaN."""
    around = torch.full([n + 3 for n in shape], math.nan)
    inside = around[tuple(slice(1, n + 1) for n in shape)]
    return inside.copy_(torch.randint(-4, 5, shape)), around


def groups_of(counts):
    """Experts in order, those without rows left out, as tiles have them."""
    found = [(e, n) for e, n in enumerate(counts) if n]
    return c_products.Groups([e for e, _ in found], [n for _, n in found])


def apart(result, around, want):
    """``result`` is ``want`` and nothing beside it was written."""
    assert torch.equal(result.double(), want)
    result.fill_(math.nan)
    assert around.isnan().all()


def check_multiply(kernels, counts, K, N, turned, add):
    R, E = sum(counts), len(counts)
    (x, _), (y, around) = whole(R, K), whole(R, N)
    w = whole(E, N, K)[0].mT if turned else whole(E, K, N)[0]
    want = torch.cat([a.double() @ w[e].double() for e, a in enumerate(x.split(counts))])
    want = want + y.double() if add else want
    assert kernels.can_multiply(w)
    kernels.multiply(groups_of(counts), x, w, y, add)
    apart(y, around, want)


def check_outers(kernels, counts, M, N, turned, add):
    R, E = sum(counts), len(counts)
    (a, _), (g, _), (dw, around) = whole(R, M), whole(R, N), whole(E, N, M) if turned else whole(E, M, N)
    dw = dw.mT if turned else dw
    idle = torch.tensor([n == 0 for n in counts])[:, None, None]
    sums = torch.stack([p.double().T @ q.double() for p, q in zip(a.split(counts), g.split(counts), strict=True)])
    want = torch.where(idle, dw.double(), sums + dw.double() * add)
    assert kernels.can_add_outers(dw)
    kernels.add_outers(groups_of(counts), a, g, dw, add)
    apart(dw, around, want)


@needs_kernels
@every_width
@settings(max_examples=60)
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(1, 9), st.integers(10, 110)), min_size=1, max_size=5),
    K=st.integers(1, 30), eights=st.integers(1, 13), more=st.integers(0, 7), turned=st.booleans(), add=st.booleans(),
)  # fmt: skip
def test_ragged_groups(lanes, counts, K, eights, more, turned, add):
    """Rows and columns that fill no tile, of dots no whole number of eights, and experts without rows."""
    N = 8 * eights
    check_multiply(compiled(lanes), counts, K, N + more if turned else N, turned, add)
    check_outers(compiled(lanes), counts, *((N, K) if turned else (K, N)), turned, add)


@needs_kernels
@every_width
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "dots"])
def test_operands_longer_than_a_block(lanes, turned):
    """Several pieces of k, slabs and runs, of different lengths."""
    check_multiply(compiled(lanes), [3, 50, 0, 49], DEPTH + 2 * SLAB + 5, 56, turned, False)
    for add in (False, True):
        check_outers(compiled(lanes), [2 * RUN + 1, 5, RUN], 24, 16 if turned else 56, turned, add)


AT_THE_END = """
import ctypes, mmap, sys
import torch
torch.set_num_threads(1)
from moec.runtime.kernels import c_products

def last(*shape):  # a tensor whose end is the end of the memory that may be touched
    size = 4 * torch.Size(shape).numel()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    held.append(mmap.mmap(-1, room + mmap.PAGESIZE))
    start = ctypes.addressof(ctypes.c_char.from_buffer(held[-1]))
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), mmap.PAGESIZE, 0)
    return torch.frombuffer(held[-1], dtype=torch.float32, count=size // 4, offset=room - size).view(shape)

held, kernels = [], c_products.of(torch.float32)
for R in (1, 3, 12, 53):
    for K in (1, 13):
        groups = c_products.Groups([0], [R])
        kernels.multiply(groups, last(R, K), last(1, K, 56), last(R, 56), True)
        kernels.multiply(groups, last(R, K), last(1, 11, K).mT, last(R, 11), True)
        kernels.add_outers(groups, last(R, K), last(R, 56), last(1, K, 56), True)
print("nothing beyond")
"""


@needs_kernels
def test_nothing_beyond_an_operand_is_touched():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True)
    assert done.stdout == "nothing beyond\n", (done.returncode, done.stderr)


@needs_kernels
@every_width
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "dots"])
def test_a_row_is_the_same_wherever_it_is(lanes, turned):
    """Bit for bit: first, last, alone, among many; NaN and infinity of other rows do not reach it."""
    torch.manual_seed(0)
    K, N, kernels = DEPTH + 40, 40, compiled(lanes)
    w = torch.randn(1, N, K).mT if turned else torch.randn(1, K, N)
    row, seen = torch.randn(K), []
    for R, at in ((1, 0), (2, 1), (7, 3), (8, 7), (48, 47), (49, 48), (100, 60)):
        x = torch.full((R, K), math.inf)
        x[::2], x[at] = math.nan, row
        y = torch.empty(R, N)
        kernels.multiply(groups_of([R]), x, w, y, False)
        others = torch.arange(R) != at
        assert not y[others].isfinite().any()
        seen.append(y[at])
    assert all(torch.equal(y, seen[0]) for y in seen)
    torch.testing.assert_close(seen[0].double(), row.double() @ w[0].double(), rtol=0, atol=1e-4)


@needs_kernels
def test_strides_that_no_kernel_reads_are_left_to_pytorch():
    kernels = compiled(MOST)
    assert kernels.can_multiply(torch.ones(2, 8, 5).mT) and kernels.can_add_outers(torch.ones(2, 5, 8).mT)
    assert not kernels.can_multiply(torch.ones(2, 8, 5)) and not kernels.can_add_outers(torch.ones(2, 5, 9))
    assert not kernels.can_multiply(torch.ones(2, 8, 16)[..., ::2]) and not kernels.can_multiply(torch.ones(0, 8, 8))
    assert not kernels.can_multiply(torch.ones(2, 8, 8).double()) and not kernels.can_add_outers(torch.ones(0))


def test_when_pytorch_multiplies(monkeypatch):
    assert c_products.of(torch.bfloat16) is None and c_products.of(torch.float64) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        assert c_products.of(torch.float32) is None
    with monkeypatch.context() as patch:
        patch.setenv("MOEC_CC", "")
        assert c_products.of(torch.float32) is None


@pytest.mark.parametrize(
    ("machine", "flags", "lanes"),
    [
        ("x86_64", "avx2 fma avx512f", 16),
        ("AMD64", "fma avx2", 8),
        ("x86_64", "avx2", None),
        ("aarch64", "asimd", None),
    ],
)
def test_vectors_are_those_of_the_processor(monkeypatch, machine, flags, lanes):
    monkeypatch.setattr(c_products.platform, "machine", lambda: machine)
    assert c_products._lanes.__wrapped__(f"name\nflags\t\t: fpu {flags} sse") == lanes


@pytest.mark.skipif(not MOST, reason="no vectors")
def test_a_compiler_that_fails_is_reported_and_done_without(failing_compiler):
    with pytest.warns(UserWarning, match="no such target"):
        assert c_products.of(torch.float32) is None
    assert failing_compiler.is_dir() and not list(failing_compiler.iterdir())


def test_text_is_deterministic_and_of_its_width():
    assert c_text(16) == c_text(16) != c_text(8)
    assert "vector_size(64)" in c_text(16) and "vector_size(64)" not in c_text(8)


def operands(layout, E, H, I, two):  # noqa: E741
    """Weights as modules hold them, as [E, K, N] views: turned (as Hugging Face's), straight, or of odd strides."""

    def weight(K, N):
        if layout == "turned":
            return torch.randn(E, N, K).mT
        return torch.randn(E, K, N) if layout == "straight" else torch.randn(E, K, 2 * N)[..., ::2]

    w_in = [weight(H, I) for _ in range(2)] if two else [weight(H, 2 * I)]
    return w_in, [torch.randn(E, w.shape[2]) for w in w_in], weight(I, H), torch.randn(E, H)


@needs_kernels
@pytest.mark.parametrize(
    ("layout", "H", "I", "two", "kernels"),
    [
        ("turned", 24, 16, False, {"multiply", "add_outers"}),
        ("turned", 24, 16, True, {"multiply", "add_outers"}),
        ("straight", 24, 16, False, {"multiply", "add_outers"}),
        ("straight", 20, 12, False, {"multiply", "add_outers"}),  # of the first product alone
        ("straight", 20, 12, True, {"multiply"}),  # of the first product's gradient alone
        ("odd", 8, 8, False, {"add_outers"}),  # gradients of such weights lie straight
    ],
)
def test_experts_are_the_same_with_and_without(layout, H, I, two, kernels, monkeypatch):  # noqa: E741
    torch.manual_seed(0)
    T, E, K = 60, 6, 2
    ids = torch.rand(T, E - 1).topk(K).indices  # nobody chooses the last
    ids[:50:7, 1] = -1
    ids[:30, 0] = 0
    w_in, b_in, w_out, b_out = operands(layout, E, H, I, two)
    leaves = [t.requires_grad_() for t in (torch.randn(T, H), torch.rand(T, K), *w_in, *b_in, w_out, b_out)]
    grad, used = torch.randn(T, H), []

    def run():
        x, weights = leaves[:2]
        y = torch.ops.moec.experts(x, ids, weights, w_in, b_in, w_out, b_out, TWO if two else SWIGLU, False)[0]
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    for name in ("multiply", "add_outers"):
        real = getattr(c_products.CProducts, name)
        monkeypatch.setattr(c_products.CProducts, name, lambda *a, name=name, real=real: used.append(name) or real(*a))
    monkeypatch.setattr(experts_cpu, "TILE", 16)
    monkeypatch.setattr(experts_cpu, "COMPILED_TILE", 16)
    found = run()
    monkeypatch.setenv("MOEC_CC", "")
    calls = set(used)
    used.clear()
    want = run()
    assert not used and calls == kernels
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape and a.stride() == b.stride()
        scale = float(b.abs().max())
        torch.testing.assert_close(a / scale, b / scale, rtol=1e-5, atol=1e-5)
