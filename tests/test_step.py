"""The graphs of a step: the same bits scheduled, in buckets or as they are, and an order that every rank can follow."""

from dataclasses import replace
from functools import cache

import deep_models
import grid
import pytest
import torch
from torch import fx

import moec
from moec import cost, shards, simulate
from moec.passes import bucket as bucketing
from moec.passes.overlap.tasks import Costs
from moec.passes.split_experts import split_experts
from moec.passes.step import complete_graphs, finish
from moec.passes.verify.order import check_order, check_same_dataflow, collective_order, dataflow
from moec.runtime.collectives import TABLE, collective, group_of, is_start, is_wait
from moec.runtime.torch_compat import WAIT
from moec.runtime.world import LockstepWorld
from moec.step import Step

aten = torch.ops.aten
DATA = deep_models.batch(8, 6)
PLANS = {
    "ep": {"dp": 4, "ep": 4},
    "fsdp, ep": {"dp": 4, "fsdp": True, "ep": 2},
    "hsdp": {"dp": 4, "fsdp": 2, "ep": 4},
    "fsdp": {"dp": 4, "fsdp": True},
    "tp, ep": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "etp": 2},
}
EVERY = [pytest.param(p, marks=pytest.mark.nightly if p in ("ep", "tp, ep", "fsdp") else ()) for p in PLANS]
SIZES = {"0": (32, 64), "1": (32, 64)}


@cache
def model():
    return deep_models.Deep(layers=3).double()


@cache
def lowered(plan: str):
    return moec.compile_program(model(), moec.Plan(**PLANS[plan]), 4, DATA, {}, training=True)


@cache
def complete(plan: str):
    return complete_graphs(lowered(plan))


@cache
def steps(plan: str, bucket_mb=None, schedule=True) -> Step:
    return finish(complete(plan), lowered(plan), moec.Overlap(schedule=schedule, bucket_mb=bucket_mb), SIZES)


def run(plan: str, step: Step):
    """Outputs and complete gradients of every rank, in lockstep."""
    program = lowered(plan)
    mesh, world, ranks = program.mesh, LockstepWorld(program.mesh), range(4)
    tensors = dict(model().named_parameters())
    params = {ph: tensors[s.name] for ph, s in program.params.items()}
    inputs = {ph: DATA[int(s.path)] for ph, s in program.inputs.items()}
    given = step.usual()
    back = step.backward(given)
    names = [n.name for n in back.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        values = [simulate._rank_values(program, params, inputs, mesh, r) for r in ranks]
        results = world.run(step.forward, [[v[n.name] for n in program.placeholders()] for v in values])
        known = [dict(zip(step.saved, r[step.num_outputs :], strict=True)) for r in results]
        tangents = {f"tangent_{i}": torch.ones((), dtype=torch.float64) for i in given}
        grads = world.run(back, [[(k | tangents)[n] for n in names] for k in known])
        alone = world.run(step.inference, [[v[n.name] for n in program.placeholders()] for v in values])
    for a, b in zip(alone, results, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=False))
    return [r[: step.num_outputs] for r in results], grads


