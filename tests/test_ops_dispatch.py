"""What dispatchers ask of ids, and rows that follow others: against plain Python, gradients, registration."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ops_permute import routings

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.errors import MoecError
from moec.runtime.route_spec import RouteSpec

ops = torch.ops.moec


@given(routings(), st.integers(1, 3), st.sampled_from([torch.int64, torch.int32]))
def test_destinations_are_the_distinct_ranks_of_a_token(routing, ranks, dtype):
    ids, share = routing
    K = ids.shape[1]
    ids = torch.where(ids < 0, -1, ids * ranks + ids % ranks).to(dtype)  # share·ranks experts
    want = []
    for token in ids.tolist():
        found = sorted({i // share for i in token if i >= 0})
        want.append(found + [-1] * (min(K, ranks) - len(found)))
    got = ops.destinations(ids, share * ranks, ranks)
    assert got.shape == (len(want), min(K, ranks)) and got.dtype == torch.int64 and got.tolist() == want


@given(routings(), st.data(), st.sampled_from([torch.int64, torch.int32]))
def test_own_ids(routing, data, dtype):
    ids, E = routing
    ids = ids.to(dtype)
    first = data.draw(st.integers(0, E - 1))
    numbers = torch.arange(first, data.draw(st.integers(first + 1, E)))
    own = ops.own_ids(ids, numbers)
    here = [i for i in ids.reshape(-1).tolist() if i in numbers.tolist()]
    assert own.dtype == dtype
    assert [i for i in own.reshape(-1).tolist() if i >= 0] == [i - first for i in here]
    assert int((own == -1).sum()) == ids.numel() - len(here)


@given(routings())
def test_rows_can_follow_others(routing):
    """``place_rows`` is ``permute`` by its own row numbers, ``permute_kept`` the same without the zeros, and
    ``add_rows`` what takes gradients back."""
    ids, E = routing
    x = torch.randn(len(ids), 3, dtype=torch.float64, requires_grad=True)
    rows, counts, row_of = ops.permute(x, ids, E)
    kept = ops.permute_kept(x, ids, E)
    n = int(counts.sum())
    placed = ops.place_rows(x, row_of, len(rows))
    assert torch.equal(placed, rows) and torch.equal(kept[0], rows[:n])
    assert torch.equal(kept[1], counts) and torch.equal(kept[2], row_of)
    g = torch.randn_like(rows)
    want = torch.autograd.grad(rows, x, g)[0]
    assert torch.equal(torch.autograd.grad(placed, x, g)[0], want)
    assert torch.equal(torch.autograd.grad(kept[0], x, g[:n])[0], want)
    y = g.clone().requires_grad_()
    back = ops.add_rows(y, row_of)
    assert torch.equal(back, want)
    g = torch.randn_like(back)
    assert torch.equal(torch.autograd.grad(back, y, g)[0], ops.place_rows(g, row_of, len(rows)))


def test_sums_are_formed_in_fp32_and_rounded_once():
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert ops.add_rows(rows, torch.arange(5).view(1, 5)).item() == 260


@pytest.mark.parametrize(
    ("dtype", "T"),
    [
        pytest.param(dtype, T, marks=() if (dtype, T) == (torch.float32, 4) else pytest.mark.nightly)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for T in (0, 4)
    ],
)
def test_opcheck(dtype, T):
    ids = torch.tensor([[0, 5, 3], [2, -1, 1], [-1, -1, -1], [4, 5, 1]])[:T]
    x = torch.randn(T, 2, dtype=dtype, requires_grad=True)
    row_of = ops.permute(x, ids, 6)[2]
    y = torch.randn(3 * T, 2, dtype=dtype, requires_grad=True)
    torch.library.opcheck(ops.destinations.default, (ids, 6, 3))
    torch.library.opcheck(ops.own_ids.default, (ids, torch.arange(2, 4)))
    torch.library.opcheck(ops.place_rows.default, (x, row_of, 3 * T))
    torch.library.opcheck(ops.add_rows.default, (y, row_of))
    torch.library.opcheck(ops.permute_kept.default, (x, ids, 6))


def test_unequal_shares_are_refused():
    with pytest.raises(MoecError, match="4 ranks do not divide 6 experts"):
        ops.destinations(torch.zeros(1, 1, dtype=torch.int64), 6, 4)


@given(routings(), st.sampled_from([0.3, 1.0, 9.0]), st.integers(1, 3))
def test_slots_hold_the_pairs_of_an_expert_in_order(routing, factor, others):
    """C is what the tokens here may send of a capacity that ``others`` as many tokens share."""
    ids, E = routing
    T, K = ids.shape
    spec = RouteSpec(E, K, capacity_factor=factor, drop="position")
    ids = ops.drop(torch.zeros(T * others, K), ids.repeat(others, 1), spec.text())[1][:T]
    x = torch.randn(T, 3, dtype=torch.float64, requires_grad=True)
    rows, row_of = ops.slots(x, ids, T * others, spec.text())
    C = min(T, spec.capacity(T * others))
    assert rows.shape == (E * C, 3)
    want, used = torch.zeros(E * C, 3, dtype=torch.float64), [0] * E
    for t in range(T):
        for k in range(K):
            if (e := int(ids[t, k])) >= 0:
                assert int(row_of[t, k]) == e * C + used[e]
                want[e * C + used[e]] = x[t].detach()
                used[e] += 1
    assert torch.equal(rows, want)
    g = torch.randn_like(rows)
    torch.testing.assert_close(torch.autograd.grad(rows, x, g)[0], ops.add_rows(g, row_of), rtol=0, atol=0)


def test_a_pair_too_many_is_an_error_and_never_dropped():
    spec = RouteSpec(4, 1, capacity_factor=1.0).text()
    ids = torch.tensor([[0], [0], [0], [1]])
    with pytest.raises(MoecError, match="3 pairs for an expert that has 1 slots for 4 tokens"):
        ops.slots(torch.zeros(4, 2), ids, 4, spec)
    with pytest.raises(MoecError, match="without a capacity"):
        ops.slots(torch.zeros(4, 2), ids, 4, RouteSpec(4, 1).text())


def test_chunks_swap_and_swap_back():
    x = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    y = ops.swap_chunks(x, 2, 3)
    assert torch.equal(y, x.view(2, 3, 2, 2).transpose(0, 1).reshape(12, 2))
    assert torch.equal(ops.swap_chunks(y, 3, 2), x)
    assert torch.autograd.gradcheck(lambda x: ops.swap_chunks(x, 2, 3), (x,))
    assert ops.equal_counts(y, 3).tolist() == [4, 4, 4]
    with pytest.raises(MoecError, match="12 rows are not 5 times 1 equal chunks"):
        ops.swap_chunks(x, 5, 1)


def test_opcheck_slots():
    ids = torch.tensor([[0, 3], [2, -1], [-1, -1], [1, 0]])
    x = torch.randn(4, 2, requires_grad=True)
    spec = RouteSpec(4, 2, capacity_factor=1.5).text()
    torch.library.opcheck(ops.slots.default, (x, ids, 4, spec))
    torch.library.opcheck(ops.swap_chunks.default, (x, 2, 1))
    torch.library.opcheck(ops.equal_counts.default, (x, 2))
