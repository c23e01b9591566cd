"""fuse_tp: against the model in eager mode, in float64; the ops and their gradients one for each transfer.

The worst error that these examples show is 3e-15.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import deep_models
import pytest
import test_joint
import torch
import torch.nn.functional as F
from spmd import Batch, Shape, build, captured, compile_stages, off, oracle
from test_gloo_grid import TOLERANCE, trains_like_one_device
from test_zoo import make
from torch import Tensor, fx, nn
from witness import WitnessError, witness

import moec
from moec import cost
from moec.compiler import compile_program, joint_graphs
from moec.cost import roofline
from moec.explain import explain
from moec.overlap import Overlap
from moec.passes.fuse_tp import fuse_tp
from moec.passes.pipeline_tp import pipeline_tp
from moec.passes.verify import verify
from moec.passes.verify.order import check_order, collective_order
from moec.placement import S
from moec.plan import Plan
from moec.precision import Precision
from moec.program import Program, op_name
from moec.runtime.collectives import is_fused
from moec.runtime.errors import MoecError

OVERLAP = Overlap(symmetric_memory=True)
ON = {"sequence_parallel": True, "overlap": OVERLAP}
CASES = {
    "experts elsewhere": (Shape(), Plan(2, 2, 2, 1, **ON)),
    "context": (Shape(), Plan(1, 2, 2, 1, cp=2, **ON)),
    "experts cut, biases": (Shape(biased=True), Plan(2, 2, 1, 2, **ON)),
    "fewer keys": (Shape(kv_heads=4), Plan(1, 4, 2, 1, **ON)),
    "fsdp": (Shape(), Plan(2, 2, 2, 1, **ON, fsdp=True)),
    "chunks too": (Shape(8), Plan(2, 2, 4, 1, sequence_parallel=True, overlap=replace(OVERLAP, chunks=2))),
}
LINEAR = torch.ops.aten.linear.default


@cache
def stages(case: str) -> dict[str, Program]:
    shape, plan = CASES[case]
    return dict(compile_stages(captured(shape), plan))


def counts(program: Program) -> Counter:
    """Fused ops, and activations' gathers and reduce-scatters, by module."""
    return Counter(
        (n.meta["where"], op_name(n).removeprefix("moec."))
        for n in program.graph.nodes
        if op_name(n) in ("moec.gather_linear", "moec.linear_scatter", "moec.s_to_r", "moec.p_to_s")
        if "moec.pack" not in op_name(n.args[0]) and isinstance(n.args[0].meta["val"].shape[0], torch.SymInt)
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in ("experts elsewhere", "experts cut, biases") else pytest.mark.nightly)
     for c in CASES],
)  # fmt: skip
def test_values_and_gradients_are_the_models(case: str) -> None:
    found, (shape, plan) = stages(case), CASES[case]
    for batch in (Batch(2 * plan.dp, 12, 1, plan.dp), Batch(plan.dp, 8, 2, plan.dp)):
        truth = oracle(build(shape), batch)
        for stage in ("fuse_tp", "lower"):
            assert off(truth.compare(stage, found[stage])) < 1e-13, (stage, batch)


def test_a_transfer_is_one_op_with_its_products() -> None:
    found = stages("experts elsewhere")
    assert counts(found["fuse_norm"]) == {("layers.0.norm1", "s_to_r"): 1, ("layers.0.attention.o", "p_to_s"): 1}
    assert counts(found["fuse_tp"]) == {
        ("layers.0.attention.q", "gather_linear"): 1, ("layers.0.attention.o", "linear_scatter"): 1,
    }  # fmt: skip
    gather = next(n for n in found["fuse_tp"].graph.nodes if op_name(n) == "moec.gather_linear")
    weights = [[n.name for n in w.all_input_nodes] for w in gather.args[1]]
    assert weights == [[f"p_layers_0_attention_{x}_weight"] for x in "qkv"]
    assert found["fuse_tp"].why_not == found["fuse_norm"].why_not


class Mlp(deep_models.Layer):
    """A layer of experts, and one that tp shares: two products of one gather."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12)
        self.down, self.norm2 = nn.Linear(12, 8, bias=False), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def deep_model() -> nn.Module:
    return deep_models.Deep(Mlp, layers=2).double()


@cache
def deep() -> Program:
    plan = Plan(2, 2, 2, 1, sequence_parallel=True, overlap=Overlap(symmetric_memory=True, cluster="h100-nvl8-400g"))
    return compile_program(deep_model(), plan, 4, DATA, {}, training=True)


DATA = (test_joint.IDS6, test_joint.LABELS6)


def test_the_ops_own_derivatives_are_those_of_the_model() -> None:
    """As graphs in lockstep: each op's derivative is the other op, and nothing else is sent."""
    program = deep()
    graphs = joint_graphs(program)
    test_joint.assert_collectives(program, graphs)
    model = deep_model()
    test_joint.run(program, graphs, model, DATA)
    kinds = [Counter(op_name(n) for n in g.graph.nodes) for g in (graphs.forward, graphs.backward)]
    for kind, other in (("moec.gather_linear", "moec.linear_scatter"), ("moec.linear_scatter", "moec.gather_linear")):
        assert kinds[0][kind] == kinds[1][other] > 0


