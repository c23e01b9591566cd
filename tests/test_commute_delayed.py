"""commute_quantise, dispatch of the recipe ``delayed``: tokens travel in FP8, scaled by the history of their experts.

Nothing about the numbers changes by it: a product reads what it would have quantised by the same history, and every
history learns what it would have learnt.  Tokens are rounded before they are sent, so all this holds on any number of
ranks.

Legend: T tokens, N rows, H hidden.
"""

from __future__ import annotations

import sys
from functools import cache
from unittest import mock

import fp8_model
import grid
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from spmd import HIDDEN, Batch, MoE, Shape, build, captured, compile_stages, oracle
from test_commute_quantise import calls, exchanged, instead, node_of
from test_delayed import HISTORY_STEPS, MARGIN, Seen, data, finite_amax, histories, same, trained
from torch import nn
from witness import WitnessError, witness

import moec
from moec import delayed
from moec.check import _relative
from moec.overlap import Overlap
from moec.passes.verify import verify
from moec.plan import Plan
from moec.precision import Precision
from moec.program import HISTORY
from moec.router import Router
from moec.runtime.errors import MoecError
from moec.runtime.ops.past_amax import ROWS

SHAPE, BATCH = Shape(4, 2, biased=True), Batch(4, 6, 0, 4)
ONE, TWO = (1, 1, 1, 1), (2, 1, 2, 1)
SLOTS = {"router": Router(capacity_factor=1.0)}
PLANS = {
    "alltoall": (TWO, {}), "folded": ((2, 2, 4, 1), {}), "etp": ((2, 2, 2, 2), {}),
    "allgather": (TWO, {"dispatch": "allgather"}), "dedup": ((2, 2, 4, 1), {"dispatch": "dedup"}),
    "hierarchical": ((4, 1, 4, 1), {"dispatch": "hierarchical", "ranks_per_node": 2}),
    "static": (TWO, {"dispatch": "static"} | SLOTS), "fsdp": (TWO, {"fsdp": True}),
    "sp": ((1, 2, 2, 1), {"sequence_parallel": True}), "chunks": (TWO, {"overlap": Overlap(chunks=2)}),
    "sequences": (TWO, {"overlap": Overlap(chunks=2, chunk_by="sequences")}), "local": (ONE, {}),
}  # fmt: skip
DAILY = ("folded", "allgather", "static", "chunks")
GATE_UP = "layers.0.moe.gate_up"


@cache
def compiled(degrees=ONE, payload="fp8", stage="lower", exclude=("first", "last"), margin=1, **options):
    options = {k: v for k, v in options.items() if v is not None}
    precision = Precision(fp8="delayed", history=3, margin=margin, dispatch=payload, exclude=exclude)
    return dict(compile_stages(captured(SHAPE), Plan(*degrees, precision=precision, **options)))[stage]


def by_name(program, result):
    return {s.name: result.grads.get(n) for n, s in program.params.items()}


def differ(program, got, other, want) -> float:
    """Of outputs and gradients the worst; infinite if histories did not learn the same, to the bit."""
    mine, theirs = by_name(program, got), by_name(other, want)
    assert mine.keys() == theirs.keys()
    if any(n.endswith(HISTORY) and not torch.equal(mine[n], g) for n, g in theirs.items()):
        return float("inf")
    theirs = {n: g for n, g in theirs.items() if g is not None and not n.endswith(HISTORY)}
    scale = max(float(g.norm()) for g in theirs.values()) * 1e-2
    found = [_relative(mine[n], g, scale) for n, g in theirs.items()]
    return max(found + [_relative(got.outputs[k], v) for k, v in want.outputs.items()])


class Bytes(torch.utils._python_dispatch.TorchDispatchMode):
    """What is encoded and what operands become of it: rows as a set, for ranks have some each; scales as a set."""

    def __init__(self):
        super().__init__()
        self.rows, self.operands, self.scales = set(), set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func._schema.name
        if name == "moec::encode_rows" and args[0].ndim == 2:  # others are a sequence's (test_commute_sequence.py)
            self.rows |= {row.numpy().tobytes() for row in out[1]}
        elif name == "moec::decode_operand" and args[4] is not None:
            self.operands |= {row.numpy().tobytes() for row in out[1].view(torch.uint8)}
            self.scales |= {float(out[2]), float(out[4])}
        return out


def run(truth, program):
    with Bytes() as seen:
        return truth._run(program), seen


