"""FP8 products: within the bound that rounding has, never without rounding; what they refuse."""

import fp8_model as model
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.check import _relative
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import RECIPES, Recipe
from moec.runtime.kernels import scaled_mm

ops = torch.ops.moec
NOW = [name for name in RECIPES if name != "delayed"]
STEP = {"e4m3": (2**-4, 2**-10), "e5m2": (2**-3, 2**-17)}
RMS = {"e4m3": 0.0236, "e5m2": 0.0472}
"""Of rounding a mantissa that is uniform in [1, 2) to 3 or 2 bits: √(4^-bits / 12 / (7/3)), half a unit being
2^-bits-1."""


def linear(x, w, recipe, amax=(None, None), shared=False):
    a = ops.quantise(x, *amax, None, recipe, "rows", True)
    b = ops.quantise(w, None, None, None, recipe, "weight", True)
    return ops.fp8_linear(a[0], b[0], *a[1:3], *b[1:3], *a[3:], *b[3:], None, recipe, shared)


def grouped(x, w, counts, recipe):
    a = ops.quantise(x, None, None, counts, recipe, "rows", True)
    b = ops.quantise(w, None, None, None, recipe, "stack", True)
    return ops.fp8_grouped_mm(a[0], b[0], counts, *a[1:3], *b[1:3], *a[3:], *b[3:], None, recipe, False)[0]


def quantum(x, recipe, role, transposed):
    """The most that an element of x can be off, from the recipe's definition."""
    fmt = model.RECIPES[recipe][0] if role == "grad" else "e4m3"
    relative, subnormal = STEP[fmt]
    each = torch.from_numpy(model.quantised(x.float().numpy(), recipe, role, transposed)[2])
    return torch.maximum(x.abs() * relative, each * subnormal)


def bound(a, b, qa, qb):
    """Of a · b, elementwise, rounding and fp32 sums."""
    return (qa @ (b.abs() + qb) + a.abs() @ qb + a.shape[1] * 2.0**-22 * (a.abs() @ b.abs())) * (1 + 2**-20)


@pytest.mark.parametrize("recipe", NOW)
@pytest.mark.parametrize("which", ["both", "x", "w"])
def test_three_products_within_their_bounds_and_not_without_rounding(recipe, which):
    """``which`` says what does not lie on the grid already: a single cast that is skipped shows."""
    gen = torch.Generator().manual_seed(3)
    x, w, g = (torch.randn(s, generator=gen) for s in ((140, 96), (72, 96), (140, 72)))
    ones = lambda t: torch.randint(1, 3, t.shape, generator=gen).float()  # noqa: E731  exact in every recipe
    x, w = (t if which in ("both", n) else ones(t) for n, t in (("x", x), ("w", w)))
    x, w = x.requires_grad_(), w.requires_grad_()
    y = linear(x, w, recipe)[0]
    y.backward(g)
    X, W, G = (t.detach().double() for t in (x, w, g))
    q = {
        (n, t): quantum(v, recipe, role, t)
        for n, v, role in (("x", X, "rows"), ("w", W, "weight"), ("g", G, "grad"))
        for t in (False, True)
    }
    fmt = model.RECIPES[recipe][0]
    for name, got, a, b, qa, qb, formats in (
        ("y", y, X, W.t(), q["x", False], q["w", False].t(), ["e4m3"] * (2 if which == "both" else 1)),
        ("dx", x.grad, G, W, q["g", False], q["w", True], [fmt] + ["e4m3"] * (which != "x")),
        ("dw", w.grad, G.t(), X, q["g", True].t(), q["x", True], [fmt] + ["e4m3"] * (which != "w")),
    ):  # fmt: skip
        error = got.detach().double() - a @ b
        assert (error.abs() <= bound(a, b, qa, qb)).all(), name
        spread = float((a.abs().square() @ b.abs().square()).sum().sqrt())
        expected = sum(RMS[f] ** 2 for f in formats) ** 0.5
        assert float(error.norm()) >= expected * spread / 2, name
        assert float(error.norm()) <= expected * spread * 2, name


