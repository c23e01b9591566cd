"""Rules that users declare for their own ops: models with such ops are exact, wrong rules are caught, and what cannot
be right is refused when it is declared or used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moec
from moec.compiler import compile_program
from moec.plan import Plan
from moec.runtime.errors import MoecError

WIDTH = 8
PLANS = [Plan(dp=2, tp=2), Plan(dp=4), Plan(tp=4)]


@pytest.fixture
def library():
    """A namespace of its own that ends with the test, and the rules of its ops with it."""
    with torch.library._scoped_library("custom_rules", "FRAGMENT") as lib:
        yield lib


def define(lib, name: str, schema: str, function, fake) -> None:
    """An op with a CPU kernel, a fake one and a derivative, as a user writes it."""
    lib.define(f"{name}{schema}")
    qualified = f"custom_rules::{name}"

    def kernel(*args):
        return function(*(a.detach() if isinstance(a, Tensor) else a for a in args))

    def setup(ctx, inputs, output) -> None:
        ctx.inputs = inputs

    def backward(ctx, *grads):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in ctx.inputs]
            out = function(*leaves)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            found = iter(torch.autograd.grad(out, tensors, grads if isinstance(out, tuple) else grads[0]))
        return tuple(next(found) if isinstance(x, Tensor) else None for x in leaves)

    torch.library.impl(qualified, "CPU", kernel, lib=lib)
    torch.library.register_fake(qualified, fake, lib=lib)
    torch.library.register_autograd(qualified, backward, setup_context=setup, lib=lib)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:]) * weight


def project(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.tanh(F.linear(x, w, bias))


def define_all(lib) -> None:
    define(lib, "gated", "(Tensor gate, Tensor up) -> Tensor", gated, lambda g, u: torch.empty_like(g))
    define(lib, "norm", "(Tensor x, Tensor weight) -> Tensor", norm, lambda x, w: torch.empty_like(x))
    define(
        lib, "project", "(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", project,
        lambda x, w, b=None: x.new_empty((*x.shape[:-1], w.shape[0])),
    )  # fmt: skip


class Net(nn.Module):
    """A gated MLP around custom ops: one between its column and row weights, a norm, a projection with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, WIDTH), nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.w = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        my = torch.ops.custom_rules
        x = x + self.down(self.inner(my.gated(self.gate(x), self.up(x))))
        y = my.project(x, self.w)
        return {"loss": y.square().mean(), "y": y}

    def inner(self, x: Tensor) -> Tensor:
        return x


class Normed(Net):
    def inner(self, x: Tensor) -> Tensor:
        return torch.ops.custom_rules.norm(x, self.scale)


RULES = {"gated": "..., ... -> ...", "norm": "... !h, !h -> ... !h", "project": "... !k, n !k, n -> ... n"}


def declare(**changed: str) -> None:
    for name, spec in (RULES | changed).items():
        moec.sharding_rule(f"custom_rules::{name}", spec)


def prove(model: nn.Module, plan: Plan) -> moec.CheckReport:
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    return moec.check(model, plan, example_inputs=(x,), world_size=4)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: str(p.to_dict()))
@pytest.mark.parametrize("model", [Net, Normed])
def test_a_model_with_ops_of_its_own_is_exact(library, model, plan) -> None:
    define_all(library)
    declare()
    report = prove(model(), plan)
    assert report.ok, report


def test_sharding_passes_through_the_op(library) -> None:
    """Between a column and a row weight, as it would pass through silu and mul; not through the norm."""
    define_all(library)
    declare()

    def placed(model: nn.Module) -> dict[str, set[str]]:
        program = compile_program(model, Plan(tp=4), 4, (torch.randn(4, 3, 6),), {}, training=True)
        return {s.name: {str(t) for t in s.types.values()} for s in program.params.values()}

    types = placed(Net())
    assert types["gate.weight"] == types["up.weight"] == {"S(0)"} and types["down.weight"] == {"S(1)"}
    assert placed(Normed())["gate.weight"] == {"I"}


@pytest.mark.parametrize(
    ("wrong", "first"),
    [({"norm": "... h, h -> ... h"}, "shard"), ({"project": "... !k, n !k, n -> ... 1"}, None)],
    ids=str,
)
def test_wrong_rules_are_caught(library, wrong, first) -> None:
    """A norm that is said to be pointwise computes its mean over a part.  A needlessly narrow rule is only slower."""
    define_all(library)
    declare(**wrong)
    report = prove(Normed(), Plan(tp=4))
    assert (report.first_failure and report.first_failure[0]) == first
    if first:
        assert report.first_failure[2] > 1e-3


def test_a_summed_factor_of_an_op_that_does_not_add_is_caught(library) -> None:
    define(library, "top", "(Tensor x) -> Tensor", lambda x: x.amax(0), lambda x: x.new_empty(x.shape[1:]))
    moec.sharding_rule("custom_rules::top", "b ... -> ...")

    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": torch.ops.custom_rules.top(self.w(x)).square().sum()}

    assert not prove(Top(), Plan(dp=4)).ok


