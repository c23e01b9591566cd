"""Capture of users' own expert loops, in every spelling that is promised."""

import pytest
import torch
from capture_models import (
    DenseMask,
    Model,
    OneHotHit,
    ScaledByExpert,
    ScaledSkipEmpty,
    SharedExpert,
    SkipEmpty,
    Stacked,
    SwiGLU,
    ThreeLists,
    TopOne,
    WhereIndexAdd,
    gradients,
    run,
    worst,
)

from moec.capture import capture, probe
from moec.runtime.errors import MoecError

SPELLINGS = [WhereIndexAdd, SkipEmpty, OneHotHit, DenseMask, TopOne, Stacked, ThreeLists, SharedExpert]


def example(b=2, s=5, vocab=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (b, s), generator=g)
    labels = torch.randint(0, vocab, (b, s), generator=g)
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


@pytest.mark.parametrize("block", SPELLINGS)
def test_loops_are_raised_and_exact_at_other_sizes(block):
    torch.manual_seed(1)
    model = Model(block()).double()
    program = capture(model, (), example(), training=True)
    assert not program.why_not
    assert [b.path for b in program.blocks] == ["layers.0"]
    ops = program.op_counts()
    assert ops["moec.permute"] == ops["moec.unpermute"] == 1 and ops["moec.grouped_mm"] >= 2
    assert probe(program.blocks[0]).max_rel_error < 1e-12
    for b, s in ((1, 1), (1, 17), (3, 8)):
        inputs = example(b, s + 2, seed=b)
        want = model(**inputs)
        loss, logits = run(program, model, inputs)
        torch.testing.assert_close(loss, want["loss"], rtol=1e-12, atol=0)
        torch.testing.assert_close(logits, want["logits"], rtol=1e-10, atol=1e-12)
        assert worst(gradients(model, want["loss"]), gradients(model, loss)) < 1e-10


def test_experts_become_one_parameter_with_a_star():
    program = capture(Model(SkipEmpty()), (), example(), training=True)
    specs = {s.name: s for s in program.params.values()}
    first = specs["layers.0.experts.*.0.weight"]
    assert first.shape == (6, 10, 12) and first.members == tuple(f"layers.0.experts.{e}.0.weight" for e in range(6))
    roles = ("0.weight", "0.bias", "2.weight", "2.bias")
    assert program.blocks[0].stacked == tuple(f"layers.0.experts.*.{p}" for p in roles)
    assert not any(".experts.0." in n for n in specs)
    assert program.op_counts()["moec.grouped_add"] == 2
    assert "aten.stack" not in program.op_counts()


def test_tied_weights_are_one_placeholder_under_the_first_name():
    program = capture(Model(WhereIndexAdd()), (), example(), training=True)
    (tied,) = [s for s in program.params.values() if s.aliases]
    assert (tied.name, tied.aliases) == ("embed.weight", ("head.weight",))
    assert "head.weight" not in {s.name for s in program.params.values()}


