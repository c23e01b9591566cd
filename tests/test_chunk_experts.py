"""chunk_experts: against the model in eager mode and dense one-hot algebra, in float64, for dispatchers, plans and
numbers of chunks; empty chunks, other lengths than those captured; what ends a region.

The worst error that these examples show is 2e-14.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from deep_models import Deep
from deep_models import batch as deep_batch
from dispatch_block import Data, compiled, dense, run, run_real, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd import Batch, Shape, build, captured, compile_stages, off, oracle
from test_dispatch import error, routings
from test_joint import assert_collectives
from test_joint import run as run_joint

import moec
from moec.compiler import joint_graphs
from moec.overlap import Overlap
from moec.plan import Plan
from moec.program import Program
from moec.router import Router
from moec.runtime.collectives import collective
from moec.runtime.route_spec import RouteSpec

SHAPE = Shape(8, biased=True)
PLANS = {
    "alltoall": Plan(2, 2, 4, 1),
    "local tokens": Plan(2, ep=2),
    "etp": Plan(2, 2, 2, 2),
    "sequence": Plan(2, 2, 4, 1, sequence_parallel=True),
    "context": Plan(1, 2, 2, 2, cp=2),
    "allgather": Plan(2, 2, 4, 1, dispatch="allgather"),
    "dedup": Plan(2, 1, 4, 1, cp=2, dispatch="dedup"),
    "hierarchical": Plan(2, 2, 4, 1, dispatch="hierarchical", ranks_per_node=2),
    "fsdp": Plan(4, ep=2, fsdp=True),
    "op by op": Plan(2, 2, 4, 1, fuse=False),
    "gathered sequence": Plan(2, 2, 2, 2, sequence_parallel=True, dispatch="allgather"),
}
BY_DAY = {("alltoall", 3), ("sequence", 5), ("hierarchical", 2)}
BY_DAY_SEQUENCES = {"alltoall", "sequence", "context"}


def plan_of(name: str, chunks: int | str, by: str = "tokens") -> Plan:
    return replace(PLANS[name], overlap=Overlap(chunks=chunks, chunk_by=by))


@cache
def stages(name: str, chunks: int, by: str = "tokens") -> dict[str, Program]:
    return dict(compile_stages(captured(SHAPE), plan_of(name, chunks, by)))


def exchanges(program: Program) -> Counter:
    """Starts that move a block's tokens, by kind and group."""
    return Counter(
        (c.kind, n.args[-1])
        for n in program.graph.nodes
        if n.op == "call_function" and (c := collective(n.target)) and c.primitive in ("exchange", "counts", "equal")
    )


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        pytest.param(name, chunks, marks=() if (name, chunks) in BY_DAY else pytest.mark.nightly)
        for name in PLANS
        for chunks in (2, 3, 5)
    ],
)
def test_values_and_gradients_are_the_models(name: str, chunks: int) -> None:
    """Of batches of other lengths than that of the capture, and of fewer tokens than chunks on a rank."""
    found, model = stages(name, chunks), build(SHAPE)
    dp, seq = PLANS[name].dp, 4 if PLANS[name].cp > 1 or PLANS[name].sequence_parallel else 1
    for batch in (Batch(2 * dp, 3 * seq, 1, dp), Batch(dp, seq, 2, dp, frozenset({0}) if dp > 1 else frozenset())):
        truth = oracle(model, batch)
        for stage in ("chunk_experts", "lower"):
            assert off(truth.compare(stage, found[stage])) < 1e-13, (stage, batch)
    once = dict(compile_stages(captured(SHAPE), PLANS[name]))["shard"]
    assert exchanges(found["lower"]) == Counter({k: n * chunks for k, n in exchanges(once).items()})
    if PLANS[name].fuse:
        counts = found["lower"].op_counts()
        assert counts["moec.experts"] + counts["moec.experts_rows"] == chunks
        assert counts["moec.route_counted"] == chunks


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in BY_DAY_SEQUENCES else pytest.mark.nightly) for n in PLANS]
)
def test_whole_sequences_go_through_attention(name: str) -> None:
    """One region from the embedding to the head; a rank may have an odd number of sequences, or fewer than chunks."""
    found, model = stages(name, 2, "sequences"), build(SHAPE)
    dp, seq = PLANS[name].dp, 4 if PLANS[name].cp > 1 or PLANS[name].sequence_parallel else 1
    for batch in (Batch(3 * dp, 2 * seq, 1, dp), Batch(dp, seq, 2, dp, frozenset({0}) if dp > 1 else frozenset())):
        truth = oracle(model, batch)
        for stage in ("chunk_experts", "lower"):
            assert off(truth.compare(stage, found[stage])) < 1e-13, (stage, batch)
    before, after = (stages(name, 2, by)["lower"].op_counts() for by in ("tokens", "sequences"))
    assert after["aten.scaled_dot_product_attention"] == 2 * before["aten.scaled_dot_product_attention"]
    assert after["moec.split_tokens"] == 1 < before["moec.split_tokens"]  # the numbers of the tokens
    assert exchanges(found["lower"]) == exchanges(stages(name, 2)["lower"])


