"""A host that launches what a GPU computes: against schedules by hand, and dispatchers with counts against slots."""

from dataclasses import replace
from functools import cache

import grid
import pytest
import torch
from cost_graphs import Graph
from hypothesis import given
from hypothesis import strategies as st

import moec
from moec import calibrate, cost
from moec.cost import trace
from moec.cost.host import HOST, READS, reads
from moec.program import op_name


def run(took, reading=(), dispatch=1.0, sync=0.5, **options):
    """Ops one after the other; ``took``: seconds by name."""
    g = Graph()
    x = g.value(1)
    done = [g.compute(x, name=n) for n in took]
    g.graph.output(tuple(done))
    host = cost.Host(dispatch, sync, lambda n: n.name in reading)
    return cost.simulate(
        list(g.graph.nodes), lambda n: took.get(n.name, 0.0), lambda n: cost.stream(n, g.mesh), host=host, **options
    )


def test_a_host_that_is_ahead_costs_its_first_launch():
    found = run({"a": 3.0, "b": 3.0, "c": 3.0})
    assert (found.step_s, found.compute_s, found.exposed_s, found.host_s) == (10.0, 9.0, 0.0, 1.0)


def test_small_ops_are_bound_by_the_host():
    found = run({"a": 0.25, "b": 0.25, "c": 0.25})
    assert (found.step_s, found.host_s) == (3.25, 2.5)


def test_what_is_read_drains_the_queue():
    """c is launched when b is done (7), read (7.5) and launched (8.5); nothing runs meanwhile."""
    found = run({"a": 3.0, "b": 3.0, "c": 3.0}, reading={"c"})
    assert (found.step_s, found.compute_s, found.host_s, found.exposed_s) == (11.5, 9.0, 2.5, 0.0)
    (span,) = (s for s in found.spans if s.stream == HOST)
    assert (span.node, span.start_s, span.end_s) == ("c", 2.0, 7.5)
    names = {e["args"]["name"] for e in trace({"x": found.spans})["traceEvents"] if e["name"] == "thread_name"}
    assert HOST in names
    assert found.then(found).host_s == 5.0


def test_transfers_go_on_while_nothing_is_launched():
    g = Graph()
    x = g.value(1)
    start = g.start(x, (1,))
    c = g.compute(x, name="c")
    g.graph.output((c, g.wait(start)))
    host = cost.Host(1.0, 0.0, lambda n: n is c)
    took = {c: 1.0, start: 2.0}
    found = cost.simulate(
        list(g.graph.nodes), lambda n: took.get(n, 0.0), lambda n: cost.stream(n, g.mesh), host=host
    )  # begins 1, ends 3; c is launched at 2 and done at 3
    assert (found.step_s, found.exposed_s, found.host_s) == (3.0, 0.0, 2.0)


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.booleans()), min_size=1, max_size=12), st.floats(0.01, 3), st.floats(0, 3)
)
def test_a_step_is_at_least_what_either_does_alone(ops, dispatch, sync):
    took = {f"n{i}": s for i, (s, _) in enumerate(ops)}
    reading = {f"n{i}" for i, (_, r) in enumerate(ops) if r}
    found = run(took, reading, dispatch, sync)
    least = max(sum(took.values()) + dispatch, dispatch * len(ops) + sync * len(reading))
    assert least - 1e-9 <= found.step_s <= sum(took.values()) + dispatch * len(ops) + sync * len(reading) + 1e-9
    assert found.step_s == pytest.approx(found.compute_s + found.host_s)
    assert run(took, (), dispatch, sync).step_s <= found.step_s + 1e-9


@cache
def program(dispatch: str):
    router = moec.Router(capacity_factor=1.0) if dispatch == "static" else None
    plan = moec.Plan(dp=4, ep=4, dispatch=dispatch, router=router, overlap=moec.Overlap(cluster="h100-nvl8-400g"))
    return moec.compile_program(grid.build("plain"), plan, 4, (), grid.batch(), training=True)


def test_counts_on_the_host_cost_what_slots_do_not():
    h100 = cost.cluster("h100-nvl8-400g")
    free = replace(h100, sync_s=0.0)
    lost = {}
    for dispatch in ("alltoall", "static"):
        step = program(dispatch).step
        graphs = [step.forward.graph, step.backward(step.usual()).graph]
        reading = [n for g in graphs for n in g.nodes if reads(n)]
        exchanges = [n for n in reading if op_name(n) in ("moec.all_to_all", "moec.all_to_all_rows")]
        assert (len(exchanges), len(reading) > 4) == ((4, True) if dispatch == "alltoall" else (0, False))
        found = moec.timeline(program(dispatch), h100)
        hosted = [s for s in found.step.spans if s.stream == HOST]
        assert len(hosted) == len(reading)
        lost[dispatch] = found.step.step_s - moec.timeline(program(dispatch), free).step.step_s
        assert lost[dispatch] <= len(reading) * h100.sync_s * 1.001
        assert "host" in str(found) and found.to_dict()["host_s"] > 0
    assert lost["alltoall"] >= 4 * h100.sync_s * 0.999 and not lost["static"]
    assert "host" in str(moec.explain(program("alltoall")).schedule)


def test_a_cpu_waits_for_nobody():
    found = moec.timeline(program("alltoall"), "cpu2-1gbit")
    assert not found.step.host_s and not [s for s in found.step.spans if s.stream == HOST]
    assert cost.Host.of(cost.cluster("cpu2-1gbit")) is None
    assert all(c.dispatch_s and c.sync_s for name, c in cost.presets().items() if not name.startswith("cpu"))


def test_ops_that_read_exist():
    import moec.runtime.transformer_engine_fp8  # noqa: F401  makes its ops

    for name in READS:
        space, _, op = name.partition(".")
        assert hasattr(getattr(torch.ops, space), op), name


def test_a_size_that_depends_on_data_is_read():
    found = [n for n in program("alltoall").step.forward.graph.nodes if op_name(n) == "moec.all_to_all"]
    assert found and all(map(reads, found))
    rows = [n for n in program("alltoall").step.forward.graph.nodes if op_name(n) == "moec.experts_rows"]
    assert not any(map(reads, rows))  # as many as the operand has


def test_the_host_is_measured():
    dispatch, sync = calibrate_host()
    assert 0 < dispatch < 1e-2 and 0 <= sync < 1e-2


def calibrate_host():
    import sys

    module = sys.modules[calibrate.__module__]
    return module._host(module._Clock("cpu"), 0.0)
