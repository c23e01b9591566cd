"""pipeline_tp: against the model in eager mode, in float64; each collective in pieces, each piece beside a product.

The worst error that these examples show is 1e-14.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from spmd import Batch, Shape, build, captured, compile_stages, off, oracle
from test_gloo_grid import TOLERANCE, trains_like_one_device

import moec
from moec.compiler import joint_graphs
from moec.overlap import Overlap
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.collectives import collective

SP = {"sequence_parallel": True}
CASES = {
    "experts elsewhere": (Shape(), Plan(2, 2, 2, 1, **SP)),
    "context": (Shape(), Plan(1, 2, 2, 1, cp=2, **SP)),
    "experts cut": (Shape(biased=True), Plan(2, 2, 1, 2, **SP)),
    "chunks too": (Shape(8), Plan(2, 2, 4, 1, **SP, overlap=Overlap(chunks=2))),
    "fsdp": (Shape(), Plan(2, 2, 2, 1, **SP, fsdp=True)),
}
LINEAR = torch.ops.aten.linear.default


@cache
def stages(case: str, pieces: int) -> dict[str, Program]:
    shape, plan = CASES[case]
    overlap = replace(plan.overlap or Overlap(), pipeline_tp=pieces)
    return dict(compile_stages(captured(shape), replace(plan, overlap=overlap)))


def shared_sequences(program: Program) -> Counter:
    """Gathers and reduce-scatters of activations along the sequence, by the module."""
    return Counter(
        (n.meta["where"], c.kind)
        for n in program.graph.nodes
        if n.op == "call_function" and (c := collective(n.target)) and c.primitive in ("all_gather", "reduce_scatter")
        if n.args[1] == 1 and n.meta["val"].ndim == 3 and not isinstance(n.meta["val"].shape[0], int)
    )


@pytest.mark.parametrize(
    ("case", "pieces"),
    [
        pytest.param(c, n, marks=() if (c, n) in {("experts elsewhere", 2), ("context", 3)} else pytest.mark.nightly)
        for c in CASES
        for n in (2, 3, 5)
    ],
)
def test_values_and_gradients_are_the_models(case: str, pieces: int) -> None:
    """Of batches of other lengths than that of the capture, and of fewer tokens than pieces on a rank."""
    found, (shape, plan) = stages(case, pieces), CASES[case]
    for batch in (Batch(2 * plan.dp, 12, 1, plan.dp), Batch(plan.dp, 4, 2, plan.dp)):
        truth = oracle(build(shape), batch)
        for stage in ("pipeline_tp", "lower"):
            assert off(truth.compare(stage, found[stage])) < 1e-13, (stage, batch)
    joint_graphs(found["lower"])


def test_each_piece_is_a_transfer_and_a_product() -> None:
    found = stages("experts elsewhere", 3)
    before, after = shared_sequences(found["bundle"]), shared_sequences(found["pipeline_tp"])
    assert before[("layers.0.attention.o", "p_to_s")] == 1 and before[("layers.0.norm1", "s_to_r")] == 1
    assert after == Counter({k: 3 * n for k, n in before.items()})
    program = found["pipeline_tp"]
    for start in program.graph.nodes:
        entry = collective(start.target)
        if entry is None or entry.kind not in ("s_to_r", "p_to_s") or "chunk" not in start.meta:
            continue
        (wait,) = start.users
        products = [u for u in wait.users if u.target is LINEAR] if entry.kind == "s_to_r" else [start.args[0]]
        assert products and {p.target for p in products} == {LINEAR}
        assert {p.meta["chunk"] for p in products} == {start.meta["chunk"]}


def test_without_a_shared_sequence_there_is_nothing_to_do() -> None:
    plan = Plan(2, 2, 2, 1, overlap=Overlap(pipeline_tp=2))
    assert "pipeline_tp" not in dict(compile_stages(captured(Shape()), plan))
    assert "pipeline_tp" not in stages("experts elsewhere", 1)


def test_blocks_in_the_wrong_order_are_caught() -> None:
    """A gathered sequence that is joined, or cut, as if it were one rank's."""
    found, batch = stages("experts elsewhere", 2)["pipeline_tp"], Batch(4, 12, 1, 2)
    truth = oracle(build(Shape()), batch)
    for name in ("moec.split_tokens", "moec.join_tokens"):
        broken = found.fork()
        node = next(n for n in broken.graph.nodes if op_name(n) == name and n.args[-1] == 2)
        node.args = (*node.args[:-1], 1) if name == "moec.join_tokens" else (*node.args[:-1], 3)
        broken.module.recompile()
        try:
            wrong = off(truth.compare(name, broken))
        except (moec.MoecError, RuntimeError):
            wrong = float("inf")
        assert wrong > 1e-4, name


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_real_processes_train_like_one_device(gloo4) -> None:
    """Pieces of products and chunks of tokens, three lengths of the sequence, one program."""
    more = {**SP, "overlap": Overlap(chunks=3, pipeline_tp=2)}
    for r in gloo4.run(trains_like_one_device, "plain", (2, 2, 4, 1), more, timeout=280):
        assert max(r["loss"], r["grad"][0]) <= TOLERANCE["plain"]
        assert max(r["norm"], r["params"][0]) <= 1e-5
