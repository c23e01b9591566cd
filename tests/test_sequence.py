"""Sequence and context parallelism: exact on simulated worlds, and the sequence is not gathered where it need not be.

The plans cover sequence parallelism with the experts on the same ranks, on others and cut in width, and context
parallelism with heads that divide (12 over 2 and 4), that do not (12 over 5, 6 of each tp rank over 4), with fewer
key/value heads, with tp inside and MoE axes across.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd import Batch, Shape, build, captured, compile_stages, off, oracle
from torch import nn

import moec
from moec.capture import capture
from moec.passes.verify import check_types
from moec.placement import S
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.collectives import collective
from moec.runtime.errors import MoecError

TOLERANCE = 1e-12
SP = {"sequence_parallel": True}
PLAIN, BIASED, FEW = Shape(), Shape(12, biased=True), Shape(kv_heads=4)
CASES = [
    (BIASED, Plan(1, 2, 2, 1, **SP)),
    (PLAIN, Plan(2, 2, 2, 2, **SP)),
    (FEW, Plan(1, 1, 2, 1, cp=4)),
    (PLAIN, Plan(1, 2, 2, 1, cp=2, **SP)),
]
MORE = [
    (BIASED, Plan(1, 4, 1, 4, **SP)),
    (BIASED, Plan(2, 2, 4, 1, **SP)),
    (PLAIN, Plan(2, 2, 1, 1, **SP)),
    (BIASED, Plan(1, 1, 1, 1, cp=2)),
    (FEW, Plan(1, 1, 1, 1, cp=5)),
    (BIASED, Plan(1, 2, 4, 1, cp=2)),
    (FEW, Plan(1, 2, 1, 2, cp=4)),
    (PLAIN, Plan(2, 1, 2, 1, cp=2)),
    (BIASED, Plan(2, 2, 4, 2, cp=2, **SP)),
    (BIASED, Plan(1, 2, 2, 4, cp=4, **SP)),
]


def shared(plan: Plan) -> int:
    return plan.cp * (plan.tp if plan.sequence_parallel else 1)


def prove(shape: Shape, plan: Plan, examples: int) -> None:
    stages = compile_stages(captured(shape), plan)[-2:]

    def compare(batch: Batch, seed: int, skew: float) -> None:
        truth = oracle(build(shape, seed, skew), batch)
        for after, program in stages:
            assert off(report := truth.compare(after, program)) <= TOLERANCE, f"after {after}: {report.worst()}"

    compare(Batch(plan.dp, shared(plan), 3, plan.dp, frozenset(range(plan.dp - 1))), 5, 100.0)  # a token each

    @settings(max_examples=examples)
    @given(st.sampled_from([1, 3]), st.sampled_from([1, 2, 5]), st.integers(0, 2**16), st.sampled_from([0.0, 1.0, 9.0]))
    def run(size: int, length: int, seed: int, skew: float) -> None:
        compare(Batch(plan.dp * size, shared(plan) * length, seed, plan.dp), seed, skew)

    run()


@pytest.mark.parametrize(("shape", "plan"), CASES, ids=str)
def test_exact(shape: Shape, plan: Plan) -> None:
    prove(shape, plan, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("shape", "plan"), CASES + MORE, ids=str)
def test_exact_on_many_plans(shape: Shape, plan: Plan) -> None:
    prove(shape, plan, 20)


# -- attention ---------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Several documents in one sequence, told apart by positions that restart; 7 heads."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused, self.heads = fused, 7
        self.embed = nn.Embedding(11, 14)
        self.qkv, self.out, self.head = nn.Linear(14, 42), nn.Linear(14, 14), nn.Linear(14, 11)

    def forward(self, ids, positions, labels):
        b, s = ids.shape
        document = (positions == 0).long().cumsum(-1)
        mask = (document[:, None, :, None] == document[:, None, None, :]).logical_and(
            torch.ones(s, s, dtype=torch.bool).tril()
        )
        x = self.embed(ids) * (1 + positions[..., None] / 8).cos()
        q, k, v = (t.view(b, s, self.heads, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            y = (q @ k.transpose(-1, -2) / 2**0.5).masked_fill(~mask, -1e9).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, s, 14))
        return F.cross_entropy(self.head(x).view(-1, 11), labels.view(-1))


def documents() -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 11, (2, 8), generator=gen) for _ in range(2))
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]])  # they cross the ranks' borders
    return ids, positions, labels


@pytest.mark.parametrize("fused", [True, False])
def test_packed_sequences_and_seven_heads_over_four_ranks(fused: bool) -> None:
    report = moec.check(Packed(fused), Plan(1, cp=4), example_inputs=documents(), world_size=4)
    assert report.ok, report


def attention_of(program: Program):
    node = next(n for n in program.graph.nodes if op_name(n) == "aten.scaled_dot_product_attention")
    return [n.meta["types"] for n in node.args[:3]]


def kinds(program: Program, where: str) -> list[str]:
    nodes = [n for n in program.graph.nodes if n.op == "call_function" and n.meta.get("where", "").startswith(where)]
    return [c.kind for n in nodes if (c := collective(n.target)) is not None and c.needs_wait]


def test_attention_exchanges_sequence_for_heads() -> None:
    """Not only exact: gathering the sequence would be exact, too."""
    program = dict(compile_stages(captured(PLAIN), Plan(1, 2, 1, 1, cp=2)))["shard"]
    cp, tp = program.mesh.names
    assert attention_of(program) == [{cp: S(1, 2), tp: S(1)}] * 3
    # q, k, v there, the result back; then what tensor parallelism does
    assert kinds(program, "layers.0.attention") == ["s_to_s"] * 4 + ["p_to_i"]


def test_the_stream_is_gathered_once_and_scattered_once() -> None:
    program = dict(compile_stages(captured(PLAIN), Plan(1, 2, 2, 1, **SP)))["shard"]
    # Around attention; then the experts, whose tokens are distinct as they are.
    assert kinds(program, "layers.0") == ["s_to_r", "p_to_s", "exchange_counts", "all_to_all", "all_to_all"]
    norms = [ph for ph, s in program.params.items() if "norm" in s.name]
    lowered = compile_stages(captured(PLAIN), Plan(1, 2, 2, 1, **SP))[-1][1]
    assert {lowered.grad_reductions[n] for n in norms} == {"tp_ep"}


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_lengths_that_the_ranks_do_not_divide_are_refused() -> None:
    program = compile_stages(captured(PLAIN), Plan(2, 2, 1, 1, **SP))[-1][1]
    ids, labels = program.inputs
    assert program.size_problems({ids: (1, 6), labels: (1, 6)}, 2) == []
    (problem,) = program.size_problems({ids: (1, 7), labels: (1, 7)}, 2)
    assert "= 7 is shared by 2 ranks, which do not divide it" in problem
    (problem,) = program.size_problems({ids: (1, 6), labels: (1, 8)}, 2)
    assert "they were equal in the examples" in problem


def test_a_model_without_a_sequence_is_refused() -> None:
    program = capture(nn.Linear(4, 4), (torch.randn(6, 4),), {}, training=True)
    with pytest.raises(MoecError, match="no input of this model has a sequence"):
        compile_stages(program, Plan(1, 2, 1, 2, **SP))


# -- sabotage ----------------------------------------------------------------------------------------------------------


def test_wrong_parts_are_caught_by_the_verifier() -> None:
    """Rows of a sharded sequence taken for a block of all rows; parts of each rank's heads taken for a block of all."""
    for plan, wrong in ((Plan(1, 2, 2, 1, **SP), S(0)), (Plan(1, 2, 1, 1, cp=2), S(1))):
        program = dict(compile_stages(captured(PLAIN), plan))["shard"].fork()
        axis = program.mesh.names[0]
        found = 0
        for node in program.graph.nodes:
            types = node.meta.get("types")
            if isinstance(types, dict) and types[axis].kind == "S" and types[axis].parts != 1 and not found:
                node.meta["types"] = {**types, axis: wrong}
                found += 1
        assert found
        with pytest.raises(MoecError, match=r"is recorded as|is fed"):
            check_types(program)


def test_a_forgotten_reduction_shows() -> None:
    program = compile_stages(captured(PLAIN), Plan(1, 2, 2, 1, **SP))[-1][1]
    truth = oracle(build(PLAIN), Batch(2, 8))
    for name in program.grad_reductions:
        owed = {k: v for k, v in program.grad_reductions.items() if k != name}
        assert off(truth.compare("sabotaged", replace(program.fork(), grad_reductions=owed))) > 1e-3, name
