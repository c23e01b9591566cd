"""Dispatchers against dense one-hot algebra, against each other, and in whole models; what they refuse.

``dispatch_block.py`` has the block and its oracle.  The worst error that these examples show is 4e-14.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from deep_models import Deep
from deep_models import batch as deep_batch
from dispatch_block import Data, H, compiled, dense, run, run_real, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from sabotage import mistakes
from spmd import Batch, Shape, captured, compile_stages, off, oracle
from spmd import build as small_model
from test_gloo_grid import TOLERANCE, trains_like_one_device
from torch import Tensor
from witness import WitnessError, witness

import moec
from moec import simulate
from moec.compiler import PIPELINE, joint_graphs
from moec.hf import build as hf
from moec.passes import manager
from moec.passes.rewrite import new
from moec.plan import DISPATCHERS, Plan
from moec.program import EQUAL_LENGTHS, Program
from moec.promote import promote_program
from moec.router import Router
from moec.runtime.errors import MoecError
from moec.runtime.ops.slots import slots_of
from moec.runtime.route_spec import RouteSpec
from moec.runtime.torch_compat import expr, is_unbacked
from moec.runtime.world import Event
from moec.traffic import Payload, predict

NAMES = [d for d in DISPATCHERS if d not in ("auto", "static")]

# (E, K), (dp, tp, ep, etp, ranks_per_node)
SIZES_AND_DEGREES = [
    ((6, 3), (6, 1, 6, 1, 2)),
    ((6, 3), (2, 3, 6, 1, 3)),
    ((6, 6), (2, 1, 2, 1, 1)),
    ((8, 4), (4, 2, 4, 2, 4)),
    ((8, 1), (8, 1, 4, 1, 2)),
    ((8, 8), (1, 8, 8, 1, 4)),
    ((1, 1), (2, 1, 1, 1, None)),
]
BY_DAY = (0, 3, 6)
CASES = [
    pytest.param(*case, marks=() if i in BY_DAY else pytest.mark.nightly, id=str(case))
    for i, case in enumerate(SIZES_AND_DEGREES)
]


def plan(name: str, degrees: tuple) -> tuple[Plan, int]:
    dp, tp, ep, etp, node = degrees
    return Plan(dp, tp, ep, etp, dispatch=name, ranks_per_node=node), dp * tp


@st.composite
def routings(draw, E: int, K: int, dp: int, equal: bool) -> list[Tensor]:
    """Ids of each dp rank: even or skewed, all to one expert, experts and ranks without a token, pairs dropped."""
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tokens = draw(st.lists(st.integers(0, 6), min_size=dp, max_size=dp))
    if equal or draw(st.booleans()):
        tokens = [tokens[0]] * dp
    skew = draw(st.sampled_from([0.0, 2.0, 50.0]))
    dropped = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    prefer = torch.linspace(skew, 0, E)
    ids = []
    for n in tokens:
        chosen = (torch.rand(n, E, generator=gen) + prefer).argsort(1, descending=True)[:, :K]
        chosen = chosen.gather(1, torch.rand(n, K, generator=gen).argsort(1))  # in any order
        ids.append(torch.where(torch.rand(n, K, generator=gen) < dropped, -1, chosen))
    return ids


def error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(float((got[k] - want[k]).norm() / want[k].norm().clamp_min(1e-3)) for k in want)


@pytest.mark.parametrize(("sizes", "degrees"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_dispatcher_is_one_hot_algebra(name: str, sizes, degrees) -> None:
    """Values and every gradient (tokens, weights, experts)."""
    program = compiled(*sizes, *plan(name, degrees))
    equal = EQUAL_LENGTHS in program.facts

    @settings(max_examples=max(5, settings.default.max_examples // 10))
    @given(routings(*sizes, degrees[0], equal), st.integers(0, 99))
    def check(ids: list[Tensor], seed: int) -> None:
        data = Data.of(ids, sizes[0], seed)
        assert error(run(program, data), dense(data)) < 1e-12

    check()


SPECS = [
    {"capacity_factor": 1.0}, {"capacity_factor": 0.5, "drop": "position"}, {"capacity_factor": 50.0},
    {"capacity_factor": 1.1, "level": "dp_shard"}, {"capacity_factor": 0.1, "min_capacity": 0},
]  # fmt: skip


def spec_for(sizes: tuple[int, int], dp: int, fields: dict) -> RouteSpec:
    shards = dp if fields.get("level") == "dp_shard" else 1
    return RouteSpec(*sizes, **fields, shards=shards)


@pytest.mark.parametrize(("sizes", "degrees"), CASES[:-1])
def test_static_is_one_hot_algebra_of_what_the_router_kept(sizes, degrees) -> None:
    """Capacities of every level below, at and above what tokens need; a capacity of nothing."""

    @settings(max_examples=max(8, settings.default.max_examples // 6))
    @given(routings(*sizes, degrees[0], True), st.sampled_from(SPECS), st.integers(0, 99))
    def check(ids: list[Tensor], fields: dict, seed: int) -> None:
        spec = spec_for(sizes, degrees[0], fields)
        data = Data.of(ids, sizes[0], seed)
        got = run(compiled(*sizes, *plan("static", degrees), spec), data)
        assert error(got, dense(data, spec)) < 1e-12

    check()


def test_static_needs_a_capacity() -> None:
    with pytest.raises(MoecError, match="dispatch='static' needs a capacity"):
        compiled(6, 3, *plan("static", (2, 1, 2, 1, None)))


def test_no_size_of_static_depends_on_the_routing() -> None:
    """No size that tracing could not know, and no counts on the way."""
    args = (6, 3, *plan("static", (6, 1, 6, 1, None)))
    program = compiled(*args, RouteSpec(6, 3, capacity_factor=1.0))
    sizes = [s for n in program.graph.nodes if isinstance(v := n.meta.get("local"), Tensor) for s in v.shape]
    assert sizes and not any(is_unbacked(expr(s)) for s in sizes)
    assert "moec.exchange_counts" not in program.op_counts()
    other = compiled(*args[:2], *plan("dedup", (6, 1, 6, 1, None)))
    sizes = [s for n in other.graph.nodes if isinstance(v := n.meta.get("local"), Tensor) for s in v.shape]
    assert any(is_unbacked(expr(s)) for s in sizes)


EDGES = {
    "no tokens": torch.zeros(0, 3, dtype=torch.int64),
    "all to one rank": torch.tensor([[0, 1, 2]]).expand(5, 3),
    "all dropped": torch.full((4, 3), -1),
    "the same pair alone": torch.tensor([[-1, 5, -1]]).expand(4, 3),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(name: str, edge: str) -> None:
    program = compiled(6, 3, *plan(name, (6, 1, 6, 1, 2)))
    data = Data.of([EDGES[edge].clone()] * 6, 6)
    assert error(run(program, data), dense(data)) < 1e-12


def spec_of(name: str, E: int, K: int) -> RouteSpec | None:
    return RouteSpec(E, K, capacity_factor=0.8) if name == "static" else None


@pytest.mark.parametrize("name", [*NAMES, "static"])
def test_ten_runs_give_the_same_bits(name: str) -> None:
    gen = torch.Generator().manual_seed(0)
    ids = [torch.rand(40, 8, generator=gen).argsort(1)[:, :4] for _ in range(4)]
    program = compiled(8, 4, *plan(name, (4, 2, 4, 2, 4)), spec_of(name, 8, 4))
    data = Data.of(ids, 8, dtype=torch.float32)
    first = run(program, data)
    for _ in range(9):
        assert all(torch.equal(first[k], v) for k, v in run(program, data).items())


@pytest.mark.parametrize("name", [*NAMES, "static"])
def test_real_processes_give_what_simulated_ones_do(gloo4, name: str) -> None:
    """Bit by bit where no sum of several ranks is involved; one rank has no tokens where that may be."""
    gen = torch.Generator().manual_seed(0)
    args = (8, 4, *plan(name, (4, 1, 4, 1, 2)), spec_of(name, 8, 4))
    tokens = [5] * 4 if EQUAL_LENGTHS in compiled(*args).facts else [5, 0, 7, 2]
    data = Data.of([torch.rand(n, 8, generator=gen).argsort(1)[:, :4] for n in tokens], 8)
    got = whole(compiled(*args), gloo4.run(run_real, data, *args))
    want = run(compiled(*args), data)
    assert error(got, want) < 1e-14
    assert error(got, dense(data, args[-1])) < 1e-12


@pytest.mark.parametrize("degrees", [(6, 1, 6, 1, 2), (6, 1, 3, 1, None)], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "static"])
def test_traffic_predicted_from_the_routing_is_what_is_counted(name: str, degrees: tuple) -> None:
    """What every rank sends every other, forward and backward."""
    E, K, node = 6, 3, degrees[4]
    if name == "hierarchical" and node is None:
        degrees = (*degrees[:4], node := 1)
    spec = spec_of(name, E, K)
    program = compiled(E, K, *plan(name, degrees), spec)
    groups = program.mesh.groups(program.mesh.role("ep"))

    @settings(max_examples=8)
    @given(routings(E, K, degrees[0], EQUAL_LENGTHS in program.facts))
    def check(ids: list[Tensor]) -> None:
        log: list[Event] = []
        run(program, Data.of(ids, E), log)
        for ranks in groups:
            mine = [ids[r] for r in ranks]
            T = len(ids[0])
            capacity = slots_of(spec, T, T * degrees[0]) if spec else None
            payload = Payload(H * 8, K * 4, K * 8)
            want = predict(name, mine, E, payload, ranks_per_node=node, capacity=capacity)
            for phase in ("forward", "backward"):
                # What the drop of the block gathers is not the dispatcher's.
                ours = [e for e in log if name != "static" or e.kind == "all_to_all_equal"]
                events = [e for e in ours if e.phase == phase]
                sent = torch.stack([torch.tensor(e.sent) for e in events]).sum(0)
                assert torch.equal(sent[list(ranks)][:, list(ranks)], getattr(want, phase)), phase

    check()


@pytest.mark.parametrize("name", ["dedup", "hierarchical"])
def test_explain_expects_what_uniform_routing_sends(name: str) -> None:
    """Bytes of the exchanges of a rank (what stays on it included), and the part of them that crosses nodes."""
    degrees, T = (8, 1, 8, 1, 4), 4000
    program = compiled(32, 4, *plan(name, degrees))
    used = [c for c in moec.explain(program, {"x": (T, H), "ids": (T, 4), "w": (T, 4)}).collectives if c.estimated]
    gen = torch.Generator().manual_seed(0)
    ids = [torch.rand(T, 32, generator=gen).argsort(1)[:, :4] for _ in range(8)]
    on_rank = sum(len(set(i.tolist())) for i in (torch.cat(ids) // 4)) / 8
    on_node = sum(len(set(i.tolist())) for i in (torch.cat(ids) // 16)) / 8
    forward, width = [c for c in used if c.phase == "forward"], {"rows": H * 8, "ids": 4 * 4, "weights": 4 * 8}
    steps = [on_rank] if name == "dedup" else [on_node, on_rank]
    want = [n * w for w in (width["rows"], width["ids"], width["weights"], width["rows"]) for n in steps]
    assert sorted(c.bytes for c in forward) == pytest.approx(sorted(want), rel=0.01)
    assert len(used) - len(forward) == 3 * len(steps)  # all but the ids have a gradient
    across = [c for c in used if c.crossing]
    assert across and all(c.crossing == c.bytes // 2 for c in across)
    assert len(across) == (len(used) if name == "dedup" else len(used) // 2)


def test_dedup_never_sends_more_rows_than_alltoall() -> None:
    @given(routings(8, 4, 4, False))
    def check(ids: list[Tensor]) -> None:
        rows = {n: predict(n, ids, 8, Payload(1, 0, 0), ranks_per_node=2).rows for n in ("alltoall", "dedup")}
        assert bool((rows["dedup"] <= rows["alltoall"]).all())
        assert bool((rows["dedup"] <= torch.tensor([len(i) for i in ids])[:, None]).all())

    check()


# -- in models -------------------------------------------------------------------------------------------------------

BIASED = Shape(12, biased=True)
MODEL_PLANS = [(2, 2, 4, 1), (4, 1, 2, 2), (1, 4, 4, 1)]


def stages(name: str, degrees: tuple, shape: Shape = BIASED, **more) -> dict:
    dp, tp, ep, etp = degrees
    node = dp * tp // 2 if name == "hierarchical" else None
    plan = Plan(dp, tp, ep, etp, dispatch=name, ranks_per_node=node, **more)
    return dict(compile_stages(captured(shape), plan))


MORE = ({}, {"fsdp": True}, {"sequence_parallel": True})


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param(n, m, marks=() if not m or (n, i) in (("hierarchical", 1), ("dedup", 2)) else pytest.mark.nightly)
        for n in NAMES[1:]
        for i, m in enumerate(MORE)
    ],
)
def test_a_model_after_every_pass(name: str, more: dict) -> None:
    """Biased experts, a shared expert, tp that does not divide the tokens (of the stream: that does)."""
    shape = Shape(12, biased=True)
    truth = oracle(small_model(shape, 3, 2.0), Batch(2, 8 if more.get("sequence_parallel") else 5, 1, 2))
    for after, program in list(stages(name, MODEL_PLANS[0], **more).items())[2:]:
        assert off(truth.compare(after, program)) < 1e-12, after


@pytest.mark.nightly
@pytest.mark.parametrize("degrees", MODEL_PLANS[1:], ids=str)
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_model_under_other_plans(name: str, degrees: tuple) -> None:
    shape = Shape(12, biased=True)
    truth = oracle(small_model(shape, 3, 2.0), Batch(4, 5, 1, degrees[0]))
    assert off(truth.compare("lower", stages(name, degrees)["lower"])) < 1e-12


def with_capacity(program: Program, spec: RouteSpec) -> Program:
    """The captured program with a drop behind the router of each block, as ``configure_router`` puts one."""
    program = next(p for n, p in compile_stages(program, Plan(1, 1, 1, 1)) if n == "raise_moe").fork()
    for permute in program.graph.find_nodes(op="call_function", target=torch.ops.moec.permute.default):
        unpermute = next(
            n for n in program.graph.find_nodes(op="call_function", target=torch.ops.moec.unpermute.default)
            if n.meta["where"] == permute.meta["where"]
        )  # fmt: skip
        pair = unpermute.args[1], permute.args[1]
        with program.graph.inserting_before(permute):
            args = (torch.ops.moec.drop.default, (*pair, spec.text()))
            dropped = new(permute, *args, tuple(n.meta["val"] for n in pair))
            weights, ids = (new(permute, operator.getitem, (dropped, i), n.meta["val"]) for i, n in enumerate(pair))
        permute.replace_input_with(pair[1], ids)
        unpermute.replace_input_with(pair[0], weights)
    program.graph.lint()
    program.module.recompile()
    return program


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        pytest.param(f, m, marks=() if f and not m else pytest.mark.nightly)
        for f in ({}, {"level": "dp_shard", "shards": 2})
        for m in MORE
    ],
)
def test_static_in_a_model(fields: dict, more: dict) -> None:
    """Against the same program on one device: what a capacity drops changes what the model computes."""
    shape = Shape(12, biased=True)
    program = with_capacity(captured(shape), RouteSpec(12, 3, capacity_factor=0.7, **fields))
    model, batch = small_model(shape, 3, 2.0).double(), Batch(2, 8 if "sequence_parallel" in more else 5, 1, 2)

    def compiled_for(plan: Plan, world: int) -> Program:
        start = replace(program.fork(), mesh=plan.mesh(world))
        return manager.run(start, plan.resolve(world), [p for p in PIPELINE if p.contract.name not in DONE])

    def values(program: Program) -> dict[str, Tensor]:
        by_name = dict(model.named_parameters())
        params = {ph: by_name[s.name] for ph, s in program.params.items()}
        ids, labels = batch.tensors()
        inputs = {ph: ids if s.path in ("ids", "0") else labels for ph, s in program.inputs.items()}
        got = simulate.run(promote_program(program), params, inputs, {"loss": torch.ones((), dtype=torch.float64)})
        assert got.disagreement < 1e-12
        return got.outputs | {program.params[ph].name: g for ph, g in got.grads.items()}

    one, many = compiled_for(Plan(1, 1, 1, 1), 1), compiled_for(Plan(2, 2, 4, dispatch="static", **more), 4)
    assert "moec.slots" in many.op_counts() and "moec.slots" not in one.op_counts()
    want, got = values(one), values(many)
    dropless = values(dict(compile_stages(captured(shape), Plan(1, 1, 1, 1)))["lower"])
    assert float((dropless["logits"] - want["logits"]).norm() / want["logits"].norm()) > 1e-3  # something was dropped
    scale = max(float(g.norm()) for g in want.values())
    for name, w in want.items():
        assert float((got[name] - w).norm()) / max(float(w.norm()), 1e-2 * scale) < 1e-12, name
    joint_graphs(many)


DONE = ("normalize", "raise_moe")


@pytest.mark.parametrize("name", ["allgather", "hierarchical"])
def test_forward_and_backward_as_graphs(name: str) -> None:
    from test_joint import assert_collectives

    program = stages(name, (2, 2, 4, 1))["lower"]
    assert_collectives(program, joint_graphs(program))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_equal_layers_stay_equal(name: str) -> None:
    """Three of six layers are compiled and copied, and differentiated once."""
    model, batch = Deep(layers=6).double(), deep_batch()
    plan = Plan(dp=2, tp=2, ep=4, dispatch=name, ranks_per_node=2)
    program = moec.compile_program(model, plan, 4, batch, {}, training=True)
    assert not program.why_not
    graphs = joint_graphs(program)
    assert (graphs.pieces, graphs.distinct) == (7, 3)


FAMILIES = ("mixtral", "deepseek_v3")


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*NAMES, "static"])
def test_family(family: str, name: str) -> None:
    torch.manual_seed(0)
    model = hf(family, 1)
    router = Router(capacity_factor=1.0, level="dp_shard") if name == "static" else None
    plan = Plan(dp=2, tp=2, ep=4, dispatch=name, ranks_per_node=2, router=router)
    report = moec.check(model, plan, world_size=4)
    assert report.ok, str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(300)
def test_real_processes_train_like_one_device(gloo4, name: str) -> None:
    more = {"dispatch": name, "ranks_per_node": 2}
    for r in gloo4.run(trains_like_one_device, "plain", (2, 2, 4, 1), more, timeout=280):
        assert max(r["loss"], r["grad"][0]) <= TOLERANCE["plain"]
        assert max(r["norm"], r["params"][0]) <= 1e-5


# -- what is wrong ---------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(MoecError, match="unknown dispatch 'dedupe' \\(did you mean 'dedup'\\?\\)"):
        Plan(ep=2, dispatch="dedupe").validate(2)
    with pytest.raises(MoecError, match="needs ranks_per_node"):
        Plan(ep=4, dispatch="hierarchical").validate(4)
    with pytest.raises(MoecError, match="ranks_per_node=3 does not divide the 4 ranks"):
        Plan(ep=4, dispatch="hierarchical", ranks_per_node=3).validate(4)
    with pytest.raises(MoecError, match=r"do not nest.* with ranks_per_node=2: 2 does not divide 3"):
        Plan(tp=3, ep=6, dispatch="hierarchical", ranks_per_node=2).validate(6)
    with pytest.raises(MoecError, match="ranks_per_node='2' is neither None nor a positive integer"):
        Plan(ep=4, ranks_per_node="2").validate(4)
    for name in NAMES:
        Plan(dispatch=name).validate(2)  # without expert parallelism nothing is dispatched


def test_gathered_tokens_are_equal_parts() -> None:
    """Where dp ranks share what is gathered; ranks that hold the same tokens have nothing to agree on."""
    assert EQUAL_LENGTHS in compiled(6, 3, *plan("allgather", (6, 1, 6, 1, None))).facts
    assert EQUAL_LENGTHS not in compiled(8, 8, *plan("allgather", (1, 8, 8, 1, None))).facts
    assert EQUAL_LENGTHS not in compiled(6, 3, *plan("dedup", (6, 1, 6, 1, None))).facts
    assert EQUAL_LENGTHS in compiled(8, 4, *plan("alltoall", (8, 1, 4, 2, None))).facts  # over etp


CLEAR = 1e-3
UNSEEN = ("ids rolled", "weights rolled", "row numbers rolled", "inverse flipped", "counts reversed")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "dedup" else pytest.mark.nightly) for n in NAMES[1:]]
)
def test_every_mistake_is_caught(name: str) -> None:
    """By the numbers; of those in collectives, by the second witness too."""
    shape = Shape(12)
    # Enough tokens that ranks do not happen to send each other as many.
    truth = oracle(small_model(shape, 3, 2.0), Batch(2, 17, 1, 2))
    program = stages(name, (2, 2, 4, 1), shape)["shard"]
    assert off(truth.compare("shard", program)) < 1e-13
    witness(program)
    missed, unseen, found = [], [], 0
    for m in mistakes(program):
        if "layers.0.moe" not in m.what:
            continue
        found += 1
        try:
            error = off(truth.compare("sabotaged", m.program))
        except (MoecError, RuntimeError, IndexError):
            error = float("inf")
        if error < CLEAR:
            missed.append((error, m.what))
        try:
            witness(m.program)
            unseen.append(m.what)
        except (WitnessError, MoecError):  # ill typed, or refused by a kernel
            pass
    assert found > 15 and not missed
    assert not [u for u in unseen if not u.startswith(UNSEEN)]
