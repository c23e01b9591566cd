"""FP8 products by Transformer Engine: with a stand-in that has TE's layouts of scales and its checks (te_stub.py), they
are those of the ``moec::`` ops.  (``test_transformer_engine_source.py``: against TE's own source.)"""

import copy
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import te_stub
import torch
import torch.nn.functional as F
from spmd import compile_stages
from torch import nn
from torch.library import opcheck
from witness import witness

import moec
from moec.capture import capture
from moec.check import _Oracle, _relative
from moec.overlap import Overlap
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision
from moec.program import op_name
from moec.runtime import transformer_engine_fp8 as te_fp8
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import RECIPES, Recipe

ours, theirs = torch.ops.moec, torch.ops.moec_te
WITH_TE = [name for name in RECIPES if name != "rowwise"]
SHAPES = {
    "delayed": (2, 24, 48, 80), "current": (2, 24, 48, 80), "mxfp8": (2, 48, 96, 160), "blockwise": (2, 64, 384, 128),
}  # fmt: skip
"""Leading dims, K and M, of which no two are equal: a transposed scale cannot fit by chance."""


class Calls:
    """What TE's products were asked for."""

    def __init__(self, monkeypatch):
        self.gemms, self.grouped = [], []

        def general_gemm(**given):
            self.gemms.append(given)
            return te_stub.general_gemm(**given)

        def general_grouped_gemm(**given):
            self.grouped.append(given)
            return te_stub.general_grouped_gemm(**given)

        te_stub.installed(monkeypatch, general_gemm=general_gemm, general_grouped_gemm=general_grouped_gemm)


@pytest.fixture
def te(monkeypatch):
    return Calls(monkeypatch)


def draw(*shape, seed=0, dtype=torch.float32):
    """Rows and columns of very different sizes, so that scales are."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen)
    for dim in (-1, -2):
        sizes = 2.0 ** torch.randint(-3, 4, (shape[dim],), generator=gen)
        x = x * (sizes if dim == -1 else sizes[:, None])
    return x.to(dtype)


def quantised_both(x, recipe, role, counts=None, amax=None):
    return ours.quantise(x, amax, amax, counts, recipe, role, True)


def linear(ops, recipe, dtype, shared=False, lead=None):
    """Result and gradients of one product by ``ops``."""
    *first, K, M = SHAPES[recipe]
    lead = lead or first
    x, w = draw(*lead, K, dtype=dtype).requires_grad_(), draw(M, K, seed=1, dtype=dtype).requires_grad_()
    past = torch.full((1, 1), 700.0, requires_grad=True) if recipe == "delayed" else None
    a, b = quantised_both(x, recipe, "rows", amax=past), quantised_both(w, recipe, "weight", amax=past)
    y, *taps = ops.fp8_linear(a[0], b[0], *a[1:3], *b[1:3], *a[3:], *b[3:], past, recipe, shared)
    z = ours.grad_amax(y, *taps, None, recipe) if shared else y
    z.backward(draw(*lead, M, seed=2, dtype=dtype))
    return [y.detach(), x.grad, w.grad, *([past.grad] if recipe == "delayed" else []), *taps]


def experts(ops, recipe, dtype, counts, stored=True):
    """Of experts' rows, some of whom have none, with gaps in between and behind."""
    *_, K, M = SHAPES[recipe]
    a, counts = Recipe.parse(recipe).alignment, torch.tensor(counts)
    rows = ours.align_rows(draw(int(counts.sum()), K, dtype=dtype), counts, a)
    x, w = rows.requires_grad_(), draw(len(counts), M, K, seed=1, dtype=dtype).requires_grad_()
    past = torch.full((1, 1), 700.0) if recipe == "delayed" else None
    p = quantised_both(x, recipe, "rows", counts, past)
    stack = w.transpose(1, 2) if stored else w.transpose(1, 2).contiguous()
    most = None if past is None else past.expand(len(counts), 1, 1)
    q = quantised_both(stack, recipe, "stack", amax=most)
    y = ops.fp8_grouped_mm(p[0], q[0], counts, *p[1:3], *q[1:3], *p[3:], *q[3:], past, recipe, False)[0]
    y.backward(draw(*y.shape, seed=2, dtype=dtype))
    return [y.detach(), x.grad, w.grad]


