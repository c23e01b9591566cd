"""A tied, sharded vocabulary on four gloo processes: three optimizer steps, what comes back, a checkpoint under another
plan; and numbers that speak of the global batch."""

import copy
import tempfile

import grid
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from test_vocab import LM, V, batch, logits_only
from torch.distributed.tensor import DTensor, Shard

import moec

pytestmark = pytest.mark.timeout(300)


class Counted(LM):
    """Hugging Face's convention: a sum over a number of items that the caller knows."""

    def forward(self, ids, labels, num_items_in_batch=None):
        logits = super().forward(ids, labels)["logits"]
        x, y = logits.flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(x, y), "logits": logits}
        return {"loss": F.cross_entropy(x, y, reduction="sum") / num_items_in_batch, "logits": logits}


def call(seed: int, items: int) -> dict:
    ids, labels = batch(S=5 + seed)
    return {"ids": ids, "labels": labels, "num_items_in_batch": items}


def trains(rank, world, folder):
    net = Counted(logits_only, tied=True).double()
    ref = copy.deepcopy(net)
    model = moec.parallelize(net, moec.Plan(dp=2, tp=2), example_kwargs=call(0, 7))
    assert model.embed.weight is model.head.weight
    assert [p.dim for p in model.embed.weight.placements if isinstance(p, Shard)] == [0]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, ref)]
    for step in range(3):
        data = call(step, 7 + step)  # another number and another length: the same program
        mine = {k: v if isinstance(v, int) else moec.shard_batch(v, model) for k, v in data.items()}
        out, want = model(**mine), ref(**data)
        out["loss"].backward()
        want["loss"].backward()
        assert grid.relative(out["loss"], want["loss"]) < 1e-12
        assert grid.worst_grad(moec.full_grads(model), ref)[0] < 1e-10
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert len(model._programs) == 1
    assert grid.worst_value(model, ref)[0] < 1e-9

    # Logits beside the loss: this rank's batch slice, sharded over tp; a gradient goes back through them.
    out, want = model(**mine), ref(**data)
    logits, expected = out["logits"], moec.shard_batch(want["logits"], model)
    assert isinstance(logits, DTensor) and logits.shape == expected.shape and logits.to_local().shape[-1] == V // 2
    assert logits.device_mesh.mesh_dim_names == model._mesh.role("tp") and logits.placements == (Shard(2),)
    assert grid.relative(logits, expected) < 1e-12
    logits.full_tensor().square().sum().backward()
    want["logits"].square().sum().backward()
    assert grid.worst_grad(moec.full_grads(model), ref)[0] < 1e-10

    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    saved = moec.full_state_dict(model)
    other = moec.parallelize(Counted(logits_only, tied=True).double(), moec.Plan(tp=4), example_kwargs=call(0, 7))
    into = {"model": other.state_dict()}
    dcp.load(into, checkpoint_id=folder)
    other.load_state_dict(into["model"])
    assert other.embed.weight is other.head.weight and other.embed.weight.to_local().shape[0] == V // 4
    assert all(torch.equal(v, saved[k]) for k, v in moec.full_state_dict(other).items())

    with pytest.raises(moec.MoecError, match="one for the global batch differs between ranks"):
        model(**mine | {"num_items_in_batch": 7 + model.dp_rank})


@pytest.mark.nightly
def test_trains_like_one_device(gloo4):
    with tempfile.TemporaryDirectory() as folder:
        gloo4.run(trains, folder, timeout=280)
