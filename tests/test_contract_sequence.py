"""The communication contract of layers over a shared sequence: counts and bytes in closed form, and those of a run.

Legend: B batch, S sequence, H hidden, W the width of all heads, n the ranks that share; bytes are those of the whole
tensor on one rank, in float32.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from spmd import HEAD_DIM, HEADS, HIDDEN, VOCAB, Shape, build, captured, compile_stages

import moec
from moec import simulate
from moec.plan import Plan

B, S = 2, 8
STREAM = 4 * B * S * HIDDEN
HEADS_OF_ALL = 4 * B * S * HEADS * HEAD_DIM
SP = {"sequence_parallel": True}


def explained(plan: Plan):
    """(explanation, collectives of a run by (kind, group, phase, node) -> bytes by rank, program)."""
    program = compile_stages(captured(Shape()), plan)[-1][1]
    model = build(Shape())
    params = {ph: dict(model.named_parameters())[s.name].detach() for ph, s in program.params.items()}
    gen = torch.Generator().manual_seed(0)
    inputs = {ph: torch.randint(0, VOCAB, (B, S), generator=gen) for ph in program.inputs}
    result = simulate.run(program, params, inputs, {"loss": torch.ones(()), "logits": torch.ones(B, S, VOCAB)})
    found = moec.explain(program, {s.path: (B // plan.dp, S) for s in program.inputs.values()})
    return found, {(e.kind, e.group, e.phase, e.node): e.bytes for e in result.log if any(e.bytes)}, program


def around(found, phase: str, *places: str) -> Counter:
    """Collectives of some places: (primitive, bytes) -> how many."""
    return Counter((c.primitive, c.bytes) for c in found.collectives if c.phase == phase and c.where in places)


ATTENTION = ("layers.0.norm1", *(f"layers.0.attention{x}" for x in ("", ".q", ".k", ".v", ".o")), "layers.0")
DENSE = {("all_reduce", STREAM): 1}
SHARED = {("all_gather", STREAM): 1, ("reduce_scatter", STREAM): 1}


@pytest.mark.parametrize(
    ("plan", "forward", "backward"),
    [
        (Plan(1, 2, 2, 1), DENSE, DENSE),
        (Plan(1, 2, 2, 1, **SP), SHARED, SHARED),
        # q, k and v from sequence to heads, the result back: each rank's part of the heads of the whole sequence
        (Plan(1, 1, 2, 1, cp=2), {("all_to_all", HEADS_OF_ALL // 2): 4}, {("all_to_all", HEADS_OF_ALL // 2): 4}),
        (
            Plan(1, 2, 2, 1, cp=2, **SP),
            {
                ("all_gather", STREAM // 2): 1,
                ("reduce_scatter", STREAM // 2): 1,
                ("all_to_all", HEADS_OF_ALL // 4): 4,
            },
            {
                ("all_gather", STREAM // 2): 1,
                ("reduce_scatter", STREAM // 2): 1,
                ("all_to_all", HEADS_OF_ALL // 4): 4,
            },
        ),
    ],
    ids=["tp", "sp", "cp", "cp and sp"],
)
def test_an_attention_layer(plan: Plan, forward: dict, backward: dict) -> None:
    found, ran, _ = explained(plan)
    assert around(found, "forward", *ATTENTION) == forward
    assert around(found, "backward", *ATTENTION) == backward
    inside = [c for c in found.collectives if c.phase != "epilogue"]
    assert Counter((c.kind, c.group, c.phase, c.node) for c in inside) == Counter(ran.keys())
    for c in inside:
        if not c.estimated:
            assert set(ran[c.kind, c.group, c.phase, c.node]) == {c.bytes}, c


def test_experts_folded_over_tp_take_the_streams_own_tokens() -> None:
    """Only counts and routed rows move, in both directions; what the routing says is what is sent."""
    found, ran, _ = explained(Plan(1, 2, 2, 1, **SP))
    moe = [c for c in found.collectives if c.where.startswith("layers.0.moe")]
    assert Counter((c.primitive, c.phase) for c in moe) == {
        ("counts", "forward"): 1, ("exchange", "forward"): 2, ("exchange", "backward"): 2,
    }  # fmt: skip
    rows = B * S * Shape().k * HIDDEN * 4
    for c in moe:
        if c.primitive == "exchange":  # a rank's figure is the larger of what it sends and what it gets
            assert rows <= sum(ran[c.kind, c.group, c.phase, c.node]) <= 2 * rows


def test_what_the_sequence_costs_the_parameters() -> None:
    """Over tp only what acts on the sequence and is whole is summed (norms, router); over cp every parameter."""
    found, _, program = explained(Plan(1, 2, 2, 1, **SP))
    owed = {program.params[p].name for p in program.grad_reductions}
    whole = {"norm.weight", *(f"layers.0.{n}" for n in ("norm1.weight", "norm2.weight", "moe.router.weight"))}
    assert owed == whole | {"layers.0.attention.q_norm.weight"}
    (epilogue,) = (c for c in found.collectives if c.phase == "epilogue")
    assert epilogue.bytes == 4 * (3 * HIDDEN + Shape().experts * HIDDEN + HEAD_DIM)

    found, _, _ = explained(Plan(1, 1, 1, 1, cp=2))
    summed = [c.bytes for c in found.collectives if c.kind == "p_to_i" and c.phase != "forward"]
    assert sum(summed) == 4 * sum(p.numel() for p in build(Shape()).parameters())
