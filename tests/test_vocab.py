"""A vocabulary that tp shards: losses of every spelling, where it lies, what it costs, what comes back.

Legend: B batch, S sequence, N = B*S, V vocabulary, H hidden.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from sabotage import mistakes
from spmd import compile_stages, off
from torch import Tensor, nn

import moec
from moec import simulate
from moec.capture import capture
from moec.check import TOLERANCE, _Oracle, check
from moec.passes.shard import vocab as rewrites
from moec.placement import S
from moec.plan import Plan
from moec.program import Program, op_name
from moec.runtime.collectives import collective

V, H = 24, 12


class LM(nn.Module):
    """Embedding, one residual MLP, head; the rest is ``loss(logits, labels)``."""

    def __init__(self, loss, tied: bool = False, bias: bool = False, vocab: int = V) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(vocab, H, padding_idx=3), nn.Linear(H, 16), nn.Linear(16, H)
        self.head, self.loss = nn.Linear(H, vocab, bias=bias), loss
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("weight", torch.linspace(0.5, 2.0, vocab))
        gen = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=gen) * 0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))))
        return self.loss(self, self.head(x), labels)


def batch(B: int = 4, S: int = 5, vocab: int = V, dp: int = 2) -> tuple[Tensor, Tensor]:
    """Global; the first dp rank has no label at all."""
    gen = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, vocab, (B, S), generator=gen) for _ in range(2))
    labels[: B // dp] = -100
    labels[-1, :2] = -100
    return ids, labels


def rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


def mean_loss(model, logits, labels):
    return {"loss": F.cross_entropy(*rows(logits, labels)), "logits": logits}


def reductions(model, logits, labels):
    x, y = rows(logits, labels)
    return {
        "mean": F.cross_entropy(x, y),
        "sum": F.cross_entropy(x, y, reduction="sum"),
        "none": F.cross_entropy(x, y, reduction="none").reshape(labels.shape),
        "classes second": F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"),
    }


def smoothed_and_weighted(model, logits, labels):
    x, y = rows(logits, labels)
    w = model.weight
    return {
        "smooth": F.cross_entropy(x, y, label_smoothing=0.2),
        "weighted": F.cross_entropy(x, y, weight=w),
        "both": F.cross_entropy(x, y, weight=w, label_smoothing=0.3, reduction="sum"),
        "another class is ignored": F.cross_entropy(x, y.clamp(min=0), ignore_index=0, label_smoothing=0.1),
    }


def spelled_out(model, logits, labels):
    """Loss and scores as people write them: log_softmax, nll_loss, gather, an index by arange, softmax."""
    x, y = rows(30 * torch.tanh(logits.float() / 30), labels)
    known = y.clamp(min=0)
    logp = x.log_softmax(-1)
    p = logits.softmax(-1)
    return {
        "nll": F.nll_loss(F.log_softmax(x, dim=-1), y),
        "weighted nll": F.nll_loss(logp, y, weight=model.weight, reduction="sum"),
        "gather": (logp.gather(-1, known[:, None]).squeeze(-1) * (y >= 0)).sum(),
        "gather of two": logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None]).mean(),
        "index": -logp[torch.arange(known.shape[0]), known].mean(),
        "logits": logits,
        "entropy": -(p * p.log()).sum(-1).mean(),
    }


def shifted(model, logits, labels):
    return {"loss": F.cross_entropy(*rows(logits[:, :-1].float(), labels[:, 1:]))}


LOSSES = (reductions, smoothed_and_weighted, spelled_out)


@cache
def captured(loss, **kwargs) -> tuple[LM, Program]:
    model = LM(loss, **kwargs)
    return model, capture(model, batch(B=2, dp=1, vocab=kwargs.get("vocab", V)), {}, training=True)


def stages(loss, plan: Plan, **kwargs) -> dict[str, Program]:
    return dict(compile_stages(captured(loss, **kwargs)[1], plan))


def calls(program: Program) -> list:
    return [n for n in program.graph.nodes if n.op == "call_function"]


def gathered_logits(program: Program) -> list[str]:
    """Collectives that move as many numbers as the logits have, by name."""
    return [n.name for n in calls(program) if collective(n.target) and V in n.meta["val"].shape[-1:]]


@pytest.mark.parametrize("plan", [Plan(2, 2, 1, 2), Plan(1, 4, 1, 4)], ids=["dp2-tp2", "tp4"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_exact_and_never_gathers_the_logits(loss, plan) -> None:
    model, _ = captured(loss, tied=True, bias=True)
    truth = _Oracle(model, batch(), {}, None)
    for name, program in stages(loss, plan, tied=True, bias=True).items():
        assert off(truth.compare(name, program)) < TOLERANCE, name
    moving = [n for n in gathered_logits(program) if "r_to_s" not in n]  # the numbers 0 … V are cut, not moved
    assert not moving
    for o in program.outputs:
        assert ("tp_etp" in o.types and o.types["tp_etp"].kind == "S") == (o.path == "logits")
    assert any(op_name(n) == "moec.lookup" for n in calls(program))


@pytest.mark.parametrize("kwargs", [{"tied": False}, {"tied": True, "vocab": 19}], ids=str)
def test_untied_and_indivisible(kwargs) -> None:
    plan = Plan(2, 2, 1, 2)
    model, _ = captured(mean_loss, **kwargs)
    program = stages(mean_loss, plan, **kwargs)["lower"]
    assert off(_Oracle(model, batch(vocab=kwargs.get("vocab", V)), {}, None).compare("lower", program)) < TOLERANCE
    types = {s.name: [t for t in s.types.values() if t.kind == "S"] for s in program.params.values()}
    if "vocab" in kwargs:
        assert not types["embed.weight"]
        assert "tp=2 does not divide the vocabulary of 19" in program.layout_reasons["embed.weight"]
    else:
        assert types["embed.weight"] == types["head.weight"] == [S(0)]
        assert "vocabulary" in program.layout_reasons["head.weight"]


def test_sizes_that_only_examples_made_agree_are_held_against_every_call() -> None:
    """An index may be shorter than what it gathers from; then it is not the entry at a label."""

    def scores(model, logits, labels):
        return {"loss": logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None]).mean()}

    before, after = (stages(scores, Plan(2, 2, 1, 2))[name] for name in ("captured", "normalize"))
    ids, labels = (s.placeholder for s in before.inputs.values())
    same, shorter = {ids: (6, 7), labels: (6, 7)}, {ids: (6, 7), labels: (6, 5)}
    assert not before.size_problems(same) and not before.size_problems(shorter)
    assert not after.size_problems(same)
    assert "size 1 of '1' = 5" in after.size_problems(shorter)[0]


@pytest.mark.nightly  # test_vocab_gloo.py does it with processes
def test_a_sum_over_the_items_of_the_batch() -> None:
    """Hugging Face's num_items_in_batch: the sum over the global batch, by a number that the caller knows."""

    class Counted(LM):
        def forward(self, ids, labels, num_items):
            return {"loss": super().forward(ids, labels)["sum"] / num_items}

    report = check(
        Counted(reductions, tied=True), Plan(dp=2, tp=2), example_inputs=(*batch(), torch.tensor(7)), world_size=4
    )
    assert report.ok, report


