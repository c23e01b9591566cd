"""Statistics: what is counted of routing, against counting by hand; micro-batches, recomputation, evaluation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd import Batch, Shape, build
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import moec
from moec import simulate
from moec.plan import Plan
from moec.runtime import ops  # noqa: F401
from moec.runtime.errors import MoecError

tally = torch.ops.moec.tally.default


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_tally_is_counting_by_hand(data) -> None:
    T, E, K = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    ids, logits = torch.randint(-1, E, (T, K), generator=g), torch.randn(T, E, generator=g) * 3
    valid = torch.rand(T, generator=g) > 0.3
    logits[~valid] = torch.nan  # padding may hold anything
    score = data.draw(st.sampled_from(["softmax_pre", "softmax_post", "sigmoid", "sqrtsoftplus"]))
    loads, dropped, entropy = [0] * E, 0, 0.0
    for t in range(T):
        if not valid[t]:
            continue
        for e in ids[t].tolist():
            if e < 0:
                dropped += 1
            else:
                loads[e] += 1
        z = [float(v) for v in logits[t].double()]
        f = {"sigmoid": lambda v: 1 / (1 + math.exp(-v)), "sqrtsoftplus": lambda v: math.sqrt(math.log1p(math.exp(v)))}
        scores = [f.get(score, math.exp)(v) for v in z]
        entropy -= sum(s / sum(scores) * math.log(s / sum(scores)) for s in scores)
    got = tally(ids, None, logits, valid, E, score)
    assert got[: E + 2].tolist() == [*loads, dropped, int(valid.sum())]
    assert float(got[E + 2]) == pytest.approx(entropy, rel=1e-9, abs=1e-9)
    assert torch.equal(tally(ids, None, None, valid, E, score), got[: E + 2])
    kept = ids.masked_fill(torch.rand(T, K, generator=g) > 0.5, -1)
    both = tally(ids, kept, logits, valid, E, score)
    assert torch.equal(both[:E], got[:E])
    assert both[E] == sum(e >= 0 and k < 0 for i in range(T) if valid[i] for e, k in zip(ids[i], kept[i], strict=True))


def test_tally_of_unlike_lengths_is_refused() -> None:
    with pytest.raises(MoecError, match="logits has 3 tokens, chosen has 2"):
        tally(torch.zeros(2, 1, dtype=torch.int64), None, torch.zeros(3, 4), None, 4, "sigmoid")


def test_opcheck() -> None:
    ids, logits = torch.tensor([[0, 1], [-1, 2]]), torch.randn(2, 3)
    torch.library.opcheck(tally, (ids, ids, logits, torch.tensor([True, False]), 3, "sigmoid"))
    torch.library.opcheck(tally, (ids, None, None, None, 3, "softmax_pre"))


def hooked(model, ids) -> torch.Tensor:
    """[T, E] logits of the first block of the untouched model."""
    seen = []
    handle = model.layers[0].moe.router.register_forward_hook(lambda m, a, out: seen.append(out.detach()))
    model(*ids)
    handle.remove()
    return seen[0].flatten(0, -2)


def expected(model, ids) -> torch.Tensor:
    """Loads of the first block."""
    logits = hooked(model, ids)
    chosen = logits.topk(model.layers[0].moe.shape.k, -1).indices
    return torch.bincount(chosen.reshape(-1), minlength=logits.shape[-1])


def test_one_process_over_micro_batches_recomputation_and_evaluation() -> None:
    source = build(Shape(layers=1), 3)
    model = moec.parallelize(source, Plan(), example_inputs=Batch(1, 3).tensors())
    assert moec.moe_stats(model) == {}
    batches = [Batch(1, 3, seed).tensors() for seed in (1, 2)]
    want = sum(expected(source, b) for b in batches)
    model(*batches[0])["loss"].backward()
    with set_checkpoint_early_stop(False):  # or the second run would end before anything is counted
        second = checkpoint(model, *batches[1], use_reentrant=False)
        second["loss"].backward()  # runs the second batch again
    model.eval()
    model(*batches[0])
    (stats,) = moec.moe_stats(model, reset=True).values()
    assert stats.tokens_per_expert.tolist() == want.tolist()
    assert stats.tokens == sum(b[0].numel() for b in batches)
    assert stats.dropped == 0
    assert stats.max_over_mean == pytest.approx(float(want.max() / want.double().mean()))
    assert moec.moe_stats(model) == {}
    (load,) = model.expert_load().values()  # of the last forward, evaluation or not
    assert load.tolist() == expected(source, batches[0]).tolist()


def test_check_compares_what_is_counted(monkeypatch) -> None:
    ids, labels = Batch(2, 3).tensors()
    net, plan, args = build(Shape(), 1), Plan(dp=2), {"example_inputs": (ids, labels), "world_size": 2}
    report = moec.check(net, plan, **args)
    assert report.ok, report
    assert "statistic layers.0.moe:tally" in report.passes[-1].outputs
    monkeypatch.setattr(simulate, "_total", lambda parts, pending, mesh: (parts[0], 0.0))  # one rank speaks for all
    first = moec.check(net, plan, **args).first_failure
    assert first is not None and first[:2] == ("shard", "output statistic layers.0.moe:tally")


class Masked(torch.nn.Module):
    """A model with padding that its router does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build(Shape(), 2)

    def forward(self, ids, labels, attention_mask):
        return self.net(ids, labels)["loss"] * attention_mask.float().mean()


def test_padding_is_not_counted() -> None:
    ids, labels = Batch(2, 4).tensors()
    mask = torch.ones(2, 4, dtype=torch.int64)
    mask[1, 2:] = 0
    source = Masked()
    data = {"ids": ids, "labels": labels, "attention_mask": mask}
    model = moec.parallelize(source, Plan(), example_kwargs=data)
    model(**data)
    (stats,) = moec.moe_stats(model).values()
    assert stats.tokens == 6
    whole = expected(source.net, (ids, labels))
    model(**{**data, "attention_mask": 1 - mask})  # the others
    (both,) = moec.moe_stats(model).values()
    assert both.tokens == 8
    assert torch.equal(both.tokens_per_expert, whole)


def test_losses_and_dropped_pairs_are_told() -> None:
    source, (ids, labels) = build(Shape(), 2, 2.0), Batch(2, 6).tensors()
    router = moec.Router(aux_loss={"micro_batch": 0.5, "global": 0.25}, z_loss=0.1, capacity_factor=0.5)
    model = moec.parallelize(source, Plan(router=router), example_inputs=(ids, labels))
    for _ in range(2):
        model(ids, labels)["loss"].backward()
    (stats,) = moec.moe_stats(model).values()
    E, K, T = 6, 3, 12
    loads = expected(source, (ids, labels))  # what was chosen, before anything is dropped
    assert torch.equal(stats.tokens_per_expert, 2 * loads)
    capacity = math.ceil(T * K / E * 0.5)
    assert stats.dropped == 2 * int((loads - capacity).clamp_min(0).sum()) > 0
    z_TE = hooked(source, (ids, labels)).double()
    p_E = z_TE.softmax(-1).sum(0)
    aux = float(E / (K * T**2) * (loads * p_E).sum())
    z_loss = float(z_TE.logsumexp(-1).square().mean())
    assert stats.losses == pytest.approx({"micro_batch": 0.5 * aux, "global": 0.25 * aux, "z": 0.1 * z_loss}, rel=1e-5)
