"""Bad plans, models and calls: all four ranks raise, in time, and the message says what, where and what to do.

(Calls that differ between ranks are also tested on a small program made by hand: tests/test_module.py.)
"""

import capture_models
import grid
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moec
from moec.bounds import with_bounds
from moec.capture import capture

pytestmark = pytest.mark.timeout(300)  # four processes compile on what may be two busy cores


def small(**sizes):
    z = {"vocab": grid.VOCAB, "hidden": 24, "ffn": 20, "layers": 1, "heads": 4, "kv_heads": 4, "experts": 8, "top_k": 3}
    return grid.models.Sizes(**{**z, **sizes})


class Around(nn.Module):
    """A plain model with something done to its logits."""

    def __init__(self, then) -> None:
        super().__init__()
        self.net, self.then = grid.build("plain"), then

    def forward(self, input_ids, labels):
        return self.then(self.net(input_ids)["logits"]).sum()


def distances(x):
    return torch.cdist(x, x)


def renormed(x):
    return torch.renorm(x, 2, 0, 1.0)


def dropped(x):
    return F.dropout(x, 0.1, training=True)


def jittery():
    from transformers import MixtralConfig, MixtralForCausalLM

    z = small()
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=z.vocab, hidden_size=z.hidden, intermediate_size=z.ffn, num_hidden_layers=1,
                      num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, router_jitter_noise=0.01)
    )  # fmt: skip


