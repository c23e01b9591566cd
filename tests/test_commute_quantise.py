"""commute_quantise: what travels is rounded once, the same on any number of ranks, and every mistake is seen.

Legend: T tokens, N rows, H hidden, W bytes a row.
"""

import pytest
import torch
from spmd import Batch, Shape, build, captured, compile_stages, oracle
from test_cast_fp8 import check, recorded
from witness import WitnessError, witness

from moec.check import _relative
from moec.explain import explain
from moec.overlap import Overlap
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision
from moec.program import op_name
from moec.router import Router
from moec.runtime.errors import MoecError
from moec.runtime.fp8.payload import width

SHAPE = Shape(4, 2, biased=True)
BATCH = Batch(4, 6, 0, 4)
ONE = (1, 1, 1, 1)
aten, moec_ops = torch.ops.aten, torch.ops.moec


def compiled(precision, degrees=ONE, shape=SHAPE, stage="lower", **options):
    plan = Plan(*degrees, precision=Precision(**precision), **options)
    return dict(compile_stages(captured(shape), plan))[stage]


def calls(program, *names):
    return [n for n in program.graph.nodes if n.op == "call_function" and op_name(n) in names]


def distance(got, want):
    """The worst of outputs and gradients."""
    scale = max(float(g.norm()) for g in want.grads.values() if g is not None) * 1e-2
    found = [_relative(got.outputs[path], want.outputs[path]) for path in want.outputs]
    found += [_relative(got.grads[n], g, scale) for n, g in want.grads.items() if g is not None]
    return max(found)


BOTH, THERE = {"dispatch": "fp8", "combine": "fp8"}, {"dispatch": "fp8"}
PLANS = {
    "alltoall": ((2, 1, 2, 1), {}), "folded": ((2, 2, 4, 1), {}), "etp": ((2, 2, 2, 2), {}),
    "allgather": ((2, 1, 2, 1), {"dispatch": "allgather"}), "dedup": ((2, 2, 4, 1), {"dispatch": "dedup"}),
    "hierarchical": ((4, 1, 4, 1), {"dispatch": "hierarchical", "ranks_per_node": 2}),
}  # fmt: skip
CASES = [
    ("folded", {"fp8": "rowwise"} | BOTH), ("hierarchical", {"fp8": "current"} | THERE),
    ("alltoall", {"fp8": "blockwise"} | BOTH), ("folded", {"dispatch": "bf16", "combine": "bf16"}),
]  # fmt: skip
MORE = [
    ("folded", BOTH), ("etp", {"fp8": "rowwise"} | THERE), ("allgather", {"fp8": "current"} | THERE), ("dedup", THERE),
    ("alltoall", {"fp8": "mxfp8"} | BOTH), ("dedup", {"fp8": "rowwise"} | THERE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "precision"), [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in MORE)], ids=str
)
def test_any_number_of_ranks_computes_what_one_does(plan, precision):
    degrees, options = PLANS[plan]
    truth = oracle(build(SHAPE), BATCH)
    stage = compiled(precision, degrees, stage="commute_quantise", **options)
    verify(stage)
    witness(stage)
    got, want = (truth._run(compiled(precision, d, **o)) for d, o in ((degrees, options), (ONE, {})))
    assert got.disagreement == 0
    # Tiles along tokens (of linears' weight gradients) are those of a rank.
    tiles = precision.get("fp8") in ("blockwise", "mxfp8")
    assert distance(got, want) < (0.03 if tiles else 1e-12)
    if tiles:
        assert all(_relative(got.outputs[path], want.outputs[path]) < 1e-12 for path in want.outputs)
    bare = truth._run(compiled({k: v for k, v in precision.items() if k == "fp8"}))
    if "fp8" in precision and "combine" not in precision:  # tokens are rounded for the product in any case
        assert all(torch.equal(want.outputs[path], bare.outputs[path]) for path in want.outputs), "and not twice"
    else:
        assert 1e-4 < distance(want, bare) < 0.5, "payloads round, and do no more"