def same(found, wanted):
    """Numbers and scales are; sums may be rounded in another order."""
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        size = float(b.float().abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=8e-3 if b.dtype == torch.bfloat16 else 1e-5, atol=1e-6 * (size or 1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", WITH_TE)
def test_linear(te, recipe, dtype):
    """Forward, both gradients, what past steps learn: and all three products are TE's."""
    found = linear(theirs, recipe, dtype)
    assert len(te.gemms) == 3
    same(found, linear(ours, recipe, dtype))


@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_scales_that_ranks_share(te, recipe):
    """The taps are there, and the gradient is quantised by what arrives through them."""
    same(linear(theirs, recipe, torch.float32, shared=True), linear(ours, recipe, torch.float32, shared=True))
    assert len(te.gemms) == 3


@pytest.mark.parametrize("counts", [[130, 0, 5, 128], [0, 0, 0], [0, 17]], ids=str)
@pytest.mark.parametrize("recipe", WITH_TE)
def test_experts(te, recipe, counts):
    for dtype, stored in ((torch.float32, True), (torch.bfloat16, False)):
        found = experts(theirs, recipe, dtype, counts, stored)
        assert len(te.grouped) == (3 if any(counts) else 0)
        te.grouped.clear()
        same(found, experts(ours, recipe, dtype, counts, stored))


@pytest.mark.parametrize("recipe", WITH_TE)
def test_opcheck(te, recipe):
    tests = ("test_faketensor", "test_autograd_registration")  # that of the schema multiplies FP8 itself
    *lead, K, M = SHAPES[recipe]
    past = torch.full((1, 1), 700.0) if recipe == "delayed" else None
    a = quantised_both(draw(*lead, K), recipe, "rows", amax=past)
    b = quantised_both(draw(M, K), recipe, "weight", amax=past)
    args = (a[0], b[0], *a[1:3], *b[1:3], *a[3:], *b[3:], past, recipe, False)
    opcheck(theirs.fp8_linear.default, args, test_utils=tests)
    counts = torch.tensor([128, 0])
    p = quantised_both(draw(128, K), recipe, "rows", counts, past)
    q = quantised_both(draw(2, K, M), recipe, "stack", amax=None if past is None else past.expand(2, 1, 1))
    args = (p[0], q[0], counts, *p[1:3], *q[1:3], *p[3:], *q[3:], past, recipe, False)
    opcheck(theirs.fp8_grouped_mm.default, args, test_utils=tests)


def test_sizes_that_tensor_cores_do_not_take(te):
    """By the product: a depth of 40 tokens is none for blocks of 128; no product has 5 tokens."""
    for lead, gemms in (((5,), 0), ((3, 16), 2), ((0,), 0)):
        te.gemms.clear()
        found = linear(theirs, "blockwise", torch.float32, lead=lead)
        assert len(te.gemms) == gemms
        same(found, linear(ours, "blockwise", torch.float32, lead=lead))
    same(linear(theirs, "current", torch.float64), linear(ours, "current", torch.float64))
    assert not te.gemms


def test_rows_that_are_nobodys(te):
    """Counts that the rows cannot have."""
    counts = torch.tensor([16, 33])
    p, q = quantised_both(draw(64, 48), "current", "rows"), quantised_both(draw(2, 48, 80), "current", "stack")
    args = (torch.tensor([16, 49]), *p[1:3], *q[1:3], *p[3:], *q[3:], None, "current", False)
    with pytest.raises(MoecError, match=r"64 rows are not those of experts with \[16, 49\] rows"):
        theirs.fp8_grouped_mm(p[0], q[0], *args)
    args = (counts, *p[1:3], *q[1:3], *p[3:], *q[3:], None, "current", False)
    assert theirs.fp8_grouped_mm(p[0], q[0], *args)[0].shape == (64, 80)


def test_what_te_cannot_do(monkeypatch):
    te_stub.installed(monkeypatch, is_mxfp8_available=lambda return_reason: (False, "Device compute capability 10.0"))
    ok = (torch.bfloat16, torch.float32)
    assert te_fp8.refused(Recipe.parse("blockwise"), (256, 128), ok) is None
    assert te_fp8.refused(Recipe.parse("delayed+2"), (48, 16), ok) is None
    for recipe, features, dtypes, why in (
        ("rowwise", (256, 128), ok, "no scales of whole rows"),
        ("mxfp8", (256, 128), ok, "no mxfp8 on this machine: Device compute capability 10.0"),
        ("blockwise", (256, 64), ok, "256 x 64 features, and blockwise wants multiples of 128"),
        ("current", (12, 16), ok, "12 x 16 features, and current wants multiples of 16"),
        ("current", (16, 16), (torch.bfloat16, torch.float64), "it computes no float64"),
    ):
        assert why in te_fp8.refused(Recipe.parse(recipe), features, dtypes)


# -- in a program


class MoE(nn.Module):
    def __init__(self, E, H, I):  # noqa: E741
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up, self.down = nn.Parameter(torch.empty(E, 2 * I, H)), nn.Parameter(torch.empty(E, H, I))

    def forward(self, x_TH):
        weights_TK, ids_TK = torch.topk(self.router(x_TH).softmax(-1), 2)
        y_TH = torch.zeros_like(x_TH)
        for e in range(len(self.down)):
            token, slot = torch.where(ids_TK == e)
            gate, up = F.linear(x_TH[token], self.gate_up[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[e])
            y_TH.index_add_(0, token, y * weights_TK[token, slot, None])
        return y_TH


class Net(nn.Module):
    """Widths that every recipe takes, but for a linear of twelve features."""

    def __init__(self, H=128):
        super().__init__()
        self.embed, self.moe, self.head = nn.Embedding(19, H), MoE(4, H, H), nn.Linear(H, 19, bias=False)
        self.up, self.down, self.thin = nn.Linear(H, 2 * H), nn.Linear(2 * H, H, bias=False), nn.Linear(H, 12)

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = (x + self.down(F.gelu(self.up(x)))).flatten(0, 1)
        x = x + self.moe(x)
        return F.cross_entropy(self.head(x), labels.flatten()) + self.thin(x).square().mean()


@cache
def net():
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * p.shape[-1] ** -0.5)
    ids = torch.randint(0, 19, (4, 32))
    return model, (ids, ids.flip(0)), capture(model, (ids, ids.flip(0)), {}, training=True)


def program(recipe, backend, degrees=(1, 1, 1, 1), stage="lower", **options):
    plan = Plan(*degrees, precision=Precision(fp8=recipe, exclude=(), **options), backend=backend)
    return dict(compile_stages(net()[2], plan))[stage]


def names(program, *kinds):
    found = [op_name(n) for n in program.graph.nodes if n.op == "call_function"]
    return [n for n in found if n.startswith(kinds)]


DEGREES = [
    ("current", (1, 1, 1, 1)),
    ("current", (1, 2, 1, 2)),
    ("mxfp8", (2, 1, 2, 1)),
    pytest.param("blockwise", (1, 1, 1, 1), marks=pytest.mark.nightly),
    pytest.param("delayed", (2, 1, 2, 1), marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("recipe", "degrees"), DEGREES, ids=str)
def test_a_program(te, recipe, degrees):
    """TE multiplies, moec quantises: the same nodes do, ranks' maxima among them; losses and gradients are those of
    moec's products; the types are, to the verifier and to the witness."""
    own, made = program(recipe, "eager", degrees), program(recipe, "te", degrees)
    products = ("moec_te.fp8_",)
    assert names(made, *products) == ["moec_te.fp8_linear"] * 2 + ["moec_te.fp8_grouped_mm"] * 2
    scales = ("moec.amax", "moec.m_to_i", "moec.i_to_m", "moec.grad_amax", "moec.note_amax", "moec.past_amax")
    assert Counter(names(made, *scales)) == Counter(names(own, *scales))
    assert any("fp8_linear is not Transformer Engine's: 12 x 128 features" in w for w in made.why_not), made.why_not
    assert any("by an op of its own: its first products are Transformer Engine's" in w for w in made.why_not)
    verify(made)
    witness(program(recipe, "te", degrees, "use_transformer_engine"))
    te.gemms.clear()
    te.grouped.clear()
    model, batch, _ = net()
    found, wanted = (_Oracle(model, batch, {}, None)._run(p, promoted=False) for p in (made, own))
    assert len(te.gemms) == 3 * 2 * made.mesh.world and len(te.grouped) == 3 * 2 * made.mesh.world
    torch.testing.assert_close(found.outputs, wanted.outputs, rtol=1e-4, atol=0)
    for name, g in wanted.grads.items():
        assert (g is None) == (found.grads[name] is None), name
        assert g is None or _relative(found.grads[name], g) < 2e-3, name


def test_what_is_declined(te):
    made = program("rowwise", "te")
    assert not names(made, "moec_te.fp8_") and names(made, "moec.fp8_linear")
    why = [w for w in made.why_not if "is not Transformer Engine's: it has no scales of whole rows" in w]
    assert len(why) == 6
    assert not names(program("current", "eager"), "moec_te")


def test_a_step(te):
    """bf16 weights that are cast and quantised once a step, scheduled graphs: through the public door."""
    model, batch, _ = net()
    found = []
    for backend in ("te", "eager"):
        precision = Precision("bf16", "blockwise", exclude=())
        plan = Plan(precision=precision, backend=backend, overlap=Overlap(), fuse=False)
        parallel = moec.parallelize(copy.deepcopy(model), plan, example_inputs=batch)
        loss = parallel(*batch)
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in parallel.named_parameters()}))
    assert te.gemms and te.grouped and {g["out_dtype"] for g in te.gemms} <= {torch.bfloat16, torch.float32}
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=0)
    for name, g in found[1][1].items():
        assert _relative(found[0][1][name].float(), g.float()) < 2e-2, name


