"""The experts' Triton kernels, interpreted, against float64 written out pair by pair, forward and backward.

The oracle is not the ops' CPU kernels (they are compared too): it multiplies every pair by its expert's own matrices.
Its pre-activations have the *values* that the kernel stored (after those have been compared), so that a body with a
kink is differentiated where the kernel differentiates it.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from interpreter import repaired

from moec import MoecError
from moec.runtime.body import Body
from moec.runtime.kernels import experts, experts_catalog
from moec.runtime.kernels.tiles import Tile

SMALL, LARGE = Tile(16, 16, 16), Tile(32, 32, 32)
EPS = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def swiglu(h):
    gate, up = h[0].chunk(2, -1)
    return F.silu(gate) * up


def clamped(h):
    gate, up = h[0][..., ::2].clamp(max=7.0), h[0][..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


BODIES = {
    experts_catalog.SWIGLU: swiglu,
    experts_catalog.SEPARATE: lambda h: F.silu(h[0]) * h[1],
    experts_catalog.CLAMPED: clamped,
    experts_catalog.GELU: lambda h: F.gelu(h[0], approximate="tanh"),
    "e = whole(h0); k = relu(e); row = square(k); return row": lambda h: F.relu(h[0]).square(),
    "a = every(h0, 3, 0); b = every(h0, 3, 2); t0 = mul(a, b); return t0": lambda h: h[0][..., ::3] * h[0][..., 2::3],
    "b = chunk(h0, 2, 1); t0 = tanh(b); return t0": lambda h: torch.tanh(h[0].chunk(2, -1)[1]),
    # Infinite at 0, which is what columns past the last ones hold.
    "x = whole(h0); t0 = abs(x); t1 = log(t0); return t1": lambda h: torch.log(h[0].abs()),
    "x = every(h0, 2, 1); t0 = exp(x); return t0": lambda h: torch.exp(h[0][..., 1::2]),
}


def close(got: torch.Tensor, wanted: torch.Tensor, what: str, dtype: torch.dtype) -> None:
    assert got.shape == wanted.shape, what
    if wanted.numel():
        scale = wanted.abs().max().clamp(min=1e-3)
        error = ((got.double() - wanted).abs().max() / scale).item()
        assert error <= 3 * EPS[dtype], f"{what}: {error:.1e}"


class Case:
    """Random operands of a block, and what it computes."""

    def __init__(
        self, T=9, K=2, E=3, H=24, I=20, C=24, body=experts_catalog.SWIGLU, bias=True, transposed=True,  # noqa: E741
        dtype=torch.float32, seed=0, drop=0.2, used=None,
    ):  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        parsed = Body.parse(body)
        self.body, self.function, self.dtype, self.E, self.K = body, BODIES[body], dtype, E, K
        self.M = I * max(i.parts for i in parsed.inputs)

        def weight(rows, columns):
            w = torch.randn(E, columns, rows, generator=draw) / rows**0.5
            return w.to(dtype).transpose(1, 2) if transposed else w.transpose(1, 2).contiguous().to(dtype)

        def vector(columns):
            return torch.randn(E, columns, generator=draw).to(dtype)

        self.x = torch.randn(T, H, generator=draw).to(dtype)
        self.ids = torch.rand(T, E, generator=draw).argsort(1)[:, :K]
        if used is not None:  # the other experts stay without rows
            self.ids = torch.where(self.ids < used, self.ids, -1)
        self.ids = torch.where(torch.rand(T, K, generator=draw) < drop, -1, self.ids)
        self.weights = torch.rand(T, K, generator=draw)
        self.w_in = [weight(H, self.M) for _ in range(parsed.products)]
        self.b_in = [vector(self.M) for _ in self.w_in] if bias else []
        self.w_out, self.b_out = weight(I, C), vector(C) if bias else None
        self.grad = torch.randn(T, C, generator=draw).to(dtype)

    def operands(self) -> list[torch.Tensor]:
        return [self.x, self.weights, *self.w_in, *self.b_in, self.w_out, *([] if self.b_out is None else [self.b_out])]

    def weights_of(self):
        return self.w_in, self.b_in, self.w_out, self.b_out, self.body

    def oracle(self, x, weights, *rest, stored=None):
        """``(y, h of each pair [T, K, A])`` in the operands' dtype; ``stored``: values of h from elsewhere."""
        J, B = len(self.w_in), len(self.b_in)
        w_in, b_in, w_out, b_out = rest[:J], rest[J : J + B], rest[J + B], rest[J + B + 1 :]
        e = self.ids.clamp(min=0)
        h = [torch.einsum("th,tkhm->tkm", x, w[e]) + (b_in[i][e] if b_in else 0) for i, w in enumerate(w_in)]
        if stored is not None:
            h = [a + (b - a).detach() for a, b in zip(h, stored.split(self.M, -1), strict=True)]
        y = torch.einsum("tki,tkic->tkc", self.function(h), w_out[e]) + (b_out[0][e] if b_out else 0)
        return (torch.where(self.ids < 0, 0, weights)[..., None] * y).sum(1), torch.cat(h, -1)

    def check(self, tile: Tile, need=None) -> None:
        """Kernels against the oracle: outputs, pre-activations, order, every gradient (of those that are needed)."""
        need = need or [True] * len(self.operands())
        with repaired():
            y, h, row_of, counts = experts.forward(self.x, self.ids, self.weights, *self.weights_of(), tile=tile)
            gradients = experts.backward(
                self.grad, self.x, self.weights, self.w_in, self.b_in, self.w_out, self.b_out, h, row_of, counts,
                self.body, need, tile=tile,
            )  # fmt: skip
        held = self.ids >= 0
        assert torch.equal(counts, torch.bincount(self.ids[held], minlength=self.E))
        assert torch.equal(row_of >= 0, held)
        assert torch.equal(row_of[held].sort()[0], torch.arange(int(held.sum())))
        key = self.ids * self.ids.numel() + torch.arange(self.ids.numel()).view_as(self.ids)
        assert torch.equal(row_of[held], key[held].argsort().argsort()), "rows lie by (expert, pair)"
        assert not h[int(held.sum()) :].any()

        self.check_op(y, h, row_of, counts, gradients, need)
        inputs = [t.detach().double().requires_grad_() for t in self.operands()]
        _, exact = self.oracle(*inputs)
        stored = h[row_of.clamp(min=0)].double() if h.shape[0] else exact
        close(stored[held], exact[held], "pre-activations", self.dtype)
        stored = torch.where(held[..., None], stored, exact)
        out, _ = self.oracle(*inputs, stored=stored)
        close(y, out, "y", self.dtype)
        wanted = torch.autograd.grad(out, inputs, self.grad.double())
        for n, (got, want, asked) in enumerate(zip(gradients, wanted, need, strict=True)):
            if asked:
                close(got, want, f"gradient {n}", self.dtype)
                if got.ndim == 3:
                    assert got.stride() == self.operands()[n].stride(), "a gradient in the layout of its weight"
            else:
                assert not got.numel()


    def check_op(self, y, h, row_of, counts, gradients, need) -> None:
        """Kernels against the op's CPU kernels, which compute the same in their own way."""
        ops = torch.ops.moec
        want = ops.experts(self.x, self.ids, self.weights, *self.weights_of(), False)
        close(y, want[0].double(), "the op's y", self.dtype)
        close(h, want[1].double(), "the op's pre-activations", self.dtype)
        assert torch.equal(row_of, want[2])
        assert torch.equal(counts, want[3])
        # From the same pre-activations: a kink is on the same side.
        wanted = ops.experts_backward(
            self.grad, self.x, self.weights, self.w_in, self.b_in, self.w_out, self.b_out, h, row_of, counts,
            self.body, need,
        )  # fmt: skip
        for n, (got, wants) in enumerate(zip(gradients, wanted, strict=True)):
            close(got, wants.double(), f"the op's gradient {n}", self.dtype)
            assert got.stride() == wants.stride()


