"""Models as people write them are proved on a covering set of plans: every pass, every output, every gradient."""

import pytest
import torch
import user_models
from spmd import STAGES

import moec

PLANS = [(4, 1, 4, 1), (2, 2, 4, 1), (1, 4, 1, 4), (2, 2, 2, 2), (1, 4, 4, 1)]
# By default each model meets one plan, and every plan meets a model; the whole product runs nightly.
DEFAULT = {name: PLANS[i % len(PLANS)] for i, name in enumerate(user_models.CASES)}


def cases():
    for name in user_models.CASES:
        for plan in PLANS:
            marks = () if DEFAULT[name] == plan else (pytest.mark.nightly,)
            yield pytest.param(name, plan, marks=marks, id=f"{name} {plan}")


@pytest.mark.parametrize(("name", "plan"), list(cases()))
def test_proved(name, plan):
    torch.manual_seed(0)
    model, inputs = user_models.CASES[name]()
    dp, tp, ep, etp = plan
    report = moec.check(model, moec.Plan(dp=dp, tp=tp, ep=ep, etp=etp), example_inputs=inputs, world_size=dp * tp)
    assert report.ok, str(report)
    names = list(STAGES)
    assert [p.name for p in report.passes] == names
    # The proof is of something: parameters are cut, and the block was raised.
    assert any(p.grads for p in report.passes)
