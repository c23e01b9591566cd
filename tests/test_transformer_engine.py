"""The Transformer Engine adapter: against a stand-in that computes what TE documents (te_stub.py); where TE's Python
source is installed (``pip install --no-deps transformer-engine``), against its signatures and its Triton kernels."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import te_stub
import torch
from hypothesis import given
from hypothesis import strategies as st
from spmd import Batch, Shape, build, captured, compile_stages
from torch.library import opcheck

import moec
from moec.capture import capture
from moec.program import op_name
from moec.runtime import transformer_engine
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec

ours, theirs = torch.ops.moec, torch.ops.moec_te
TE = importlib.util.find_spec("transformer_engine")  # where it is, without importing it


@pytest.fixture
def te(monkeypatch):
    te_stub.installed(monkeypatch)


@pytest.fixture(scope="module")
def te_here():
    """For hypothesis, which wants no fixture of one function's scope."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        te_stub.installed(monkeypatch)
        yield


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def specs(draw_):
    groups = draw_(st.sampled_from([1, 1, 2, 4]))
    size = draw_(st.integers(2, 5))
    kept = draw_(st.integers(1, groups))
    k = draw_(st.integers(1, min(6, kept * size)))
    score = draw_(st.sampled_from(["softmax_pre", "sigmoid", "sqrtsoftplus"] + ["softmax_post"] * (k > 1)))
    kinds = ["max", "top2"] + ["topk"] * (kept <= k)
    group_score = draw_(st.sampled_from(kinds)) if groups > 1 else "max"
    return RouteSpec(
        num_experts=groups * size, top_k=k, score=score, normalize=draw_(st.booleans()), scaling=2.5, groups=groups,
        kept_groups=kept, group_score=group_score,
    )  # fmt: skip


@given(specs(), st.booleans(), st.integers(0, 99))
def test_route(te_here, spec, biased, seed):
    """Whatever spec is not refused is computed alike, with its gradient."""
    z = draw(9, spec.num_experts, seed=seed)
    bias = draw(spec.num_experts, seed=seed + 1) * 0.1 if biased else None
    if transformer_engine.refused(spec, biased):
        return
    found = []
    for ops in (ours, theirs):
        leaf = z.clone().requires_grad_()
        weights, ids = ops.route(leaf, bias, None, None, spec.text())
        (grad,) = torch.autograd.grad((weights * draw(*weights.shape, seed=seed + 2)).sum(), leaf)
        found.append((ids, weights, grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1:], found[1][1:])


@pytest.mark.parametrize(
    ("fields", "biased", "why"),
    [
        ({"score": "sigmoid"}, False, "not normalised"),
        ({"score": "softmax_post"}, True, "a bias of the selection"),
        ({"capacity_factor": 1.0}, False, "a capacity"),
        ({"force": "random"}, False, "force='random'"),
        ({"score": "sigmoid", "normalize": True, "groups": 4, "group_score": "max"}, True, "groups scored by max"),
        ({"normalize": True, "groups": 4, "kept_groups": 2, "group_score": "topk"}, False, "groups scored by softmax"),
    ],
)
def test_what_te_cannot_express(fields, biased, why):
    spec = RouteSpec(**{"num_experts": 16, "top_k": 4, "kept_groups": 1} | fields)
    assert why in transformer_engine.refused(spec, biased)


def test_ops(te):
    """Values, gradients, fakes: every op through one block, with an expert that gets nothing; stored both ways."""
    spec = RouteSpec(num_experts=5, top_k=2, score="sigmoid", normalize=True).text()
    z, x, w = draw(7, 5), draw(7, 16, seed=1), draw(5, 12, 16, seed=2)
    z[:, 3] = -9
    for transposed in (True, False):
        found = []
        for ops in (ours, theirs):
            leaves = [t.clone().requires_grad_() for t in (z, x, w)]
            weights, ids = ops.route(leaves[0], None, None, None, spec)
            rows, counts, numbering = ops.permute(leaves[1], ids, 5)
            weight = leaves[2].transpose(1, 2) if transposed else leaves[2].transpose(1, 2).contiguous()
            y = ops.unpermute(ops.grouped_mm(rows, weight, counts), weights, numbering)
            found.append([counts, rows, y, *torch.autograd.grad((y * draw(*y.shape, seed=3)).sum(), leaves)])
        assert found[0][0][3] == 0
        torch.testing.assert_close(found[0], found[1])
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
    rows, counts, numbering = theirs.permute(x[:3], ids, 4)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(theirs.route.default, (z, None, None, None, spec), test_utils=tests)
    opcheck(theirs.permute.default, (x[:3], ids, 4), test_utils=tests)
    opcheck(theirs.unpermute.default, (rows, draw(3, 2), numbering), test_utils=tests)
    opcheck(theirs.grouped_mm.default, (rows, draw(4, 16, 8), counts), test_utils=tests)
    for empty in (theirs.permute(x[:0], ids[:0], 4)[0], theirs.unpermute(rows[:0], draw(0, 2), numbering[:0])):
        assert empty.shape == (0, 16)


