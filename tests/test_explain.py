"""explain against what a simulated world of four ranks really communicates: kinds, groups, phases, bytes."""

import json
from collections import Counter

import grid
import pytest
import torch

import moec
from moec import compiler, simulate

PLANS = [(2, 2, 4, 1), (1, 4, 4, 1), (4, 1, 4, 1), (2, 2, 2, 2), (1, 4, 1, 4)]
SHARED = [(2, 2, 4, 1, 2), (4, 1, 1, 1, 2), (4, 1, 2, 1, 4)]
"""The same with FSDP."""


@pytest.fixture(scope="module", params=["plain", "mixtral"])
def captured(request):
    net = grid.build(request.param)
    return net, compiler.capture(net, (), grid.batch(), training=True)


def run(program, net, data, B, S):
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    params = {
        ph: torch.stack([tensors[m].detach() for m in s.members]) if s.members else tensors[s.name].detach()
        for ph, s in program.params.items()
    }
    cotangents = {"loss": torch.ones((), dtype=torch.float64), "logits": torch.ones(B, S, grid.VOCAB).double()}
    return simulate.run(program, params, {s.placeholder: data[s.path] for s in program.inputs.values()}, cotangents)


PADDED = [(p, 2, 5) for p in PLANS if p[0] < 4]  # tp does not divide the tokens


@pytest.mark.parametrize(("degrees", "B", "S"), [(p, 4, 9) for p in PLANS + SHARED] + PADDED, ids=str)
def test_counts_and_bytes_are_those_of_a_run(captured, monkeypatch, degrees, B, S):
    net, program = captured
    dp, tp, ep, etp, *fsdp = degrees
    monkeypatch.setattr(compiler, "capture", lambda *_, **__: program.fork())
    plan = moec.Plan(dp=dp, tp=tp, ep=ep, etp=etp, fsdp=fsdp[0] if fsdp else False)
    compiled = moec.compile_program(net, plan, 4, (), grid.batch(), training=True)
    result = run(compiled, net, grid.batch(B=B, S=S), B, S)
    explained = moec.explain(compiled, {"input_ids": (B // dp, S), "labels": (B // dp, S)})
    assert explained.sizes == {"input_ids": (B // dp, S), "labels": (B // dp, S)}

    def key(c):
        return c.kind, c.group, c.phase, c.node

    moving = [e for e in result.log if any(e.bytes)]
    # One layer and a head are kept for the backward.  Experts that other ranks share make two gathers of the layer, of
    # which the first is made again; the simulated world keeps what it gathered (real ranks: test_fsdp_gloo.py).
    again = [c for c in explained.collectives if (c.phase, c.kind, c.traffic) == ("backward", "s_to_r", "parameter")]
    assert bool(again) == bool(fsdp and dp * tp > ep > 1)
    inside = [c for c in explained.collectives if c.phase != "epilogue" and c not in again]
    assert moving
    assert Counter(map(key, inside)) == Counter(map(key, moving))
    bytes_of = {key(e): e.bytes for e in moving}
    rows = B * S * grid.SIZES.top_k * grid.SIZES.hidden * 8  # float64
    for c in inside:
        assert c.ranks == compiled.mesh.size(c.group)
        if not c.estimated:
            assert bytes_of[key(c)] == (c.bytes,) * 4, c
            continue
        # The routing decides who gets how many rows, never how many there are: at least as many bytes as rows, and at
        # most twice as many (a rank's figure is the larger of what it sends and what it gets).
        assert c.primitive == "exchange"
        total = rows * etp  # ranks of etp get the same rows
        assert total <= c.bytes * 4 <= total * 1.35  # padding, and rounding up on each rank
        assert total <= sum(bytes_of[key(c)]) <= 2 * total
    # The epilogue: every trainable parameter that is owed a sum, once, in buckets by group.
    owed = Counter()
    for name, group in compiled.grad_reductions.items():
        local = next(p for p in explained.parameters if p.name == compiled.params[name].name)
        owed[group] += local.bytes
    assert owed == Counter({c.group: c.bytes for c in explained.collectives if c.phase == "epilogue"})
    assert explained.totals()["all"][0] == len(explained.collectives)


def test_text_and_json_say_the_same(captured, monkeypatch):
    net, program = captured
    monkeypatch.setattr(compiler, "capture", lambda *_, **__: program.fork())
    compiled = moec.compile_program(net, moec.Plan(tp=2, ep=4), 4, (), grid.batch(), training=True)
    explained = moec.explain(compiled)
    data = json.loads(explained.to_json())
    text = str(explained)
    assert len(data["collectives"]) == len(explained.collectives)
    for c in data["collectives"]:
        assert c["kind"] in text
        assert c["group"] in text
    for p in data["parameters"]:
        assert p["name"] in text
    experts = [p for p in explained.parameters if "experts" in p.name]
    assert experts
    assert all(p.local_shape[0] * 4 == p.shape[0] == grid.EXPERTS for p in experts)
    assert any("tp" in p.types and p.reason.startswith("auto: column") for p in explained.parameters)


def test_a_program_that_is_not_sharded_has_nothing_to_explain(captured):
    with pytest.raises(moec.MoecError, match="only a sharded program communicates"):
        moec.explain(captured[1])
