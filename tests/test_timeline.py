"""Predicted steps of programs, recorded ones, and the commands."""

import json
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from unittest import mock

import grid
import pytest
import torch

import moec
from moec import cli, cost
from moec.cost.roofline import COMPUTE

CLUSTER = cost.Cluster(
    "test", {"float32": ((1.0, 1e9),)}, ((1.0, 1e9),), 1e-6,
    {"node": cost.Link(1e-5, 1e9), "network": cost.Link(1e-3, 1e8)}, ranks_per_node=1,
)  # fmt: skip


@cache
def compiled(overlap: bool = False, **degrees):
    data = grid.batch()
    plan = moec.Plan(**degrees, overlap=moec.Overlap(schedule=False, bucket_mb=None) if overlap else None)
    layers = 3 if "fsdp" in degrees else 1  # the last two units are not gathered again
    model = grid.build("plain", replace(grid.SIZES, layers=layers))
    return moec.compile_program(model, plan, 2, (), data, training=True)


def sizes():
    return {name: (x.shape[0] // 2, *x.shape[1:]) for name, x in grid.batch().items()}


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 2, "fsdp": True}, {"dp": 2, "ep": 2}], ids=str)
def test_a_step_as_it_is_and_as_graphs(degrees):
    """A plan whose graphs run as built takes as long as the recorded one, reductions apart: those are buckets here and
    single ones there."""
    recorded = moec.timeline(compiled(**degrees), CLUSTER, sizes())
    built = moec.timeline(compiled(True, **degrees), CLUSTER, sizes())
    assert list(built.parts) == ["forward", "backward"]
    assert built.parts["forward"].step_s == pytest.approx(recorded.parts["forward"].step_s)
    alone = recorded.parts["backward"].step_s + sum(
        p.step_s for name, p in recorded.parts.items() if name in ("gathered", "epilogue")
    )
    # Each reduction of its own costs a latency more.
    singles = sum(s.stream.endswith("#gradients") for s in built.step.spans)
    assert abs(built.parts["backward"].step_s - alone) <= (singles + 8) * 1.2e-3
    assert ("epilogue" in recorded.parts) == ("fsdp" not in degrees or bool(compiled(**degrees).grad_reductions))
    assert ("gathered" in recorded.parts) == ("fsdp" in degrees)
    for found in (recorded, built):
        assert found.step.exposed_s > 0
        assert found.step.peak_bytes > sum(p.numel() * 4 for p in grid.build("plain").parameters()) / 2


def test_a_slower_link_takes_longer():
    program = compiled(dp=2, ep=2)
    step = moec.timeline(program, CLUSTER, sizes()).step
    slow = cost.Cluster.from_dict({**CLUSTER.to_dict(), "links": {"network": {"alpha_s": 1e-3, "bytes_per_s": 1e6}}})
    assert moec.timeline(program, slow, sizes()).step.exposed_s > 5 * step.exposed_s
    assert moec.timeline(program, slow, sizes()).step.compute_s == step.compute_s


def test_a_step_says_what_it_is_for():
    found = moec.timeline(compiled(dp=2, ep=2), "cpu2-1gbit", sizes())
    assert "cpu2-1gbit" in str(found) and "exposed communication" in str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["step_s"] == pytest.approx(sum(p["step_s"] for p in data["parts"].values()))
    assert {e["args"]["name"] for e in found.trace()["traceEvents"] if e["name"] == "process_name"} == {
        "predicted on cpu2-1gbit"
    }


def test_what_cannot_be_predicted():
    with pytest.raises(moec.MoecError, match="inputs and their dims"):
        moec.timeline(compiled(dp=2), CLUSTER, {"nothing": (1, 2)})
    alone = cost.Cluster.from_dict({**CLUSTER.to_dict(), "links": {}})
    with pytest.raises(moec.MoecError, match="no link"):
        moec.timeline(compiled(dp=2), alone, sizes())
    inference = moec.compile_program(grid.build("plain"), moec.Plan(), 1, (), grid.batch(), training=False)
    with pytest.raises(moec.MoecError, match="training mode"):
        moec.timeline(inference, CLUSTER)


def test_a_recorded_step_is_the_step(tmp_path):
    data = grid.batch()
    model = moec.parallelize(grid.build("plain"), moec.Plan(overlap=moec.Overlap()), example_kwargs=data)

    def step():
        model.zero_grad()
        loss = model(**data)["loss"]
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    wanted = step()
    with moec.record(model) as spans:
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert {s.stream for s in spans} == {COMPUTE}
    assert all(a.start_s <= a.end_s <= b.start_s for a, b in pairwise(spans))
    assert len(spans) > 100
    count = len(spans)
    step()
    assert len(spans) == count  # outside nothing is recorded
    moec.save_spans(spans, tmp_path / "run.json")
    assert moec.load_spans(tmp_path / "run.json") == spans


def test_what_cannot_be_recorded(tmp_path):
    model = moec.parallelize(grid.build("plain"), moec.Plan(), example_kwargs=grid.batch())
    with pytest.raises(moec.MoecError, match="Overlap"), moec.record(model):
        pass
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(moec.MoecError, match="not a recorded run"):
        moec.load_spans(tmp_path / "a.json")


