"""The experts of a block become one op: bodies found in graphs, what is declined and why, what is left in memory."""

import functools

import pytest
import torch
import torch.nn.functional as F
from capture_models import Model
from moe_spellings import SPELLINGS
from spmd import Shape, compiled
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from user_models import Regression, floats

import moec
from moec import hf
from moec.capture.examples import dummy_examples
from moec.compiler import compile_program
from moec.passes.outline_body import Declined, outline
from moec.passes.verify import verify
from moec.program import op_name
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import DispatchMode, python_dispatcher

ops = torch.ops.moec
N, M, T = 6, 8, 7
SPELLED = {
    "chunk": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "halves": lambda h: torch.tanh(h[:, : M // 2]) * h[:, M // 2 :],
    "interleaved": lambda h: h[:, ::2].clamp(max=0.5) * (h[:, 1::2] + 1),
    "squared relu": lambda h: F.relu(h).square(),
    "relu to a power": lambda h: F.relu(h).pow(2),
    "cube": lambda h: h.pow(3),
    "gelu": lambda h: F.gelu(h),
    "gelu tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu written out": lambda h: 0.5 * h * (1 + torch.erf(h / 2**0.5)),
    "quick gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "relu6": lambda h: F.relu6(h),
    "bounded": lambda h: torch.maximum(h, -h).clamp(0.1, 0.9),
    "subtracted": lambda h: 1 - torch.exp(-h.abs()),
    "scaled add": lambda h: torch.add(h.sigmoid(), h, alpha=0.25),
    "reciprocal": lambda h: 1 / (1 + torch.exp(-h)),
    "one column more": lambda h: (h.unsqueeze(1) * 2).squeeze(1),
    "nothing": lambda h: h,
}
DECLINED = {
    "softplus": (F.softplus, "aten.softplus is no function that generated code knows"),
    "softmax": (lambda h: h.softmax(-1), "aten._softmax is no function"),
    "columns turned": (lambda h: h.flip(1), "aten.flip is no function"),
    "uneven": (lambda h: h[:, :3], "no one of several equal blocks"),
    "sum over rows": (lambda h: h * h.sum(0), "mixes rows"),
    "another tensor": (lambda h: h * torch.ones(M), "aten.ones mixes rows"),
    "float16 between": (lambda h: h.half().float(), "torch.float16"),
}


def outlined(fn, dtype=torch.float64):
    """``fn`` between two products, traced; the body that is found there and the nodes that it replaces."""

    def experts(x, w_in, w_out, counts):
        return ops.grouped_mm(fn(ops.grouped_mm(x, w_in, counts)), w_out, counts)

    width = fn(torch.zeros(N, M, dtype=dtype)).shape[1]
    args = torch.zeros(N, 4, dtype=dtype), torch.zeros(2, 4, M, dtype=dtype), torch.zeros(2, width, 4, dtype=dtype)
    with python_dispatcher():
        graph = make_fx(experts, tracing_mode="fake")(*args, torch.tensor([2, 4])).graph
    second = [n for n in graph.nodes if op_name(n) == "moec.grouped_mm"][-1]
    return outline(second.args[0], second.args[2], Mesh())


@pytest.mark.parametrize("name", SPELLED)
def test_a_body_is_what_it_was_outlined_from(name):
    body, products, between = outlined(SPELLED[name])
    h = torch.randn(N, M, dtype=torch.float64)
    (y,) = body.run([h])
    torch.testing.assert_close(y, SPELLED[name](h), rtol=1e-14, atol=1e-14)
    assert len(products) == body.products == 1
    assert products[0] not in between


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_no_body_is_declined_with_the_reason(name):
    fn, reason = DECLINED[name]
    with pytest.raises(Declined, match=reason):
        outlined(fn, torch.float32)


def test_casts_keep_their_meaning():
    """To fp32 is what the body does anyway; to the dtype of the products is a rounding in between."""
    fn = lambda h: F.silu(h.float()).bfloat16() * h  # noqa: E731
    body, _, _ = outlined(fn, torch.bfloat16)
    assert [s.op for s in body.steps] == ["silu", "rounded", "mul"]
    h = torch.randn(N, M).bfloat16()
    (y,) = body.run([h])
    assert torch.equal(y, fn(h))


@functools.cache
def parallel(fuse: bool) -> moec.ParallelModule:
    torch.manual_seed(0)
    return moec.parallelize(Regression(), moec.Plan(fuse=fuse), example_inputs=floats(T))


def block(module: moec.ParallelModule) -> list[str]:
    """Ops of the block, routing and views apart."""
    found = [op_name(n) for n in module.program.graph.nodes if n.op == "call_function"]
    return [n for n in found if n.startswith("moec.") and n not in ("moec.tally", "moec.route", "moec.route_counted")]


def gradients(module: moec.ParallelModule) -> list[torch.Tensor]:
    module.zero_grad()
    loss, out = module(*floats(T))
    loss.backward()
    return [loss.detach(), out.detach(), *[p.grad for p in module.parameters()]]


def test_a_block_is_one_op_with_the_same_results():
    assert block(parallel(True)) == ["moec.experts"]
    assert set(block(parallel(False))) == {"moec.permute", "moec.grouped_mm", "moec.grouped_add", "moec.unpermute"}
    torch.testing.assert_close(gradients(parallel(True)), gradients(parallel(False)), rtol=1e-5, atol=1e-6)


class Rows(DispatchMode):
    """Every value with a row for each pair of a token and a choice that an op makes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.shape[:1] == (T * 2,) and t.untyped_storage().data_ptr() not in given:
                self.made.append((str(func).rsplit(".", 1)[0], tuple(t.shape)))
        return out


@pytest.mark.parametrize(("fuse", "forward", "backward"), [(True, [("moec.experts", (14, 8))], 0), (False, None, 4)])
def test_materialised_between_tokens_and_tokens(fuse, forward, backward):
    """Rows of pairs in memory: the first product in the forward, which is saved, and none in the backward."""
    with Rows() as seen:
        loss, _ = parallel(fuse)(*floats(T))
    with Rows() as later:
        loss.backward()
    assert seen.made == forward or (not fuse and len(seen.made) == 6)
    assert len(later.made) == backward, later.made


def test_saved_are_inputs_first_products_and_indices():
    """Counted on the parallel module: what its experts keep for the backward, node by node."""
    program = parallel(True).program
    kept: dict[str, list[torch.Tensor]] = {}

    class Run(fx.Interpreter):
        def run_node(self, n):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(n.name, []).append(t) or t, id):
                return super().run_node(n)

    values = {n: torch.randn(s.shape, requires_grad=True) for n, s in program.params.items()}
    x, y = floats(T)
    inputs = dict(zip(program.inputs, (x, y), strict=True))
    run = Run(program.module, garbage_collect_values=False)
    run.run(*[values[n.name] if n.name in values else inputs[n.name] for n in program.placeholders()])
    (node,) = [n for n in program.graph.nodes if op_name(n) == "moec.experts"]
    x_TH, _, weights_TK, w_in, b_in, w_out, b_out, _, _ = fx.node.map_arg(node.args, run.env.get)
    _, h_NA, row_of_TK, counts_E = run.env[node]
    expected = [x_TH, weights_TK, *w_in, *b_in, w_out, b_out, h_NA, row_of_TK, counts_E]
    assert sum(t.nbytes for t in kept[node.name]) == sum(t.nbytes for t in expected)
    assert {t.data_ptr() for t in kept[node.name]} == {t.data_ptr() for t in expected}


def declined(model, *args, plan: moec.Plan | None = None) -> list[str]:
    program = compile_program(model, plan or moec.Plan(), 1, args, {}, training=True)
    return [w.split("op by op: ")[1] for w in program.why_not if "op by op" in w]


@pytest.mark.parametrize("degrees", [(1, 2, 1, 1), (2, 2, 1, 1)])
def test_tokens_that_were_padded_for_their_ranks(degrees):
    """tp ranks that hold the same tokens share them out: numbers that do not divide are padded around the block."""
    program = dict(compiled(Shape(), degrees))["lower"]
    assert {"moec.pad_rows", "moec.experts"} <= {op_name(n) for n in program.graph.nodes if n.op == "call_function"}



def test_an_activation_without_a_primitive_stays_and_says_why():
    torch.manual_seed(0)
    model = Regression()
    for expert in model.moe.experts:
        expert.act = torch.nn.Softplus()
    assert declined(model, *floats(T)) == ["aten.softplus is no function that generated code knows"]


def test_columns_of_a_packed_product_are_its_blocks():
    """What is cut in each of two blocks cannot be read as interleaved columns: the shards would be other columns."""
    program = dict(compiled(Shape(), (1, 4, 1, 4)))["fuse_experts"].fork()
    verify(program)
    (node,) = [n for n in program.graph.nodes if op_name(n) == "moec.experts"]
    node.args = tuple(a.replace("chunk", "every") if isinstance(a, str) else a for a in node.args)
    with pytest.raises(MoecError, match=r"type S\(1,parts=2\) on \w+, not S\(1\)"):
        verify(program)


STAY = {"WeightedBetween", "WeightedBetweenLoop", "ScaledExperts", "ScaledStacked"}
"""Spellings with weights, or scales of an expert, between the products."""
FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_next",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_every_spelling_of_a_block_becomes_one_op_or_says_why(spelling):
    torch.manual_seed(1)
    inputs = {n: torch.randint(0, 20, (6, 5)) for n in ("ids", "labels")}
    program = compile_program(Model(spelling()), moec.Plan(ep=2), 2, (), inputs, training=True)
    reasons = [w for w in program.why_not if "op by op" in w]
    assert bool(reasons) == (spelling.__name__ in STAY), reasons
    assert program.op_counts()["moec.experts_rows"] == (not reasons)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_family_become_one_op(family):
    args, kwargs = dummy_examples(model := hf.build(family), training=True)
    program = compile_program(model, moec.Plan(), 1, args, kwargs, training=True)
    counts = program.op_counts()
    assert counts["moec.experts"] == len(program.blocks) and not counts["moec.grouped_mm"]
