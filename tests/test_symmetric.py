"""When tensor parallelism runs over symmetric memory: what ranks say of their GPUs decides, on all alike."""

import re
from unittest import mock

import grid
import pytest
from test_gloo_grid import TOLERANCE

import moec
from moec import compiler, symmetric
from moec.overlap import Overlap
from moec.plan import Plan
from moec.program import op_name
from moec.symmetric import Card, settled, why_not

EVERY = frozenset(range(4))


def plan(asked, **more) -> Plan:
    return Plan(**{"dp": 2, "tp": 2, "sequence_parallel": True, "overlap": Overlap(symmetric_memory=asked)} | more)


def one_host(peers=EVERY) -> list[Card]:
    return [Card("a", i, peers - {i}) for i in range(4)]


def two_hosts(across: bool) -> list[Card]:
    """``across``: each tp group has a rank on either."""
    return [Card("ab"[r % 2 if across else r // 2], r // 2 if across else r % 2, frozenset((0, 1))) for r in range(4)]


CASES = {
    "one host": (one_host(), None, None),
    "a host for each tp group": (two_hosts(False), None, None),
    "hosts in a tp group": (two_hosts(True), r"ranks \[0, 1\] of a tp group are on the hosts a, b", None),
    "no peers": (one_host(frozenset((0, 1))), *[r"cuda:2 \(rank 2\) cannot access cuda:3 \(rank 3\) of a"] * 2),
    "one card": ([Card("a", r // 3, EVERY) for r in range(4)], *["ranks 0 and 1 have the same GPU, cuda:0 of a"] * 2),
    "an old torch": ([*one_host()[:3], Card("a", 3, EVERY, "no operator")], *["no operator on rank 3"] * 2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reasons(case):
    cards, of_auto, of_true = CASES[case]
    for sure, text in ((True, of_auto), (False, of_true)):
        found = why_not(plan("auto"), cards, sure)
        assert found is None if text is None else re.search(text, str(found)), found


def _settled(rank: int, world: int, asked, cards) -> object:
    """On processes whose cards are made up."""
    with mock.patch.object(symmetric, "_mine", return_value=cards[rank]):
        return settled(plan(asked), on_gpus=True).overlap.symmetric_memory


@pytest.mark.parametrize("case", CASES)
def test_ranks_decide_alike(gloo4, case):
    cards, of_auto, of_true = CASES[case]
    assert gloo4.run(_settled, "auto", cards) == [of_auto is None] * 4
    assert gloo4.run(_settled, False, cards) == [False] * 4
    if of_true is None:
        assert gloo4.run(_settled, True, cards) == [True] * 4
        return
    errors = [str(e) for e in gloo4.run_raising(_settled, True, cards)]
    assert len(set(errors)) == 1 and "plan.overlap: symmetric_memory=True, but" in errors[0]
    assert "pipeline_tp" in errors[0]


def test_a_rank_without_cuda_answers_too():
    """No GPU here: what CUDA says is what this rank lacks."""
    assert "CUDA does not work" in symmetric._mine().lacks


@pytest.mark.parametrize(("asked", "becomes"), [("auto", False), (False, False), (True, True)])
def test_without_gpus(asked, becomes):
    assert settled(plan(asked), on_gpus=False).overlap.symmetric_memory is becomes


def test_what_has_no_such_transfers_stays_as_it_is():
    for other in (plan("auto", sequence_parallel=False), plan("auto", dp=4, tp=1), Plan(2, 2), plan(False)):
        assert settled(other, on_gpus=False) is other


def _trained(rank: int, world: int, asked, cards) -> tuple[set[str], dict]:
    """A world that says it has GPUs; what then runs here are the CPU's kernels."""
    more = {"sequence_parallel": True, "overlap": Overlap(symmetric_memory=asked)}
    with mock.patch.object(compiler, "_on_gpus", return_value=True), \
         mock.patch.object(symmetric, "_mine", return_value=cards[rank]):  # fmt: skip
        net, data = grid.build("plain"), grid.batch(S=8)
        ref = grid.reference(net)
        model = grid.parallelize("plain", net, Plan(dp=2, tp=2, ep=4, **more), data)
    out, want = model(**moec.shard_batch(data, model)), ref(**data)
    out["loss"].backward()
    want["loss"].backward()
    errors = {"loss": grid.relative(out["loss"], want["loss"]), "grad": grid.worst_grad(moec.full_grads(model), ref)[0]}
    return {op_name(n) for n in model.program.graph.nodes}, errors


@pytest.mark.timeout(180)
@pytest.mark.parametrize("asked", ["auto", True])
def test_a_model_has_the_ops_where_its_gpus_can(gloo4, asked):
    for ops, errors in gloo4.run(_trained, asked, one_host(), timeout=150):
        assert {"moec.gather_linear", "moec.linear_scatter"} <= ops
        assert max(errors.values()) <= TOLERANCE["plain"]


def test_and_none_where_they_cannot(gloo4):
    for ops, _ in gloo4.run(_trained, "auto", one_host(frozenset()), timeout=60):
        assert not {"moec.gather_linear", "moec.linear_scatter"} & ops
    for e in gloo4.run_raising(_trained, True, one_host(frozenset())):
        assert "cannot access" in str(e)