# -- layout and outputs ----------------------------------------------------------------------------------------------


class Unlabelled(LM):
    def forward(self, ids):
        return super().forward(ids, ids)


def logits_only(model, logits, labels):
    return {"logits": logits}


def test_with_labels_and_without_parameters_lie_alike() -> None:
    plan = Plan(2, 2, 1, 2)
    trained = stages(mean_loss, plan)["shard"]
    evaluated = dict(compile_stages(capture(Unlabelled(logits_only), batch()[:1], {}, training=False), plan))["shard"]
    assert {s.name: s.types for s in trained.params.values()} == {s.name: s.types for s in evaluated.params.values()}
    dp, tp = trained.mesh.names
    # Beside a loss the logits stay where they are; alone they are this rank's batch slice, whole.
    assert next(o for o in trained.outputs if o.path == "logits").types == {dp: S(0), tp: S(2)}
    assert [o.types[tp].kind for o in evaluated.outputs] == ["I"]


@pytest.mark.parametrize("mode", ["full", "drop", {"logits": "sharded"}], ids=str)
def test_what_comes_back(mode) -> None:
    program = stages(mean_loss, Plan(2, 2, 1, 2, outputs=mode))["lower"]
    logits = next(o for o in program.outputs if o.path == "logits")
    if mode == "drop":
        assert logits.index is None and not gathered_logits(program)[1:]
    else:
        kinds = [t.kind for t in logits.types.values()]
        assert kinds == (["I", "I"] if mode == "full" else ["S", "S"])
    report = _Oracle(captured(mean_loss)[0], batch(), {}, None).compare("lower", program)
    # The oracle's gradients are those of loss and logits.
    assert max(report.outputs.values()) < TOLERANCE if mode == "drop" else off(report) < TOLERANCE


@pytest.mark.parametrize(
    ("layout", "embed", "head"),
    [
        ({"embed": "replicate"}, [], [S(0)]),
        ({"head": "replicate"}, [S(0)], []),
        ({"embed": "row", "head": "row"}, [S(1)], [S(1)]),
        ({"*": "replicate", "embed": "column"}, [S(0)], []),
    ],
    ids=str,
)
def test_a_layout_of_the_users_is_obeyed_and_exact(layout, embed, head) -> None:
    program = stages(mean_loss, Plan(2, 2, 1, 2, layout=layout))["lower"]
    types = {s.name: [t for t in s.types.values() if t.kind == "S"] for s in program.params.values()}
    assert (types["embed.weight"], types["head.weight"]) == (embed, head)
    assert off(_Oracle(captured(mean_loss)[0], batch(), {}, None).compare("lower", program)) < TOLERANCE