def equal(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        for u, v in zip(x, y, strict=True):
            assert (u is None) == (v is None) and (u is None or torch.equal(u, v))


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("bucket_mb", [None, 0.002], ids=str)
@pytest.mark.parametrize("plan", EVERY)
def test_scheduled_and_unscheduled_graphs_are_equal_bit_by_bit(plan, bucket_mb):
    plain, scheduled = steps(plan, bucket_mb, False), steps(plan, bucket_mb)
    backwards = [s.backward(s.usual()).graph for s in (plain, scheduled)]
    assert [n.name for n in backwards[0].nodes] != [n.name for n in backwards[1].nodes]
    a, b = run(plan, plain), run(plan, scheduled)
    equal(a[0], b[0])
    equal(a[1], b[1])


@pytest.mark.parametrize("plan", EVERY)
def test_gradients_are_those_of_the_model(plan):
    """With regathers, reductions and buckets in the graphs, against autograd on one device."""
    program, step = lowered(plan), steps(plan, "auto")
    _, grads = run(plan, step)
    net = model()
    net.zero_grad()
    net(*DATA)[0].backward()
    tensors = dict(net.named_parameters())
    for i, ph in enumerate(step.params):
        spec = program.params[ph]
        parts = [shards.trim(grads[r][i], spec.shape, spec.types, program.mesh, r) for r in range(4)]
        got, apart = simulate._assemble(parts, spec.types, program.mesh)
        assert apart < 1e-12
        torch.testing.assert_close(got, tensors[spec.name].grad, rtol=1e-10, atol=1e-12)


def kinds(graph: fx.Graph) -> list[str]:
    return [collective(n.target).kind for n in graph.nodes if n.op == "call_function" and is_start(n.target)]


def test_buckets_are_filled_to_their_size():
    many, few, one = (steps("hsdp", mb).backward(frozenset([0])).graph for mb in (None, 0.002, 1000.0))
    counts = [[k for k in kinds(g) if k != "all_to_all_rows"] for g in (many, few, one)]
    assert len(counts[0]) > len(counts[1]) > len(counts[2])
    # Dense parameters over their group and the experts over theirs; what HSDP's copies sum of both.
    assert sorted(counts[2]) == ["p_to_i", "p_to_s", "s_to_r"] or len(counts[2]) <= 6, counts[2]
    for graph, limit in ((few, 2000), (one, 10**9)):
        for n in graph.nodes:
            if n.op == "call_function" and is_start(n.target) and n.args[0].target is torch.ops.moec.pack.default:
                assert bucketing._bytes(n) <= limit or len(n.args[0].args[0]) == 1


def test_what_is_as_large_as_a_bucket_does_not_part_the_small_ones_around_it(monkeypatch):
    monkeypatch.setattr(bucketing, "_bytes", lambda size: size)
    assert list(bucketing._fill([1, 9, 1, 4, 1, 2, 3], 4)) == [[9], [4], [1, 1, 1], [2], [3]]


def test_the_last_bucket_is_an_eighth_at_most_unless_that_is_all_latency(monkeypatch):
    """A link measured with a long latency would else have all gradients travel behind the last one."""
    start = next(n for n in complete("ep").backward.graph.nodes if n.op == "call_function" and is_start(n.target))
    cluster = cost.cluster("cpu2-1gbit")
    costs = Costs(replace(cluster, links={"network": cost.Link(1e-3, 1e8)}), lowered("ep").mesh, cost.Sizes({}))
    monkeypatch.setattr(bucketing, "_bytes", lambda _: each)
    each = 10**6
    assert bucketing._limit([start] * 4, costs) == 500_000
    assert bucketing._limit([start] * 100, costs) == bucketing.LATENCY * 10**5
    each = 10
    assert bucketing._limit([start] * 4, costs) == 10**5


def on(link: cost.Link, monkeypatch, **options) -> tuple[Step, float]:
    """A step for this link, and how long it is predicted to take."""
    made = cost.Cluster("made", {"float64": ((1.0, 1e10),)}, ((1.0, 1e10),), 1e-6, {"network": link})
    monkeypatch.setattr("moec.passes.step.load_cluster", lambda _: made)
    step, mesh = finish(complete("fsdp"), lowered("fsdp"), moec.Overlap(**options), SIZES), lowered("fsdp").mesh
    sizes = cost.Sizes.of(lowered("fsdp"), SIZES, _graphs(step))
    return step, sum(cost.predict(g.nodes, made, mesh, sizes).step_s for g in _graphs(step))


def gathered(graph) -> list[int]:
    """How many are in each bucket of gathered parameters."""
    starts = [n for n in graph.nodes if n.op == "call_function" and is_start(n.target)]
    starts = [s for s in starts if collective(s.target).primitive == "all_gather" and "#parameters" in group_of(s)]
    return [len(s.meta.get("bucket", (0,))) for s in starts]


def test_small_gathers_are_apart_where_that_is_faster(monkeypatch):
    """Of a tiny model all fit one bucket; then nothing runs until the last parameter has come."""
    link = cost.Link(2e-4, 2e8)
    auto, seconds = on(link, monkeypatch)
    joined, longer = on(link, monkeypatch, bucket_mb=1000)
    for graph, one in zip(_graphs(auto), _graphs(joined), strict=True):
        assert len(gathered(one)) == 1 < len(gathered(graph)) <= bucketing.SHARES
        assert sum(gathered(one)) == sum(gathered(graph))
    assert seconds < longer
    slow, _ = on(cost.Link(10.0, 2e8), monkeypatch)  # nothing is computed for ten seconds
    assert [gathered(g) for g in _graphs(slow)] == [gathered(g) for g in _graphs(joined)]


@pytest.mark.parametrize(("overhead", "wanted"), [(0.0, [[0, 1], [3], [2]]), (1e-6, [[0, 1, 2, 3]])])
def test_a_bucket_begins_where_compute_hides_its_latency(monkeypatch, overhead, wanted):
    """A second after the first of the last one; not where a bucket costs compute more than its byte costs the link."""
    nodes = complete("fsdp").forward.graph.nodes
    starts = [n for n in nodes if n.op == "call_function" and is_start(n.target)][:4]
    made = cost.Cluster("made", {"float64": ((1.0, 1.0),)}, ((1.0, 1.0),), overhead, {"network": cost.Link(1.0, 1e6)})
    monkeypatch.setattr(bucketing, "_bytes", lambda _: 1)
    at = dict(zip(starts, (0.0, 0.5, 3.0, 1.2), strict=True))
    found = bucketing._apart(starts, Costs(made, lowered("fsdp").mesh, cost.Sizes({})), at)
    assert [[starts.index(s) for s in part] for part in found] == wanted


def _graphs(step: Step):
    return [step.forward.graph, step.backward(step.usual()).graph]


def test_regathers_bring_only_what_is_read():
    """FSDP: no gathered matrix is saved but of the last two gathers, and embeddings do not come again."""
    step = steps("fsdp, ep")
    graph = step.backward(step.usual()).graph
    gathers = [n for n in graph.nodes if n.op == "call_function" and n.target is TABLE["s_to_r"].op]
    forward = [n for n in step.forward.graph.nodes if n.target is TABLE["s_to_r"].op]
    assert 0 < len(gathers) < len(forward)
    moved, whole = (sum(n.meta["val"].numel() for n in g) for g in (gathers, forward))
    assert moved < whole
    sharded = {s.placeholder for s in lowered("fsdp, ep").params.values()}
    assert {f"saved_{p}" for p in sharded} & set(step.saved)


def test_weight_gradients_of_experts_apart_are_the_same():
    """Each half computes its gradients as the whole op does."""
    step = steps("fsdp, ep", None, False)
    whole = step.backward(step.usual())
    graph = split_experts(whole.graph)
    ops = [n for n in graph.nodes if n.target is torch.ops.moec.experts_rows_backward.default]
    assert len(ops) == 6 and sum(n.args[-1][0] for n in ops) == 3
    assert all(any(n.args[-1][1:]) != n.args[-1][0] for n in ops)
    apart = fx.GraphModule(whole, graph)
    equal(run("fsdp, ep", step)[1], run("fsdp, ep", replace(step, backward_for=lambda _: apart, made={}))[1])
    assert split_experts(graph) is None


# ------------------------------------------------------------------------------------------------ order


def test_purposes_have_communicators_of_their_own():
    step = steps("hsdp")
    by: dict[str, set[str]] = {}
    for graph in (step.forward.graph, step.backward(step.usual()).graph):
        for n in graph.nodes:
            if n.op == "call_function" and is_start(n.target):
                by.setdefault(group_of(n).partition("#")[2], set()).add(collective(n.target).primitive)
    assert by["exchange"] <= {"exchange", "equal"} and by["parameters"] == {"all_gather", "reduce_scatter"}
    assert all("exchange" not in p for k, p in by.items() if k != "exchange")
    assert by["counts"] == {"counts"} and all("counts" not in p for k, p in by.items() if k != "counts")
    assert by["gradients"] == {"all_reduce"}


def sabotaged(what):
    """A scheduled backward with one mistake."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(steps("fsdp, ep").backward(frozenset([0])).graph, {}))
    starts = [n for n in graph.nodes if n.op == "call_function" and is_start(n.target)]
    what(graph, starts)
    return graph


def _no_wait(graph, starts):
    wait = next(u for u in starts[0].users if is_wait(u.target))
    wait.replace_all_uses_with(starts[0])
    graph.erase_node(wait)


def _second_wait(graph, starts):
    with graph.inserting_after(starts[0]):
        graph.call_function(WAIT, (starts[0],))


def _waits_for_nothing(graph, starts):
    with graph.inserting_before(starts[0]):
        graph.call_function(WAIT, (starts[0].args[0],))


def _read_before_the_wait(graph, starts):
    wait = next(iter(starts[0].users))
    next(iter(wait.users)).replace_input_with(wait, starts[0])


def _shared_communicator(graph, starts):
    exchange = next(s for s in starts if group_of(s).endswith("#exchange"))
    other = next(s for s in starts if s.args[-2] == exchange.args[-2] and not group_of(s).endswith("#exchange"))
    exchange.args = (*exchange.args[:-1], group_of(other))


def _wrong_group(graph, starts):
    starts[0].args = (*starts[0].args[:-1], "nobody#exchange")


def _wrong_size(graph, starts):
    starts[0].args = (*starts[0].args[:-2], 3, starts[0].args[-1])


def _branch(graph, starts):
    with graph.inserting_before(starts[0]):
        graph.call_module("maybe", (starts[0].args[0],))


ORDERS = {
    _no_wait: "waits", _second_wait: "2 waits", _waits_for_nothing: "starts nothing",
    _read_before_the_wait: "reads its", _shared_communicator: "over the communicator", _wrong_group: "not a group",
    _wrong_size: "size 3", _branch: "branch",
}  # fmt: skip


@pytest.mark.parametrize("mistake", ORDERS, ids=lambda f: f.__name__)
def test_each_mistake_in_the_order_is_caught(mistake):
    mesh = lowered("fsdp, ep").mesh
    check_order(sabotaged(lambda *_: None), mesh)
    with pytest.raises(moec.MoecError, match=ORDERS[mistake]):
        check_order(sabotaged(mistake), mesh)


def test_ranks_that_order_differently_are_told_apart():
    one = sabotaged(lambda *_: None)
    pairs = collective_order(one)

    def swapped(graph, starts):
        key = next(k for k, v in pairs.items() if len(v) > 1)
        a, b = [s for s in starts if group_of(s) == key][:2]
        a.prepend(b)

    other = sabotaged(swapped)
    assert collective_order(other) != pairs and str(other) != str(one)


def test_changed_dataflow_is_caught():
    graph = sabotaged(lambda *_: None)
    before = dataflow(graph)
    check_same_dataflow(before, graph)
    add = next(n for n in graph.nodes if n.target is aten.add.Tensor)
    add.args = (add.args[1], add.args[0])  # the order of a sum
    with pytest.raises(moec.MoecError, match="scheduling changed"):
        check_same_dataflow(before, graph)


def test_a_dump_has_the_graphs_that_run(tmp_path):
    plan = moec.Plan(dp=2, overlap=moec.Overlap())
    program = moec.compile_program(grid.build("plain"), plan, 2, (), grid.batch(), training=True, dump=tmp_path)
    step = program.step
    for name, module in (("forward", step.forward), ("backward", step.backward(step.usual()))):
        assert (tmp_path / f"step_{name}.txt").read_text().strip() == str(module.graph).strip()
