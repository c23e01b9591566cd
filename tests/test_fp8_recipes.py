"""Every recipe against a float64 model written from its definition, to the bit; and what the definition promises."""

import fp8_model as model
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime.errors import MoecError
from moec.runtime.fp8 import RECIPES, ROLES, Recipe, amax, dequantised, quantised
from moec.runtime.fp8.recipes import E4M3, E5M2, LARGEST

FINITE_MAX = float(np.finfo(np.float32).max)


def drawn(kind: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen)
    mask = torch.rand(shape, generator=gen) < 0.1
    match kind:
        case "zero":
            return torch.zeros(shape) * -1
        case "tiny":  # subnormal in fp32, too
            return x * 2.0**-140
        case "huge":
            return (x * 1e38).clamp(-FINITE_MAX, FINITE_MAX)
        case "nan":
            return x.masked_fill(mask, torch.nan)
        case "inf":
            return x.masked_fill(mask, torch.inf).masked_fill(mask.flip(0), -torch.inf)
        case "equal":
            return torch.full(shape, float(x[0, 0]) if x.numel() else 0.0)
        case "spread":  # from subnormals of the format to its largest, in one tile
            return x * torch.logspace(-12, 3, shape[1])
        case "halves":  # ties: exactly between two numbers of the format
            return (torch.randint(-31, 32, shape, generator=gen) * 2 + 1) / 4.0
        case "edges":  # the largest is the format's times a power of two, or next to it
            most = torch.tensor([448.0, 57344.0, 464.0])[torch.randint(0, 3, (1,), generator=gen)]
            towards = torch.stack([most[0] * 0, most[0] * 2, most[0]])[torch.randint(0, 3, (1,), generator=gen)]
            most = torch.nextafter(most, towards)
            return (x.sign() * most).masked_fill(mask, 1.0) * 2.0**-9
    return x


KINDS = ("random", "zero", "tiny", "huge", "nan", "inf", "equal", "spread", "halves", "edges")
sizes = st.sampled_from([1, 3, 31, 32, 33, 127, 128, 129, 150])


@given(st.sampled_from(sorted(RECIPES)), st.sampled_from(ROLES), st.booleans(), st.sampled_from(KINDS), sizes, sizes,
       st.integers(0, 99))  # fmt: skip
def test_it_is_the_model_to_the_bit(name, role, transposed, kind, rows, columns, seed):
    x = drawn(kind, (rows, columns), seed)
    same_bits(x, Recipe.parse(name), role, transposed)


def same_bits(x, recipe, role, transposed):
    q, scale = quantised(x, recipe, role, transposed)
    want_q, want_scale, each = model.quantised(x.numpy(), recipe.name, role, transposed)
    assert q.dtype == (E5M2 if model.RECIPES[recipe.name][0] == "e5m2" and role == "grad" else E4M3)
    assert np.array_equal(scale.float().double().numpy(), want_scale)
    ours, theirs = q.double().numpy(), want_q
    assert np.array_equal(ours, theirs, equal_nan=True)
    signs = ~np.isnan(theirs)
    assert np.array_equal(np.signbit(ours)[signs], np.signbit(theirs)[signs])  # of zeros too
    value = dequantised(q, scale, recipe, role, transposed, torch.float32).numpy()
    with np.errstate(over="ignore"):
        assert np.array_equal(value, (want_q * each).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_off_by_more_than_half_a_unit(name):
    recipe = Recipe.parse(name)
    for role in ("rows", "grad"):
        x = drawn("spread", (64, 300), 1)
        q, scale = quantised(x, recipe, role, False)
        value = dequantised(q, scale, recipe, role, False, torch.float64)
        relative, subnormal = (2**-3, 2**-17) if q.dtype == E5M2 else (2**-4, 2**-10)
        each = torch.from_numpy(model.quantised(x.numpy(), name, role, False)[2])
        bound = torch.maximum(x.double().abs() * relative, each * subnormal)
        assert ((value - x.double()).abs() <= bound * (1 + 2**-20)).all()
        error = float((value - x.double()).norm() / x.norm())
        assert error > 0.01, "nothing was quantised"


@given(st.sampled_from(["blockwise", "mxfp8"]), st.integers(-120, 100), st.integers(0, 99))
def test_powers_of_two_commute(name, exponent, seed):
    """Of a tile times a power of two the numbers are the same, and the scales times it."""
    recipe, x = Recipe.parse(name), drawn("random", (3, 130), seed)
    q, scale = quantised(x, recipe, "rows", False)
    q2, scale2 = quantised(torch.ldexp(x, torch.tensor(exponent)), recipe, "rows", False)
    if float(scale2.float().min()) > 2.0**-126:
        assert torch.equal(q.view(torch.uint8), q2.view(torch.uint8))
        assert torch.equal(scale2.float(), torch.ldexp(scale.float(), torch.tensor(exponent)))


@pytest.mark.parametrize("margin", [0, 1, 3])
def test_delayed_takes_what_it_is_given(margin):
    """Scales of past steps: what is larger now is clamped, and the margin leaves room."""
    recipe = Recipe.parse(f"delayed+{margin}" if margin else "delayed")
    assert Recipe.parse(recipe.text()) == recipe
    x, past = torch.tensor([[1.0, -3.0, 0.5, 9.0]]), torch.full((1, 1), 2.0)
    q, scale = quantised(x, recipe, "rows", False, past)
    want, want_scale, _ = model.quantised(x.numpy(), "delayed", "rows", False, past.numpy(), margin)
    assert np.array_equal(q.double().numpy(), want) and scale.item() == want_scale.item()
    assert scale.item() == np.float32(2 / 448) * 2**margin
    assert (q.float().abs().max().item() == 448) == (margin < 3)


def test_memory_is_contiguous_along_the_product():
    for role in ROLES:
        x = torch.randn(2, 40, 50) if role == "stack" else torch.randn(40, 50)
        for transposed in (False, True):
            q, _ = quantised(x, Recipe.parse("mxfp8"), role, transposed)
            along = -2 if transposed != (role == "stack") else -1
            assert q.stride(along) == 1


def test_experts_of_a_stack_are_by_themselves():
    x = torch.stack([torch.randn(40, 50), torch.randn(40, 50) * 1e6])
    for name in RECIPES:
        recipe = Recipe.parse(name)
        for transposed in (False, True):
            q, scale = quantised(x, recipe, "stack", transposed)
            for e in range(2):
                one = quantised(x[e : e + 1], recipe, "stack", transposed)
                assert torch.equal(q[e].float(), one[0][0].float())
                assert torch.equal(scale[e].float(), one[1][0].float())


def test_without_elements():
    for name in RECIPES:
        q, scale = quantised(torch.zeros(0, 7), Recipe.parse(name), "rows", False)
        assert q.shape == (0, 7) and scale.ndim == 2
        assert amax(torch.zeros(0, 7), (0, 0)).tolist() == [[0.0]]


@pytest.mark.parametrize("text", ["fp8", "current+1", "delayed+x", "delayed+", ""])
def test_what_is_no_recipe_is_refused(text):
    with pytest.raises(MoecError, match="no FP8 recipe"):
        Recipe.parse(text)
    with pytest.raises(MoecError, match="no role"):
        Recipe.parse("current").tile("bias", False)


def test_formats():
    """The model's tables are the formats' numbers."""
    for fmt, dtype in (("e4m3", E4M3), ("e5m2", E5M2)):
        bits = torch.arange(128, dtype=torch.uint8).view(dtype).double()
        finite = bits[bits.isfinite()]
        assert np.array_equal(finite.numpy(), model.TABLES[fmt]) and finite.max() == LARGEST[dtype]
