"""What is said of a scheduled step against the graphs that run, times by hand, and what the recorded step moves."""

import json
from collections import Counter
from functools import cache

import grid
import pytest
import torch
from cost_graphs import Graph

import moec
from moec import cost
from moec.runtime.collectives import collective, is_start, is_wait
from moec.runtime.mesh import axes_of
from moec.schedule import Transfer, _transfers, predicted, step_graphs

BUILT = moec.Overlap(schedule=False, bucket_mb=None)


@cache
def compiled(overlap: moec.Overlap | None = None, **degrees):
    plan = moec.Plan(overlap=overlap, **degrees)
    return moec.compile_program(grid.build("plain"), plan, 4, (), grid.batch(), training=True)


def local(program) -> dict[str, tuple[int, ...]]:
    return {k: (x.shape[0] // program.mesh.size(program.mesh.role("dp")), x.shape[1]) for k, x in grid.batch().items()}


@pytest.mark.parametrize("degrees", [{"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "fsdp": True}], ids=str)
def test_the_order_is_that_of_the_graphs_that_run(degrees):
    program = compiled(moec.Overlap(chunks=2, bucket_mb=0.004), **degrees)
    found = moec.explain(program).schedule
    step = program.step
    for phase, graph in (("forward", step.forward.graph), ("backward", step.backward(step.usual()).graph)):
        mine = [t for t in found.transfers if t.phase == phase]
        starts = [n for n in graph.nodes if n.op == "call_function" and is_start(n.target)]
        assert [t.node for t in mine] == [s.name for s in starts] and [t.number for t in mine] == [
            *range(1, len(mine) + 1)
        ]
        issued = [t.issued_s for t in mine]
        assert issued == sorted(issued)
        position = {n: i for i, n in enumerate(graph.nodes)}
        for t, start in zip(mine, starts, strict=True):
            (wait,) = (u for u in start.users if is_wait(u.target))
            assert t.before == 1 + sum(position[s] < position[wait] for s in starts)
            assert t.primitive == collective(start.target).primitive
            assert 0 <= t.hidden_s <= (t.end_s - t.start_s) * (1 + 1e-9) and t.issued_s <= t.start_s + 1e-12
            assert t.waited_s >= t.issued_s
    chunks = {(t.phase, t.chunk) for t in found.transfers if t.primitive == "exchange"}
    assert chunks == {(p, c) for p in ("forward", "backward") for c in (0, 1)}
    assert {t.where.rpartition(".")[2] for t in found.transfers if t.primitive == "exchange"} == {"moe"}


@pytest.mark.parametrize("degrees", [{"dp": 2, "tp": 2, "ep": 4}, {"dp": 4, "ep": 2}], ids=str)
def test_as_built_it_moves_what_the_recorded_step_does(degrees):
    """Of the same sizes: every collective but sums of gradients one by one, and these in sum."""

    def counted(program):
        one_by_one, sums = Counter(), Counter()
        for c in moec.explain(program, local(program)).collectives:
            if c.phase == "epilogue" or c.group.endswith("#gradients"):
                sums[axes_of(c.group)] += c.bytes
            else:
                one_by_one[c.phase, c.kind, c.traffic, axes_of(c.group), c.ranks, c.bytes, c.estimated] += 1
        return one_by_one, sums

    assert counted(compiled(BUILT, **degrees)) == counted(compiled(**degrees))


def test_what_is_hidden_and_beside_what():
    """A transfer of 3 seconds beside two ops of 1 second each, and one of half a second beside an op that is longer."""
    g = Graph()
    x = g.value(4)
    first = g.start(x, (4,))
    a, b = g.compute(x, name="a"), g.compute(x, name="b")
    a.meta["where"] = "layer.attention"
    waited = g.wait(first)
    second = g.start(waited, (4,))
    c = g.compute(x, name="c")
    g.graph.output((a, b, c, g.wait(second)))
    seconds = {"a": 1.0, "b": 1.0, "c": 2.0, first.name: 3.0, second.name: 0.5}
    nodes = list(g.graph.nodes)
    times = cost.simulate(nodes, lambda n: seconds.get(n.name, 0.0), lambda n: "comm:dp_edp")
    one, two = _transfers("forward", nodes, times, g.sizes, 10.0, lambda n: (0.0, 0.0))
    assert (one.issued_s, one.start_s, one.end_s, one.waited_s) == (10.0, 10.0, 13.0, 12.0)
    assert (one.hidden_s, one.stall_s, one.before) == (2.0, 1.0, 2)
    assert one.beside == (("layer.attention", 1.0), ("b", 1.0))
    assert (two.start_s, two.hidden_s, two.stall_s, two.before, two.beside) == (13.0, 0.5, 0.0, 3, (("c", 0.5),))
    assert (one.bytes, one.ranks, one.bucket, one.chunk) == (16, 2, 1, None)


def test_memory_and_times_are_those_of_the_timeline():
    program = compiled(moec.Overlap(memory_gb=0.5), dp=4, ep=4)
    found = moec.explain(program).schedule
    predicted = moec.timeline(program, "cpu2-1gbit", program.step.shapes)
    assert found.peak_bytes == predicted.step.peak_bytes <= found.bound == 5e8
    assert found.step.step_s == predicted.step.step_s and found.step.exposed_s == predicted.step.exposed_s
    elsewhere = moec.explain(program, dict.fromkeys(local(program), (1, 3))).schedule
    assert elsewhere.peak_bytes < found.peak_bytes


def test_text_and_json_fit_a_screen(tmp_path):
    program = compiled(moec.Overlap(chunks=2, bucket_mb=0.004), dp=4, ep=4)
    explained = moec.explain(program)
    text, data = str(explained.schedule), json.loads(explained.to_json())["schedule"]
    assert text in str(explained) and len(text.splitlines()) < 45
    assert "memory peak" in text and "no bound" in text and "cpu2-1gbit" in text and "bucket of" in text
    assert len(data["transfers"]) == len(explained.schedule.transfers)
    assert set(data["transfers"][0]) == set(Transfer.__dataclass_fields__)
    assert "in the order in which they were built" in str(moec.explain(compiled(BUILT, dp=4, ep=2)))
    moec.compile_program(
        grid.build("plain"), moec.Plan(ep=1, overlap=moec.Overlap()), 1, (), grid.batch(), training=True, dump=tmp_path
    )
    assert "memory peak" in (tmp_path / "step_schedule.txt").read_text()
    assert (tmp_path / "step_backward.txt").is_file()


def test_evaluation_is_the_graph_that_keeps_nothing():
    plan = moec.Plan(dp=4, ep=4, overlap=moec.Overlap())
    program = moec.compile_program(grid.build("plain").eval(), plan, 4, (), grid.batch(), training=False)
    starts = [n.name for n in program.step.inference.graph.nodes if n.op == "call_function" and is_start(n.target)]
    found = moec.explain(program).schedule
    assert list(found.parts) == ["forward"] and [t.node for t in found.transfers] == starts


def test_parameters_that_the_backward_does_not_read_are_there_all_the_same():
    program = compiled(BUILT, dp=4, ep=2)
    graph = step_graphs(program)["backward"]
    sizes = cost.Sizes.of(program, None, step_graphs(program).values())
    cluster = cost.cluster("cpu2-1gbit")
    owned = [n for n in graph.nodes if n.op == "placeholder" and n.name.removeprefix("saved_") not in program.params]
    alone = cost.predict(graph.nodes, cluster, program.mesh, sizes, owned).peak_bytes
    table = next(s for s in program.params.values() if s.name == "embed.weight")  # the gradient needs ids alone
    found = predicted(program, "backward", graph, cluster, sizes).peak_bytes
    assert found - alone >= torch.Size(table.shape).numel() * table.dtype.itemsize
