"""Graphs in predicted time: against schedules computed by hand, and bounds that hold for any."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from cost_graphs import Graph
from hypothesis import given

from moec import cost
from moec.cost import timeline as module
from moec.cost.roofline import COMPUTE
from moec.runtime.collectives import TABLE, is_start


def run(g, took, **options):
    """``took``: seconds by name; links by group unless said otherwise."""
    return cost.simulate(
        list(g.graph.nodes), lambda n: took.get(n.name, 0.0), lambda n: cost.stream(n, g.mesh), **options
    )


def hidden(order):
    """One collective (s) beside one op (c), in this order of start, compute, wait; then the output."""
    g = Graph()
    x = g.value(1)
    s = c = w = None
    for step in order:
        if step == "s":
            s = g.start(x, (1,))
            s.name = "s"
        elif step == "c":
            c = g.compute(x, name="c")
        else:
            w = g.wait(s)
    g.graph.output((c, w))
    return g


def test_compute_hides_communication():
    assert run(hidden("scw"), {"s": 2, "c": 3}).step_s == 3
    assert run(hidden("scw"), {"s": 2, "c": 3}).exposed_s == 0
    late = run(hidden("scw"), {"s": 5, "c": 3})
    assert (late.step_s, late.compute_s, late.exposed_s) == (5, 3, 2)


@pytest.mark.parametrize("order", ["swc", "csw"])
def test_what_is_not_beside_each_other_adds_up(order):
    """Sabotage of the order: the same nodes, nothing hidden."""
    found = run(hidden(order), {"s": 2, "c": 3})
    assert (found.step_s, found.exposed_s) == (5, 2)


def two(groups):
    g = Graph()
    x = g.value(1)
    starts = [g.start(x, (1,), group) for group in groups]
    for name, s in zip("ab", starts, strict=True):
        s.name = name
    waits = [g.wait(s) for s in starts]
    g.graph.output(tuple(waits))
    return g


def ends(timeline):
    return {s.node: s.end_s for s in timeline.spans}


def test_a_stream_works_in_order():
    assert ends(run(two(["dp_edp", "dp_edp"]), {"a": 2, "b": 3})) == {"a": 2, "b": 5}


def test_two_at_once_share_the_link():
    # Each gets half: a is done at 4, and b, of which 1 is left, at 5.
    assert ends(run(two(["dp_edp", "dp_edp"]), {"a": 2, "b": 3}, at_once=2)) == {"a": 4, "b": 5}


def test_what_pairs_of_ranks_send_goes_one_behind_the_other():
    g = two(["dp_edp", "dp_edp"])
    for s in g.graph.find_nodes(op="call_function", target=TABLE["p_to_i"].op):
        s.target = TABLE["p_to_s"].op
    assert ends(run(g, {"a": 2, "b": 3}, at_once=2)) == {"a": 2, "b": 5}


def test_streams_have_links_of_their_own_or_one():
    g = two(["dp_edp", "tp_etp"])
    assert ends(run(g, {"a": 2, "b": 3})) == {"a": 2, "b": 3}
    assert ends(run(g, {"a": 2, "b": 3}, link=lambda stream: "cable")) == {"a": 4, "b": 5}


def test_communication_slows_compute_down():
    # While s runs, half of 2 s is done in each second: 1 of 2 after 2 s; then 1 more.
    found = run(hidden("scw"), {"s": 2, "c": 2}, comm_share=0.5)
    assert (found.step_s, found.compute_s, found.exposed_s) == (3, 2, 1)


def test_a_start_takes_a_launch():
    found = run(hidden("scw"), {"s": 2, "c": 3}, launch=0.5)
    assert (found.step_s, found.exposed_s) == (3.5, 0)
    assert [(s.node, s.stream, s.start_s, s.end_s) for s in found.spans] == [
        ("s", COMPUTE, 0, 0.5),
        ("s", "comm:dp_edp", 0.5, 2.5),
        ("c", COMPUTE, 0.5, 3.5),
    ]


def test_what_nobody_waits_for_is_part_of_the_step():
    g = Graph()
    s = g.start(g.value(1), (1,))
    s.name = "s"
    assert run(g, {"s": 4}).step_s == 4


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("_sharing", lambda clock, job: 1),
        ("wait", lambda clock, job: None),
        ("_begin", lambda clock, stream: _all_at_once(clock, stream)),
    ],
)
def test_sabotage(monkeypatch, fault, broken):
    """Links that are not shared, waits that do not wait, streams without order: one of the schedules above differs."""

    def all_of_them():
        shared = run(two(["dp_edp", "tp_etp"]), {"a": 2, "b": 3}, link=lambda stream: "cable")
        return (
            ends(run(two(["dp_edp", "dp_edp"]), {"a": 2, "b": 3})),
            ends(shared),
            run(hidden("swc"), {"s": 2, "c": 3}),
        )

    right = all_of_them()
    monkeypatch.setattr(module._Clock, fault, broken)
    assert all_of_them() != right


def _all_at_once(clock, stream):
    while clock.queues[stream]:
        job = clock.queues[stream].popleft()
        job.began = clock.now
        clock.running.append(job)


@st.composite
def orders(draw):
    """A graph of computes and collectives over two groups, waits somewhere behind their starts."""
    g, took, waiting = Graph(), {}, []
    values = [g.value(1)]
    for i in range(draw(st.integers(1, 12))):
        what = draw(st.sampled_from(["compute", "start", "wait"]))
        if what == "wait" and waiting:
            values.append(g.wait(waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
            continue
        source = draw(st.sampled_from(values))
        if what == "start":
            node = g.start(source, (1,), draw(st.sampled_from(["dp_edp", "tp_etp"])))
            waiting.append(node)
        else:
            node = g.compute(source)
            values.append(node)
        node.name = f"n{i}"
        took[f"n{i}"] = draw(st.floats(0.0, 10.0))
    values += [g.wait(s) for s in waiting]
    g.graph.output(tuple(values))
    return g, took


@given(orders(), st.integers(1, 3), st.booleans())
def test_bounds_of_any_schedule(made, at_once, one_link):
    g, took = made
    link = (lambda s: "cable") if one_link else (lambda s: s)
    found = run(g, took, at_once=at_once, link=link)
    starts = {n.name: cost.stream(n, g.mesh) for n in g.graph.nodes if is_start(n.target)}
    compute = sum(t for name, t in took.items() if name not in starts)
    by_link = {}
    for name, stream in starts.items():
        by_link[link(stream)] = by_link.get(link(stream), 0.0) + took[name]
    assert found.compute_s == pytest.approx(compute)
    assert found.step_s >= max([compute, *by_link.values()]) - 1e-6
    assert found.step_s <= compute + sum(by_link.values()) + 1e-6
    assert found.exposed_s == pytest.approx(found.step_s - compute)
    events = sorted((s for s in found.spans if s.stream == COMPUTE), key=lambda s: s.start_s)
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(events))
    # Communication alone takes its link's whole time; compute alone takes compute's.
    assert run(g, {n: t for n, t in took.items() if n not in starts}).step_s == pytest.approx(compute)


def test_then():
    a, b = (run(hidden("scw"), {"s": 2, "c": c}) for c in (3, 1))
    both = a.then(b)
    assert both.step_s == 5 and both.exposed_s == 1 and len(both.spans) == 4
    assert max(s.end_s for s in both.spans) == 5
    assert torch.tensor([s.start_s for s in both.spans]).min() == 0