@pytest.mark.parametrize("plan", [p if p in DAILY else pytest.param(p, marks=pytest.mark.nightly) for p in PLANS])
def test_any_number_of_ranks_sends_and_learns_what_one_does(plan):
    degrees, options = PLANS[plan]
    router = options.get("router")
    early, program = (compiled(degrees, stage=stage, **options) for stage in ("commute_quantise", "lower"))
    verify(early)
    witness(early)
    operands = [n for n in calls(program, "moec.decode_operand") if n.args[4] is not None]
    assert len(operands) == (2 if "overlap" in options else 1) and not calls(program, "moec.decode_rows")
    truth = oracle(build(SHAPE), BATCH)
    alone, wide = compiled(router=router), compiled(payload=None, router=router)
    (got, sent), (want, as_one), bare = run(truth, program), run(truth, alone), truth._run(wide)
    assert got.disagreement == 0 and not any(e.kind in ("m_to_i", "i_to_m") for e in got.log), "nothing on the way"
    assert sent.scales == as_one.scales and len(as_one.scales) == 1 and 1.0 not in as_one.scales
    assert sent.rows == as_one.rows and sent.operands == as_one.operands
    assert differ(program, got, alone, want) < 1e-12
    assert differ(alone, want, wide, bare) == 0, "bit for bit what it is without"


class Rising(Seen):
    """And every payload, as an operand of its history."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name
        if name == "moec::encode_rows":
            self.calls.append(("tokens", *self.sources[args[1].data_ptr()], args[0].detach(), out[1]))
        elif name == "moec::decode_operand":
            assert args[2].data_ptr() == args[3].data_ptr()
            self.calls.append(("rows", *self.sources[args[2].data_ptr()], args[4], args[0], out[1:]))
        return out


def quantised(x, past, role="rows", transposed=False):
    """``(numbers, scale)`` by the model in numpy."""
    amaxes = np.array([[past]])
    return fp8_model.quantised(x.float().numpy(), "delayed", role, transposed, amaxes, MARGIN)[:2]


def equal(q, scale, want) -> bool:
    return np.array_equal(q.double().numpy(), want[0]) and np.array_equal(scale.double().numpy(), want[1])


@cache
def parallel(payload="fp8", **options):
    precision = Precision(fp8="delayed", history=HISTORY_STEPS, margin=MARGIN, dispatch=payload)
    return moec.parallelize(build(SHAPE), Plan(precision=precision, **options), example_inputs=data())


def fresh(**options):
    model = parallel(**options).train()
    moec.load_full_state_dict(model, build(SHAPE).state_dict())
    for name, b in model.named_buffers():
        if name.endswith(HISTORY):
            b.zero_()
    model.histories = delayed.Histories(1)
    return model


def steps_as_modelled(model, factors):
    """Of steps before which a norm grows by ``factors``: what is sent, read and learnt, against lists of magnitudes."""
    past, names = [], [s.name for s in model.program.params.values() if s.history]
    for factor in factors:
        with torch.no_grad():
            model.get_parameter("layers.0.norm2.weight").mul_(factor)
        model.zero_grad()
        with Rising(names) as seen:
            model(*data())["loss"].backward()
        (tokens,) = [c[1:] for c in seen.calls if c[0] == "tokens"]
        (rows,) = [c[1:] for c in seen.calls if c[0] == "rows"]
        largest = max(past[-HISTORY_STEPS:], default=0.0)
        for name, row in (tokens[:2], rows[:2]):
            assert (name, ROWS[row]) == (GATE_UP + HISTORY, "rows")
        x_TH, sent = tokens[2:]
        assert np.array_equal(sent.view(torch.float8_e4m3fn).double().numpy(), quantised(x_TH, largest)[0])
        counts, arrived, (q, scale, q_T, scale_T) = rows[2:]
        assert {r.numpy().tobytes() for r in sent} >= {r.numpy().tobytes() for r in arrived[: int(counts[0])]}
        value = q.float() * scale
        assert torch.equal(q.view(torch.uint8)[: int(counts[0])], arrived[: int(counts[0])])
        assert equal(q, scale, quantised(value, largest))
        assert equal(q_T, scale_T, quantised(value, largest, transposed=True))
        past.append(finite_amax(x_TH))
        found = histories(model)[GATE_UP + HISTORY][0].tolist()
        assert found == (past[::-1] + [0.0] * HISTORY_STEPS)[: 1 + HISTORY_STEPS]


FACTORS = (1.0, 37.0, 1e-3, 1.0, 1.0, 1.0, 2.0**-60)
"""Numbers larger than any before, so that some are clamped; then smaller ones, until the large ones are forgotten."""


def test_every_step_is_the_models_bit_for_bit():
    steps_as_modelled(fresh(), FACTORS)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(-12, 12).map(lambda e: 2.0**e), min_size=1, max_size=5))
def test_steps_of_any_magnitudes(factors):
    steps_as_modelled(fresh(), factors)


@pytest.mark.parametrize("options", [{}, {"overlap": Overlap()}], ids=["plain", "scheduled"])
def test_training_is_what_it_is_without(options):
    """Losses, parameters' histories: bit for bit.  A graph that is scheduled multiplies in an order of its own."""
    on, off = fresh(**options), fresh(payload=None)
    assert (trained(on, 4), True) == (trained(off, 4), same(histories(on), histories(off)))
    assert torch.equal(on.eval()(*data())["loss"], off.eval()(*data())["loss"])