def test_what_an_op_carries(library) -> None:
    """A pending sum goes through a linear op, and is reduced before any other."""
    define(library, "twice", "(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like)

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, WIDTH, bias=False), nn.Linear(WIDTH, 6, bias=False)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": torch.ops.custom_rules.twice(self.down(F.relu(self.up(x)))).square().mean()}

    def type_of_result() -> set[str]:
        program = compile_program(Mlp(), Plan(tp=4), 4, (torch.randn(4, 6),), {}, training=True)
        (node,) = (n for n in program.graph.nodes if n.target is torch.ops.custom_rules.twice.default)
        return {str(t) for t in node.meta["types"].values()}

    moec.sharding_rule("custom_rules::twice", "... -> ...", carries="linear")
    assert type_of_result() == {"P"}
    report = moec.check(Mlp(), Plan(tp=4), example_inputs=(torch.randn(4, 6),), world_size=4)
    assert report.ok, report
    del torch.ops.custom_rules.twice.moec_sharding_rule
    moec.sharding_rule("custom_rules::twice", "... -> ...")
    assert type_of_result() == {"I"}


def test_lists_optional_arguments_and_several_results(library) -> None:
    def ends(xs: list[Tensor], scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = sum(xs) if scale is None else sum(xs) * scale
        return x.sin(), x.cos().sum(-1)

    library.define("ends(Tensor[] xs, Tensor? scale=None) -> (Tensor, Tensor)")
    torch.library.impl("custom_rules::ends", "CompositeExplicitAutograd", ends, lib=library)
    torch.library.register_fake(
        "custom_rules::ends",
        lambda xs, scale=None: (torch.empty_like(xs[0]), xs[0].new_empty(xs[0].shape[:-1])),
        lib=library,
    )
    moec.sharding_rule("custom_rules::ends", "... k, k -> ... k, ...")

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(6, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            a, b = torch.ops.custom_rules.ends([x, 2 * x, x])
            c, _ = torch.ops.custom_rules.ends([x], x[0, 0])
            with torch.no_grad():
                return {"a": a, "b": b, "c": c, "loss": a.mean() + b.sum()}

    report = prove(Ends().eval(), Plan(dp=2, tp=2))
    assert report.ok, report


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "spec", "message"),
    [
        ("custom_rules::no_such_op", "... -> ...", "there is no op 'custom_rules::no_such_op'"),
        ("gated", "... -> ...", "there is no op 'gated'"),
        ("custom_rules::gated", "..., ...", "is not 'operands -> results'"),
        ("custom_rules::gated", "..., ... -> ... -> ...", "is not 'operands -> results'"),
        ("custom_rules::gated", "a-b, ... -> ...", "'a-b' in 'a-b, ... -> ...' is no dim"),
        ("custom_rules::gated", "a b a, ... -> ...", "'a' is twice"),
        ("custom_rules::gated", "... !a a, ... -> ...", "'a' is twice"),
        ("custom_rules::gated", "... a, ... a -> ... b", "'b' in the result .* is in no operand"),
        ("custom_rules::gated", "a, a -> ... a", r"'\.\.\.' in the result .* is in no operand"),
        ("custom_rules::gated", "... -> ...", "has 1 operands and 1 results, but the op has 2 tensor arguments"),
        ("custom_rules::gated", "..., ... -> ..., ...", "has 2 operands and 2 results"),
        ("aten::linear", "... k, n k, n -> ... n", "moec has a rule for this op"),
        ("moec::permute", "t k, t j -> t k, 1, t j", "moec has a rule for this op"),
    ],
)
def test_declarations_that_cannot_be_right_are_refused(library, op, spec, message) -> None:
    define_all(library)
    with pytest.raises(MoecError, match=message):
        moec.sharding_rule(op, spec)


def test_an_op_has_one_rule(library) -> None:
    define_all(library)
    declare()
    declare()  # the same again is no contradiction
    with pytest.raises(MoecError, match=r"custom_rules::norm: has the rule '\.\.\. !h, !h -> \.\.\. !h' .* already"):
        moec.sharding_rule("custom_rules::norm", "... h, h -> ... h")
    with pytest.raises(MoecError, match="already"):
        moec.sharding_rule("custom_rules::norm", RULES["norm"], carries="linear")
    with pytest.raises(MoecError, match="carries='all' is not one of none, linear, multilinear"):
        moec.sharding_rule("custom_rules::norm", RULES["norm"], carries="all")


def test_rules_end_with_their_op() -> None:
    for spec in ("..., ... -> ...", "... a, ... a -> ... a"):
        with torch.library._scoped_library("custom_rules", "FRAGMENT") as lib:
            define_all(lib)
            moec.sharding_rule("custom_rules::gated", spec)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gated": "a, a -> a"}, r"operand 'a' has the shape \[s\d+, s\d+, 8\]"),
        ({"gated": "a b c d ..., ... -> a ..."}, r"operand 'a b c d \.\.\.' has the shape"),
        ({"project": "... k, k n, n -> ... n"}, "'k' would be 6 and 4"),
        ({"project": "... !k, n !k, n -> n ..."}, "'n' would be 4 and "),
    ],
    ids=str,
)
def test_a_rule_that_does_not_fit_the_shapes_is_named_at_its_use(library, changed, message) -> None:
    define_all(library)
    declare(**changed)
    with pytest.raises(MoecError, match=message) as e:
        prove(Net(), Plan(dp=2, tp=2))
    assert "does not fit custom_rules" in e.value.message
    assert "sharding_rule" in e.value.way_out


def test_an_op_without_a_rule_names_the_way_out(library) -> None:
    define_all(library)
    with pytest.raises(MoecError, match=r"no sharding rule for custom_rules\.gated") as e:
        prove(Net(), Plan(dp=2, tp=2))
    assert 'moec.sharding_rule("custom_rules::gated", ' in e.value.way_out