class BranchOnCounts(capture_models.WhereIndexAdd):
    """With an idle expert it computes something else."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        w, ids = self.route(flat)
        out, scale = torch.zeros_like(flat), 1.0
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                scale = 2.0
                continue
            out.index_add_(0, token, self.experts[e](flat[token]) * w[token, slot, None])
        return (out * scale).view_as(x)


MODELS = {
    "plain": lambda: grid.build("plain"),
    "3 heads": lambda: grid.build("plain", small(heads=3)),
    "6 experts": lambda: grid.build("plain", small(experts=6)),
    "width 18": lambda: grid.build("plain", small(ffn=18)),
    "cdist": lambda: Around(distances),
    "renorm": lambda: Around(renormed),
    "dropout": lambda: Around(dropped),
    "jitter": jittery,
    "branch": lambda: capture_models.Model(BranchOnCounts(experts=8)),
    "scaled": lambda: capture_models.Model(capture_models.ScaledByExpert(experts=8)),
}


def compiled(rank, world, name, degrees, only=None):
    """Parallelize; on ranks other than ``only`` with a plan that nothing is wrong with."""
    model, data = MODELS[name](), grid.batch(B=4, S=5)
    if isinstance(model, capture_models.Model):
        data = {"ids": data["input_ids"] % 20, "labels": data["labels"].clamp(max=19)}
    plan = moec.Plan(**degrees) if only in (None, rank) else moec.Plan()
    moec.parallelize(model, plan, example_kwargs=data)


@pytest.mark.parametrize(
    ("model", "degrees", "texts"),
    [
        ("plain", {"dp": 3}, ["dp*tp = 3*1 = 3 is not the world of 4 ranks", "nearest degrees that work: dp=4"]),
        ("plain", {"tp": 3}, ["tp=3 does not divide the 4 ranks"]),
        ("plain", {"ep": 8}, ["ep*etp = 8*1 = 8 does not divide the 4 ranks"]),
        ("3 heads", {"tp": 2}, ["layers.0.attention", "tp=2 does not divide the 3 heads", "nearest degrees that work"]),
        ("6 experts", {"ep": 4}, ["layers.0.moe", "ep=4 does not divide the 6 experts"]),
        pytest.param(
            "width 18", {"tp": 4}, ["layers.0.moe", "etp=4 does not divide the 18 heads or width"],
            marks=pytest.mark.nightly,
        ),
        ("cdist", {"tp": 2}, ["no sharding rule for aten", "cdist", "declare its dims, say moec.sharding_rule("]),
        pytest.param(
            "renorm", {"dp": 4}, ["no sharding rule for aten", "renorm", "declare its dims, say moec.sharding_rule("],
            marks=pytest.mark.nightly,
        ),
        (
            "dropout",
            {"dp": 4},
            ["draws random numbers in its forward", "p = 0.1", "set dropout and router jitter to 0"],
        ),
        ("jitter", {"ep": 4}, ["mlp", "draws random numbers in its forward", "0.99", "router jitter to 0"]),
        ("branch", {"ep": 4}, ["layers.0: ", "differs from the module by ", " (relative) in ", "way out"]),
        ("scaled", {"ep": 4}, ["layers.0: MoE block not raised", "relative error", "a plan with ep=1 and etp=1 runs"]),
    ],
)
def test_plans_and_models_that_are_refused(gloo4, model, degrees, texts):
    errors = gloo4.run_raising(compiled, model, degrees, timeout=280)
    assert len({str(e) for e in errors}) == 1
    for text in texts:
        assert text in str(errors[0])


def test_a_plan_that_only_one_rank_gets(gloo4):
    for degrees, text in (
        ({"dp": 3}, "rank 2: plan: dp*tp = 3*1 = 3 is not the world"),
        ({"ep": 4}, "rank 2: plan {'ep': 4}, program"),
    ):
        errors = gloo4.run_raising(compiled, "plain", degrees, 2, timeout=280)
        assert len({str(e) for e in errors}) == 1
        assert text in str(errors[0])


def test_missing_process_group():
    with pytest.raises(moec.MoecError, match="asks for more ranks than one, and there is no process group"):
        moec.parallelize(grid.build("plain"), moec.Plan(tp=2), example_kwargs=grid.batch())


# ------------------------------------------------------------------------------------------------ calls


def called(rank, world, what):
    data = grid.batch(B=4, S=6)
    model = grid.parallelize("plain", grid.build("plain"), moec.Plan(dp=2, tp=2, ep=4), data)
    if what == "batch":
        moec.shard_batch(grid.batch(B=5), model)
    data = moec.shard_batch(data, model)
    ids, labels = data["input_ids"].clone(), data["labels"].clone()
    odd = rank == 3
    if what == "token id" and odd:
        ids[1, 2] = grid.VOCAB
    elif what == "label" and odd:
        labels[0, 1:3] = -1
    elif what == "shapes in tp" and odd:
        ids, labels = ids[:, :5], labels[:, :5]
    elif what == "values in tp" and odd:
        ids[0, 0] = (ids[0, 0] + 1) % grid.VOCAB
    elif what == "dtype" and odd:
        ids = ids.int()
    elif what == "ndim" and odd:
        ids = ids[0]
    elif what == "overlap" and odd:
        both = torch.cat([ids, labels.clamp(min=0)])
        ids, labels = both[:2], both[1:3]
    elif what == "compile":  # a kind of call that is new, and that one rank alone cannot compile
        fn = model._compile_fn
        model._compile_fn = lambda *a: fn(*a) if not odd else 1 / 0
        model.eval()
    model(ids, labels)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("batch", ["a tensor of shape (5, 9) cannot be cut into 2 equal parts", "way out: choose a global batch size"]),
        ("token id", ["rank 3: input 'input_ids' has the value 40, which must lie in [0, 40)", "embed has 40 rows"]),
        ("label", ["rank 3: input 'labels' has the value -1, which must lie in [0, 40) or be -100"]),
        ("shapes in tp", ["shapes differ inside the tp group [2, 3]", "labels=[2, 5]", "way out: every rank"]),
        ("values in tp", ["token ids or other integer inputs differ inside the tp group [2, 3]"]),
        ("dtype", ["the ranks make different calls", "rank 3: train(input_ids: int32[:, :]"]),
        ("ndim", ["the ranks make different calls", "rank 3: train(input_ids: int64[:]"]),
        ("overlap", ["rank 3: inputs 'input_ids' and 'labels' overlap in memory: pass clones"]),
        ("compile", ["rank 3: ZeroDivisionError: division by zero"]),
    ],
)
def test_calls_that_are_refused(gloo4, what, texts):
    errors = gloo4.run_raising(called, what, timeout=280)
    assert len({str(e) for e in errors}) == 1
    for text in texts:
        assert text in str(errors[0])


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return (x * 2).sum() + self.scale.sum()


def test_an_input_that_shares_memory_with_a_parameter():
    model = moec.parallelize(Weighted(), moec.Plan(), example_inputs=(torch.ones(4, 3),))
    with pytest.raises(moec.MoecError, match="input 'x' shares memory with parameter 'scale'"):
        model(model.scale.detach()[:2])


# ------------------------------------------------------------------------------------------------ bounds of integers


class Lookups(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Embedding(5, 4), nn.Embedding(9, 4)

    def forward(self, a, b, c, target):
        x = self.small(a[:, 1:]).sum() + self.large(a.reshape(-1)).sum() + self.large(b + 1).sum()
        x = x + self.small(c.reshape(-1)[2:]).sum()
        shifted = F.pad(target, (0, 1), value=7)[..., 1:].reshape(-1)
        logits = self.large(target.clamp(0, 8)).flatten(0, 1)
        return x + F.cross_entropy(logits, shifted, ignore_index=7)


def test_bounds_follow_moves_and_replay_slices():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    example = dict.fromkeys(("a", "b", "c", "target"), ids)
    program = with_bounds(capture(Lookups(), (), {k: v.clone() for k, v in example.items()}, training=True))
    bounds = {s.path: s.bounds for s in program.inputs.values()}
    assert not bounds["b"]  # what is looked up is computed
    assert not bounds["c"]  # a slice of something reshaped
    assert {(b.low, b.high, b.also) for b in bounds["a"]} == {(0, 5, None), (0, 9, None)}
    (target,) = bounds["target"]
    assert (target.low, target.high, target.also) == (0, 4, 7)

    def wrong(path, *rows):
        return [b.problem(torch.tensor(rows)) for b in bounds[path] if b.problem(torch.tensor(rows))]

    assert not wrong("a", [8, 4, 0])  # the small table never sees the first column
    assert len(wrong("a", [0, 5, 0])) == 1
    assert len(wrong("a", [0, 9, 0])) == 2
    assert not wrong("target", [99, 3, 7], [-5, 0, 1])  # the shift drops the first column
    assert "has the value 4, which must lie in [0, 4) or be 7" in wrong("target", [0, 4, 7])[0]
