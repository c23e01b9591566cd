"""The parameters of a layer are gathered by one collective: exact to the bit, one gather a layer and kind of parameter,
and the verifier refuses what is taken apart otherwise than it was put together."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from spmd import Batch, Shape, build, captured, oracle
from test_fsdp import error

import moec
from moec import simulate
from moec.compiler import PIPELINE
from moec.passes import manager
from moec.passes.verify import check_types
from moec.placement import local_shape
from moec.plan import Plan
from moec.program import Program, op_name
from moec.promote import promote_program
from moec.runtime.collectives import collective
from moec.runtime.errors import MoecError

SHAPE = Shape(biased=True, layers=2)
PLANS = [(2, 2, 2, 1, 2), (5, 1, 1, 1, 5)]
WIDER = [(4, 1, 1, 1, 4), (4, 2, 2, 2, 2), (4, 1, 2, 1, 2)]


@cache
def compiled(degrees: tuple[int, ...], units: bool = True) -> Program:
    dp, tp, ep, etp, fsdp = degrees
    return manager_run(SHAPE, Plan(dp, tp, ep, etp, fsdp=fsdp), units)


def manager_run(shape: Shape, plan: Plan, units: bool = True) -> Program:
    world = plan.dp * plan.tp
    program = replace(captured(shape).fork(), mesh=plan.mesh(world))
    return manager.run(program, plan.resolve(world), [p for p in PIPELINE if units or p.name != "units"])


def gathers(program: Program) -> list[tuple[str, str]]:
    """(kind of what is gathered, group) of every all-gather of parameters."""
    found = []
    for n in program.graph.nodes:
        c = collective(n.target)
        if c is not None and c.primitive == "all_gather" and n.args[0].op in ("placeholder", "call_function"):
            if n.args[0].op == "placeholder" or op_name(n.args[0]) == "moec.pack":
                found.append((op_name(n.args[0]) if n.args[0].op != "placeholder" else "one", n.args[-1]))
    return found


@pytest.mark.parametrize(
    "degrees", [*PLANS, *(pytest.param(d, marks=pytest.mark.nightly) for d in WIDER)], ids=str
)
def test_exact(degrees) -> None:
    assert error(SHAPE, degrees, passes=2) <= 1e-12


def test_the_same_bits_as_one_by_one() -> None:
    truth = oracle(build(SHAPE, 1, 2.0), Batch(2, 3, 1, 2))
    results = []
    for units in (True, False):
        program = promote_program(compiled((2, 2, 2, 1, 2), units))
        params = {ph: truth.tensors[s.name].detach() for ph, s in program.params.items()}
        ids, labels = Batch(2, 3, 1, 2).tensors()
        inputs = {ph: ids if s.path in ("ids", "0") else labels for ph, s in program.inputs.items()}
        results.append(simulate.run(program, params, inputs, {"loss": torch.ones((), dtype=torch.float64)}))
    one, many = results
    assert all(torch.equal(one.outputs[k], many.outputs[k]) for k in one.outputs)
    assert any(g is not None for g in one.grads.values())
    for name, g in one.grads.items():
        assert (g is None and many.grads[name] is None) or torch.equal(g, many.grads[name]), name


def test_one_gather_a_layer_and_group() -> None:
    """Two layers, the first with the embedding, and the norm behind them.  With expert parallelism the experts lie
    elsewhere than the rest: over four of the eight ranks of dp, so a layer has two gathers."""
    assert gathers(compiled((4, 1, 1, 1, 4))) == [("moec.pack", "dp_edp")] * 2 + [("one", "dp_edp")]
    found = gathers(compiled((8, 1, 2, 1, 8)))
    assert found[-1] == ("one", "dp_edp,dp_ep")
    assert sorted(found[:-1]) == sorted([("moec.pack", "dp_edp,dp_ep"), ("moec.pack", "dp_edp")] * 2)


def test_closed_form() -> None:
    """Three layers and a norm over four ranks: all parameters are gathered once and reduce-scattered once, one
    collective a unit; the first two layers' matrices once more in the backward, what comes last is kept."""
    program = manager_run(Shape(layers=3), Plan(4, fsdp=True))
    uses = [c for c in moec.explain(program).collectives if c.traffic == "parameter"]
    trained = [s for s in program.params.values() if not s.buffer]

    def size(*prefixes: str, dims: int = 1) -> int:
        return sum(
            4 * 4 * prod(local_shape(s.shape, s.types, program.mesh))
            for s in trained
            if s.name.startswith(prefixes) and len(s.shape) >= dims
        )

    def moved(phase: str, primitive: str) -> list[int]:
        return sorted(c.bytes for c in uses if (c.phase, c.primitive) == (phase, primitive))

    units = sorted([size("embed", "layers.0."), size("layers.1."), size("layers.2."), size("norm.")])
    assert sum(units) == size("")
    assert moved("forward", "all_gather") == moved("backward", "reduce_scatter") == units
    assert moved("backward", "all_gather") == [size("layers.0.", dims=2), size("layers.1.", dims=2)]
    assert len(uses) == 2 * 4 + 2


@pytest.mark.nightly
def test_equal_layers_have_equal_units() -> None:
    """Layers that are compiled a few times and copied stay so."""
    ids, labels = Batch(4, 3, 1, 4).tensors()
    seen: list[str] = []
    program = moec.compile_program(
        build(Shape(layers=6), 1, 2.0), Plan(dp=4, fsdp=True), 4, (ids, labels), {}, training=True,
        observe=lambda name, _: seen.append(name),
    )  # fmt: skip
    assert seen[-1] == "expand" and not program.why_not, program.why_not
    assert gathers(program) == [("moec.pack", "dp_edp")] * 6 + [("one", "dp_edp")]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("another dim", "takes apart what was not packed so"),
        ("another operand", "recorded as"),
        ("not gathered", "does not feed one gather"),
    ],
)
def test_sabotage(damage: str, complaint: str) -> None:
    program = compiled((2, 2, 2, 1, 2)).fork()
    unpack = next(n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "moec.unpack")
    start = unpack.args[0].args[0]
    pack = start.args[0]
    if damage == "another dim":
        unpack.args = (*unpack.args[:2], [1 - d if d < 2 else d for d in unpack.args[2]], unpack.args[3])
    elif damage == "another operand":
        by_types = {str(x.meta["types"]): x for x in pack.args[0]}
        assert len(by_types) > 1
        other = next(iter(by_types.values()))
        pack.args = ([other] * len(pack.args[0]), 1, [pack.args[2][pack.args[0].index(other)]] * len(pack.args[0]))
        unpack.args = (*unpack.args[:2], pack.args[2], unpack.args[3])
    else:
        wait = unpack.args[0]
        wait.replace_all_uses_with(pack)
    with pytest.raises(MoecError, match=complaint):
        check_types(program)
