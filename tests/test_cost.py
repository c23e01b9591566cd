"""The cost model: work of ops against what torch counts and runs, clusters as data, memory by liveness."""

import json
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from cost_graphs import Graph
from hypothesis import given
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import moec
from moec import cost
from moec.capture.examples import dummy_examples
from moec.compiler import compile_program, joint_graphs
from moec.cost.cluster import rate
from moec.cost.operations import PLAIN
from moec.hf import build
from moec.runtime.collectives import is_start
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import is_fake

BATCH = (3, 11)


@pytest.fixture(scope="module")
def compiled():
    """By architecture: the model, one call, its program on one rank, and the graphs of a step."""
    pytest.importorskip("transformers")
    known = {}

    def get(name):
        if name not in known:
            torch.manual_seed(0)
            model = build(name, 1 if name == "mixtral" else 2).train()
            args, kwargs = dummy_examples(model, training=True)
            program = compile_program(model, moec.Plan(), 1, args, kwargs, training=True)
            known[name] = model, program, joint_graphs(program)
        return known[name]

    return get


def sizes_of(program, joint):
    given = {spec.path: BATCH for spec in program.inputs.values()}
    return cost.Sizes.of(program, given, (joint.forward.graph, joint.backward.graph))


def call(model):
    ids = torch.randint(0, 128, BATCH, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


FAMILIES = ["mixtral", "qwen3_moe"] + [
    pytest.param(f, marks=pytest.mark.nightly) for f in ("deepseek_v3", "gpt_oss", "qwen2_moe", "olmoe")
]


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_those_that_torch_counts(compiled, family):
    """Matrix products of the model's own step (experts one by one), against the fused graphs'; attention, which no
    counter of torch's sees on a CPU, by itself."""
    model, program, joint = compiled(family)
    model.set_experts_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(**call(model)).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    sizes, ours, attention = sizes_of(program, joint), Counter(), 0.0
    for graph in (joint.forward.graph, joint.backward.graph):
        for node in graph.nodes:
            if node.op == "call_function":
                work = cost.work(node, sizes)
                if "attention" in work.formula:
                    attention += work.flops
                else:
                    ours[work.formula] += work.flops
    aten = torch.ops.aten
    written_out = ours.pop("aten.bmm", 0)  # attention that is no op of its own
    assert sum(ours.values()) == counted[aten.mm] + counted.get(aten.addmm, 0)
    assert any(name.startswith("moec.experts") for name in ours)
    if written_out:
        assert (written_out, attention) == (counted[aten.bmm], 0)
    else:
        # Scores and weighted values: 4 forward, 8 backward, and 2 for scores that a flash backward forms again; half of
        # them where the kernel knows that the mask is causal.
        assert attention / (14 * counted[aten.bmm] / 12) in (pytest.approx(1), pytest.approx(0.5))


@pytest.mark.parametrize("family", ["mixtral"])
def test_shapes_and_bytes_are_those_of_a_run(compiled, family):
    """Every value of the forward graph, run on real tensors: the predicted shape, dtype and so bytes."""
    model, program, joint = compiled(family)
    sizes, seen = sizes_of(program, joint), 0
    params = dict(model.named_parameters()) | dict(model.named_buffers())

    class Run(fx.Interpreter):
        def run_node(self, n):
            nonlocal seen
            found, val = super().run_node(n), n.meta.get("val")
            if isinstance(found, torch.Tensor) and n.op != "get_attr":
                assert sizes.shape(val) == tuple(found.shape) and sizes.bytes(val) == found.nbytes, n
                seen += 1
            return found

    operands = []
    for node in program.placeholders():
        spec = program.params.get(node.name)
        operands.append(params[spec.name].detach() if spec else call(model)[program.inputs[node.name].path])
    with torch.no_grad():
        Run(joint.forward).run(*operands)
    assert seen > 100


def test_work_of_ops_by_hand():
    g = Graph()
    x, w = g.value(6, 4), g.value(3, 4, 5)
    counts = g.value(3, dtype=torch.int64)
    product = g.call(torch.ops.moec.grouped_mm.default, x, w, counts, shape=(6, 5))
    assert g.work(product).flops == 2 * 6 * 4 * 5
    assert g.work(product).bytes == 4 * (6 * 4 + 3 * 4 * 5 + 6 * 5) + 8 * 3
    add = g.call(torch.ops.aten.add.Tensor, x, x, shape=(6, 4))
    assert g.work(add) == cost.Work(0, 4 * (2 * 24), "float32", 1, PLAIN)
    table, ids = g.value(1000, 4), g.value(7, dtype=torch.int64)
    rows = g.call(torch.ops.aten.embedding.default, table, ids, shape=(7, 4))
    assert g.work(rows).bytes == 2 * 4 * 28 + 8 * 7  # not the table


@pytest.mark.parametrize("space", ["moec", "moec_te"])
def test_work_of_fp8_products(space):
    """Three of a weight, at FP8's rate; carriers have no memory; a forward reads one layout of each operand."""
    import moec.runtime.transformer_engine_fp8  # noqa: F401  makes its ops

    ops, N, E, K, M = getattr(torch.ops, space), 64, 4, 32, 16
    g = Graph()

    def operand(*shape):
        scale = g.value(*shape[:-2], 1, 1)
        return g.value(*shape, dtype=torch.float8_e4m3fn), scale

    for experts, forward, dgrad, wgrad in (
        ((), ops.fp8_linear, ops.fp8_dgrad, ops.fp8_wgrad),
        ((E,), ops.fp8_grouped_mm, ops.fp8_grouped_dgrad, ops.fp8_grouped_wgrad),
    ):
        counts = [g.value(E, dtype=torch.int64)] if experts else []
        weight = (*experts, K, M) if experts else (M, K)
        x, w, x_q, w_q = g.value(N, K), g.value(*weight), operand(N, K), operand(*weight)
        rest = (None, "current", False)
        y = g.call(forward.default, x, w, *counts, *x_q, *w_q, *x_q, *w_q, *rest, shape=[(N, M), (0,), (0,)])
        size = E if experts else 1
        wanted = cost.Work(2 * N * K * M, 4 * N * M + N * K + size * K * M + 4 * (1 + size), "float8_e4m3fn", size,
                           "moec." + forward.__name__)  # fmt: skip
        assert g.work(y) == wanted
        g_q = operand(N, M)
        dx = g.call(dgrad.default, *g_q, *w_q, *counts, "current", torch.float32, shape=(N, K))
        pair = (*x_q, *g_q) if experts else (*g_q, *x_q)
        dw = g.call(wgrad.default, *pair, *counts, "current", torch.float32, shape=(*experts, M, K))
        for node in (dx, dw):
            assert (g.work(node).flops, g.work(node).products) == (2 * N * K * M, size)
    rates = cost.cluster("mi300x"), cost.cluster("h100-nvl8-400g"), cost.cluster("cpu2-1gbit")
    assert rates[0].matmul("float8_e4m3fn", 1e9) == rates[0].matmul("bfloat16", 1e9)
    assert rates[1].matmul("float8_e4m3fn", 1e9) == 2 * rates[1].matmul("bfloat16", 1e9)
    assert rates[2].matmul("float8_e4m3fn", 1e9) == rates[2].matmul("float32", 1e9)


def experts_backward(need):
    g = Graph()
    E, H, M, I, N = 3, 4, 10, 5, 7  # noqa: E741
    grad, x, h = g.value(N, H), g.value(N, H), g.value(N, M)
    w_in, b_in, w_out = g.value(E, H, M), g.value(E, M), g.value(E, I, H)
    counts = g.value(E, dtype=torch.int64)
    op = torch.ops.moec.experts_rows_backward.default
    shapes = [(N, H), (E, H, M), (E, M), (E, I, H)]
    args = (grad, x, [w_in], [b_in], w_out, None, h, counts, "body", need)
    return g.work(g.call(op, *args, shape=shapes)).flops, 2 * N * H * M, 2 * N * I * H


def test_a_frozen_weight_has_no_gradient_to_compute():
    flops, first, second = experts_backward([True, True, True, True])
    assert flops == 2 * (first + second)
    assert experts_backward([True, False, True, True])[0] == flops - first
    assert experts_backward([True, True, False, False])[0] == flops - second


# ------------------------------------------------------------------------------------------------ communication

CLUSTER = cost.Cluster(
    "test", {"float32": ((1.0, 1e9),)}, ((1.0, 1e9),), 1e-6,
    {"node": cost.Link(1e-5, 1e9), "network": cost.Link(1e-3, 1e8, {"all_to_all": (2e-3, 5e7)})}, ranks_per_node=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "key", "primitive", "wanted"),
    [
        ({"tp": 2, "dp": 4}, "tp_etp", "all_reduce", 1e-5 + 3e6 / 1e9),  # inside a node
        # Four ranks in different nodes: each has its own way out.
        ({"tp": 2, "dp": 4}, "dp_edp", "all_reduce", 1e-3 + 3e6 / 1e8),
        ({"tp": 2, "dp": 4}, "dp_edp", "all_to_all", 2e-3 + 3e6 / 5e7),
        # All eight, two in each of four nodes: what rings bring out of a node (3/4 of the whole) its two share.
        ({"tp": 2, "dp": 4}, "dp_edp,tp_etp", "all_gather", 1e-3 + (3e6 * 8 / 7 * 3 / 4) / 2 / 1e8),
        # In an exchange six of seven parts go out.
        ({"tp": 2, "dp": 4}, "dp_edp,tp_etp", "all_to_all", 2e-3 + 3e6 * 6 / 7 / 5e7),
    ],
)
def test_seconds_of_a_transfer(plan, key, primitive, wanted):
    mesh = Mesh.of(etp=2, **plan)
    assert cost.transfer(primitive, 3e6, key, CLUSTER, mesh) == pytest.approx(wanted)