@pytest.mark.parametrize(
    "options",
    [{"dispatch": "static", "router": Router(capacity_factor=1.0)}, {"overlap": Overlap(chunks=2)},
     {"overlap": Overlap(chunks=2, chunk_by="sequences")}],
    ids=["static", "chunks of tokens", "chunks of sequences"],
)  # fmt: skip
def test_what_travels_in_slots_and_in_chunks_is_rounded_once(options):
    """The experts' products read rounded tokens in any case, so the payload changes no output."""
    truth = oracle(build(SHAPE), BATCH)
    bare, sent = (compiled({"fp8": "blockwise"} | more, (2, 1, 2, 1), **options) for more in ({}, THERE))
    assert not calls(bare, "moec.encode_rows") and calls(sent, "moec.encode_rows")
    want, got = truth._run(bare), truth._run(sent)
    assert all(torch.equal(got.outputs[path], want.outputs[path]) for path in want.outputs)
    assert distance(got, want) < 1e-4  # weights' gradients read tiles of what was rounded


@pytest.mark.parametrize(
    "recipe", ["rowwise", "mxfp8", *(pytest.param(r, marks=pytest.mark.nightly) for r in ("current", "blockwise"))]
)
def test_every_operand_lies_on_the_recipes_grid(recipe):
    """The experts' first operand is what the tokens were rounded to, scales and all; the other layout is quantised from
    what it means."""
    program = compiled({"fp8": recipe} | THERE, fuse=False)
    values, _ = recorded(program)
    (encode,) = calls(program, "moec.encode_rows")
    (operand,) = calls(program, "moec.decode_operand")
    (permute,) = calls(program, "moec.permute_aligned")
    x_TH = values[encode.args[0]].detach()
    row_of_TK, counts = values[permute][3], values[operand.args[4]]
    x_NH = torch.zeros(values[permute][0].shape[0], x_TH.shape[1])
    for k in range(row_of_TK.shape[1]):
        x_NH[row_of_TK[:, k]] = x_TH
    _, q, scale, q_T, scale_T = values[operand]
    check(x_NH, counts, q, scale, recipe, "rows", False)
    x_NH = moec_ops.dequantise(q, scale, recipe, "rows", False, torch.float32)
    check(x_NH, counts, q_T, scale_T, recipe, "rows", True)
    products = [n for n in calls(program, "moec.fp8_grouped_mm") if n.args[3].args[0] is operand]
    assert products and all(n.args[3].args[1] == 1 and n.args[4].args[1] == 2 for n in products)


def exchanged(precision):
    """Bytes of a step's exchanges of rows by phase, of one rank: as explained."""
    program = compiled(precision, (2, 1, 2, 1), shape=Shape(4, 2, kv_heads=4))
    found = [c for c in explain(program, {"0": (8, 8), "1": (8, 8)}).collectives if c.primitive == "exchange"]
    return {p: [c.bytes for c in found if c.phase == p] for p in ("forward", "backward")}


def test_bytes_are_half_of_bf16(monkeypatch):
    """At a hidden size at which scales weigh what they do in practice."""
    monkeypatch.setattr("spmd.HIDDEN", 1024)
    rows = 8 * 8 * 2
    wide = exchanged({"compute": "bf16"})
    assert wide == {"forward": [rows * 2048] * 2, "backward": [rows * 2048] * 2}
    for recipe in ("blockwise", "mxfp8", "rowwise"):
        low = exchanged({"compute": "bf16", "fp8": recipe} | THERE)
        assert low == {"forward": [rows * width(1024, recipe), rows * 2048], "backward": [rows * 2048] * 2}
        assert low["forward"][0] <= 0.53 * wide["forward"][0]
    low = exchanged({"compute": "bf16"} | BOTH)
    each = rows * width(1024, "blockwise")
    assert low == {"forward": [each, each], "backward": [each, rows * 2048]}