def test_tokens_where_sequences_are_too_few_or_compete() -> None:
    program = stages("alltoall", 3, "sequences")["lower"]
    assert any("the example has 4 sequences, for 3 chunks of 2" in w for w in program.why_not)
    assert exchanges(program) == exchanges(stages("alltoall", 3)["lower"])
    with pytest.raises(moec.MoecError, match="chunk_by='rows'"):
        Overlap(chunks=2, chunk_by="rows")


def test_a_sequence_cut_in_two_is_caught() -> None:
    """Of flat tokens, as many as a sequence has stay together."""
    plan = Plan(2, ep=2, router=Router(force_balance="round_robin"), overlap=Overlap(chunks=2, chunk_by="sequences"))
    truth = oracle(build(SHAPE), Batch(6, 4, 1, 2))  # three sequences a rank
    found = dict(compile_stages(captured(SHAPE), plan))
    truth.follow("configure_router", found["configure_router"])
    assert off(truth.compare("lower", found["lower"])) < 1e-12
    broken = found["lower"].fork()
    (split,) = [n for n in broken.graph.nodes if n.target is torch.ops.moec.split_tokens.default and n.args[3] != 1]
    split.args = (*split.args[:3], 1)
    broken.module.recompile()
    with pytest.raises((moec.MoecError, RuntimeError)):
        truth.compare("broken", broken)


def test_one_chunk_is_no_pass() -> None:
    assert "chunk_experts" not in stages("alltoall", 1)
    assert "chunk_experts" not in dict(compile_stages(captured(SHAPE), Plan(2, 2, 1, 2, overlap=Overlap(chunks=4))))


def test_auto() -> None:
    program = compiled(6, 3, Plan(6, 1, 6, 1, overlap=Overlap(chunks="auto")), 6)
    assert sum(exchanges(program).values()) == 4 * 3  # counts, rows there and back
    spec = RouteSpec(6, 3, capacity_factor=1.0)
    static = compiled(6, 3, Plan(6, 1, 6, 1, dispatch="static", overlap=Overlap(chunks="auto")), 6, spec)
    assert sum(exchanges(static).values()) == 2


CASES = [((6, 3), (6, 1, 6, 1, 2)), ((8, 4), (4, 2, 4, 2, 4)), ((6, 6), (2, 1, 2, 1, 1)), ((8, 8), (1, 8, 8, 1, 4))]
NAMES = ("alltoall", "allgather", "dedup", "hierarchical")


