"""The generated kernels that quantise and find largest magnitudes, interpreted, against the CPU ops: to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from interpreter import repaired
from test_fp8_recipes import KINDS, drawn
from test_ops_permute import routings

from moec.runtime.fp8 import Recipe
from moec.runtime.kernels import amax, quantise, turn

ops = torch.ops.moec
SOME = settings(max_examples=settings.default.max_examples // 4)
NAMES = ("carrier", "q", "scale", "q_T", "scale_T")


def same(got, want) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.stride() == b.stride() or min(a.shape) <= 1, name
        assert torch.equal(a.float(), b.float()) or torch.equal(a.float().nan_to_num(7), b.float().nan_to_num(7)), name
        assert torch.equal(a.float().isnan(), b.float().isnan()), name


@SOME
@given(st.sampled_from(["blockwise", "mxfp8"]), st.sampled_from(["rows", "grad", "weight", "stack", "stack stored"]),
       st.sampled_from(KINDS), st.sampled_from([1, 33, 150]), st.sampled_from([1, 40, 129]), st.booleans(),
       st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_it_is_the_cpu_op_to_the_bit(recipe, role, kind, rows, columns, both, dtype):
    x = drawn(kind, (rows, columns), rows + columns).to(dtype)
    if role.startswith("stack"):
        x = torch.stack([x, drawn("random", (rows, columns), 1).to(dtype)])
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if role == "stack stored" else x
    args = (x, None, None, None, recipe, role.split()[0], both)
    with repaired():
        got = quantise.quantise(*args)
    same(got, ops.quantise(*args))


@SOME
@given(st.sampled_from(["rowwise", "current", "delayed+1"]), st.sampled_from(["none", "first", "both"]),
       st.sampled_from(["rows", "grad", "weight", "stack", "stack stored"]), st.sampled_from(KINDS),
       st.sampled_from([0, 1, 33, 150]), st.sampled_from([1, 129]), st.booleans(),
       st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_scales_of_whole_dims(recipe, maxima, role, kind, rows, columns, both, dtype):
    """The largest magnitudes given or not; and these by themselves."""
    x = (drawn(kind, (rows, columns), rows + columns) if rows else torch.empty(0, columns)).to(dtype)
    if role.startswith("stack"):
        x = torch.stack([x, torch.randn(rows, columns).to(dtype)])
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if role == "stack stored" else x
    role = role.split()[0]
    largest = [ops.amax(x, None, recipe, role, t) for t in (False, True)]
    with repaired():
        found = [amax.amax(x, None, recipe, role, t) for t in (False, True)]
    for a, b in zip(found, largest, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    given_T = largest[1] / 3 if maxima == "both" else None
    args = (x, largest[0] / 2 if maxima != "none" else None, given_T, None, recipe, role, both)
    with repaired():
        got = quantise.quantise(*args)
    same(got, ops.quantise(*args))


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "rowwise", "current"])
def test_rows_of_experts(recipe):
    counts = torch.tensor([3, 0, 70])
    alignment = Recipe.parse(recipe).alignment
    x = ops.align_rows(torch.randn(80, 50), counts, alignment)
    x[3:alignment] = torch.nan  # nobody's
    args = (x, None, None, counts, recipe, "rows", True)
    with repaired():
        got = quantise.quantise(*args)
    same(got, ops.quantise(*args))
    three = (torch.randn(2, 35, 40), None, None, None, recipe, "rows", True)
    with repaired():
        got = quantise.quantise(*three)
    same(got, ops.quantise(*three))


@pytest.mark.parametrize("recipe", ["rowwise", "current", "delayed"])
def test_a_matrix_is_read_once_more_for_its_largest_magnitudes(recipe):
    """In one read, for both layouts; not where they are given."""
    x = torch.randn(256, 384).bfloat16()
    with repaired() as traffic:
        _, *made = quantise.quantise(x, None, None, None, recipe, "rows", True)
    assert sum(traffic.unique_bytes()) <= 1.1 * (2 * x.nbytes + sum(t.nbytes for t in made))
    largest = [ops.amax(x, None, recipe, "rows", t) for t in (False, True)]
    with repaired() as traffic:
        _, *made = quantise.quantise(x, *largest, None, recipe, "rows", True)
    assert sum(traffic.unique_bytes()) <= 1.001 * (x.nbytes + sum(t.nbytes for t in made))


def test_a_matrix_is_read_once():
    """Bytes: x once, both layouts and their scales once."""
    x = torch.randn(256, 128).bfloat16()
    with repaired() as traffic:
        _, *made = quantise.quantise(x, None, None, None, "blockwise", "rows", True)
    assert sum(traffic.unique_bytes()) == x.nbytes + sum(t.nbytes for t in made)


@SOME
@given(routings(), st.sampled_from(["rowwise", "blockwise", "mxfp8", "current", "current, given"]), st.booleans(),
       st.sampled_from([1, 40, 130]), st.sampled_from([torch.float32, torch.bfloat16]))  # fmt: skip
def test_permute_quantised_is_the_cpu_op_to_the_bit(routing, recipe, both, H, dtype):
    ids, E = routing
    x = (torch.randn(len(ids), H) * torch.logspace(-5, 5, len(ids))[:, None]).to(dtype)
    x[: len(ids) // 3] = torch.nan
    recipe, *most = recipe.split(", ")
    most = torch.full((1, 1), 3e3) if most else None  # some numbers are beyond it
    args = (x, ids, E, most, most, recipe, both)
    with repaired():
        *got, counts, row_of = quantise.permute_quantised(*args)
    *want, want_counts, want_row_of = ops.permute_quantised(*args)
    same(got, want)
    assert torch.equal(counts, want_counts) and torch.equal(row_of, want_row_of)


@pytest.mark.parametrize("both", [False, True])
def test_permuted_rows_are_nowhere(both):
    """Bytes: the tokens' rows, once in all, and what comes out; no row in x's dtype is written."""
    x, ids = torch.randn(96, 256).bfloat16(), torch.rand(96, 4).argsort(1)[:, :2]
    with repaired() as traffic:
        _, *made, _, _ = quantise.permute_quantised(x, ids, 4, None, None, "blockwise", both)
    made = made if both else made[:2]
    small = 8 * (ids.numel() + made[0].shape[0])  # where rows lie
    assert sum(traffic.unique_bytes()) <= x.nbytes + sum(t.nbytes for t in made) + small


@SOME
@given(st.sampled_from(["rows", "weight", "stack"]), st.sampled_from([0, 1, 70]), st.sampled_from([1, 65]))
def test_turn_is_the_cpu_op_to_the_bit(role, rows, columns):
    x = torch.randn(2, rows, columns) if role != "weight" else torch.randn(rows, columns)
    q = ops.quantise(x, None, None, None, "current", role, False)[1]
    with repaired() as traffic:
        got = turn.turn(q, role)
    want = ops.turn(q, role)
    assert got.dtype == want.dtype and got.shape == want.shape and got.stride() == want.stride()
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert sum(traffic.unique_bytes()) == 2 * q.nbytes