def trained(plan):
    """Loss and gradients of one step in fp32."""
    inputs = Batch(2, 5).tensors()
    model = moec.parallelize(build(Shape()), plan, example_inputs=inputs)
    loss = model(*inputs)["loss"]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def lowered(plan, dtype=torch.float32):
    """The ops of ours in the last program, and why_not."""
    program = captured(Shape()) if dtype == torch.float32 else capture(
        build(Shape()).to(dtype), Batch(2, 5).tensors(), {}, training=True
    )
    program = compile_stages(program, plan)[-1][1]
    names = [op_name(n) for n in program.graph.nodes if n.op == "call_function"]
    return {n for n in names if n.startswith("moec")}, program.why_not


def test_a_model(te):
    loss, grads = trained(moec.Plan())
    te_loss, te_grads = trained(moec.Plan(backend="te"))
    torch.testing.assert_close(te_loss, loss)
    torch.testing.assert_close(te_grads, grads, rtol=1e-4, atol=1e-5)


def test_what_is_lowered(te):
    """Typed and verified like any program; what is declined says why."""
    wanted = {"moec_te.route", "moec_te.permute", "moec_te.grouped_mm", "moec_te.unpermute"}
    names, _ = lowered(moec.Plan(dp=2, ep=2, backend="te"))
    assert wanted <= names and not {n.replace("moec_te.", "moec.") for n in wanted} & names
    names, why_not = lowered(moec.Plan(dp=2, ep=2, dispatch="allgather", backend="te"))
    assert "moec.permute_kept" in names and "moec_te.grouped_mm" in names
    assert any("permute_kept is not Transformer Engine's: its ids may be -1" in line for line in why_not)


@pytest.mark.nightly
def test_what_is_not_lowered(te):
    names, why_not = lowered(moec.Plan(dp=1, backend="te"), torch.float64)
    assert not any(n.startswith("moec_te") for n in names)
    assert any("moec.route is not Transformer Engine's: it computes no float64" in line for line in why_not)
    assert not any(n.startswith("moec_te") for n in lowered(moec.Plan(dp=1))[0])