def test_a_purpose_changes_no_seconds():
    mesh = Mesh.of(dp=2)
    assert cost.transfer("all_reduce", 1e6, "dp_edp#gradients", CLUSTER, mesh) == cost.transfer(
        "all_reduce", 1e6, "dp_edp", CLUSTER, mesh
    )


@pytest.mark.parametrize(("dispatch", "chunks"), [("alltoall", 1), ("dedup", 1), ("dedup", 3)])
def test_exchanges_move_what_explain_says(dispatch, chunks):
    """Rows that depend on data: both graphs, and the collectives that ``explain`` reads off the program."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build("mixtral", 1).train()
    args, kwargs = dummy_examples(model, training=True)
    overlap = moec.Overlap(chunks=chunks) if chunks > 1 else None
    plan = moec.Plan(ep=4, dispatch=dispatch, overlap=overlap)
    program = compile_program(model, plan, 4, args, kwargs, training=True)
    joint = joint_graphs(program)
    sizes = sizes_of(program, joint)
    told = moec.explain(program, {spec.path: BATCH for spec in program.inputs.values()})
    for graph, phase in ((joint.forward.graph, "forward"), (joint.backward.graph, "backward")):
        starts = [n for n in graph.nodes if is_start(n.target) and "all_to_all" in str(n.target)]
        wanted = sorted(c.bytes for c in told.collectives if c.phase == phase and c.primitive == "exchange")
        bytes_ = sorted(min(sizes.bytes(n.args[0].meta["val"]), sizes.bytes(n.meta["val"])) for n in starts)
        assert bytes_ == pytest.approx(wanted, abs=4 * 64)  # a row of rounding
    assert all(is_fake(n.meta["val"]) for n in starts)


def test_an_op_that_was_measured_has_its_own_seconds():
    g = Graph()
    y = g.call(torch.ops.aten.neg.default, g.value(1000), shape=(1000,))
    plain = cost.seconds(y, CLUSTER, g.mesh, g.sizes)
    assert plain == pytest.approx(1e-6 + 8000 / 1e9)
    measured = replace(CLUSTER, ops={"aten.neg": (5e-6, 3.0)})
    assert cost.seconds(y, measured, g.mesh, g.sizes) == pytest.approx(5e-6 + 3 * 8000 / 1e9)
    assert cost.Cluster.from_dict(measured.to_dict()) == measured


def test_a_start_copies_what_it_sums():
    g = Graph()
    start = g.start(g.value(1000), (1000,))
    cluster = replace(CLUSTER, launch_s=1e-4)
    launch = cost.roofline.launch(start, cluster, g.mesh, g.sizes)
    assert launch == pytest.approx(1e-6 + 1e-4 + 8000 / 1e9)


def test_a_start_moves_rows_that_stay_at_home():
    """Of an exchange among two, half of them."""
    g = Graph()
    start = g.call(torch.ops.moec.all_to_all_equal.default, g.value(1000), 2, "dp_edp", shape=(1000,))
    moved = cost.roofline.launch(start, CLUSTER, g.mesh, g.sizes) - CLUSTER.op_overhead_s - CLUSTER.launch_s
    assert moved == pytest.approx(2 * 2000 / 1e9)


# ------------------------------------------------------------------------------------------------ clusters


def test_presets():
    known = cost.presets()
    assert set(known) == {"cpu2-1gbit", "h100-nvl8-400g", "gb200-nvl72", "mi300x"}
    for c in known.values():
        assert c.matmul("float32", 1e12) < c.matmul_flops["bfloat16"][-1][1] * 1.01
        assert c.link("network").bytes_per_s <= c.link("node").bytes_per_s


def test_a_file_is_what_was_written(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CLUSTER.to_yaml())
    assert cost.cluster(path) == CLUSTER
    path.write_text("matmul_flops: {float32: 1e+11}\nmemory_bytes: 1e+10\nop_overhead_s: 1e-6\n")
    found = cost.cluster(str(path))
    assert found.name == "mine" and found.matmul("bfloat16", 5) == 1e11
    with pytest.raises(moec.MoecError, match="no link"):
        found.link("network")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "expected the fields"),
        ("matmul_flops: {float32: 1}", "memory_bytes"),
        ("matmul_flops: {float32: 1}\nmemory_bytes: 1\nop_overhead_s: 0\ncores: 2", "unknown fields"),
        ("matmul_flops: {float32: -1}\nmemory_bytes: 1\nop_overhead_s: 0", "positive"),
        ("matmul_flops: {float32: [[2, 1], [1, 1]]}\nmemory_bytes: 1\nop_overhead_s: 0", "by growing size"),
        ("matmul_flops: {float32: 1}\nmemory_bytes: 1\nop_overhead_s: 0\ncomm_share: 1", "comm_share"),
        ("matmul_flops: {float32: 1}\nmemory_bytes: 1\nop_overhead_s: 0\nlaunch_s: -1", "times not negative"),
        ("matmul_flops: {float32: 1}\nmemory_bytes: 1\nop_overhead_s: 0\nops: {aten.mul: [-1, 1]}", "not negative"),
        ("matmul_flops: {float32: 1}\nmemory_bytes: 1\nop_overhead_s: 0\nops: {aten.mul: [0, 0]}", "positive"),
        ("matmul_flops: {float32: 1}\nmemory_bytes: 1\nop_overhead_s: 0\nops: {aten.mul: 3}", "not a cluster"),
        ("matmul_flops: {float32: 1}\nmemory_bytes: 1\nop_overhead_s: 0\nlinks: {moon: {alpha_s: 1, bytes_per_s: 1}}",
         "unknown links"),
    ],
)  # fmt: skip
def test_what_is_no_cluster(tmp_path, text, why):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(moec.MoecError, match=why):
        cost.cluster(path)


def test_an_unknown_name_names_the_known():
    with pytest.raises(moec.MoecError, match="h100-nvl8-400g"):
        cost.cluster("h100")


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_a_curve_goes_through_its_points(a, b):
    curve = ((10.0, 3.0), (1000.0, 30.0), (1e5, 20.0))
    assert [rate(curve, x) for x, _ in curve] == pytest.approx([y for _, y in curve])
    assert rate(curve, 100.0) == pytest.approx((3 * 30) ** 0.5)
    assert 3 - 1e-9 <= rate(curve, a) <= 30 + 1e-9
    if a <= b <= 1000:
        assert rate(curve, a) <= rate(curve, b) + 1e-9


# ------------------------------------------------------------------------------------------------ memory


def test_memory_by_liveness():
    g = Graph()
    x = g.value(10)  # 40 bytes each
    a = g.call(torch.ops.aten.neg.default, x, shape=(10,))
    view = g.call(torch.ops.aten.view.default, a, [10], shape=(10,))
    b = g.call(torch.ops.aten.neg.default, view, shape=(10,))
    c = g.call(torch.ops.aten.neg.default, b, shape=(10,))
    out = g.graph.output((c,))
    order = list(g.graph.nodes)
    storages = cost.Storages(order, g.sizes)
    #               x   a   view  b    c (a is free)  output
    wanted = [40, 80, 80, 120, 120, 80]
    assert storages.profile(order, [x, out]) == wanted
    assert storages.profile(order, [out])[3] == 80  # of x nothing is left after its use
    assert storages.of(view) == storages.of(a) and not storages.made[view]


def test_what_is_sent_is_alive_until_it_has_arrived():
    g = Graph()
    x = g.value(10)
    a = g.call(torch.ops.aten.neg.default, x, shape=(10,))
    start = g.start(a, (10,))
    b = g.call(torch.ops.aten.neg.default, x, shape=(10,))
    wait = g.wait(start)
    c = g.call(torch.ops.aten.add.Tensor, wait, b, shape=(10,))
    out = g.graph.output((c,))
    order = list(g.graph.nodes)
    profile = cost.Storages(order, g.sizes).profile(order, [x, out])
    assert profile == [40, 80, 120, 160, 160, 160, 80]


def test_results_of_an_op_are_let_go_of_one_by_one():
    g = Graph()
    x = g.value(10)
    both = g.call(torch.ops.aten.split.Tensor, x, 5, shape=[(10,), (20,)])
    both.target = torch.ops.moec.permute.default  # any op with several results
    first, second = g.item(both, 0, (10,)), g.item(both, 1, (20,))
    a = g.call(torch.ops.aten.neg.default, first, shape=(10,))
    b = g.call(torch.ops.aten.neg.default, second, shape=(20,))
    out = g.graph.output((a, b))
    order = list(g.graph.nodes)
    assert cost.Storages(order, g.sizes).profile(order, [x, out]) == [40, 160, 160, 160, 200, 240, 160]


def test_a_trace_is_json_with_one_thing_at_a_time():
    at = [
        ("a", "compute", 0, 2),
        ("b", "compute", 2, 3),
        ("s", "comm:x", 0, 2),
        ("t", "comm:x", 1, 3),
        ("u", "comm:x", 2, 4),
    ]
    spans = [cost.Span(*s) for s in at]
    events = json.loads(json.dumps(cost.trace({"predicted": spans, "measured": spans[:1]})))["traceEvents"]
    tracks: dict[tuple, float] = {}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert e["ts"] >= tracks.get((e["pid"], e["tid"]), 0.0)
        tracks[e["pid"], e["tid"]] = e["ts"] + e["dur"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"compute", "comm:x", "comm:x (2)"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["predicted", "measured"]


def test_a_cluster_can_be_changed():
    assert replace(CLUSTER, ranks_per_node=4).to_dict()["ranks_per_node"] == 4