@pytest.mark.parametrize("recipe", NOW)
def test_experts_are_linears(recipe):
    """Each expert by itself, to the bit, where no scale depends on the other experts' rows."""
    a = Recipe.parse(recipe).alignment
    counts = torch.tensor([a + 3, 0, 5, a])
    x = ops.align_rows(torch.randn(int(counts.sum()), 70), counts, a).requires_grad_()
    w = torch.randn(4, 50, 70, requires_grad=True)
    y = grouped(x, w.transpose(1, 2), counts, recipe)
    g = torch.randn(y.shape)
    y.backward(g)
    start = 0
    for e, n in enumerate(counts.tolist()):
        at = slice(start, start + -(-n // a) * a)
        start = at.stop
        mine, weight = x.detach()[at].clone().requires_grad_(), w.detach()[e].clone().requires_grad_()
        if not n:
            assert not w.grad[e].any()
            continue
        real = (torch.arange(mine.shape[0]) < n)[:, None]
        want = linear(mine, weight, recipe)[0]
        want.backward(g[at] * real)
        alone = recipe in ("blockwise", "mxfp8")
        for got, expected in ((y[at] * real, want * real), (x.grad[at], mine.grad), (w.grad[e], weight.grad)):
            if alone:
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())
            assert _relative(got.detach(), expected.detach()) < 0.12  # each is rounded by itself
    assert not y[start:].any() and not x.grad[start:].any()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.sampled_from([1, 4, 16]), st.integers(0, 3))