cases = st.builds(
    Case,
    T=st.integers(1, 14), K=st.integers(1, 3), E=st.integers(3, 5), H=st.integers(1, 40), I=st.integers(1, 40),
    C=st.integers(1, 40), body=st.sampled_from(sorted(BODIES)), bias=st.booleans(), transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 2**16),
    drop=st.sampled_from([0.0, 0.3, 1.0]), used=st.sampled_from([None, 1, 2]),
)  # fmt: skip


@given(case=cases, tile=st.sampled_from([LARGE, Tile(16, 32, 32), Tile(64, 32, 64)]))
@settings(max_examples=8)
def test_block(case, tile):
    case.check(tile)


@pytest.mark.nightly
@given(case=cases, tile=st.sampled_from([LARGE, SMALL, Tile(16, 32, 32), Tile(64, 32, 64)]))
@settings(max_examples=200)
def test_block_deep(case, tile):
    case.check(tile)


@pytest.mark.parametrize(("number", "body"), list(enumerate(sorted(BODIES))))
def test_bodies(number, body):
    """Several tiles of rows, columns and depth; the last of each is not whole."""
    dtype = torch.bfloat16 if number % 2 else torch.float32
    Case(T=20, H=40, I=40, C=40, body=body, dtype=dtype).check(LARGE)


