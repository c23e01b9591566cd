"""The promise on simulated worlds: loss, logits and every gradient equal the single-device model's on the global
batch, in float64, over the grid of plans and drawn batches.

Widths are no powers of two; batches and sequences are drawn from 1 up, so that there are fewer tokens than ranks;
routers are skewed until experts are empty; labels are ignored unevenly, on some ranks all of them.  The worst error
that these examples show is 4e-15; the smallest that sabotage shows is far above the tolerance (test_sabotage.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd import Batch, Shape, build, compiled, off, oracle

TOLERANCE = 1e-12

PLANS = [(4, 1, 1, 1), (1, 4, 1, 1), (1, 4, 1, 4), (2, 2, 1, 2), (4, 1, 4, 1), (2, 2, 4, 1), (2, 2, 2, 2), (1, 4, 4, 1)]
WIDER = [(1, 6, 6, 1), (2, 3, 3, 1), (6, 1, 2, 3), (2, 4, 2, 2), (4, 2, 4, 2), (1, 1, 1, 1)]
SHAPES = {"plain": Shape(), "biased": Shape(biased=True), "top1": Shape(k=1)}


def shape_for(name: str, degrees: tuple[int, ...]) -> Shape:
    """E=6, or the next that ep divides."""
    shape = SHAPES[name]
    return shape if shape.experts % degrees[2] == 0 else Shape(12, shape.k, shape.biased)


@st.composite
def batches(draw, dp: int) -> Batch:
    size = dp * draw(st.sampled_from([1, 1, 3]))
    seq = draw(st.sampled_from([17, 1, 2, 5]))
    silent = frozenset(draw(st.sets(st.integers(0, dp - 1), max_size=dp - 1)))
    return Batch(size, seq, draw(st.integers(0, 2**16)), dp, silent)


def compare(name: str, degrees: tuple[int, int, int, int], batch: Batch, seed: int, skew: float, passes: int) -> float:
    """The worst error after each of the last ``passes`` passes."""
    shape = shape_for(name, degrees)
    truth = oracle(build(shape, seed, skew), batch)
    worst = 0.0
    for after, program in compiled(shape, degrees)[-passes:]:
        report = truth.compare(after, program)
        assert off(report) <= TOLERANCE, f"after {after}: {report.worst()}"
        assert len(report.grads) == len({s.name for s in program.params.values() if s.requires_grad})
        worst = max(worst, off(report))
    return worst


def run_grid(name: str, degrees: tuple[int, int, int, int], examples: int, passes: int) -> None:
    # Few draws would seldom hit these together: one sequence of two tokens, one expert with everything, silent ranks.
    dp = degrees[0]
    compare(name, degrees, Batch(dp, 2, 3, dp, frozenset(range(dp - 1))), 5, 100.0, passes)

    @settings(max_examples=examples)
    @given(batches(dp), st.integers(0, 2**16), st.sampled_from([0.0, 1.0, 3.0, 100.0]))
    def run(batch: Batch, seed: int, skew: float) -> None:
        compare(name, degrees, batch, seed, skew, passes)

    run()


@pytest.mark.parametrize("name", ["plain", "biased"])
@pytest.mark.parametrize("degrees", PLANS, ids=str)
def test_grid(degrees, name) -> None:
    run_grid(name, degrees, examples=4, passes=1)


@pytest.mark.parametrize("degrees", WIDER, ids=str)
def test_wider_worlds(degrees) -> None:
    run_grid("biased", degrees, examples=3, passes=1)


@pytest.mark.parametrize("degrees", [(2, 2, 2, 2), (1, 4, 4, 1)], ids=str)
def test_one_expert_a_token(degrees) -> None:
    run_grid("top1", degrees, examples=3, passes=1)


def test_every_pass_holds_not_only_the_last() -> None:
    run_grid("biased", (2, 2, 2, 2), examples=2, passes=5)


def test_grouped_query_attention_under_tp() -> None:
    """Fewer key/value heads than query heads, more than one layer."""
    shape = Shape(layers=2, kv_heads=6, biased=True)
    truth = oracle(build(shape, 1, 2.0), Batch(2, 7, 0, 2))
    for degrees in [(2, 2, 2, 1), (1, 6, 3, 2)]:
        assert off(truth.compare("lower", compiled(shape, degrees)[-1][1])) <= TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_fewer_key_value_heads_than_ranks(kv_heads: int) -> None:
    """Each rank computes them all and takes what its query heads need; only the gradients of the projections are owed,
    to the one reduction at the end of the backward.  (A single head is shared as it is.)"""
    few, every = (compiled(Shape(kv_heads=n), (1, 6, 3, 2))[-1][1] for n in (kv_heads, 12))
    truth = oracle(build(Shape(kv_heads=kv_heads), 1, 2.0), Batch(2, 7, 0, 1))
    assert off(truth.compare("lower", few)) <= TOLERANCE
    if kv_heads > 1:
        of_few, of_every = (
            {k: n for k, n in p.op_counts().items() if k.startswith("moec.") and "_to_" in k} for p in (few, every)
        )
        assert of_few.pop("moec.r_to_s") == 2 + of_every.pop("moec.r_to_s", 0)  # slices
        assert of_few == of_every
        owed = [{p.params[ph].name for ph in p.grad_reductions} for p in (few, every)]
        assert owed[0] - owed[1] == {"layers.0.attention.k.weight", "layers.0.attention.v.weight"}


def test_expert_counts_are_those_of_the_global_batch() -> None:
    """Two tokens on four ranks, all to the same experts: some ranks have none, and the counts still add up."""
    import torch

    from moec import simulate
    from moec.promote import promote_program

    shape, batch = Shape(12, biased=True), Batch(1, 2, 0)
    program = promote_program(compiled(shape, (1, 4, 4, 1))[-1][1])
    truth = oracle(build(shape, 0, 0.0), batch)  # its bias alone: every token takes the same three experts
    ids, labels = batch.tensors()
    params = {ph: truth.tensors[s.name].detach() for ph, s in program.params.items()}
    inputs = {ph: ids if s.path in ("ids", "0") else labels for ph, s in program.inputs.items()}
    got = simulate.run(program, params, inputs, {})
    (tally,) = got.statistics.values()
    counts, (dropped, tokens) = tally[: shape.experts], tally[shape.experts : shape.experts + 2]
    assert (dropped, tokens) == (0, 2)
    assert counts.sum() == 2 * shape.k
    assert sorted(counts.tolist())[-3:] == [2, 2, 2]
    assert torch.equal(counts.bool().sum(), torch.tensor(3))


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("degrees", [*PLANS, *WIDER], ids=str)
def test_sweep(degrees, name) -> None:
    run_grid(name, degrees, examples=40, passes=2)
