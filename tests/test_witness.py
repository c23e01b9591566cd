"""Types have a second witness: the ``spmd_types`` checker derives those of sharded graphs anew (``witness.py``).

It accepts every right program, and of the mistakes of ``sabotage.py`` it catches every one in a collective or in a
gradient: dropped, or with the wrong gradient.  What it cannot see are other values of the same type.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from covering import covering, name
from sabotage import mistakes
from spmd import Shape, captured, compile_stages, compiled
from test_zoo import BY_DEFAULT, FAMILIES, PLANS, make
from witness import WitnessError, witness
from witness_moves import CONVERSIONS
from witness_rules import MOEC, PACKED

from moec.capture.examples import dummy_examples
from moec.compiler import compile_program
from moec.overlap import Overlap
from moec.placement import R, S
from moec.plan import Plan
from moec.precision import Precision
from moec.program import Program, op_name
from moec.runtime.collectives import TABLE, collective
from moec.runtime.errors import MoecError

aten = torch.ops.aten

SHAPES = {
    (2, 2, 4, 1): Shape(12, biased=True), (2, 2, 2, 2): Shape(biased=True), (1, 4, 1, 4): Shape(),
    (4, 1, 2, 2): Shape(biased=True),
}  # fmt: skip
OPTIONS = [
    Plan(2, 2, 4, 1, sequence_parallel=True), Plan(2, 1, 2, 1, cp=2), Plan(1, 2, 2, 1, cp=2, sequence_parallel=True),
    Plan(4, 1, 2, 1, fsdp=True), Plan(2, 2, 2, 2, fsdp=True), Plan(4, 1, 2, 1, fsdp=2),
]  # fmt: skip
"""Sequence and context parallelism (packed dims), FSDP (packed parameters, shards inside of shards, copies)."""
UNSEEN = ("ids rolled", "weights rolled", "row numbers rolled", "inverse flipped", "counts reversed")
"""Mistakes that leave every type as it was: rows in another order, other tokens' weights.  The numbers show them
(``test_sabotage.py``)."""


@pytest.mark.parametrize("degrees", SHAPES, ids=str)
def test_a_right_program_is_accepted(degrees) -> None:
    stages = dict(compiled(SHAPES[degrees], degrees))
    assert witness(stages["shard"]).by_rule["moec.grouped_mm"] == 2
    fused = witness(stages["fuse_experts"]).by_rule
    assert fused.get("moec.experts_rows", 0) + fused.get("moec.experts", 0) == 1 and "moec.grouped_mm" not in fused


@pytest.mark.parametrize(
    "degrees", [(2, 2, 4, 1), *(pytest.param(d, marks=pytest.mark.nightly) for d in list(SHAPES)[1:])], ids=str
)
def test_every_mistake_in_a_collective_is_caught(degrees) -> None:
    all_are_caught(dict(compiled(SHAPES[degrees], degrees))["shard"])


def all_are_caught(program: Program) -> None:
    missed, caught = [], 0
    for m in mistakes(program):
        try:
            witness(m.program)
            missed.append(m.what)
        except WitnessError:
            caught += 1
    assert not [m for m in missed if not m.startswith(UNSEEN)]
    assert caught > 2 * len(missed), "most of the catalogue are collectives"


def last_stage(plan: Plan) -> Program:
    return dict(compile_stages(captured(Shape(12, kv_heads=6)), plan))["fuse_experts"]


@pytest.mark.parametrize("plan", OPTIONS, ids=name)
def test_a_right_program_with_options_is_accepted(plan: Plan) -> None:
    seen = witness(last_stage(plan)).by_rule
    assert bool(plan.fsdp) == ("moec.unpack" in seen)


def test_narrow_copies() -> None:
    plan = Plan(dp=2, tp=2, ep=2, fsdp=True, precision=Precision(compute="bf16"))
    program = last_stage(plan)
    assert any(op_name(n) == "moec.s_to_r_low" for n in program.graph.nodes if n.op == "call_function")
    witness(program)
    all_are_caught(program)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, tp=2, ep=4, overlap=Overlap(chunks=2)),
        Plan(dp=2, tp=2, ep=2, sequence_parallel=True, overlap=Overlap(chunks=3, pipeline_tp=2)),
    ],
    ids=["chunks", "chunks and pieces"],
)
def test_chunks(plan: Plan) -> None:
    program = last_stage(plan)
    assert any(op_name(n) == "moec.join_tokens" for n in program.graph.nodes if n.op == "call_function")
    witness(program)


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=() if p is OPTIONS[2] else pytest.mark.nightly) for p in OPTIONS], ids=name
)
def test_every_mistake_with_options_is_caught(plan: Plan) -> None:
    all_are_caught(last_stage(plan))


def broken_units(program: Program) -> Iterator[tuple[str, Program]]:
    """Mistakes that only packed parameters can have."""
    for what in ("another dim", "taken apart on another dim", "another shard first"):
        broken = program.fork()
        pack = next(n for n in broken.graph.nodes if n.op == "call_function" and op_name(n) == "moec.pack")
        unpack = next(n for n in broken.graph.nodes if n.op == "call_function" and op_name(n) == "moec.unpack")
        at = next(i for i, x in enumerate(pack.args[0]) if x.meta["val"].ndim == 2)
        dims = [1 - d if i == at else d for i, d in enumerate(pack.args[2])]
        if what == "another dim":
            pack.args = (*pack.args[:2], dims)
            unpack.args = (*unpack.args[:2], dims, unpack.args[3])
        elif what == "taken apart on another dim":
            unpack.args = (*unpack.args[:2], dims, unpack.args[3])
        else:  # a whole value where the collective expects a shard
            with broken.graph.inserting_before(pack):
                gathered = broken.graph.call_function(aten.repeat.default, (pack.args[0][at], [4, 1]))
            gathered.meta.update(pack.args[0][at].meta, types=dict.fromkeys(broken.mesh.names, R))
            pack.args = ([gathered if i == at else x for i, x in enumerate(pack.args[0])], *pack.args[1:])
        yield what, broken


def test_every_mistake_in_a_unit_of_parameters_is_caught() -> None:
    for what, broken in broken_units(last_stage(OPTIONS[3])):
        with pytest.raises(WitnessError):
            assert witness(broken) is None, what


def test_other_blocks_are_another_type() -> None:
    """Rows of B sequences, each of which is sharded, added to rows that are sharded in one piece."""
    program = last_stage(OPTIONS[0])
    reshapes = program.graph.find_nodes(op="call_function", target=aten.reshape.default)
    reshape = next(n for n in reshapes if any(t.parts != 1 for t in n.meta["types"].values()))
    right = dict(reshape.meta["types"])
    for axis, t in right.items():
        if t.kind == "S" and t.parts != 1:
            reshape.meta["types"] = {**right, axis: S(t.dim)}
            with pytest.raises(WitnessError, match="recorded are 1"):
                witness(program)
    reshape.meta["types"] = right
    witness(program)


def test_an_op_keeps_the_blocks_of_its_operands() -> None:
    program = last_stage(OPTIONS[0])
    makes = ("aten.reshape", "moec.pack", "moec.unpack", *PACKED)
    node = next(
        n for n in program.graph.nodes
        if n.op == "call_function" and not collective(n.target) and op_name(n) not in makes
        and isinstance(n.meta.get("types"), dict) and any(t.parts != 1 for t in n.meta["types"].values())
    )  # fmt: skip
    node.meta["types"] = {a: S(t.dim) if t.kind == "S" else t for a, t in node.meta["types"].items()}
    with pytest.raises(WitnessError, match=rf"%{node.name} .*recorded as S\(0\)"):
        witness(program)


def test_every_op_of_moec_has_a_typing_rule() -> None:
    """The dialect's in ``MOEC``, conversions and exchanges by what they do; backwards ops are in no sharded graph."""
    ops = {s.name.removeprefix("moec::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("moec::")}
    backward = {n for n in ops if n.endswith(("_backward", "_wgrad", "_dgrad"))} | {"grouped_sum"}
    backward |= {"quantise_act", "quantise_act_grad"}  # within moec::fp8_grouped_act and its backward
    assert {f"moec.{n}" for n in ops - backward - TABLE.keys()} == MOEC.keys()
    assert {TABLE[n].primitive for n in TABLE} == CONVERSIONS.keys()


def sharded(family: str, plan: Plan, layers: int, stage: str = "shard") -> Program:
    model, found = make(family, layers), {}
    args, kwargs = dummy_examples(model, training=True)
    compile_program(model, plan, 4, args, kwargs, training=True, observe=found.__setitem__)
    return found[stage]


@pytest.mark.nightly
def test_family() -> None:
    """Biased experts, sinks, interleaved gate and up, a vocabulary in parts."""
    witness(sharded("gpt_oss", Plan(*BY_DEFAULT["gpt_oss"]), layers=1))


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_under_every_plan(family: str, plan: tuple[int, int, int, int]) -> None:
    witness(sharded(family, Plan(*plan), layers=2))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan", [p for p in covering(4) if p.sequence_parallel or p.cp != 1 or p.fsdp is not False], ids=name
)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_with_options(family: str, plan: Plan) -> None:
    try:
        program = sharded(family, plan, layers=2, stage="units" if plan.fsdp else "bundle")
    except MoecError as refused:
        if "nearest degrees that work" not in str(refused):
            raise
        return  # a width that they do not divide: there is no graph
    witness(program)
