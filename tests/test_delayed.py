"""The FP8 recipe ``delayed``: scales of past steps, and what keeps them.

The oracle is a model of its own in numpy: it sees operands in high precision, remembers their magnitudes in lists, and
says bit by bit what they must be quantised to.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

import fp8_model
import numpy as np
import pytest
import torch
from spmd import Batch, Shape, build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moec
from moec import delayed
from moec.plan import Plan
from moec.precision import Precision
from moec.program import HISTORY
from moec.runtime.errors import MoecError

SHAPE = Shape(4, 2, biased=True)
HISTORY_STEPS, MARGIN = 3, 2
PRECISION = Precision(fp8="delayed", history=HISTORY_STEPS, margin=MARGIN)
PRODUCTS = 7  # k v o; experts' gate_up, down; shared up, down


def data(B=4, S=6, seed=4):
    return Batch(B, S, seed, 4).tensors()


def parallel(precision=PRECISION, **options):
    return moec.parallelize(build(SHAPE), Plan(precision=precision, **options), example_inputs=data())


@cache
def compiled():
    return parallel()


def fresh():
    """A model without history; compiled once."""
    model = compiled().train()
    moec.load_full_state_dict(model, build(SHAPE).state_dict())
    for p in model.parameters():
        p.grad = None
    for name, b in model.named_buffers():
        if name.endswith(HISTORY):
            b.zero_()
    model.histories = delayed.Histories(1)
    return model


def histories(model):
    return {n: b.clone() for n, b in model.named_buffers() if n.endswith(HISTORY)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def trained(model, steps, seed=4, lr=0.1):
    """Losses of some steps; the optimizer has no state, and so a step is a step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*data(seed=seed + step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


# -- steps, bit for bit


class Seen(TorchDispatchMode):
    """Every quantisation of a step: ``(weight, row, operand, role, counts, results)``."""

    def __init__(self, names):
        super().__init__()
        self.names, self.sources, self.calls, self.kept = names, {}, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func._schema.name
        if name in ("moec::past_amax", "moec::note_amax"):
            row = args[1] if name == "moec::past_amax" else 2
            history = args[0]
            self.sources[out.data_ptr()] = self.names[history.storage_offset() // history.numel()], row
            self.kept.append(out)  # or its address would be another's
        elif name == "moec::quantise":
            x, amax, amax_T, counts, _, role, both = args
            assert both and amax.data_ptr() == amax_T.data_ptr()
            self.calls.append((*self.sources[amax.data_ptr()], x, role, counts, out))
        return out


def finite_amax(x):
    x = np.abs(x.detach().numpy().astype(np.float64))
    return float(x[np.isfinite(x)].max(initial=0.0))


def real(x, counts):
    """Without what lies between experts."""
    x = x.detach()
    if counts is None:
        return x
    kept, start = torch.zeros_like(x), 0
    for n in counts.tolist():
        kept[start : start + n] = x[start : start + n]
        start += -(-n // 16) * 16
    return kept


class Oracle:
    """Past magnitudes, as lists."""

    def __init__(self):
        self.past = defaultdict(list)

    def check(self, calls):
        """One forward and backward: every operand against the past; its magnitudes are the next step's past."""
        now = defaultdict(float)
        for weight, row, x, role, counts, (_, q, scale, q_T, scale_T) in calls:
            x = real(x, counts if role != "stack" else None)
            past = max(self.past[weight, row][-HISTORY_STEPS:], default=0.0)
            for e in range(len(x)) if role == "stack" else [None]:
                x_2, q_2, s_2 = (x, q.view(-1, x.shape[-1]), scale) if e is None else (x[e], q[e], scale[e])
                q_T2, s_T2 = (q_T, scale_T) if e is None else (q_T[e], scale_T[e])
                flat = x_2.reshape(-1, x.shape[-1]).numpy()
                for got, s, transposed in ((q_2, s_2, False), (q_T2, s_T2, True)):
                    amaxes = np.array([[past]])
                    want, want_s, _ = fp8_model.quantised(flat, "delayed", role, transposed, amaxes, MARGIN)
                    assert np.array_equal(got.double().numpy(), want, equal_nan=True), (weight, role)
                    assert np.array_equal(s.double().numpy(), want_s), (weight, role)
            now[weight, row] = finite_amax(x)
        assert len({w for w, _ in now}) == PRODUCTS
        return now


def shared(now):
    """Products that share activations each note them: k's and v's, gate_up's and shared_up's."""
    pairs = [("attention.k.weight", "attention.v.weight"), ("moe.shared_up.weight", None)]
    for one, other in pairs:
        if other is not None:
            now[f"layers.0.{other}{HISTORY}", 0] = now[f"layers.0.{one}{HISTORY}", 0]
    return now


def step(model, oracle, change, batch=None):
    names = [s.name for s in model.program.params.values() if s.history]
    with torch.no_grad():
        change(model)
    for p in model.parameters():
        p.grad = None
    with Seen(names) as seen:
        model(*(batch or data()))["loss"].backward()
    now = shared(oracle.check(seen.calls))
    for key, value in now.items():
        oracle.past[key].append(value)
    return now


def scaled(path, factor):
    return lambda model: model.get_parameter(path).mul_(factor)


def poisoned(value):
    return lambda model: model.get_parameter("layers.0.attention.o.weight")[0, 0].fill_(value)


DOWN, NORM = "layers.0.moe.shared_down.weight", "layers.0.norm2.weight"
CHANGES = {
    "larger": scaled(NORM, 37.0), "smaller": scaled(NORM, 1e-3), "zero": scaled(DOWN, 0.0),
    "zero still": scaled(DOWN, 1.0), "zero again": scaled(DOWN, 1.0), "zero at last": scaled(DOWN, 1.0),
    "one nan": poisoned(math.nan), "one inf": poisoned(math.inf), "mended": poisoned(0.5),
    "tiny": scaled(NORM, 2.0**-100),
}  # fmt: skip


def run_all(oracle):
    model = fresh()
    for name, change in CHANGES.items():
        now = step(model, oracle, change)
        found = histories(model)
        assert len(found) == PRODUCTS
        for weight, history in found.items():
            for row in range(3):
                mine = oracle.past[weight, row][-1 - HISTORY_STEPS :][::-1]
                mine += [0.0] * (1 + HISTORY_STEPS - len(mine))
                assert history[row].tolist() == mine, (name, weight, row)
        if name.startswith("zero"):
            assert now[DOWN + HISTORY, 1] == 0
        if name == "one nan":
            assert now["layers.0.moe.down" + HISTORY, 2] == 0, "nothing finite behind it"


def test_every_step_is_the_models_bit_for_bit():
    run_all(Oracle())


@pytest.mark.parametrize("mistake", ["not rolled", "of this step", "margin"])
def test_the_model_sees_mistakes(mistake, monkeypatch):
    if mistake == "not rolled":
        monkeypatch.setattr(delayed, "_moved_on", lambda x: x)
    elif mistake == "of this step":
        monkeypatch.setattr(delayed, "_moved_on", lambda x: x.roll(2, -1))
    else:
        known = fp8_model.scale_of
        monkeypatch.setattr(fp8_model, "scale_of", lambda amax, fmt, kind, margin: known(amax, fmt, kind))
    with pytest.raises(AssertionError):
        run_all(Oracle())


def test_a_stack_of_experts_is_one_tensor():
    model = fresh()
    trained(model, 2)
    with Seen([s.name for s in model.program.params.values() if s.history]) as seen:
        model(*data())
    scales = [out[2] for _, _, _, role, _, out in seen.calls if role == "stack"]
    assert len(scales) == 2
    for s in scales:
        assert s.shape == (SHAPE.experts, 1, 1) and s.unique().numel() == 1 and s[0] != 1


# -- when a history changes, and when it does not


def test_micro_batches_are_one_step():
    """Their scales are those of the steps before, and the largest magnitude of all of them is remembered."""
    batches = [data(seed=seed) for seed in (4, 9, 12, 15)]

    def begun():
        model = fresh()
        trained(model, 1)
        model.zero_grad()
        return model

    alone = []
    for batch in batches:
        model = begun()
        model(*batch)["loss"].backward()
        alone.append(histories(model))
    model = begun()
    losses = [model(*batch)["loss"] for batch in batches]  # forwards before a backward
    for loss in losses:
        loss.backward()
    both = histories(model)
    for name, h in both.items():
        assert torch.equal(h, torch.stack([a[name] for a in alone]).amax(0)), name
        assert not torch.equal(h[:, 0], h[:, 1])
    assert not any(same(both, a) for a in alone)
    model = begun()
    for batch in batches:
        model(*batch)["loss"].backward()
    assert same(histories(model), both)


def test_what_changes_nothing():
    model, batch = fresh(), data()
    trained(model, 2)
    before = histories(model)
    model(*batch)["loss"]  # no backward
    with torch.no_grad():
        model(*batch)
    evaluated = model.eval()(*batch)["loss"]
    assert same(histories(model), before)
    state = moec.full_state_dict(model)
    model.train()
    loss = model(*batch)["loss"]
    loss.backward(retain_graph=True)
    once = histories(model)
    loss.backward()  # what was noted is noted
    assert same(histories(model), once) and not same(once, before)
    resumed = fresh()
    moec.load_full_state_dict(resumed, state)
    assert torch.equal(resumed.eval()(*batch)["loss"], evaluated), "evaluation reads what is saved, and no more"


def test_which_steps_a_forward_reads_amid_a_step():
    """Behind a backward and before the optimizer's step: evaluation reads that backward's magnitudes too, the next
    micro-batch does not, unless somebody has written the buffer meanwhile: what is loaded is whole steps."""
    buffers, histories = {"w": torch.zeros(3, 1 + HISTORY_STEPS)}, delayed.Histories(1)
    given = histories.enter(buffers, 0, True)["w"]
    found = torch.tensor([1.0, 2.0, 3.0])
    (given[:, 0] @ found).backward()
    assert torch.equal(buffers["w"][:, 0], found)
    assert torch.equal(histories.enter(buffers, 0, False)["w"][:, 1], found)
    assert not histories.enter(buffers, 0, True)["w"][:, 1:].any()
    assert torch.equal(histories.enter(buffers, 1, True)["w"][:, 1], found)
    buffers["w"].copy_(buffers["w"].clone())
    assert torch.equal(histories.enter(buffers, 0, True)["w"][:, 1], found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_computed_again_is_noted_once(reentrant):
    runs = []
    for again in (False, True):
        model = fresh()
        for p in model.parameters():
            p.grad = None
        trained(model, 1)
        model.zero_grad()
        ids, labels = data(seed=8)
        if again:
            one = torch.ones((), requires_grad=True)  # reentrant checkpoints want an input with a gradient
            loss = checkpoint(lambda o: model(ids, labels)["loss"] * o, one, use_reentrant=reentrant)
        else:
            loss = model(ids, labels)["loss"]
        loss.backward()
        runs.append((histories(model), {n: p.grad.clone() for n, p in model.named_parameters()}))
    assert same(runs[0][0], runs[1][0]) and same(runs[0][1], runs[1][1])


def test_without_history_scales_are_one():
    model = fresh()
    with Seen([s.name for s in model.program.params.values() if s.history]) as seen:
        model(*data())["loss"].backward()
    scales = {float(s) for *_, out in seen.calls for s in (*out[2].flatten(), *out[4].flatten())}
    assert scales == {1.0} and len(seen.calls) == 6 + 7 + 7  # activations of k and v are one


# -- saved, loaded


def test_saved_and_loaded_it_goes_on_with_the_same_bits():
    model = fresh()
    trained(model, 3)
    state = moec.full_state_dict(model)
    assert sorted(n for n in state if n.endswith(HISTORY)) == sorted(histories(model))
    want = trained(model, 2, seed=20), histories(model)
    resumed = fresh()
    moec.load_full_state_dict(resumed, state)
    assert (trained(resumed, 2, seed=20), True) == (want[0], same(histories(resumed), want[1]))
    resumed = fresh()
    resumed.load_state_dict({n: v.clone() for n, v in state.items()})
    assert trained(resumed, 2, seed=20) == want[0]
    forgotten = fresh()  # sabotage: histories were not saved
    moec.load_full_state_dict(forgotten, {n: v for n, v in state.items() if not n.endswith(HISTORY)})
    assert trained(forgotten, 2, seed=20) != want[0]


def test_a_plain_models_checkpoint_and_back():
    model, source = fresh(), build(SHAPE, seed=5)
    trained(model, 1)
    kept = histories(model)
    moec.load_full_state_dict(model, source.state_dict())
    assert same(histories(model), kept)
    state = moec.full_state_dict(model)
    assert same({n: v for n, v in state.items() if not n.endswith(HISTORY)}, dict(source.state_dict()))
    plain = parallel(precision=None)
    moec.load_full_state_dict(plain, state)
    assert same(moec.full_state_dict(plain), dict(source.state_dict()))
    missing, unexpected = build(SHAPE).load_state_dict(state, strict=False)
    assert not missing and sorted(unexpected) == sorted(kept)
    with pytest.raises(MoecError, match=r"shape \(3, 9\), expected \(3, 4\)"):
        moec.load_full_state_dict(model, state | {n: torch.zeros(3, 9) for n in list(kept)[:1]})


def test_scheduled_graphs_keep_the_same_histories():
    model = fresh()
    want = trained(model, 3), histories(model)
    other = parallel(overlap=moec.Overlap())
    assert trained(other, 3) == want[0] and same(histories(other), want[1])


def test_what_has_no_backward_stays_out():
    source = build(SHAPE).requires_grad_(False)
    source.layers[0].moe.down.requires_grad_()
    source.head = torch.nn.Linear(12, 19, bias=False)
    model = moec.parallelize(source, Plan(precision=PRECISION), example_inputs=data())
    assert list(histories(model)) == ["layers.0.moe.down" + HISTORY]
    assert sum("learns scales in the backward" in w for w in model.program.why_not) == PRODUCTS - 1
    assert len(trained(model, 2)) == 2 and histories(model)["layers.0.moe.down" + HISTORY][:, :2].all()


def test_a_name_that_is_taken():
    source = build(SHAPE)
    source.layers[0].moe.register_buffer("down" + HISTORY, torch.zeros(2))
    with pytest.raises(MoecError, match="of this name"):
        moec.parallelize(source, Plan(precision=PRECISION), example_inputs=data())
