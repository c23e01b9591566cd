"""Bodies as C: the same values and gradients as PyTorch's steps, in float32 and bfloat16; and what happens without."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_body import MEANING, bodies

from moec.runtime.body import Body
from moec.runtime.kernels import c_body, c_library
from moec.runtime.kernels.c_text import C, c_text
from moec.runtime.ops import experts_cpu
from moec.runtime.pointwise import PRIMITIVES

SWIGLU = "g = chunk(h0, 2, 0); u = chunk(h0, 2, 1); t0 = silu(g); t1 = mul(t0, u); return t1"
GPT_OSS = (
    "g = every(h0, 2, 0); u = every(h0, 2, 1); a = clamp(g, -inf, 7.0); b = clamp(u, -7.0, 7.0); c = mul(a, 1.702); "
    "d = sigmoid(c); e = mul(a, d); f = add(b, 1.0); y = mul(e, f); return y"
)
TWO = "g = whole(h0); u = whole(h1); a = gelu_tanh(g); b = relu(u); c = square(b); y = mul(a, c); return y"
THREE = (
    "g = every(h0, 3, 0); u = every(h0, 3, 1); v = every(h0, 3, 2); a = silu(g); b = mul(a, u); y = add(b, v); return y"
)
STEPS_OF_PYTORCH = {"log", "erf", "gelu", "gelu_backward"}

needs_compiler = pytest.mark.skipif(c_library.compiler() is None, reason="no C compiler here")


@pytest.fixture(autouse=True, scope="module")
def kernels(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEC_KERNELS", str(tmp_path_factory.mktemp("kernels")))
        yield


@needs_compiler
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_nothing_to_kernels(default):
    """Gradients of weights that are not fp32 pass through memory of their own: C fills it with fp32."""
    body, used = Body.parse(SWIGLU), torch.get_default_dtype()
    _, h, d, weight = operands(body, 5, 8, torch.bfloat16)
    dweights, (a, dh) = torch.zeros(2, 5, dtype=torch.bfloat16), (torch.empty_like(d), torch.empty_like(h))
    for dtype, dweight in zip((used, default), dweights, strict=True):
        try:
            torch.set_default_dtype(dtype)
            c_body.of(body, torch.bfloat16).backward(h, d, weight.bfloat16(), dweight, a, dh)
        finally:
            torch.set_default_dtype(used)
    assert torch.equal(*dweights) and dweights.all()


def operands(body, R, I, dtype, pitch=0):  # noqa: E741
    """h of all products in rows that lie ``pitch`` elements further apart than they are long, d, weight."""
    widths = [max(i.parts for i in body.inputs if i.source == s) * I for s in range(body.products)]
    h = (2 * torch.randn(R, sum(widths) + pitch)).to(dtype)[:, : sum(widths)]
    return widths, h, torch.randn(R, I).to(dtype), torch.rand(R)


def by_steps(body, widths, h, d, weight):
    """What ``CBody`` computes, in float64 but for what is rounded: (a, a weighted, dh, dweight)."""
    products = [t.double() for t in h.split(widths, 1)]
    value, *gradients = body.derivative(value=True).run(products, grad=d.double() * weight.double()[:, None])
    a = value.to(h.dtype).double()
    dh = torch.zeros_like(h, dtype=torch.float64)
    for i, g in zip(body.inputs, gradients, strict=True):
        i.of(dh.split(widths, 1)[i.source]).add_(g)
    return a, a * weight.double()[:, None], dh, (a * d.double()).sum(1)


def compare(body, R, I, dtype, pitch=0):  # noqa: E741
    widths, h, d, weight = operands(body, R, I, dtype, pitch)
    compiled = c_body.of(body, dtype)
    forward, a, dh, dweight = torch.full((R, I), 9.0, dtype=dtype), *(torch.full_like(t, 9) for t in (d, h, weight))
    compiled.forward(h, forward)
    compiled.backward(h, d, weight, dweight, a, dh)
    near = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for got, want in zip((forward, a, dh, dweight), by_steps(body, widths, h, d, weight), strict=True):
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got.double() / scale, want / scale, rtol=near, atol=near)
    plain = torch.empty_like(a)
    compiled.backward(h, d, None, None, plain, dh)
    assert torch.equal(plain, forward)


@needs_compiler
@settings(max_examples=40)
@given(bodies(rows=0), st.integers(0, 3), st.integers(1, 9))
def test_drawn_bodies(body, R, I):  # noqa: E741
    if c_body.of(body, torch.float32) is not None:
        compare(body, R, I, torch.float32)
    else:
        assert not body.covers() or {s.op for s in body.derivative(value=True).steps} & STEPS_OF_PYTORCH


@needs_compiler
@pytest.mark.parametrize("op", sorted(MEANING.keys() - STEPS_OF_PYTORCH))
def test_values_and_kinks_of_every_primitive(op):
    """On a grid that has its bounds, zeros and ties; positive where it has to be."""
    grid = torch.tensor([-2.0, -0.5, -0.0, 0.0, 0.25, 0.5, 2.0, -0.03, 0.03])
    a, b = (t.reshape(1, -1) for t in torch.meshgrid(grid, grid, indexing="ij"))
    if op in ("sqrt", "rsqrt"):
        a = a.abs() + 0.1
    if op == "div":
        b = b.abs() + 0.1
    arity = len(PRIMITIVES[op].derivative)
    numbers = ", -0.5, 0.5" if op == "clamp" else ", v" if arity == 2 else ""
    text = f"u = chunk(h0, 2, 0); v = chunk(h0, 2, 1); y = {op}(u{numbers}); z = add(y, 0.0); return z"
    body, h, d = Body.parse(text), torch.cat([a, b], 1), torch.ones(1, a.shape[1])
    compiled, value, got = c_body.of(body, torch.float32), torch.empty_like(d), torch.empty_like(h)
    compiled.backward(h, d, None, None, value, got)
    want, *of = body.derivative(value=True).run([h.double()], grad=d.double())
    torch.testing.assert_close(value.double(), want, rtol=5e-6, atol=2e-7)
    torch.testing.assert_close(got.double(), torch.cat(of, 1), rtol=5e-6, atol=5e-7)


@needs_compiler
def test_bfloat16_is_rounded_as_pytorch_rounds_it():
    """Every number halfway between two (but for the ends of the range); NaN and infinities."""
    halfway = (torch.arange(0x10000, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    x = halfway[(halfway.abs() < 1e30) & (halfway.abs() > 1e-30)]
    body = Body.parse("x = whole(h0); y = whole(h1); z = add(x, y); return z")
    high = x.to(torch.bfloat16)
    low = (x - high.float()).to(torch.bfloat16)  # exact: x has one bit more than bfloat16
    assert torch.equal(high.float() + low.float(), x)
    ends = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.bfloat16)
    h = torch.stack([torch.cat([high, ends]), torch.cat([low, 0 * ends.nan_to_num()])]).reshape(1, -1)
    got = torch.empty(1, h.shape[1] // 2, dtype=torch.bfloat16)
    c_body.of(body, torch.bfloat16).forward(h, got)
    want = torch.cat([x, ends.float()]).to(torch.bfloat16)
    torch.testing.assert_close(got[0], want, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", [SWIGLU, GPT_OSS, TWO, THREE], ids=["swiglu", "gpt_oss", "two", "three"])
def test_bodies_of_models(text, dtype):
    """Long rows too, so that vectors and what is left of them both occur."""
    torch.manual_seed(0)
    for R, I, pitch in ((5, 67, 3), (1, 1, 0), (0, 4, 0)):  # noqa: E741
        compare(Body.parse(text), R, I, dtype, pitch)


@needs_compiler
def test_exp_has_the_range_of_a_real_one():
    body = Body.parse("x = whole(h0); y = exp(x); return y")
    x = torch.cat([torch.linspace(-110, 95, 4001), torch.tensor([math.inf, -math.inf, math.nan, 88.7, -87.5, 0.0])])
    got = torch.empty(1, len(x))
    c_body.of(body, torch.float32).forward(x[None], got)
    want = x.double().exp().float()
    assert torch.equal(got[0].isnan(), want.isnan()) and torch.equal(got[0].isinf(), want.isinf())
    normal = (want > 1.2e-38) & want.isfinite()
    torch.testing.assert_close(got[0][normal], want[normal], rtol=4e-7, atol=0)
    assert got[0][want < 1.2e-38].max() < 1.3e-38 and got[0].nan_to_num(0).min() >= 0


@needs_compiler
def test_tanh_is_accurate_near_zero():
    """Relative to its value, where the difference of two numbers near one would have no digits left."""
    body = Body.parse("x = whole(h0); y = tanh(x); return y")
    x = torch.cat([sign * torch.logspace(-6, 0, 2001) for sign in (1, -1)])
    got = torch.empty(1, len(x))
    c_body.of(body, torch.float32).forward(x[None], got)
    torch.testing.assert_close(got[0].double(), x.double().tanh(), rtol=2e-6, atol=0)


@needs_compiler
def test_nan_and_infinities_pass():
    """As in PyTorch: NaN is not clamped away, and a gate of minus infinity closes."""
    body = Body.parse("x = whole(h0); a = clamp(x, -1.0, 1.0); b = maximum(a, 0.5); c = relu(b); y = neg(c); return y")
    x = torch.tensor([[math.nan, math.inf, -math.inf, 0.7]])
    got = torch.empty_like(x)
    c_body.of(body, torch.float32).forward(x, got)
    assert torch.equal(got.nan_to_num(7), torch.tensor([[7.0, -1.0, -0.5, -0.7]]))


def test_every_primitive_is_accounted_for():
    assert set(C) | STEPS_OF_PYTORCH == set(PRIMITIVES) and not set(C) & STEPS_OF_PYTORCH


def test_text_is_deterministic_and_says_what_it_computes():
    body = Body.parse(SWIGLU)
    assert c_text(body, torch.float32) == c_text(Body.parse(SWIGLU), torch.float32)
    assert SWIGLU in c_text(body, torch.float32) != c_text(body, torch.bfloat16)
    assert c_text(body, torch.float64) is None
    assert c_text(Body.parse("x = chunk(h0, 2, 1); y = neg(x); return y"), torch.float32) is None  # half of h0 unread


def test_without_a_compiler_pytorch_computes(monkeypatch):
    monkeypatch.setenv("MOEC_CC", "")
    assert c_body.of(Body.parse(SWIGLU), torch.float32) is None


def test_a_compiler_that_fails_is_reported_and_done_without(failing_compiler):
    with pytest.warns(UserWarning, match="no such target"):
        assert c_body.of(Body.parse(SWIGLU), torch.float32) is None
    assert failing_compiler.is_dir() and not list(failing_compiler.iterdir())


@needs_compiler
def test_the_library_is_made_once_and_named_by_what_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEC_KERNELS", str(tmp_path))
    path = c_library.made(c_text(Body.parse(SWIGLU), torch.float32), "body", c_library.compiler(), tmp_path)
    before = path.stat().st_mtime_ns
    assert c_library.made(path.with_suffix(".c").read_text(), "body", c_library.compiler(), tmp_path) == path
    assert path.stat().st_mtime_ns == before and sorted(os.listdir(tmp_path)) == [path.stem + ".c", path.name]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_are_the_same_with_and_without(dtype, monkeypatch):
    torch.manual_seed(0)
    T, E, K, H, I = 40, 5, 3, 8, 12  # noqa: E741
    ids = torch.rand(T, E).topk(K).indices
    ids[::7, 1] = -1
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in ((T, H), (T, K), (E, 2 * I, H), (E, H, I))]
    grad = torch.randn(T, H).to(dtype)
    used = []

    def run():
        x, weights, w_in, w_out = leaves
        y = torch.ops.moec.experts(
            x, ids, weights, [w_in.transpose(1, 2)], [], w_out.transpose(1, 2), None, SWIGLU, False
        )[0]
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    real = c_body.CBody.backward
    monkeypatch.setattr(c_body.CBody, "backward", lambda self, *a: used.append(1) or real(self, *a))
    monkeypatch.setattr(experts_cpu, "TILE", 16)
    compiled = run()
    monkeypatch.setenv("MOEC_CC", "")
    steps = run()
    assert used
    near = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for got, want in zip(compiled, steps, strict=True):
        scale = float(want.abs().max())
        torch.testing.assert_close(got.float() / scale, want.float() / scale, rtol=near, atol=near)