def gloo_record(rank, world):
    model = moec.parallelize(
        grid.build("plain"), moec.Plan(dp=4, ep=4, overlap=moec.Overlap()), example_kwargs=grid.batch()
    )
    mine = {k: moec.shard_batch(x, model) for k, x in grid.batch().items()}
    with moec.record(model) as spans:
        model(**mine)["loss"].backward()
    return spans, moec.explain(model).schedule.transfers


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_collectives_are_recorded(gloo4):
    for spans, said in gloo4.run(gloo_record, timeout=250):
        streams = {s.stream for s in spans}
        assert {COMPUTE, "comm:dp_ep#exchange", "comm:dp_ep#gradients"} <= streams
        launched = {s.node: s for s in spans if s.stream == COMPUTE}
        sent = [s for s in spans if s.stream != COMPUTE]
        assert all(launched[s.node].start_s == s.start_s for s in sent)
        began = sorted(sent, key=lambda s: s.start_s)  # what explain says is what ran, in that order
        assert [(s.node, s.stream) for s in began] == [(t.node, f"comm:{t.group}") for t in said]
        waited = [s.node for s in sorted(sent, key=lambda s: s.end_s)]
        assert waited == [t.node for t in sorted(said, key=lambda t: (t.phase == "backward", t.waited_s))]


# ------------------------------------------------------------------------------------------------ calibration


def shorter():
    sizes = {"PRODUCTS": (8, 32), "ELEMENTS": (16, 1024), "LARGE": (64, 128), "REPEATS": 1, "STEADY": 0.01}
    return mock.patch.multiple(sys.modules["moec.calibrate"], **sizes)


@pytest.fixture
def short():
    with shorter():
        yield


def test_calibration_alone(short, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    assert cli.main(["calibrate", "--out", str(path), "--dtype", "float32", "--name", "laptop"]) == 0
    assert "no links" in capsys.readouterr().out
    found = cost.cluster(path)
    assert found.name == "laptop" and not found.links
    assert [size for size, _ in found.matmul_flops["float32"]] == [2.0 * 8**3, 2.0 * 32**3]
    assert cost.Cluster.from_dict(found.to_dict()) == found


def test_what_interrupts_a_step_is_in_the_figures(monkeypatch):
    """Of ten products one takes eleven times as long: medians miss it, a step does not."""
    module = sys.modules["moec.calibrate"]
    took = iter([1.0, *[1.0] * 9, 11.0] * 2)  # the first warms up
    now = [0.0]

    def product():
        now[0] += next(took)

    monkeypatch.setattr(module, "_product", lambda *_: product)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "STEADY", 20.0)
    assert module._interrupted(module._Clock("cpu")) == pytest.approx(2.0)
    assert module._interrupted(module._Clock("cuda")) == 1.0
    ops = {"aten.pow": (1e-6, 3.0)}
    found = module.slower(replace(CLUSTER, ops=ops, launch_s=1e-5), 2.0)
    assert found.matmul("float32", 1.0) == CLUSTER.matmul("float32", 1.0) / 2 and found.memory(1.0) == 5e8
    assert found.op_overhead_s == 2e-6 and found.ops == {"aten.pow": (2e-6, 3.0)}
    assert found.links == CLUSTER.links


def test_an_unknown_dtype_is_refused():
    with pytest.raises(moec.MoecError, match="float33"):
        moec.calibrate(dtypes=("float33",))


def gloo_calibrate(rank, world, local):
    with shorter(), mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=str(local)):
        return moec.calibrate(dtypes=("float32",))


@pytest.mark.parametrize(("local", "scopes"), [(2, {"node", "network"}), (4, {"node"})])
def test_calibration_of_links(gloo4, local, scopes):
    first, *others = gloo4.run(gloo_calibrate, local)
    assert set(first.links) == scopes and first.ranks_per_node == local
    assert set(first.links["node"].primitives) == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "equal", "counts"
    }  # fmt: skip
    assert first.at_once == 2 and 0 <= first.comm_share < 1 and first.launch_s > 0
    assert {"aten._scaled_dot_product_flash_attention_for_cpu", "moec.cross_entropy", "moec.permute"} <= set(first.ops)
    assert {"aten.addmm", "moec.rms_norm", "moec.rms_norm_backward", "moec.experts_rows"} <= set(first.ops)
    assert all(overhead > 0 and times >= 1 for overhead, times in first.ops.values())
    assert all(o.ops == first.ops and o.launch_s == first.launch_s for o in others)
    assert all(o.matmul_flops == first.matmul_flops and o.comm_share == first.comm_share for o in others)


# ------------------------------------------------------------------------------------------------ the command


def test_the_command(tmp_path, capsys):
    out, measured = tmp_path / "trace.json", tmp_path / "run.json"
    moec.save_spans([cost.Span("mm", COMPUTE, 0.0, 1.0)], measured)
    path = tmp_path / "model.py"
    path.write_text("import grid\ndef make_model():\n    return grid.build('plain'), (), grid.batch()\n")
    command = ["timeline", f"{path}:make_model", "--world", "8", "--ep", "4", "--cluster", "h100-nvl8-400g", "--json"]
    shape = next(iter(grid.batch().values())).shape
    size = f"{next(iter(grid.batch()))}=1x{shape[1]}"
    assert cli.main([*command, "--out", str(out), "--measured", str(measured), "--size", size]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cluster"] == "h100-nvl8-400g" and told["step_s"] > told["compute_s"] > 0
    events = json.loads(out.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert cli.main([*command, "--size", "x=ab"]) == 2
    assert "INPUT=BxS" in capsys.readouterr().err
    assert cli.main([*command[:-3], "--cluster", "moon"]) == 2
    assert "known: cpu2-1gbit" in capsys.readouterr().err
