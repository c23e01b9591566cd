"""Generated kernels of payloads, interpreted, against the CPU ops: to the bit.

Legend: N rows, H numbers and W bytes a row.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from interpreter import repaired
from test_fp8_recipes import KINDS, drawn
from test_kernels_quantise import same

from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe, amax
from moec.runtime.fp8.payload import width
from moec.runtime.kernels import decode, decode_operand, encode

ops = torch.ops.moec
SOME = settings(max_examples=settings.default.max_examples // 4)
NAMES = ("current", "rowwise", "blockwise", "mxfp8")
sizes = st.sampled_from([1, 31, 130, 300])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def largest(x, name):
    return amax(x.reshape(-1, x.shape[-1]), (0, 0)) if name == "current" else None


@SOME
@given(st.sampled_from(NAMES), st.sampled_from(KINDS), st.sampled_from([0, 1, 5]), sizes, dtypes,
       st.sampled_from(["rows", "grad"]), st.booleans())  # fmt: skip
def test_there_and_back(name, kind, N, H, dtype, role, leading):
    x = drawn(kind, (N, H), N + H).to(dtype) if N else torch.empty(0, H, dtype=dtype)
    x = x[None] if leading else x
    most = largest(x, name)
    with repaired():
        carrier, data = encode.encode_rows(x, most, name, role)
    want_carrier, want = ops.encode_rows(x, most, name, role)
    assert data.dtype == want.dtype and torch.equal(data, want)
    assert carrier.shape == want_carrier.shape and carrier.dtype == want_carrier.dtype
    want[..., :1, :] = 0  # a row that nobody filled
    with repaired():
        y = decode.decode_rows(want, carrier, most, name, role)
    values = ops.decode_rows(want, carrier, most, name, role)
    assert y.dtype == values.dtype and torch.equal(y.isnan(), values.isnan())
    assert torch.equal(y.nan_to_num(7), values.nan_to_num(7))


@SOME
@given(st.sampled_from(NAMES), st.sampled_from(KINDS), st.sampled_from([[3, 0, 70], [0, 0], [129], None]), sizes,
       dtypes, st.booleans(), st.booleans())  # fmt: skip
def test_operands(name, kind, counts, H, dtype, both, maximum):
    """Rows of experts, and of linears (no counts), the largest magnitudes of the other layout given or not."""
    recipe = Recipe.parse(name)
    counts_E = None if counts is None else torch.tensor(counts)
    N = 50 if counts is None else sum(-(-n // recipe.alignment) for n in counts) * recipe.alignment
    x = drawn(kind, (N, H), N + H).to(dtype) if N else torch.empty(0, H, dtype=dtype)
    most = largest(x, name)
    given = amax(x, recipe.tile("rows", True)) * 0.5 if maximum and recipe.reads_whole else None
    carrier, data = ops.encode_rows(x, most, name, "rows")
    args = (data, carrier, most, given, counts_E, name, both)
    with repaired():
        got = decode_operand.decode_operand(*args)
    same(got, ops.decode_operand(*args))


@pytest.mark.parametrize("name", NAMES)
def test_operands_of_sequences(name):
    x = torch.randn(3, 40, 50)
    most = largest(x, name)
    carrier, data = ops.encode_rows(x, most, name, "rows")
    with repaired():
        got = decode_operand.decode_operand(data, carrier, most, None, None, name, True)
    same(got, ops.decode_operand(data, carrier, most, None, None, name, True))


def test_what_has_no_kernel():
    """bf16's payload, numbers of fp64, and E5M2."""
    y = torch.randn(5, 12)
    for x, most, name, role in ((y, None, "bf16", "rows"), (y.double(), None, "mxfp8", "rows"),
                                (y, largest(y, "current"), "current", "grad")):  # fmt: skip
        with repaired() as traffic:
            carrier, data = encode.encode_rows(x, most, name, role)
            y = decode.decode_rows(data, carrier, most, name, role)
        assert not traffic.launches
        assert torch.equal(data, ops.encode_rows(x, most, name, role)[1])
        assert torch.equal(y, ops.decode_rows(data, carrier, most, name, role))


def test_what_does_not_fit_is_refused():
    x = torch.randn(2, 8)
    carrier, data = ops.encode_rows(x, None, "rowwise", "rows")
    with pytest.raises(MoecError, match="no largest magnitude"):
        encode.encode_rows(x, None, "current", "rows")
    for refused in (
        lambda: decode.decode_rows(data, carrier, None, "mxfp8", "rows"),
        lambda: decode_operand.decode_operand(data, carrier, None, None, None, "mxfp8", True),
    ):
        with pytest.raises(MoecError, match="12 bytes are no mxfp8 payload of 8"):
            refused()


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_is_moved_once(name):
    x = torch.randn(160, 256).bfloat16()
    most = largest(x, name)
    with repaired() as traffic:
        carrier, data = encode.encode_rows(x, most, name, "rows")
    assert sum(traffic.unique_bytes()) <= 1.001 * (x.nbytes + data.nbytes)
    assert data.nbytes == 160 * width(256, name)
    with repaired() as traffic:
        y = decode.decode_rows(data, carrier, most, name, "rows")
    assert sum(traffic.unique_bytes()) <= 1.001 * (data.nbytes + y.nbytes)
    other = None if name in ("blockwise", "mxfp8") else amax(x, Recipe.parse(name).tile("rows", True))
    for both in (False, True):
        with repaired() as traffic:
            _, *made = decode_operand.decode_operand(data, carrier, most, other, None, name, both)
        assert sum(traffic.unique_bytes()) <= 1.1 * (data.nbytes + sum(t.nbytes for t in made))