def test_without_transformer_engine(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(MoecError, match=r"(?s)cannot be imported.*leave Plan.backend alone"):
        lowered(moec.Plan(dp=1, backend="te"))


def test_another_transformer_engine_is_refused(te, monkeypatch):
    """The proof that runs on a GPU: passes with what TE documents, and sees each function that does something else."""
    transformer_engine.prove.__wrapped__("cpu", torch.bfloat16)
    for name, wrong in {
        "moe_unpermute": lambda inp, **kw: te_stub.moe_unpermute(inp, **kw) * 1.05,
        "moe_permute": lambda inp, **kw: [t.roll(1, 0) for t in te_stub.moe_permute(inp, **kw)],
        "moe_permute_index_map_backward": lambda grad_permuted_act, row_id_map, num_tokens, topK: grad_permuted_act[
            row_id_map.view(topK, num_tokens)[0]
        ],
        "moe_unpermute_index_map_backward": lambda **kw: [
            t * 1.1 for t in te_stub.moe_unpermute_index_map_backward(**kw)
        ],
        "fused_topk_with_score_function": lambda **kw: te_stub.fused_topk_with_score_function(
            **kw | {"score_function": "sqrtsoftplus"}
        ),
        "general_grouped_gemm": lambda **kw: te_stub.general_grouped_gemm(**kw | {"B": [b * 0.9 for b in kw["B"]]}),
    }.items():
        te_stub.installed(monkeypatch, **{name: wrong})
        with pytest.raises(MoecError, match="differs from moec's"):
            transformer_engine.prove.__wrapped__("cpu", torch.bfloat16)


# -- Transformer Engine's own source


def source(file: str) -> Path:
    if TE is None or TE.origin is None:
        pytest.skip("Transformer Engine's source is not here (pip install --no-deps transformer-engine)")
    return Path(TE.origin).parent / file


@pytest.mark.nightly
@pytest.mark.parametrize("file", transformer_engine.USED)
def test_signatures(file):
    """TE has the functions, with the parameters that are passed, and asks for no other; so has the stand-in."""
    functions = {n.name: n.args for n in ast.parse(source(file).read_text()).body if isinstance(n, ast.FunctionDef)}
    for name, passed in transformer_engine.USED[file].items():
        arguments = functions[name]
        known = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
        assert set(passed) <= set(known), f"{name} takes {known}"
        required = known[: len(arguments.args) - len(arguments.defaults)]
        assert set(required) <= set(passed), f"{name} asks for {required}"
        stand_in = getattr(te_stub, name).__code__
        assert set(stand_in.co_varnames[: stand_in.co_argcount]) <= set(known)


@pytest.fixture
def te_permutation(monkeypatch, tmp_path):
    """TE's launchers of its Triton kernels, on CPU tensors, with a block size instead of a search for the best."""
    pytest.importorskip("triton")
    name = "transformer_engine.common.triton.permutation"
    for package in ("transformer_engine", "transformer_engine.common", "transformer_engine.common.triton"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    kernels = load(name, source("common/triton/permutation.py"))
    monkeypatch.setitem(sys.modules, name, kernels)
    for tuned in [k for k, v in vars(kernels).items() if hasattr(v, "configs")]:
        setattr(kernels, tuned, WithBlock(getattr(kernels, tuned).fn))
    here = tmp_path / "te_permutation.py"
    here.write_text(source("pytorch/triton/permutation.py").read_text().replace('device="cuda"', 'device="cpu"'))
    return load("te_permutation", here)


def load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WithBlock:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        grid = grid({"BLOCK_SIZE": 64}) if callable(grid) else grid
        return lambda *args, **named: self.kernel[grid](*args, BLOCK_SIZE=64, **named)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropped", [False, True])
def test_te_kernels_permute_as_we_do(te_permutation, dtype, dropped):
    """NVIDIA's Triton kernels, run by the repaired interpreter, against ``moec::permute``, ``moec::unpermute`` and
    their gradients; with pairs that are dropped, TE by its mask, moec by -1."""
    from interpreter import repaired

    T, K, E, H = 21, 3, 6, 80
    gen = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(E - 1, generator=gen)[:K] for _ in range(T)])  # the last expert gets nothing
    if dropped:
        ids[torch.rand(T, K, generator=gen) < 0.3] = -1
        ids[5] = -1
    x, weights = draw(T, H, dtype=dtype), draw(T, K, seed=1).where(ids >= 0, torch.zeros(()))
    mask = torch.zeros(T, E + 1, dtype=torch.int32).scatter(1, ids.where(ids >= 0, torch.tensor(E)), 1)[:, :E]
    probs = torch.zeros(T, E + 1).scatter(1, ids.where(ids >= 0, torch.tensor(E)), weights)[:, :E].contiguous()
    kept = int(mask.sum())

    x.requires_grad_()
    rows, counts, row_of = ours.permute(x, ids, E)
    assert counts.tolist() == mask.sum(0).tolist()
    body = (rows * 2).detach().requires_grad_()
    leaf = weights.clone().requires_grad_()
    y = ours.unpermute(body, leaf, row_of)
    grad = draw(T, H, seed=2, dtype=dtype)
    y.backward(grad)
    (grad_x,) = torch.autograd.grad(rows, x, body.grad)

    with repaired():
        row_id_map = te_permutation.make_row_id_map(mask.contiguous(), T, E)
        te_rows, _, _ = te_permutation.permute_with_mask_map(x.detach(), row_id_map, None, None, None, T, E, kept, H, 0)
        te_y, _ = te_permutation.unpermute_with_mask_map(te_rows * 2, row_id_map, probs, None, None, T, E, H)
        te_grad_rows, te_grad_probs = te_permutation.unpermute_with_mask_map_bwd_with_merging_probs(
            grad, row_id_map, te_rows * 2, probs, None, T, E, kept, H
        )
        te_grad_x, _ = te_permutation.unpermute_with_mask_map(te_grad_rows, row_id_map, None, None, None, T, E, H)
    assert torch.equal(te_rows, rows[:kept])
    assert torch.equal(te_grad_rows, body.grad[:kept])
    torch.testing.assert_close(te_y, y)  # TE adds from the last expert to the first
    torch.testing.assert_close(te_grad_x, grad_x)
    te_grad_weights = te_grad_probs.gather(1, ids.clamp(min=0)).where(ids >= 0, torch.zeros(()))
    torch.testing.assert_close(te_grad_weights, leaf.grad, rtol=1e-4, atol=1e-4)