@pytest.mark.parametrize(
    ("sizes", "degrees"), [CASES[0], *(pytest.param(*c, marks=pytest.mark.nightly) for c in CASES[1:])]
)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_a_dispatcher_are_one_hot_algebra(name: str, sizes, degrees) -> None:
    """Whatever the routing, and the tokens of each rank."""
    dp, tp, ep, etp, node = degrees
    plan = Plan(dp, tp, ep, etp, dispatch=name, ranks_per_node=node, overlap=Overlap(chunks=3))
    program = compiled(*sizes, plan, dp * tp)
    assert program.op_counts()["moec.join_tokens"] == 1

    @settings(max_examples=max(3, settings.default.max_examples // 20))
    @given(routings(*sizes, dp, "equal_lengths" in program.facts), st.integers(0, 99))
    def check(ids, seed: int) -> None:
        data = Data.of(ids, sizes[0], seed)
        assert error(run(program, data), dense(data)) < 1e-12

    check()


@pytest.mark.parametrize("fields", [{"capacity_factor": 1.0}, {"capacity_factor": 0.5, "level": "dp_shard"}], ids=str)
def test_tokens_compete_across_chunks(fields: dict) -> None:
    """A capacity sees all tokens, whatever chunk they are in; the slots of a chunk hold all that were kept."""
    plan = Plan(6, 1, 6, 1, dispatch="static", overlap=Overlap(chunks=2))
    spec = RouteSpec(6, 3, **fields, shards=6 if "level" in fields else 1)
    program = compiled(6, 3, plan, 6, spec)
    assert program.op_counts()["moec.drop"] == 1 and program.op_counts()["moec.slots"] == 2

    @settings(max_examples=max(4, settings.default.max_examples // 12))
    @given(routings(6, 3, 6, True), st.integers(0, 99))
    def check(ids, seed: int) -> None:
        data = Data.of(ids, 6, seed)
        assert error(run(program, data), dense(data, spec)) < 1e-12

    check()


ROUTERS = [
    Router(aux_loss={"micro_batch": 0.1, "sequence": 0.2, "global": 0.3}, z_loss=0.01, expert_bias=1e-3),
    Router(capacity_factor=0.8),
]


@pytest.mark.parametrize(
    ("router", "by"),
    [(ROUTERS[0], "tokens"), (ROUTERS[1], "tokens"), (ROUTERS[0], "sequences"),
     pytest.param(ROUTERS[1], "sequences", marks=pytest.mark.nightly)],
    ids=["losses", "capacity", "losses of sequences", "capacity of sequences"],
)  # fmt: skip
def test_losses_and_capacities_are_of_all_tokens(router: Router, by: str) -> None:
    """Also what a plan adds to routers, the statistics among it, is that of one rank without chunks."""
    model, batch = build(SHAPE), Batch(4, 6, 3, 2)
    truth = oracle(model, batch)
    whole_plan = Plan(2, 2, 2, 1, router=router)
    for name, program in compile_stages(captured(SHAPE), whole_plan):
        if name == "configure_router":
            truth.follow(name, program)
    chunks = 3 if by == "tokens" else 2
    chunked = dict(compile_stages(captured(SHAPE), replace(whole_plan, overlap=Overlap(chunks=chunks, chunk_by=by))))
    for stage in ("chunk_experts", "lower"):
        report = truth.compare(stage, chunked[stage])
        assert off(report) < 1e-12, report
    if router.capacity_factor:
        assert chunked["lower"].op_counts()["moec.drop"] == 1
        assert any(w.startswith("layers.0.moe: chunks of tokens end at") for w in chunked["lower"].why_not)


def test_what_ends_a_region_is_said() -> None:
    why = stages("alltoall", 3)["lower"].why_not
    assert any(w.startswith("layers.0.attention: chunks of tokens end at aten.transpose") for w in why)


@pytest.mark.parametrize(
    ("plan", "by"),
    [
        (Plan(dp=2, tp=2, ep=4), "sequences"),
        pytest.param(Plan(dp=2, tp=2, ep=4), "tokens", marks=pytest.mark.nightly),
        pytest.param(Plan(dp=2, tp=2, ep=2, sequence_parallel=True), "tokens", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_equal_layers_and_joint_graphs(plan: Plan, by: str) -> None:
    """Layers are compiled three times; where they meet chunks pass as they are.  Forward and backward are graphs."""
    model, data = Deep(layers=5).double(), deep_batch(S=6)
    plan = replace(plan, overlap=Overlap(chunks=2, chunk_by=by))
    program = moec.compile_program(model, plan, 4, data, {}, training=True)
    assert not [w for w in program.why_not if "layers are compiled one by one" in w]
    assert program.op_counts()["moec.split_tokens"] == 1  # the model has nothing but tokens
    graphs = joint_graphs(program)
    assert (graphs.pieces, graphs.distinct) == (6, 3)
    assert_collectives(program, graphs)
    run_joint(program, graphs, model, data)


def test_mistakes_are_caught() -> None:
    """Chunks in another order, a chunk of another chunk, the sizes of others: by the numbers or by the checks."""
    found, batch = stages("alltoall", 3)["chunk_experts"], Batch(4, 6, 1, 2)
    truth = oracle(build(SHAPE), batch)
    for what in ("order", "twice", "permute", "weights"):
        broken = found.fork()
        joins = broken.graph.find_nodes(op="call_function", target=torch.ops.moec.join_tokens.default)
        permutes = broken.graph.find_nodes(op="call_function", target=torch.ops.moec.permute.default)
        unpermutes = broken.graph.find_nodes(op="call_function", target=torch.ops.moec.unpermute.default)
        if what == "order":
            joins[-1].args = (joins[-1].args[0][::-1], *joins[-1].args[1:])
        elif what == "twice":
            joins[-1].args = ([joins[-1].args[0][0]] * 3, *joins[-1].args[1:])
        elif what == "permute":
            permutes[0].args = (permutes[0].args[0], permutes[1].args[1], permutes[0].args[2])
        else:
            unpermutes[0].args = (unpermutes[0].args[0], unpermutes[1].args[1], unpermutes[0].args[2])
        broken.graph.lint()
        broken.module.recompile()
        try:
            wrong = off(truth.compare(what, broken))
        except (moec.MoecError, RuntimeError):
            wrong = float("inf")
        assert wrong > 1e-4, what


def test_on_real_processes(gloo4) -> None:
    g = torch.Generator().manual_seed(5)
    ids = [torch.rand(n, 8, generator=g).argsort(1)[:, :4] for n in (5, 2)]
    for name in ("alltoall", "hierarchical"):
        plan = Plan(2, 2, 4, 1, dispatch=name, ranks_per_node=2, overlap=Overlap(chunks=3))
        data, args = Data.of(ids, 8), (8, 4, plan, 4)
        got = whole(compiled(*args), gloo4.run(run_real, data, *args))
        assert error(got, dense(data)) < 1e-12
