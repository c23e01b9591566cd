"""Blocks in other spellings than a loop are raised, exact under every plan, and a wrong raising is seen."""

import dataclasses

import pytest
import torch
from capture_models import Model
from moe_spellings import (
    SPELLINGS,
    Capacity,
    DenseEinsum,
    DenseWhere,
    E,
    H,
    SharedFirst,
    SortedCapacity,
    WeightedBetween,
)

import moec
from moec.capture import guide as guides
from moec.capture.blocks import Raised, prepare
from moec.capture.owners import candidates
from moec.capture.probe import Recipe
from moec.capture.steps import Refused

PLANS = [
    (moec.Plan(tp=2), 2),
    (moec.Plan(ep=2), 2),
    (moec.Plan(dp=2, ep=2), 2),
    (moec.Plan(dp=3, tp=2, ep=6), 6),
    (moec.Plan(dp=2, etp=2), 2),
    (moec.Plan(dp=2, tp=2, ep=2, etp=2), 4),
]
# By default four spellings are the layers of one model that meets one plan; every pair meets at night.
TOGETHER = [SPELLINGS[i : i + 4] for i in range(0, len(SPELLINGS), 4)]


def cases():
    for i, blocks in enumerate(TOGETHER):
        yield pytest.param(blocks, *PLANS[(i + 3) % len(PLANS)], id="+".join(b.__name__ for b in blocks))
    for block in SPELLINGS:
        for plan, world in PLANS:
            name = f"{block.__name__} {plan.to_dict()}"
            yield pytest.param((block,), plan, world, id=name, marks=pytest.mark.nightly)


@pytest.mark.parametrize(("blocks", "plan", "world"), list(cases()))
def test_proved(blocks, plan, world):
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(2)
    inputs = {n: torch.randint(0, 20, (6, 5), generator=g) for n in ("ids", "labels")}
    # Every plan splits experts, and a block that was not raised would be refused.
    report = moec.check(Model(*(b() for b in blocks)), plan, example_kwargs=inputs, world_size=world)
    assert report.ok, str(report)


def prepared(block: type) -> Raised | str | None:
    """What capture makes of a block alone."""
    torch.manual_seed(1)
    module = block()
    (owner,) = candidates(module)
    return prepare(owner, module, Recipe.of((torch.empty(4, 7, H),), {}), training=True)


DAMAGE = {
    "another expert": lambda how, body, x, ids, w, *rest: (
        how,
        body,
        x,
        torch.where(ids < 0, ids, E - 1 - ids),
        w,
        *rest,
    ),
    "no weight": lambda how, body, x, ids, w, *rest: (how, body, x, ids, torch.ones_like(w), *rest),
    "one choice less": lambda how, body, x, ids, w, *rest: (how, body, x, ids[:, 1:], w[:, 1:], *rest),
    "weight elsewhere": lambda how, *rest: ("before" if how == "after" else "after", *rest),
    "weight detached": lambda how, body, x, ids, w, *rest: (how, body, x, ids, w.detach(), *rest),
    "tokens detached": lambda how, body, x, *rest: (how, body, x.detach(), *rest),
}
FORMS = [DenseEinsum, DenseWhere, Capacity, WeightedBetween]
AT_NIGHT = [b for b in SPELLINGS if b not in FORMS]


@pytest.mark.parametrize("block", [*FORMS, *(pytest.param(b, marks=pytest.mark.nightly) for b in AT_NIGHT)])
def test_the_probe_sees_damage(block, monkeypatch):
    raised = prepared(block)
    assert isinstance(raised, Raised) and raised.prove().max_rel_error < 1e-12
    combined = guides.combined
    for name, damage in DAMAGE.items():
        if raised.guide.found.body.scale is not None and name == "weight elsewhere":
            continue  # a body that takes its weight inside cannot run without it
        monkeypatch.setattr(guides, "combined", lambda *args, damage=damage: combined(*damage(*args)))
        with pytest.raises(Refused, match=r"differs from the module|fails for sizes"):
            raised.prove()


@pytest.mark.parametrize(
    ("block", "change"),
    [
        (SharedFirst, lambda found: {"base": None}),  # the shared expert is forgotten
        (DenseWhere, lambda found: {"weights": dataclasses.replace(found.weights, value=found.weights.value - 6)}),
    ],
)
def test_the_probe_sees_what_is_left_out(block, change):
    raised = prepared(block)
    found = raised.guide.found
    if block is DenseWhere:
        # A mask ``scores >= kth`` takes more than K experts where scores tie, which the proof has seen: it is the mask
        # that says the choice, not the ids of the top-k.  Here it becomes scores that no mask has touched.
        assert found.ids is None and found.top_k == E
        assert raised.guide.tape.calls[raised.guide.tape.maker[found.weights.value]].name == "where"
    guide = dataclasses.replace(raised.guide, found=dataclasses.replace(found, **change(found)))
    with pytest.raises(Refused, match="differs from the module"):
        dataclasses.replace(raised, guide=guide).prove()


def test_tokens_dropped_where_nothing_says_so_per_pair_are_refused():
    assert isinstance(prepared(SortedCapacity), str)
