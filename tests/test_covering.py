"""Every model under every plan of a covering set over dp, tp, cp, ep, etp, sequence parallelism and FSDP, on 4 and 8
simulated ranks: outputs and every gradient exact in float64, or refused with the nearest plan that works.

One capture and one oracle serve all plans of a model.  By default five models meet one plan each (another one each,
from the set of 4 ranks); the whole product runs nightly.
"""

from __future__ import annotations

import functools

import covering
import pytest
from test_zoo import FAMILIES, make

from moec import compiler
from moec.check import TOLERANCE, _Oracle
from moec.passes import manager
from moec.plan import Plan
from moec.runtime.errors import MoecError

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(300)

BATCH, LENGTH = 8, 8
"""Of the global batch: 8 dp ranks, or 8 ranks that share each sequence."""


@functools.lru_cache(maxsize=1)
def prepared(family: str):
    """The captured program, and the untouched model's float64 outputs and gradients on one global batch."""
    import torch

    model = make(family)
    g = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, 40, (BATCH, LENGTH), generator=g) for _ in range(2))
    labels[0] = -100
    labels[-1, :3] = -100
    kwargs = {"input_ids": ids, "labels": labels}
    program = compiler.with_bounds(compiler.capture(model, (), dict(kwargs), training=True))
    return program, _Oracle(model, (), kwargs, None)


def worst(family: str, plan: Plan) -> tuple[str, float]:
    captured, oracle = prepared(family)
    program = captured.fork()
    world = plan.dp * plan.cp * plan.tp
    program.mesh = plan.mesh(world)
    return oracle.compare("lower", manager.run(program, plan.resolve(world), compiler.PIPELINE)).worst()


def prove(family: str, plan: Plan) -> str:
    """``exact`` or ``refused``; anything else raises."""
    try:
        what, error = worst(family, plan)
    except MoecError as e:
        # Only degrees that a width or a number of heads does not divide may be refused, with a way out.
        if "nearest degrees that work" in str(e):
            return "refused"
        raise
    assert error <= TOLERANCE, f"{covering.name(plan)}: {what} differs by {error:.3g}"
    return "exact"


BY_DAY = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe")


@pytest.mark.parametrize(
    ("i", "family"),
    [pytest.param(i, f, marks=() if f in BY_DAY else pytest.mark.nightly) for i, f in enumerate(FAMILIES)],
)
def test_each_model_under_one_plan(i: int, family: str) -> None:
    plans = covering.covering(4)
    prove(family, plans[(2 * i + 1) % len(plans)])


@pytest.mark.nightly
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_under_every_plan(family: str, world: int) -> None:
    outcome = {covering.name(p): prove(family, p) for p in covering.covering(world)}
    print(family, world, outcome)
    assert "exact" in outcome.values()