def test_bytes_travel():
    """A run moves rows of as many bytes as are explained: bytes to the experts and back, gradients of results; float64
    for those of tokens."""
    log = oracle(build(SHAPE), BATCH)._run(compiled({"fp8": "rowwise"} | BOTH, (2, 1, 2, 1))).log
    moved = [e for e in log if e.kind.startswith("all_to_all")]
    each = width(12, "rowwise")
    assert [e.phase for e in moved] == ["forward", "forward", "backward", "backward"]
    for e, row in zip(moved, (each, each, each, 12 * 8), strict=True):
        rows = [n // row for n in e.bytes]
        assert [n * row for n in rows] == list(e.bytes) and min(rows) > 0
        assert max(rows) <= 4 * 6 * SHAPE.k
    assert len({tuple(n // row for n in e.bytes) for e, row in zip(moved, (each, each, each, 96), strict=True)}) == 1


def node_of(program, name, index=0):
    return calls(program, f"moec.{name}")[index]


def instead(node, make):
    """Everybody reads what ``make(call)`` makes of ``node``."""
    graph, made = node.graph, []

    def call(target, *args):
        with graph.inserting_after(made[-1] if made else node):
            made.append(graph.call_function(target, args))
        made[-1].meta.update(node.meta)
        return made[-1]

    end = make(call)
    node.replace_all_uses_with(end, delete_user_cb=lambda user: user not in made)


def lose_scales(program):
    data = node_of(program, "decode_rows").args[0]
    instead(data, lambda call: call(aten.mul.Tensor, data, call(aten.lt.Scalar, call(aten.cumsum.default, call(
        aten.ones_like.default, call(aten.to.dtype, data, torch.int64)), 1), 13)))  # fmt: skip


def other_rows_scales(program):
    data = node_of(program, "decode_rows").args[0]
    instead(data, lambda call: call(aten.cat.default, [call(aten.slice.Tensor, data, 1, 0, 12), call(
        aten.roll.default, call(aten.slice.Tensor, data, 1, 12, 16), [1], [0])], 1))  # fmt: skip


def scale_twice(program):
    y = node_of(program, "decode_rows")
    instead(y, lambda call: call(aten.mul.Tensor, y, call(aten.div.Tensor, call(
        aten.amax.default, call(aten.abs.default, y), [1], True), 448.0)))  # fmt: skip


def test_mistakes_in_scales_change_the_numbers():
    truth = oracle(build(SHAPE), BATCH)
    precision = {"fp8": "rowwise", "exclude": ("*",)} | BOTH  # payloads alone
    program, want = compiled(precision, (2, 1, 2, 1)), truth._run(compiled(precision))
    assert distance(truth._run(program), want) < 1e-12
    for mistake in (lose_scales, other_rows_scales, scale_twice):
        broken = program.fork()
        mistake(broken)
        broken.graph.lint()
        broken.module.recompile()
        assert distance(truth._run(broken), want) > 1e-3, mistake.__name__


def test_mistakes_in_the_graph_are_refused():
    """A maximum of one rank's part; gradients that come from elsewhere than their rows went."""
    program = compiled({"fp8": "current"} | THERE, (2, 1, 2, 1), stage="commute_quantise")
    verify(program)

    def own_maximum(p):
        encode = node_of(p, "encode_rows")
        start = encode.args[1].args[0]
        assert op_name(start) == "moec.m_to_i"
        encode.args[1].replace_all_uses_with(start.args[0])

    def other_splits(p):
        node = node_of(p, "carry_exchange")
        carrier, data, send, recv, *rest = node.args
        node.args = (carrier, data, recv, send, *rest)

    def other_carrier(p):
        node = node_of(p, "decode_operand")
        node.args = (node.args[0], node_of(p, "carry_exchange"), *node.args[2:])

    def other_order(p):
        node = node_of(p, "carry_sorted")
        node.args = (*node.args[:-1], not node.args[-1])

    def not_sorted(p):
        node = node_of(p, "sort_chunks")
        node.replace_all_uses_with(node.args[0])

    for mistake in (own_maximum, other_splits, other_carrier, other_order, not_sorted):
        broken = program.fork()
        mistake(broken)
        broken.graph.eliminate_dead_code()
        with pytest.raises(MoecError):
            verify(broken)
    broken = program.fork()
    own_maximum(broken)
    broken.graph.eliminate_dead_code()
    with pytest.raises(WitnessError):
        witness(broken)


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(MoecError, match="one scale for a whole tensor"):
        Precision(fp8="current", combine="fp8")
    for dispatch in ("dedup", "allgather"):
        with pytest.raises(MoecError, match=f"rounds the row of each pair, and dispatch='{dispatch}' sends sums"):
            Plan(2, 1, 2, 1, dispatch=dispatch, precision=Precision(combine="fp8")).validate(2)
    with pytest.raises(MoecError, match=r"layers.0.moe.*pending sums over tp_etp"):
        compiled({"combine": "bf16"}, (2, 2, 2, 2))