@pytest.mark.nightly
def test_a_position_table_is_no_vocabulary_and_a_residual_weight_no_head() -> None:
    class Square(LM):
        """As many hidden features as tokens: sizes alone do not tell a head."""

        def __init__(self) -> None:
            super().__init__(mean_loss, vocab=H)
            self.positions, self.mix = nn.Embedding(H, H), nn.Linear(H, H, bias=False)
            self.mixed = nn.Linear(H, H, bias=False)

        def forward(self, ids, labels):
            x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
            return mean_loss(self, self.head(x + self.mix(x).tanh().softmax(-1)), labels)

    program = capture(Square(), batch(vocab=H), {}, training=True)
    program = dict(compile_stages(program, Plan(2, 2, 1, 2)))["lower"]
    sharded = {s.name for s in program.params.values() if any(t.kind == "S" for t in s.types.values())}
    assert {"embed.weight", "head.weight"} <= sharded
    assert "positions.weight" not in sharded


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_gradients_that_a_slice_of_the_batch_cannot_give_are_refused(option) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(V, H, **{option: True})

        def forward(self, ids):
            return {"loss": self.embed(ids).sum()}

    for plan in (Plan(2, 1, 1, 1), Plan(1, 2, 1, 2)):
        with pytest.raises(moec.MoecError, match="scale_grad_by_freq or sparse"):
            compile_stages(capture(Odd(), batch()[:1], {}, training=True), plan)


# -- communication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_what_a_sharded_vocabulary_costs(tp) -> None:
    """Of embedding, head and loss: B·S·H numbers for the rows forward and for the head's input backward, B·S·(tp + 1)
    for the loss; the MLP between has its own two.  A run moves what explain says."""
    B, S_ = 4, 5
    program = stages(shifted, Plan(1, tp, 1, tp))["lower"]
    explained = moec.explain(program, {"0": (B, S_), "1": (B, S_)})
    fp32, n = 4, B * (S_ - 1)
    found = sorted((c.phase, c.primitive, c.bytes // fp32) for c in explained.collectives if c.phase != "epilogue")
    loss = [("forward", "all_gather", n * tp), ("forward", "all_reduce", n)]
    assert found == sorted(loss + 2 * [(p, "all_reduce", B * S_ * H) for p in ("forward", "backward")])

    full = captured(shifted)[0].state_dict()
    params = {ph: full[s.name] for ph, s in program.params.items()}
    ids, labels = batch()
    names = {s.path: s.placeholder for s in program.inputs.values()}
    result = simulate.run(program, params, {names["0"]: ids, names["1"]: labels}, {"loss": torch.ones(())})
    ran = sorted((e.phase, e.kind, e.bytes[0]) for e in result.log if any(e.bytes))
    assert ran == sorted((c.phase, c.kind, c.bytes) for c in explained.collectives if c.phase != "epilogue")


# -- sabotage --------------------------------------------------------------------------------------------------------


def test_every_mistake_in_the_collectives_is_caught() -> None:
    truth = _Oracle(captured(smoothed_and_weighted)[0], batch(), {}, None)
    found = []
    for m in mistakes(stages(smoothed_and_weighted, Plan(2, 2, 1, 2))["shard"]):
        try:
            found.append((off(truth.compare("sabotaged", m.program)), m.what))
        except (moec.MoecError, RuntimeError):
            found.append((float("inf"), m.what))
    assert len(found) > 15 and sum(e == float("inf") for e, _ in found) * 3 < len(found)
    assert not [f for f in found if f[0] < 1e-4], min(found)


@pytest.mark.parametrize("what", ["numbers off by one", "another block count"])
def test_wrong_arguments_are_caught(what) -> None:
    program = stages(mean_loss, Plan(2, 2, 1, 2))["shard"].fork()
    for node in calls(program):
        if what == "numbers off by one" and op_name(node) == "moec.lookup":
            with program.graph.inserting_before(node):
                moved = program.graph.call_function(torch.ops.aten.add.Scalar, (node.args[1], 1))
            node.args = (node.args[0], moved, *node.args[2:])
        elif what == "another block count" and op_name(node) == "moec.blocked_logsumexp":
            node.args = (node.args[0], 2)
    program.module.recompile()
    truth = _Oracle(captured(mean_loss)[0], batch(), {}, None)
    error = off(truth.compare("sabotaged", program))
    # The number of blocks is free: another one is the same sum.
    assert error < TOLERANCE if what == "another block count" else error > 1e-3


@pytest.mark.nightly
def test_probabilities_as_targets_gather_and_say_so() -> None:
    class Soft(LM):
        def forward(self, ids, labels):
            targets = F.one_hot(labels.clamp(min=0), V).float() * 0.9 + 0.1 / V
            logits = super().forward(ids, labels)["logits"]
            return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))}

    report = check(Soft(logits_only), Plan(dp=2, tp=2), example_inputs=batch(), world_size=4)
    assert report.ok, report
    program = dict(compile_stages(capture(Soft(logits_only), batch(), {}, training=True), Plan(2, 2, 1, 2)))["shard"]
    assert any("probabilities" in w for w in program.why_not)


def test_the_rewrites_name_every_op_that_they_know() -> None:
    assert all(f"``{w}``" in (rewrites.__doc__ or "") for w in ("embedding", "log_softmax", "gather", "cross_entropy"))