def test_every_rank_issues_them_in_one_order() -> None:
    """They are in the order that ranks compare, and share no communicator with exchanges of tokens."""
    program = deep()
    assert program.step is not None
    graph = program.step.forward.graph
    fused = [n for n in graph.nodes if n.op == "call_function" and is_fused(n.target)]
    listed = [line.split()[1] for lines in collective_order(graph).values() for line in lines]
    assert fused and {n.name for n in fused} <= set(listed)
    check_order(graph, program.mesh)
    broken = fx.Graph()
    broken.output(broken.graph_copy(graph, {}))
    exchange = next(n for n in broken.nodes if op_name(n) == "moec.all_to_all")
    other = next(n for n in broken.nodes if is_fused(n.target))
    other.args = (*other.args[:-1], exchange.args[-1])
    with pytest.raises(MoecError, match="communicator"):
        check_order(broken, program.mesh)


def test_explain_says_what_is_sent_and_what_hides_it() -> None:
    shown = explain(deep())
    assert shown.schedule is not None
    found = [t for t in shown.schedule.transfers if t.kind in ("gather_linear", "linear_scatter")]
    assert {t.phase for t in found} == {"forward", "backward"}
    for t in found:
        assert t.beside[0][0] == "its own products" and 0 < t.hidden_s < t.end_s - t.start_s and t.stall_s > 0
        assert t.before == t.number + 1 and t.ranks == 2
        assert t.hidden_s + t.stall_s == pytest.approx(t.end_s - t.start_s)
    tokens = DATA[0].numel()  # an example call is a rank's; gathered over tp
    assert {t.bytes for t in found} == {tokens * deep_models.H * 8}
    assert "its own products" in str(shown)


def test_the_cost_is_that_of_the_longer_and_a_part_of_the_other() -> None:
    program = deep()
    assert program.step is not None
    graph = program.step.forward.graph
    values = cost.Sizes.of(program, program.step.shapes, [graph])
    node = next(n for n in graph.nodes if op_name(n) == "moec.gather_linear")
    base = cost.cluster("h100-nvl8-400g")
    for slow in ("node", "matmul"):
        bandwidth, flops = (1.0, 1e18) if slow == "node" else (1e18, 1.0)
        on = replace(
            base,
            op_overhead_s=0.0,
            links={**base.links, "node": cost.Link(0.0, bandwidth)},
            matmul_flops=dict.fromkeys([*base.matmul_flops, "float64"], ((1.0, flops),)),
            memory_bytes=((1.0, 1e18),),
        )
        sent, hidden = roofline.own_transfer(node, on, program.mesh, values)
        work = cost.work(node, values)
        (B, S, K), ws = values.shape(node.args[0].meta["val"]), [values.shape(w.meta["val"]) for w in node.args[1]]
        assert work.flops == sum(2 * B * 2 * S * K * n for n, _ in ws)
        longer = sent if slow == "node" else work.flops
        assert roofline.seconds(node, on, program.mesh, values) == pytest.approx(longer, rel=1e-6)
        assert hidden == pytest.approx(0 if slow == "node" else sent / 2, rel=1e-6, abs=1e-9)


# ------------------------------------------------------------------------------------------------ wrong programs


def test_ill_typed_ops_are_found() -> None:
    """By the verifier and by the second witness: another dim, weights that are cut otherwise, a sum that is none."""
    program = stages("experts elsewhere")["fuse_tp"]
    verify(program)
    witness(program)

    def other_dim(n: fx.Node) -> None:
        n.args = (*n.args[:2], 0, *n.args[3:])

    def other_weight(n: fx.Node) -> None:
        own = n.args[1][0] if isinstance(n.args[1], (list, tuple)) else n.args[1]
        ours = "o" if op_name(n) == "moec.gather_linear" else "q"
        wrong = next(m for m in n.graph.nodes if m.name == f"p_layers_0_attention_{ours}_weight")
        with n.graph.inserting_before(n):
            made = n.graph.call_function(torch.ops.aten.transpose.int, (wrong, 0, 1))
            made.meta.update(own.meta)
            made.meta["types"] = {a: S(1 - t.dim) if t.kind == "S" else t for a, t in wrong.meta["types"].items()}
        n.args = (n.args[0], [made, *n.args[1][1:]] if isinstance(n.args[1], (list, tuple)) else made, *n.args[2:])

    for kind in ("moec.gather_linear", "moec.linear_scatter"):
        for change in (other_dim, other_weight):
            broken = program.fork()
            change(next(n for n in broken.graph.nodes if op_name(n) == kind))
            broken.module.recompile()
            for check in (verify, witness):
                with pytest.raises((MoecError, WitnessError)):
                    check(broken)