@settings(max_examples=15, deadline=None)
@given(st.integers(-30, 30), st.integers(0, 3), st.integers(0, 5))
def test_histories_of_any_size_change_nothing_else(exponent, margin, seed):
    """Where all tokens are clamped, or vanish, two ranks that send in FP8 compute what one does that does not."""
    truth, module = oracle(build(SHAPE), Batch(4, 6, seed, 4)), sys.modules[_relative.__module__]
    drawn = module._drawn
    with mock.patch.object(module, "_drawn", lambda spec: drawn(spec) * 2.0**exponent):
        sends, wide = (compiled(d, payload, margin=margin) for d, payload in ((TWO, "fp8"), (ONE, None)))
        assert differ(sends, truth._run(sends), wide, truth._run(wide)) < 1e-12


def test_bytes_are_half_of_bf16(monkeypatch):
    monkeypatch.setattr("spmd.HIDDEN", 1024)
    wide, low = (exchanged({"compute": "bf16"} | more) for more in ({}, {"fp8": "delayed", "dispatch": "fp8"}))
    assert low["forward"][0] * 2 == wide["forward"][0] > 0, "no scale travels"
    assert low["forward"][1:] == wide["forward"][1:] and low["backward"] == wide["backward"]


def test_without_training_nothing_is_learnt():
    model, options = build(SHAPE).eval(), {"fp8": "delayed", "dispatch": "fp8"}
    program = moec.compile_program(model, Plan(*TWO, precision=Precision(**options)), 2, data(), {}, training=False)
    assert calls(program, "moec.encode_rows") and calls(program, "moec.decode_operand")
    assert not calls(program, "moec.amax", "moec.note_amax")


# -- who reads what is sent


