"""FP8 of tokens in chunks: the numbers of one chunk, or a refusal."""

import pytest
from spmd import build, captured, compile_stages, oracle
from test_cast_fp8 import BATCH, SHAPE, calls, compiled

from moec.check import _relative
from moec.overlap import Overlap
from moec.plan import Plan
from moec.precision import Precision
from moec.runtime.errors import MoecError

EP = (2, 1, 2, 1)


@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param("blockwise", marks=pytest.mark.nightly)])
def test_chunks_compute_what_one_chunk_does(recipe):
    """A tile along the features is one token's, so outputs are equal up to how float64 sums are formed (an FP8 number
    that is its neighbour would show by nine orders more), and so are gradients of what is only reached through tokens.
    For weights of FP8 products tiles run along tokens, and another chunk has other tokens."""
    truth = oracle(build(SHAPE), BATCH)
    whole, chunked = compiled(recipe, EP), compiled(recipe, EP, overlap=Overlap(chunks=2))
    assert len(calls(chunked, "moec.fp8_grouped_mm")) == 2 * len(calls(whole, "moec.fp8_grouped_mm"))
    want, got = truth._run(whole), truth._run(chunked)
    for path in want.outputs:
        assert _relative(got.outputs[path], want.outputs[path]) < 1e-12
    exact = {n: _relative(got.grads[n], g, 1e-9) for n, g in want.grads.items() if g is not None}
    for name, off in exact.items():
        assert off < (1e-12 if whole.params[name].name in ("embed.weight", "norm.weight") else 0.03), (name, off)
    assert max(exact.values()) > 1e-6, "some tiles do run along tokens"


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_scales_of_all_tokens_are_refused(recipe):
    with pytest.raises(MoecError, match=r"layers\.0.*scales (all values|a feature of all tokens).*in parts") as e:
        compiled(recipe, EP, overlap=Overlap(chunks=2))
    assert "Precision.exclude" in e.value.way_out


def test_a_payload_with_the_scale_of_all_tokens_is_refused():
    """Products that stay out of FP8 would let it pass."""
    precision = Precision(fp8="current", dispatch="fp8", exclude=("*",))
    with pytest.raises(MoecError, match=r"layers\.0\.moe.*payload of current scales all tokens.*in parts") as e:
        compile_stages(captured(SHAPE), Plan(*EP, precision=precision, overlap=Overlap(chunks=2)))
    assert "blockwise" in e.value.way_out