def test_values_show_what_types_do_not() -> None:
    """Weights of k and v exchanged, and a part of another rank: the types are the same."""
    found, batch = stages("experts elsewhere")["fuse_tp"], Batch(4, 12, 1, 2)
    broken = found.fork()
    gather = next(n for n in broken.graph.nodes if op_name(n) == "moec.gather_linear")
    gather.args = (gather.args[0], [gather.args[1][i] for i in (0, 2, 1)], *gather.args[2:])
    broken.module.recompile()
    verify(broken)
    assert off(oracle(build(Shape()), batch).compare("exchanged", broken)) > 1e-4


# ------------------------------------------------------------------------------------------------ what is left as it is


def test_only_where_it_is_asked_for() -> None:
    for plan in (
        Plan(2, 2, 2, 1, sequence_parallel=True, overlap=Overlap()),
        Plan(2, 2, 2, 1, sequence_parallel=True, overlap=Overlap(symmetric_memory=False)),
        Plan(2, 2, 2, 1, overlap=Overlap(symmetric_memory=True)),
        Plan(4, 1, 2, 1, **ON),
    ):
        assert not fuse_tp.applies(plan), plan
    pieces = Overlap(pipeline_tp=2, symmetric_memory=True)
    assert not pipeline_tp.applies(Plan(2, 2, sequence_parallel=True, overlap=pieces))
    assert pipeline_tp.applies(Plan(2, 2, sequence_parallel=True, overlap=pieces, precision=Precision(fp8="blockwise")))
    assert pipeline_tp.applies(Plan(2, 2, sequence_parallel=True, overlap=Overlap(pipeline_tp=2)))


def test_an_option_without_meaning_is_refused() -> None:
    with pytest.raises(MoecError, match="symmetric_memory=2 is not a bool or 'auto'"):
        Overlap(symmetric_memory=2)  # type: ignore[arg-type]
    assert Overlap.from_dict({"symmetric_memory": True}).to_dict() == {"symmetric_memory": True}


def test_products_in_fp8_stay_and_why_not_says_so() -> None:
    plan = Plan(2, 2, 2, 1, **ON, precision=Precision(fp8="current", exclude=()))
    found = dict(compile_stages(captured(Shape()), plan))["fuse_tp"]
    kinds = {k for _, k in counts(found)}
    assert "s_to_r" in kinds and "gather_linear" not in kinds
    assert [w for w in found.why_not if "is not one op with its products: its products are in FP8" in w]


def test_what_others_read_as_well_stays_and_why_not_says_so() -> None:
    found = stages("experts elsewhere")["fuse_norm"].fork()
    wait = next(n for n in found.graph.nodes if n.target is LINEAR and n.meta["where"].endswith("attention.q")).args[0]
    with found.graph.inserting_after(wait):
        reader = found.graph.call_function(torch.ops.aten.relu.default, (wait,))
    reader.meta.update(wait.meta)
    left = fuse_tp.run(found, CASES["experts elsewhere"][1])
    assert "aten.relu reads it as well" in left.why_not[-1]
    assert "gather_linear" not in {k for _, k in counts(left)}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_hugging_face_models(family: str) -> None:
    """Shared experts in two dims, low-rank projections, what is gathered being read by others too."""
    model = make(family)
    ids = torch.randint(0, model.config.vocab_size, (3, 6), generator=torch.Generator().manual_seed(0))
    plan = Plan(1, 2, 2, 1, **ON)
    report = moec.check(model, plan, example_kwargs={"input_ids": ids, "labels": ids.flip(0)}, world_size=2)
    assert report.ok, report


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_real_processes_train_like_one_device(gloo4) -> None:
    for r in gloo4.run(trains_like_one_device, "plain", (2, 2, 4, 1), ON, timeout=280):
        assert max(r["loss"], r["grad"][0]) <= TOLERANCE["plain"]
        assert max(r["norm"], r["params"][0]) <= 1e-5