@pytest.mark.parametrize("needed", range(7))
def test_only_what_is_needed(needed):
    Case(T=5).check(LARGE, [n == needed for n in range(6)] if needed < 6 else [False] * 6)


def test_kept_rows_alone():
    case = Case(drop=0.7)
    with repaired():
        y, h, row_of, counts = experts.forward(case.x, case.ids, case.weights, *case.weights_of(), True, tile=LARGE)
        whole = experts.forward(case.x, case.ids, case.weights, *case.weights_of(), tile=LARGE)
    N = int((case.ids >= 0).sum())
    assert h.shape[0] == N < case.ids.numel()
    assert torch.equal(h, whole[1][:N])
    assert torch.equal(y, whole[0])
    assert torch.equal(row_of, whole[2])
    assert torch.equal(counts, whole[3])


@pytest.mark.parametrize("counts", [[5, 0, 11], [0, 0, 0], [0, 19, 0], [1, 1, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_between_exchanges(counts, dtype):
    """``experts_rows``: rows lie by expert already, there are more than the experts own, the others are zeros."""
    case, N = Case(T=19, K=1, dtype=dtype, drop=0.0), sum(counts)
    case.ids = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))[:, None]
    case.weights = torch.ones(N, 1)
    x, grad = case.x.clone(), case.grad.clone()
    with repaired():
        y, h = experts.rows_forward(x, torch.tensor(counts), *case.weights_of(), tile=LARGE)
        gradients = experts.rows_backward(
            grad, x, case.w_in, case.b_in, case.w_out, case.b_out, h, torch.tensor(counts), case.body, [True] * 5,
            tile=LARGE,
        )  # fmt: skip
    assert not y[N:].any() and not h[N:].any() and not gradients[0][N:].any()
    case.x, case.grad = x[:N], grad[:N]
    inputs = [t.detach().double().requires_grad_() for t in case.operands()]
    out, _ = case.oracle(*inputs, stored=h[:N, None].double())
    close(y[:N], out, "y", dtype)
    wanted = torch.autograd.grad(out, inputs, case.grad.double())
    gradients[0] = gradients[0][:N]
    for n, (got, want) in enumerate(zip(gradients, wanted[:1] + wanted[2:], strict=True)):
        close(got, want, f"gradient {n}", dtype)


def test_what_is_materialised():
    """Everything that a step writes to memory: no permuted copy of x or of the gradient, no gradient of the activation,
    and what the backward starts from is the inputs, the pre-activations and the order."""
    T, K, H, I, C = 8, 2, 24, 20, 28  # noqa: E741
    case, A, P = Case(T=T, K=K, H=H, I=I, C=C, drop=0.0), 2 * I, T * K
    with repaired() as traffic:
        _, h, row_of, counts = experts.forward(case.x, case.ids, case.weights, *case.weights_of(), tile=LARGE)
    assert [tuple(t.shape) for t in traffic.written()] == [(P, A), (P, I), (P, C), (T, C)]
    assert (row_of.shape, counts.shape) == ((T, K), (case.E,))
    with repaired() as traffic:
        experts.backward(
            case.grad, case.x, case.weights, case.w_in, case.b_in, case.w_out, case.b_out, h, row_of, counts, case.body,
            [True] * 6, tile=LARGE,
        )  # fmt: skip
    shares = (P, 2)  # a number for each half of a tile
    of_weights = [(case.E, H, A), (case.E, A), (case.E, I, C), (case.E, C)]
    assert [tuple(t.shape) for t in traffic.written()] == [(P, A), (P, I), shares, *of_weights, (P, H), (T, H), (T, K)]


def test_no_tokens():
    case = Case(T=0)
    case.check(LARGE)


def test_what_is_refused():
    case = Case(dtype=torch.float32)
    with pytest.raises(MoecError, match="float64"):
        experts.forward(case.x.double(), case.ids, case.weights, *case.weights_of())
    case.ids[0, 0] = 3
    with pytest.raises(RuntimeError, match="ids must lie in"), repaired():
        experts.forward(case.x, case.ids, case.weights, *case.weights_of())
    with pytest.raises(RuntimeError, match="counts do not fit 9 rows"), repaired():
        experts.rows_forward(case.x, torch.tensor([5, 0, 5]), *case.weights_of())
    both = "a = whole(h0); b = whole(h1); c = chunk(h1, 2, 0); return a"
    with pytest.raises(MoecError, match="body"), repaired():
        experts.forward(case.x, case.ids, case.weights, case.w_in * 2, [], case.w_out, None, both)