def test_without_transformer_engine(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    for act in (lambda: te_fp8.require("current"), lambda: program("current", "te")):
        with pytest.raises(MoecError, match=r"(?s)cannot be imported.*leave Plan.backend alone"):
            act()


def test_cases_for_a_gpu(te, monkeypatch):
    """One for each product and recipe that TE has, all of whose products are TE's (a GPU being there, which is played);
    none without TE."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import gpu_cases

    found = [c for c in gpu_cases.cases(tiny=True) if "by Transformer Engine" in c.name]
    assert len(found) == 6 and not any("rowwise" in c.name for c in found)
    for case in found:
        exact = gpu_cases.outputs(case, "cpu", torch.float32, torch.float32)
        assert not te.gemms and not te.grouped
        with monkeypatch.context() as m:
            m.setattr(torch.Tensor, "is_cuda", True)
            got = gpu_cases.outputs(case, "cpu", torch.float32, torch.float32)
        assert len(te.gemms) + len(te.grouped) == 3
        assert gpu_cases.error(got, exact) < case.limit
        te.gemms.clear()
        te.grouped.clear()
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    assert not [c for c in gpu_cases.cases(tiny=True) if "by Transformer Engine" in c.name]


# -- it is seen where something is wrong


@pytest.mark.parametrize("recipe", WITH_TE)
def test_the_proof(te, recipe):
    te_fp8.prove.__wrapped__("cpu", recipe)


def transposed(q_RD, scale, recipe, square):
    """Scales of the right shape, in each other's place."""
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    turned = scale.t().reshape(scale.shape)
    return operand(q_RD, turned.view(torch.float8_e8m0fnu) if turned.dtype == torch.uint8 else turned, recipe, square)


def not_transposed(q_RD, scale, recipe, square):
    """Numbers in the other layout."""
    return operand(q_RD.contiguous().t().reshape(q_RD.shape), scale, recipe, square)


def next_to_it(q_RD, scale, recipe, square):
    """Scales of the neighbouring tile."""
    moved = scale.view(torch.uint8).roll(1, 0).view(scale.dtype) if scale.element_size() == 1 else scale.roll(1, 0)
    return operand(q_RD, moved, recipe, square)


def twice(q_RD, scale, recipe, square):
    return operand(q_RD, scale * scale, recipe, square)


operand = te_fp8.operand
SABOTAGE = [("delayed", twice), ("current", twice), ("current", not_transposed)]
SABOTAGE += [(r, f) for r in ("blockwise", "mxfp8") for f in (transposed, not_transposed, next_to_it)]


@pytest.mark.parametrize(("recipe", "wrong"), SABOTAGE)
def test_operands_that_are_wrong(te, monkeypatch, recipe, wrong):
    """Each is seen by the proof that runs on a GPU, and by the tests above."""
    monkeypatch.setattr(te_fp8, "operand", wrong)
    with pytest.raises(MoecError, match="differs from moec's by"):
        te_fp8.prove.__wrapped__("cpu", recipe)
    counts = [130, 0, 5, 128]
    for f, *args in ((linear, torch.float32), (experts, torch.float32, counts)):
        with pytest.raises(AssertionError):
            same(f(theirs, recipe, *args), f(ours, recipe, *args))


def test_another_transformer_engine_is_refused(monkeypatch):
    def with_fast_sums(**given):
        return te_stub.general_gemm(**given)[0].mul(1.05), None

    te_stub.installed(monkeypatch, general_gemm=with_fast_sums)
    with pytest.raises(MoecError, match=r"fp8_linear of the recipe blockwise differs"):
        te_fp8.prove.__wrapped__("cpu", "blockwise")


def test_the_proof_is_asked_for(te, monkeypatch):
    """By the pass, of the plan's recipe; on a GPU that has the recipe."""
    asked = []
    with monkeypatch.context() as m:
        m.setattr(te_fp8, "require", asked.append)
        program("current", "te")
        program("current", "eager")
    assert asked == ["current"]
    monkeypatch.setattr(te_fp8, "prove", lambda device, recipe: asked.append((device, recipe)))
    te_fp8.require("mxfp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    te_fp8.require("mxfp8")
    te_fp8.require("rowwise")
    te_stub.installed(monkeypatch, is_mxfp8_available=lambda return_reason: (False, "of another kind"))
    te_fp8.require("mxfp8")
    assert asked == ["current", (3, "mxfp8")]
