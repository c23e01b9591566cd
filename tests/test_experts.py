"""``moec::experts`` and ``experts_rows`` against the ops that they are made of and dense algebra, in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError
from moec.runtime.ops import experts_cpu

ops = torch.ops.moec
SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"
BODIES = {  # text, how many columns each first product has for I, the same in plain operations
    "packed": (SWIGLU, [2], lambda h: F.silu(h.chunk(2, 1)[0]) * h.chunk(2, 1)[1]),
    "two": ("g = whole(h0); u = whole(h1); t = gelu(g); y = mul(t, u); return y", [1, 1], lambda g, u: F.gelu(g) * u),
    "one": ("x = whole(h0); t0 = relu(x); t1 = square(t0); return t1", [1], lambda h: F.relu(h) ** 2),
    "every": (
        "g = every(h0, 2, 0); u = every(h0, 2, 1); a = clamp(g, -inf, 0.7); b = sigmoid(a); c = mul(a, b); "
        "d = add(u, 1.0); e = mul(c, d); return e",
        [2], lambda h: h[:, ::2].clamp(max=0.7) * h[:, ::2].clamp(max=0.7).sigmoid() * (h[:, 1::2] + 1),
    ),
    "a part": ("x = chunk(h0, 2, 1); t0 = silu(x); return t0", [2], lambda h: F.silu(h.chunk(2, 1)[1])),
    "twice": ("x = whole(h0); u = whole(h1); v = whole(h0); t0 = mul(x, u); t1 = mul(t0, v); return t1", [1, 1],
              lambda a, b: a * b * a),
}  # fmt: skip


@st.composite
def blocks(draw):
    """``(E, ids_TK, counts, H, I, body, biases, transposed, kept)``: ragged and empty experts, dropped pairs."""
    E = draw(st.integers(1, 4))
    K = draw(st.integers(1, E))
    T = draw(st.integers(0, 5))
    ids = [draw(st.permutations(range(E)))[:K] for _ in range(T)]
    drop = draw(st.booleans())
    ids = [[-1 if drop and draw(st.booleans()) else i for i in row] for row in ids]
    body = draw(st.sampled_from(sorted(BODIES)))
    return E, torch.tensor(ids, dtype=torch.int64).reshape(T, K), draw(st.integers(1, 4)), 2, body, *[
        draw(st.booleans()) for _ in range(4)
    ]


def weight(E: int, a: int, b: int, transposed: bool, dtype=torch.float64) -> torch.Tensor:
    """A leaf [E, a, b] or [E, b, a], and [E, a, b] of it."""
    leaf = torch.randn(E, b, a, dtype=dtype) if transposed else torch.randn(E, a, b, dtype=dtype)
    return leaf.requires_grad_()


def operands(E, H, I, name, b_in, b_out, transposed, dtype=torch.float64):  # noqa: E741
    text, widths, plain = BODIES[name]
    w_in = [weight(E, H, n * I, transposed, dtype) for n in widths]
    w_out = weight(E, I, H, transposed, dtype)
    biases = [torch.randn(E, n * I, dtype=dtype, requires_grad=True) for n in widths] if b_in else []
    bias_out = torch.randn(E, H, dtype=dtype, requires_grad=True) if b_out else None
    shown = [w.transpose(1, 2) if transposed else w for w in (*w_in, w_out)]
    leaves = [*w_in, *biases, w_out, *([bias_out] if b_out else [])]
    return text, plain, shown[:-1], biases, shown[-1], bias_out, leaves


def unfused(rows, counts, plain, w_in, b_in, w_out, b_out):
    h = [ops.grouped_mm(rows, w, counts) for w in w_in]
    h = [ops.grouped_add(x, b, counts) for x, b in zip(h, b_in, strict=True)] if b_in else h
    y = ops.grouped_mm(plain(*h), w_out, counts)
    return y if b_out is None else ops.grouped_add(y, b_out, counts), torch.cat(h, 1)


def compare(got, want, leaves, tolerance=1e-12):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    g = torch.randn_like(want)
    got, want = (torch.autograd.grad(y, leaves, g) for y in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert all(a.stride() == leaf.stride() for a, leaf in zip(got, leaves, strict=True) if a.numel() > 1)


@given(blocks())
def test_experts_are_the_ops_that_they_fuse(block):
    E, ids, H, I, name, b_in, b_out, transposed, kept = block  # noqa: E741
    text, plain, w_in, biases, w_out, bias_out, leaves = operands(E, H, I, name, b_in, b_out, transposed)
    x = torch.randn(ids.shape[0], H, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(ids.shape, dtype=torch.float64, requires_grad=True)
    y, h, row_of, counts = ops.experts(x, ids, weights, w_in, biases, w_out, bias_out, text, kept)
    rows, c, r = (ops.permute_kept if kept else ops.permute)(x, ids, E)
    out, pre = unfused(rows, c, plain, w_in, biases, w_out, bias_out)
    assert torch.equal(row_of, r) and torch.equal(counts, c)
    torch.testing.assert_close(h, pre.detach(), rtol=1e-12, atol=1e-12)
    compare(y, ops.unpermute(out, weights, r), [x, weights, *leaves])


@given(blocks(), st.integers(0, 2))
def test_rows_of_experts_are_the_ops_that_they_fuse(block, tail):
    E, ids, H, I, name, b_in, b_out, transposed, _ = block  # noqa: E741
    text, plain, w_in, biases, w_out, bias_out, leaves = operands(E, H, I, name, b_in, b_out, transposed)
    counts = torch.bincount(ids[ids >= 0].flatten(), minlength=E)
    x = torch.randn(int(counts.sum()) + tail, H, dtype=torch.float64, requires_grad=True)
    y, h = ops.experts_rows(x, counts, w_in, biases, w_out, bias_out, text)
    want, pre = unfused(x, counts, plain, w_in, biases, w_out, bias_out)
    torch.testing.assert_close(h, pre.detach(), rtol=1e-12, atol=1e-12)
    compare(y, want, [x, *leaves])


def test_against_dense_algebra():
    """Every expert on every token, one-hot: shares no code with the ops."""
    torch.manual_seed(0)
    T, E, K, H, I = 9, 4, 2, 3, 5  # noqa: E741
    text, _, (w_in,), (b_in,), w_out, b_out, leaves = operands(E, H, I, "packed", True, True, True)
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(T, K, dtype=torch.float64, requires_grad=True)
    ids = torch.rand(T, E).topk(K).indices
    dense = torch.zeros(T, E, dtype=torch.float64).scatter(1, ids, weights)
    h = torch.einsum("th,ehm->etm", x, w_in) + b_in[:, None]
    a = F.silu(h[..., :I]) * h[..., I:]
    want = torch.einsum("eth,te->th", torch.einsum("eti,eih->eth", a, w_out) + b_out[:, None], dense)
    y = ops.experts(x, ids, weights, [w_in], [b_in], w_out, b_out, text, False)[0]
    compare(y, want, [x, weights, *leaves])


@pytest.mark.parametrize("name", ["packed", "two"])
def test_many_rows_go_in_tiles(name, monkeypatch):
    """Experts with more rows than a tile, and tiles of several experts; results do not depend on where a tile ends."""
    torch.manual_seed(0)
    text, plain, w_in, b_in, w_out, b_out, leaves = operands(5, 3, 2, name, True, True, True)
    ids = torch.randint(0, 3, (40, 1)) * torch.tensor([[1]])
    ids[:3] = 4
    x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(40, 1, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(experts_cpu, "TILE", 7)
    monkeypatch.setattr(experts_cpu, "BLOCK", 12)
    counts = torch.bincount(ids.flatten(), minlength=5).tolist()
    found = experts_cpu.tiles(counts, torch.float64)
    assert [t.start for t in found[1:]] == [t.end for t in found[:-1]] and found[-1].end == 40
    assert max(t.rows for t in found) <= 7 and any(not t.first for t in found)
    assert max(t.rows for t in experts_cpu.tiles(counts, torch.bfloat16)) == max(counts)
    y = ops.experts(x, ids, weights, w_in, b_in, w_out, b_out, text, False)[0]
    rows, c, r = ops.permute(x, ids, 5)
    compare(y, ops.unpermute(unfused(rows, c, plain, w_in, b_in, w_out, b_out)[0], weights, r), [x, weights, *leaves])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_near_float64(dtype):
    torch.manual_seed(0)
    text, _, w_in, b_in, w_out, b_out, leaves = operands(4, 16, 8, "packed", True, True, True, dtype)
    ids = torch.rand(50, 4).topk(2).indices
    x = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    weights = torch.rand(50, 2, requires_grad=True)
    inputs = [x, weights, *leaves]
    y = ops.experts(x, ids, weights, w_in, b_in, w_out, b_out, text, False)[0]
    g = torch.randn(50, 16)
    got = [y, *torch.autograd.grad(y, inputs, g.to(dtype))]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    x, weights, w, b, v, c = wide
    h, b_out = torch.einsum("th,emh->etm", x, w) + b[:, None], c
    a = F.silu(h[..., :8]) * h[..., 8:]
    dense = torch.zeros(50, 4, dtype=torch.float64).scatter(1, ids, weights)
    want = torch.einsum("eth,te->th", torch.einsum("eti,ehi->eth", a, v) + b_out[:, None], dense)
    want = [want, *torch.autograd.grad(want, wide, g.to(dtype).double())]
    for a, b in zip(got, want, strict=True):
        assert a.dtype in (dtype, torch.float32)
        assert (a.double() - b).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * b.norm()


@pytest.mark.parametrize(("dtype", "biases"), [(torch.float32, True), (torch.bfloat16, False)])
def test_opcheck(dtype, biases):
    torch.manual_seed(0)
    text, _, w_in, b_in, w_out, b_out, _ = operands(3, 4, 2, "two", biases, biases, True, dtype)
    ids = torch.tensor([[0, 2], [2, -1], [0, 1]])
    x, weights = torch.randn(3, 4, dtype=dtype, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    torch.library.opcheck(ops.experts.default, (x, ids, weights, w_in, b_in, w_out, b_out, text, False))
    counts = torch.tensor([1, 0, 2])
    torch.library.opcheck(ops.experts_rows.default, (x, counts, w_in, b_in, w_out, b_out, text))
    with torch.no_grad():
        _, h, row_of, counts = ops.experts(x, ids, weights, w_in, b_in, w_out, b_out, text, False)
        need = [True, False, *[True] * (3 + 3 * biases)]
        args = (x, x, weights, w_in, b_in, w_out, b_out, h, row_of, counts, text, need)
        torch.library.opcheck(ops.experts_backward.default, args)
        args = (x, x, w_in, b_in, w_out, b_out, h[:3].clone(), torch.tensor([1, 0, 2]), text, need[:1] + need[2:])
        torch.library.opcheck(ops.experts_rows_backward.default, args)


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch):
    """Each alone is what it is among all; and without gradients of weights no product for them runs."""
    torch.manual_seed(0)
    text, _, w_in, b_in, w_out, b_out, _ = operands(3, 4, 2, "packed", True, True, True)
    ids = torch.tensor([[0, 2], [2, 1], [0, 1]])
    x = torch.randn(3, 4, dtype=torch.float64)
    weights = torch.rand(3, 2, dtype=torch.float64)
    every = [x, weights, w_in[0].detach(), b_in[0].detach(), w_out.detach(), b_out.detach()]

    def gradients(need):
        leaves = [t.clone().requires_grad_(n) for t, n in zip(every, need, strict=True)]
        x, weights, w, b, v, c = leaves
        y = ops.experts(x, ids, weights, [w], [b], v, c, text, False)[0]
        return torch.autograd.grad(y, [t for t, n in zip(leaves, need, strict=True) if n], torch.ones_like(y))

    want = gradients([True] * 6)
    for i in range(6):
        (got,) = gradients([i == j for j in range(6)])
        torch.testing.assert_close(got, want[i], rtol=1e-13, atol=1e-13)
    monkeypatch.setattr(experts_cpu, "_add_weight_gradients", None)
    gradients([True, True, False, True, False, True])
    with pytest.raises(TypeError):
        gradients([True, True, False, True, True, True])


def test_a_gradient_of_one_stride_zero_value():
    text, _, w_in, b_in, w_out, b_out, _ = operands(2, 3, 2, "packed", False, False, True)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([1, 3])
    ops.experts_rows(x, counts, w_in, b_in, w_out, b_out, text)[0].sum().backward()
    got = x.grad.clone()
    x.grad = None
    (ops.experts_rows(x, counts, w_in, b_in, w_out, b_out, text)[0] * torch.ones(4, 3)).sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=0, atol=0)


def test_saved_are_inputs_first_products_and_indices_and_nothing_else():
    torch.manual_seed(0)
    text, _, w_in, b_in, w_out, b_out, _ = operands(3, 4, 2, "packed", True, True, True)
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0]])
    x, weights = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 4), (4, 2)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, h, row_of, counts = ops.experts(x, ids, weights, w_in, b_in, w_out, b_out, text, False)
    expected = [x, weights, *w_in, *b_in, w_out, b_out, h, row_of, counts]
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in expected}
    assert len(saved) == len(expected)


def test_repeatable_bit_for_bit():
    torch.manual_seed(0)
    text, _, w_in, b_in, w_out, b_out, leaves = operands(8, 16, 8, "packed", True, True, True, torch.float32)
    ids = torch.rand(200, 8).topk(3).indices
    x, weights = torch.randn(200, 16, requires_grad=True), torch.rand(200, 3, requires_grad=True)
    runs = []
    for _ in range(3):
        y = ops.experts(x, ids, weights, w_in, b_in, w_out, b_out, text, False)[0]
        runs.append([y, *torch.autograd.grad(y, [x, weights, *leaves], torch.ones_like(y))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"w_in": [torch.zeros(2, 3, 4)] * 2}, "do not fit the body"),
        ({"w_in": [torch.zeros(2, 3, 5)]}, "do not fit the body"),
        ({"w_in": [torch.zeros(2, 2, 4)]}, r"w_in\[0\] is \(2, 2, 4\), not \(2, 3, 4\)"),
        ({"w_out": torch.zeros(2, 5, 3)}, "w_out is"),
        ({"w_out": torch.zeros(2, 2, 3).double()}, "float64, x is torch.float32"),
        ({"b_in": [torch.zeros(2, 3)]}, r"b_in\[0\] is"),
        ({"b_in": [torch.zeros(2, 4)] * 2}, "2 biases for 1 first products"),
        ({"b_out": torch.zeros(3, 3)}, "b_out is"),
        ({"ids": torch.tensor([[2]])}, r"must lie in \[0, 2\)"),
        ({"weights": torch.zeros(1, 2)}, "differ in shape"),
        ({"body": "x = whole(h0); w = row(r0); y = mul(x, w); return y"}, "numbers of a row"),
    ],
)
def test_what_does_not_fit_is_refused(change, problem):
    right = {
        "x": torch.zeros(1, 3), "ids": torch.tensor([[1]]), "weights": torch.zeros(1, 1),
        "w_in": [torch.zeros(2, 3, 4)], "b_in": [], "w_out": torch.zeros(2, 2, 3), "b_out": None, "body": SWIGLU,
        "kept": False,
    }  # fmt: skip
    ops.experts(*right.values())
    with pytest.raises(MoecError, match=problem):
        ops.experts(*(right | change).values())


def test_counts_that_do_not_fit_are_refused():
    for counts in ([2, 3], [-1, 2]):
        with pytest.raises(MoecError, match="do not fit 4 rows"):
            ops.experts_rows(
                torch.zeros(4, 3), torch.tensor(counts), [torch.zeros(2, 3, 4)], [], torch.zeros(2, 2, 3), None, SWIGLU
            )