def test_layers_of_one_kind_are_each_a_block():
    program = capture(Model(WhereIndexAdd(), SkipEmpty(), WhereIndexAdd()), (), example(), training=True)
    assert [b.path for b in program.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert program.blocks[0].guide.report is program.blocks[2].guide.report  # proved once


def test_sixty_four_experts_fit_the_budget():
    import time

    torch.set_num_threads(1)
    model = Model(SkipEmpty(experts=64, k=4), OneHotHit(experts=64, k=4))
    start = time.process_time()
    program = capture(model, (), example(), training=True)
    assert len(program.blocks) == 2
    assert time.process_time() - start < 15


def test_a_block_of_another_form_exports_as_it_stands_and_says_why():
    model = Model(ScaledByExpert()).double()
    program = capture(model, (), example(), training=True)
    assert not program.blocks
    (why,) = program.why_not
    assert why.startswith("layers.0: MoE block not raised") and "relative error" in why
    inputs = example(3, 7)
    torch.testing.assert_close(run(program, model, inputs)[0], model(**inputs)["loss"])


def test_a_block_of_another_form_that_does_not_export_is_refused():
    with pytest.raises(MoecError, match=r"(?s)layers\.0.*relative error.*way out") as e:
        capture(Model(ScaledSkipEmpty()), (), example(), training=True)
    assert e.value.where == "layers.0"


class BranchOnCounts(WhereIndexAdd):
    """Observed inputs reach every expert; with an idle expert it computes something else."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        w, ids = self.route(flat)
        out = torch.zeros_like(flat)
        scale = 1.0
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                scale = 2.0
                continue
            out.index_add_(0, token, self.experts[e](flat[token]) * w[token, slot, None])
        return (out * scale).view_as(x)


def test_the_probe_sees_what_observation_did_not():
    with pytest.raises(MoecError, match=r"differs from the module by"):
        capture(Model(BranchOnCounts()), (), example(), training=True)


def test_frozen_experts():
    model = Model(WhereIndexAdd())
    model.layers[0].experts.requires_grad_(False)
    specs = {s.name: s for s in capture(model, (), example(), training=True).params.values()}
    assert not specs["layers.0.experts.*.w1.weight"].requires_grad and specs["layers.0.gate.weight"].requires_grad
    model.layers[0].experts[3].requires_grad_(True)
    with pytest.raises(MoecError, match="are frozen"):
        capture(model, (), example(), training=True)


class DropsOut(WhereIndexAdd):
    def expert(self, hidden, width):
        return torch.nn.Sequential(SwiGLU(hidden, width), torch.nn.Dropout(0.25))


class Jitter(WhereIndexAdd):
    def forward(self, x):
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        return super().forward(x)


@pytest.mark.parametrize(("block", "figure"), [(DropsOut, "0.25"), (Jitter, "0.9")])
def test_randomness_is_refused_in_training_only(block, figure):
    model = Model(block())
    with pytest.raises(MoecError, match=rf"layers\.0.*{figure}"):
        capture(model, (), example(), training=True)
    assert capture(model, (), example(), training=False).blocks


class Counts(WhereIndexAdd):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        _, ids = self.route(x)
        self.seen.add_(torch.bincount(ids.flatten(), minlength=6))
        return super().forward(x)


def test_a_buffer_that_forward_writes_is_refused():
    model = Model(Counts())
    with pytest.raises(MoecError, match=r"is written to|writes to"):
        capture(model, (), example(), training=True)
    assert not model.layers[0].seen.any()


class KeepsLoss(WhereIndexAdd):
    """Leaves a statistic of the routing in an attribute, for the model to pick up."""

    def forward(self, x):
        _, ids = self.route(x)
        self.load = torch.nn.functional.one_hot(ids, 6).flatten(0, -2).to(x.dtype).mean(0).square().sum()
        return super().forward(x)


class PicksUp(Model):
    def forward(self, ids, labels=None):
        out = super().forward(ids, labels)
        return {**out, "loss": out["loss"] + self.layers[0].load}


class Appends(KeepsLoss):
    def forward(self, x):
        out = super().forward(x)
        self.box = [self.load]
        return out


class PicksFromList(Model):
    def forward(self, ids, labels=None):
        out = super().forward(ids, labels)
        return {**out, "loss": out["loss"] + self.layers[0].box[0]}


def test_observed_values_never_become_constants():
    with pytest.raises(MoecError, match="cannot follow"):
        capture(PicksFromList(Appends()), (), example(), training=True)


def test_statistics_left_in_an_attribute_are_computed_in_the_graph():
    model = PicksUp(KeepsLoss()).double()
    program = capture(model, (), example(), training=True)
    inputs = example(4, 9, seed=5)
    torch.testing.assert_close(run(program, model, inputs)[0], model(**inputs)["loss"], rtol=1e-12, atol=0)
