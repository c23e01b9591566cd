"""Four gloo processes against one device, on a grid of plans: loss, gradients, three optimizer steps, expert loads."""

import grid
import pytest
import torch

import moec

pytestmark = pytest.mark.timeout(300)  # four processes compile on what may be two busy cores

TOLERANCE = {"plain": 1e-9, "mixtral": 1e-6, "qwen3_moe": 1e-6}
"""Of losses and gradients.  Hugging Face's models compute router and norms in float32."""


def trains_like_one_device(rank, world, kind, degrees, more=None):
    dp, tp, ep, etp = degrees
    net, data = grid.build(kind), grid.batch()
    ref = grid.reference(net)
    model = grid.parallelize(kind, net, moec.Plan(dp=dp, tp=tp, ep=ep, etp=etp, **(more or {})), data)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, ref)]
    loss_error, grad_error, norm_error = 0.0, (0.0, ""), 0.0
    for step in range(3):
        data = grid.batch(
            seed=step, S=8 + 4 * step if more else 9 + 2 * step
        )  # other lengths (that ``more`` ranks can share): the same program
        out, want = model(**moec.shard_batch(data, model)), ref(**data)
        assert type(out) is type(want)
        out["loss"].backward()
        want["loss"].backward()
        loss_error = max(loss_error, grid.relative(out["loss"], want["loss"]))
        if step == 0:  # later the float32 parts of the models have drifted apart
            grad_error = grid.worst_grad(moec.full_grads(model), ref)
            assert grid.relative(out["logits"], moec.shard_batch(want["logits"], model)) < TOLERANCE[kind]
            # A block's path is the module that owns the experts: Hugging Face's is a child of the router's parent.
            load = {p.removesuffix(".experts"): n for p, n in model.expert_load().items()}
            counts = grid.routing_counts(ref, data)
            assert load.keys() == counts.keys()
            assert all(torch.equal(load[p], counts[p]) for p in counts)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norm_error = max(norm_error, grid.relative(norm, torch.nn.utils.clip_grad_norm_(ref.parameters(), 0.1)))
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert len(model._programs) == 1
    return {"loss": loss_error, "grad": grad_error, "norm": norm_error, "params": grid.worst_value(model, ref)}


def cases():
    """The plain model where roles fold or cross, Mixtral on one plan; the whole product runs nightly.  Worlds that are
    simulated see every plan by day (test_simulated_grid.py)."""
    for kind in grid.KINDS:
        for i, degrees in enumerate(grid.PLANS):
            daily = (kind == "plain" and i in (2, 4, 5, 6)) or (kind == "mixtral" and i == 5)
            marks = () if daily else (pytest.mark.nightly,)
            yield pytest.param(kind, degrees, marks=marks, id="{}-dp{}-tp{}-ep{}-etp{}".format(kind, *degrees))


@pytest.mark.parametrize(("kind", "degrees"), list(cases()))
def test_trains_like_one_device(gloo4, kind, degrees):
    results = gloo4.run(trains_like_one_device, kind, degrees, timeout=280)
    print(kind, degrees, results[0])
    for r in results:
        assert r["loss"] <= TOLERANCE[kind]
        assert r["grad"][0] <= TOLERANCE[kind], r["grad"]
        assert r["norm"] <= 1e-5
        assert r["params"][0] <= 1e-5, r["params"]


SHARED = [
    ((2, 2, 4, 1), {"sequence_parallel": True}),
    ((1, 2, 2, 1), {"cp": 2, "sequence_parallel": True}),
    ((1, 1, 4, 1), {"cp": 4}),
    ((1, 4, 1, 4), {"sequence_parallel": True}),
]


@pytest.mark.parametrize(
    ("kind", "degrees", "more"),
    [
        pytest.param(k, *plan, marks=() if k == "plain" and i < 2 else pytest.mark.nightly, id=f"{k}-{i}")
        for k in grid.KINDS
        for i, plan in enumerate(SHARED)
    ],
)
def test_shared_sequences_train_like_one_device(gloo4, kind, degrees, more):
    """Sequence and context parallelism; lengths that the ranks divide differ from step to step."""
    results = gloo4.run(trains_like_one_device, kind, degrees, more, timeout=280)
    print(kind, degrees, more, results[0])
    for r in results:
        assert r["loss"] <= TOLERANCE[kind]
        assert r["grad"][0] <= TOLERANCE[kind], r["grad"]
        assert r["norm"] <= 1e-5
        assert r["params"][0] <= 1e-5, r["params"]