class TwoBlocks(nn.Module):
    """Experts of two blocks that read the same tokens, each by a history of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(16, HIDDEN), nn.Linear(HIDDEN, 16)
        self.one, self.other = MoE(Shape(4, 2)), MoE(Shape(4, 2))

    def forward(self, ids):
        x = F.layer_norm(self.embed(ids), (HIDDEN,)).reshape(-1, HIDDEN)
        return self.last(x + torch.tanh(self.one(x)) + torch.tanh(self.other(x))).square().mean()


def stage_of(model, exclude, args=(), kwargs=None, world=2):
    plan = Plan(world, 1, world, 1, precision=Precision(fp8="delayed", dispatch="fp8", exclude=exclude))
    stages = {}
    moec.compile_program(
        model, plan, world, args, kwargs or {}, training=True, observe=lambda name, p: stages.update({name: p})
    )
    program = stages["commute_quantise"]
    verify(program)
    witness(program)
    return program


def history_read(program, node):
    return program.params[node.args[0].name].name.removesuffix(HISTORY), ROWS[node.args[1]]


def test_each_block_sends_by_its_own_history():
    program = stage_of(TwoBlocks(), ("last",), (torch.zeros(4, 6, dtype=torch.long),))
    encodes = calls(program, "moec.encode_rows")
    assert [history_read(program, n.args[1]) for n in encodes] == [("one.gate_up", "rows"), ("other.gate_up", "rows")]
    for n in encodes:
        learnt = [a for a in calls(program, "moec.amax") if a.args[0] is n.args[0]]
        assert learnt and all(a.args[1] is None for a in learnt)


@pytest.mark.parametrize("exclude", [(), ("*w3*",), ("*w1*",)], ids=str)
def test_products_that_read_the_same_rows(exclude):
    """The first one's history scales what all of them read, and each learns; one that is left out of FP8 reads the
    values that have arrived."""
    program = stage_of(grid.build("plain").float(), ("last", *exclude), kwargs=grid.batch(S=8))
    (encode,), (operand,) = (calls(program, f"moec.{name}") for name in ("encode_rows", "decode_operand"))
    w1, w2, w3 = (f"layers.0.moe.experts.*.w{i}.weight" for i in (1, 2, 3))
    assert history_read(program, encode.args[1]) == (w3 if "*w1*" in exclude else w1, "rows")
    learns = {program.params[n.args[0].name].name.removesuffix(HISTORY): n.args[1].args[0]
              for n in calls(program, "moec.note_amax")}  # fmt: skip
    first = {w1, w3} - {w for w in (w1, w3) if f"*{w.split('.')[-2]}*" in exclude}
    assert {w for w, x in learns.items() if x is encode.args[0]} == first and w2 in learns
    decodes = calls(program, "moec.decode_rows")
    assert len(decodes) == bool(exclude) and all(n.args[2] is encode.args[1] is operand.args[2] for n in decodes)


def test_tokens_without_a_history_are_refused():
    with pytest.raises(MoecError, match=r"layers\.0\.moe: a payload of delayed\+1 is scaled by the history") as e:
        compiled(TWO, exclude=("*moe*",))
    assert "Precision(dispatch='bf16')" in e.value.way_out


# -- mistakes


def of_the_weight(program):
    past = node_of(program, "encode_rows").args[1]
    past.args = (past.args[0], ROWS.index("weight"), *past.args[2:])


def of_another_product(program):
    past = node_of(program, "encode_rows").args[1]
    other = next(n.args[0] for n in calls(program, "moec.past_amax") if n.args[0] is not past.args[0])
    past.args = (other, *past.args[1:])


def read_by_the_weights(program):
    operand = node_of(program, "decode_operand")
    other = next(n for n in calls(program, "moec.past_amax") if n.args[1] and n.meta["val"].shape == (1, 1))
    operand.args = (*operand.args[:2], other, *operand.args[3:])


def turned_by_the_weights(program):
    operand = node_of(program, "decode_operand")
    other = next(n for n in calls(program, "moec.past_amax") if n.args[1] and n.meta["val"].shape == (1, 1))
    operand.args = (*operand.args[:3], other, *operand.args[4:])


def scaled_twice(program):
    scale = next(u for u in node_of(program, "decode_operand").users if u.args[1] == 2)
    instead(scale, lambda call: call(torch.ops.aten.mul.Tensor, scale, scale))


def nothing_learnt(program):
    learnt = next(n for n in calls(program, "moec.amax") if n.args[0] is node_of(program, "encode_rows").args[0])
    instead(learnt, lambda call: call(torch.ops.aten.zeros_like.default, learnt))


def learnt_of_some(program):
    learnt = next(n for n in calls(program, "moec.amax") if n.args[0] is node_of(program, "encode_rows").args[0])
    with program.graph.inserting_before(learnt):
        some = program.graph.call_function(torch.ops.aten.slice.Tensor, (learnt.args[0], 1, 0, 1))
    learnt.args = (some, *learnt.args[1:])


def learnt_of_what_arrives(program):
    """Of clamped numbers: a history would never see more than its own scale can say."""
    operand = node_of(program, "decode_operand")
    learnt = next(n for n in calls(program, "moec.amax") if n.args[0] is node_of(program, "encode_rows").args[0])
    note = next(iter(learnt.users))
    next(iter(note.users)).prepend(note)
    q, scale = (next(u for u in operand.users if u.args[1] == i) for i in (1, 2))
    with program.graph.inserting_before(note):
        how = (operand.args[5], "rows", False, torch.float32)
        value = program.graph.call_function(torch.ops.moec.dequantise.default, (q, scale, *how))
        clamped = program.graph.call_function(learnt.target, (value, *learnt.args[1:]))
    note.args = (note.args[0], clamped, note.args[2])


MISTAKES = (of_the_weight, of_another_product, read_by_the_weights, turned_by_the_weights, scaled_twice,
            nothing_learnt, learnt_of_some, learnt_of_what_arrives)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistakes_change_the_numbers(mistake):
    truth = oracle(build(SHAPE), BATCH)
    program, alone = compiled(TWO, fuse=False).fork(), compiled(fuse=False)
    want = truth._run(alone)
    assert differ(program, truth._run(program), alone, want) < 1e-12
    mistake(program)
    program.graph.lint()
    program.module.recompile()
    assert differ(program, truth._run(program), alone, want) > 1e-3


def test_mistakes_in_the_graph_are_refused():
    """A scale of this rank's tokens alone, and none."""
    program = compiled(TWO, stage="commute_quantise")

    def own_maximum(p):
        encode = node_of(p, "encode_rows")
        own = next(n for n in calls(p, "moec.amax") if n.args[0] is encode.args[0])
        encode.prepend(own)
        encode.args = (encode.args[0], own, *encode.args[2:])

    def none(p):
        encode = node_of(p, "encode_rows")
        encode.args = (encode.args[0], None, *encode.args[2:])

    for mistake in (own_maximum, none):
        broken = program.fork()
        mistake(broken)
        with pytest.raises(MoecError):
            verify(broken)
    broken = program.fork()
    own_maximum(broken)
    with pytest.raises(WitnessError):
        witness(broken)