def test_alignment_and_back(counts, alignment, more):
    """Rows past the counts are lost on purpose; gradients are each other's."""
    counts_E = torch.tensor(counts)
    N = sum(counts)
    x = torch.randn(N + more, 3, dtype=torch.float64, requires_grad=True)
    y = ops.align_rows(x, counts_E, alignment)
    assert y.shape[0] == (N + more + len(counts) * (alignment - 1)) // alignment * alignment
    at, start = 0, 0
    for n in counts:
        assert torch.equal(y[at : at + n], x[start : start + n])
        whole = -(-n // alignment) * alignment
        assert not y[at + n : at + whole].any()
        at, start = at + whole, start + n
    assert not y[at:].any()
    back = ops.unalign_rows(y, counts_E, alignment, N + more)
    assert torch.equal(back[:N], x[:N]) and not back[N:].any()
    g = torch.randn(back.shape, dtype=torch.float64)
    (dx,) = torch.autograd.grad(back, x, g)
    assert torch.equal(dx[:N], g[:N]) and not dx[N:].any()


@pytest.mark.parametrize("recipe", NOW)
def test_groups_that_are_not_aligned_are_refused(recipe):
    counts = torch.tensor([5, 7])
    x, w = torch.randn(12, 32), torch.randn(2, 32, 32)
    with pytest.raises(MoecError, match="begin at multiples"):
        grouped(x, w, counts, recipe)


def test_what_lies_between_experts_changes_nothing():
    """NaN in rows that are nobody's, too: in both layouts, forward and backward."""
    counts = torch.tensor([3, 2])
    x, w = torch.randn(48, 32), torch.randn(2, 32, 16)
    dirty = x.clone()
    dirty[3:16], dirty[18:] = torch.nan, 1e30
    clean = x.clone()
    clean[3:16], clean[18:] = 0, 0
    results = []
    for rows in (x, dirty, clean):
        a, b = rows.clone().requires_grad_(), w.clone().requires_grad_()
        y = grouped(a, b, counts, "current")
        y.backward(torch.ones_like(y))
        results.append((y[:3], y[16:18], a.grad[:3], a.grad[16:18], b.grad))
    for other in results[:2]:
        for got, want in zip(other, results[2], strict=True):
            assert torch.equal(got, want)


def test_a_carrier_has_no_memory_and_the_gradient():
    x = torch.randn(6, 40, dtype=torch.bfloat16, requires_grad=True)
    carrier, *rest = ops.quantise(x, None, None, None, "mxfp8", "rows", True)
    assert carrier.shape == x.shape and carrier.dtype == x.dtype and carrier.stride() == (0, 0)
    assert carrier.requires_grad and not any(t.requires_grad for t in rest)
    g = torch.randn(6, 40).bfloat16()
    carrier.backward(g)
    assert torch.equal(x.grad, g)
    *_, q_T, scale_T = ops.quantise(x, None, None, None, "mxfp8", "rows", False)
    assert q_T.numel() == 0 and scale_T.numel() == 0


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_scales_of_all_ranks(recipe):
    """Two ranks have halves of the rows: with the maximum over both, forward and (by the taps) backward, each computes
    its half of what one would compute."""
    x, w, g = torch.randn(64, 48), torch.randn(32, 48), torch.randn(64, 32)
    x[40] *= 9
    g[:32] *= 20
    whole_x, whole_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    linear(whole_x, whole_w, recipe)[0].backward(g)
    of = lambda t, role: [ops.amax(t, None, recipe, role, tr) for tr in (False, True)]  # noqa: E731
    amax = [torch.maximum(a, b) if recipe == "current" or t else None
            for t, (a, b) in enumerate(zip(of(x[:32], "rows"), of(x[32:], "rows"), strict=True))]  # fmt: skip
    seen, dws = {}, []
    for half in (slice(0, 32), slice(32, 64)):
        a, b = x[half].clone().requires_grad_(), w.clone().requires_grad_()
        y, *taps = linear(a, b, recipe, amax, shared=True)

        def maximum(grad, t, half=half):
            other = slice(32, 64) if half.start == 0 else slice(0, 32)
            seen[half.start, t] = grad
            return torch.maximum(grad, of(g[other], "grad")[t]) if recipe == "current" or t else grad

        for t, tap in enumerate(taps):
            if tap.numel():
                tap.register_hook(lambda grad, t=t: maximum(grad, t))
        ops.grad_amax(y, *taps, None, recipe).backward(g[half])
        assert torch.equal(a.grad, whole_x.grad[half])
        dws.append(b.grad)
    torch.testing.assert_close(sum(dws), whole_w.grad, rtol=1e-5, atol=1e-4)
    for (start, t), found in seen.items():
        assert torch.equal(found, of(g[start : start + 32], "grad")[t])


def test_taps_that_nothing_answers_are_an_error():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    with pytest.raises(MoecError, match="did not arrive"):
        linear(x, w, "current", shared=True)[0].sum().backward()


def test_a_transposed_scale_is_seen():
    """Sabotage: scales of rows where those of columns belong."""
    x = torch.randn(128, 128) * torch.logspace(-3, 3, 128)[:, None]
    w = torch.randn(64, 128)
    a, b = (ops.quantise(t, None, None, None, "rowwise", role, True) for t, role in ((x, "rows"), (w, "weight")))
    swapped = a[2].t().contiguous()
    y, want = (
        ops.fp8_linear(a[0], b[0], a[1], s, *b[1:3], *a[3:], *b[3:], None, "rowwise", False)[0] for s in (swapped, a[2])
    )
    q = quantum(x.double(), "rowwise", "rows", False), quantum(w.double(), "rowwise", "weight", False).t()
    limit = bound(x.double(), w.double().t(), *q)
    exact = x.double() @ w.double().t()
    assert ((want - exact).abs() <= limit).all() and not ((y - exact).abs() <= limit).all()


@pytest.mark.parametrize("recipe", ["current", "rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_tensor_cores_compute_is_the_same(monkeypatch, recipe, dtype):
    """torch's scaled product, which a GPU would run, in the layouts that each of the three products gives it; a
    generated one where torch has none."""
    repaired = pytest.importorskip("interpreter", exc_type=ImportError).repaired
    monkeypatch.setattr(scaled_mm, "capability", lambda a: (9, 0))
    calls = []
    product = scaled_mm.product
    monkeypatch.setattr(scaled_mm, "product", lambda *a: calls.append(a) or product(*a))
    x, w, g = (torch.randn(s).to(dtype) for s in ((2, 16, 48), (64, 48), (2, 16, 64)))
    a = ops.quantise(x, None, None, None, recipe, "rows", True)
    b = ops.quantise(w, None, None, None, recipe, "weight", True)
    c = ops.quantise(g, None, None, None, recipe, "grad", True)
    args = (a[0], b[0], *a[1:3], *b[1:3], *a[3:], *b[3:], None, recipe, False)
    with repaired():
        made = (
            (scaled_mm.forward(*args)[0], ops.fp8_linear(*args)[0]),
            (scaled_mm.dgrad(*c[1:3], *b[3:], recipe, dtype), ops.fp8_dgrad(*c[1:3], *b[3:], recipe, dtype)),
            (scaled_mm.wgrad(*c[3:], *a[3:], recipe, dtype), ops.fp8_wgrad(*c[3:], *a[3:], recipe, dtype)),
        )
    for got, want in made:
        assert got.shape == want.shape and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    ours = recipe in ("blockwise", "mxfp8") or (recipe, dtype) == ("rowwise", torch.float32)
    assert len(calls) == (0 if ours else 3)
    odd = ops.quantise(torch.randn(5, 40).to(dtype), None, None, None, recipe, "rows", True)
    assert scaled_mm.found_way(odd[1], torch.empty(7, 40), Recipe.parse(recipe), "forward", dtype) is None


def test_operands_that_do_not_fit_are_refused():
    a, b = (
        ops.quantise(torch.randn(4, n), None, None, None, "current", r, True) for n, r in ((8, "rows"), (6, "weight"))
    )
    with pytest.raises(MoecError, match="do not fit"):
        ops.fp8_linear(a[0], b[0], *a[1:3], *b[1:3], *a[3:], *b[3:], None, "current", False)
    with pytest.raises(MoecError, match="do not fit"):
        ops.quantise(torch.randn(4, 8), torch.ones(4, 1), None, None, "current", "rows", True)


TESTS = ("test_faketensor", "test_autograd_registration")  # the others compute with operands, which fp8 cannot


@pytest.mark.parametrize("recipe", NOW)
def test_opcheck(recipe):
    x, w = torch.randn(2, 33, 40, requires_grad=True), torch.randn(24, 40, requires_grad=True)
    for role, t in (("rows", x), ("weight", w), ("stack", torch.randn(3, 40, 24))):
        torch.library.opcheck(ops.quantise.default, (t, None, None, None, recipe, role, True), test_utils=TESTS)
        for transposed in (False, True):
            torch.library.opcheck(ops.amax.default, (t.detach(), None, recipe, role, transposed), test_utils=TESTS)
    a, b = (
        [t.detach() for t in ops.quantise(t, None, None, None, recipe, r, True)]
        for t, r in ((x, "rows"), (w, "weight"))
    )
    args = (a[0].requires_grad_(), b[0].requires_grad_(), *a[1:3], *b[1:3], *a[3:], *b[3:], None, recipe, False)
    torch.library.opcheck(ops.fp8_linear.default, args, test_utils=TESTS)
    torch.library.opcheck(ops.dequantise.default, (a[1], a[2], recipe, "rows", False, torch.float32), test_utils=TESTS)
    counts = torch.tensor([3, 4])
    rows = ops.align_rows(torch.randn(7, 40), counts, Recipe.parse(recipe).alignment)
    a, b = ([t.detach() for t in ops.quantise(t, None, None, c, recipe, r, True)]
            for t, c, r in ((rows, counts, "rows"), (torch.randn(2, 40, 24), None, "stack")))  # fmt: skip
    args = (a[0], b[0], counts, *a[1:3], *b[1:3], *a[3:], *b[3:], None, recipe, False)
    torch.library.opcheck(ops.fp8_grouped_mm.default, args, test_utils=TESTS)
    torch.library.opcheck(ops.align_rows.default, (torch.randn(7, 3, requires_grad=True), counts, 4))
    torch.library.opcheck(ops.unalign_rows.default, (torch.randn(12, 3, requires_grad=True), counts, 4, 7))
