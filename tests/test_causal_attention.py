"""Masks that are the causal one are told as a flag, all others stay; what nodes mean is held against their values."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import moec
from moec.hf import build
from moec.passes.causal_attention import FALSE, Linear, _Meaning
from moec.passes.causal_attention import TRUE as TRUTH
from moec.program import op_name

aten = torch.ops.aten
B, S = 2, 6


class Attention(nn.Module):
    """One head; ``mask(x)`` gives what attention is masked with."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.proj = mask, nn.Linear(8, 8, bias=False)

    def forward(self, x):
        q = self.proj(x).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x)).squeeze(1)


def at(x):
    return torch.arange(x.shape[1])


def packed(x, positions):
    """As Hugging Face looks for packed sequences: a new one begins where a position is not the one before plus 1."""
    positions = positions.expand(x.shape[0], -1)
    number = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1).ne(1).cumsum(-1)
    return number[:, None, :, None] == number[:, None, None, :]


CAUSAL = {
    "compared": lambda x: at(x)[None, :] <= at(x)[:, None],
    "turned": lambda x: at(x)[:, None] >= at(x)[None, :],
    "strictly": lambda x: at(x)[None, :] < at(x)[:, None] + 1,
    "lower triangle": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(),
    "shifted alike": lambda x: (at(x)[None, :] + 3) <= (at(x)[:, None] + 3),
    "for each sequence": lambda x: (at(x)[None, :] <= at(x)[:, None])[None, None].expand(x.shape[0], 1, -1, -1),
    "nothing packed": lambda x: (at(x)[None, :] <= at(x)[:, None]) & packed(x, at(x)[None]),
}
TRUE = {
    "ones": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool),
    "nothing packed": lambda x: packed(x, at(x)[None]),
}
OTHER = {
    "one too few": lambda x: (at(x)[None, :] < at(x)[:, None]) | (at(x)[None, :] == 0),
    "one too many": lambda x: at(x)[None, :] <= at(x)[:, None] + 1,
    "anticausal": lambda x: at(x)[None, :] >= at(x)[:, None],
    "window": lambda x: (at(x)[None, :] <= at(x)[:, None]) & (at(x)[None, :] > at(x)[:, None] - 4096),
    "every other": lambda x: 2 * at(x)[None, :] <= at(x)[:, None] * 2 + 1,
    "values": lambda x: (at(x)[None, :] <= at(x)[:, None]) & (x[:, None, :, :1] < 9),
    "packed": lambda x: (at(x)[None, :] <= at(x)[:, None]) & packed(x, (at(x) // 3)[None]),
    "of the first": lambda x: (at(x)[None, :] <= at(x)[:1, None]).expand(x.shape[1], -1),
}


def attention(mask) -> fx.Node:
    model = Attention(mask)
    program = moec.compile_program(model, moec.Plan(), 1, (torch.randn(B, S, 8),), {}, training=True)
    assert moec.check(model, moec.Plan(), world_size=1, example_inputs=(torch.randn(B, S, 8),)).ok
    (node,) = [n for n in program.graph.nodes if op_name(n) == "aten.scaled_dot_product_attention"]
    return node


@pytest.mark.parametrize("spelling", CAUSAL)
def test_causal_masks_become_the_flag(spelling):
    node = attention(CAUSAL[spelling])
    assert node.kwargs.get("is_causal") is True and len(node.args) == 3 and "attn_mask" not in node.kwargs
    assert not any(op_name(n) == "aten.arange" for n in node.graph.nodes)


@pytest.mark.parametrize("spelling", TRUE)
def test_masks_that_hide_nothing_go(spelling):
    node = attention(TRUE[spelling])
    assert not node.kwargs.get("is_causal") and len(node.args) == 3 and "attn_mask" not in node.kwargs


@pytest.mark.parametrize("spelling", OTHER)
def test_other_masks_stay(spelling):
    node = attention(OTHER[spelling])
    assert isinstance(node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask"), fx.Node)
    assert not node.kwargs.get("is_causal")


KINDS = ("unsqueeze", "slice", "select", "expand", "add", "diff", "cumsum", "index", "compare", "both", "tril")


class _Drawn:
    """A graph whose nodes have values, and what was made so far."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def __call__(self, target, *args, **kwargs) -> fx.Node:
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        value = target(*values[0], **values[1])
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node


@st.composite
def graphs(draw) -> fx.Graph:
    new = _Drawn()
    made = [new(aten.arange.default, 4), new(aten.arange.start, 1, 5), new(aten.ones.default, [4, 4], dtype=torch.bool)]
    for _ in range(draw(st.integers(1, 8))):
        x, y = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        rank = x.meta["val"].ndim
        whole, dim = x.meta["val"].dtype == torch.int64, draw(st.integers(-rank, rank - 1)) if rank else 0
        kind = draw(st.sampled_from(KINDS))
        try:
            if kind == "unsqueeze" and rank < 4:
                made.append(new(aten.unsqueeze.default, x, draw(st.integers(-rank - 1, rank))))
            elif kind == "slice" and rank:
                start = draw(st.integers(0, 2))
                made.append(new(aten.slice.Tensor, x, dim, start, draw(st.sampled_from([start + 1, 4]))))
            elif kind == "select" and rank:
                made.append(new(aten.select.int, x, dim, draw(st.integers(0, 1))))
            elif kind == "expand" and rank:
                made.append(new(aten.expand.default, x, [draw(st.sampled_from([4, -1])) for _ in range(rank)]))
            elif kind == "add" and whole:
                other = draw(st.sampled_from([y, 1, -2]))
                made.append(new(draw(st.sampled_from([aten.add.Tensor, aten.sub.Tensor])), x, other))
            elif kind == "diff" and whole and rank:
                first = new(aten.slice.Tensor, x, dim, 0, 1)
                before = new(aten.sub.Tensor, first, draw(st.integers(0, 1)))
                made.append(new(aten.diff.default, x, 1, dim, *draw(st.sampled_from([(), (before,)]))))
            elif kind == "cumsum" and rank:
                made.append(new(aten.cumsum.default, x, dim))
            elif kind == "index" and rank and y.meta["val"].dtype == torch.int64:
                made.append(new(aten.index.Tensor, x, [None] * (dim % rank) + [y]))
            elif kind == "compare" and whole:
                op = draw(st.sampled_from(["le", "lt", "ge", "gt", "eq", "ne"]))
                number = draw(st.booleans())
                target = getattr(getattr(aten, op), "Scalar" if number else "Tensor")
                made.append(new(target, x, draw(st.integers(-1, 3)) if number else y))
            elif kind == "both":
                made.append(new(aten.logical_and.default, x, y))
            elif kind == "tril" and rank >= 2:
                made.append(new(aten.tril.default, x, draw(st.integers(-1, 1))))
        except (RuntimeError, IndexError):  # shapes that do not fit
            continue
    return new.graph


def evaluated(found, shape) -> torch.Tensor:
    """A meaning at every index of a tensor of ``shape``."""
    rank = len(shape)
    index = torch.meshgrid(*[torch.arange(n) for n in shape], indexing="ij") if rank else ()

    def number(x: Linear) -> torch.Tensor:
        return torch.full(shape, x.constant) + sum(s * index[d + rank] for d, s in x.slopes)

    if isinstance(found, Linear):
        return number(found)
    return torch.stack([torch.ones(shape, dtype=torch.bool), *[number(x) <= 0 for x in found]]).all(0)


@given(graphs())
def test_what_nodes_mean_is_what_they_compute(graph):
    meaning = _Meaning()
    for node in graph.nodes:
        found, value = meaning.of(node), node.meta["val"]
        if found is not None:
            assert torch.equal(evaluated(found, value.shape), value), (node.format_node(), found)


def test_differences_are_known_or_not():
    new, meaning = _Drawn(), _Meaning()
    a = new(aten.arange.default, 4)
    first = new(aten.slice.Tensor, a, 0, 0, 1)
    for before, want in ((1, Linear(1)), (0, None), (2, None)):  # what x would be at -1 is one less than at 0
        assert meaning.of(new(aten.diff.default, a, 1, 0, new(aten.sub.Tensor, first, before))) == want
    more = new(aten.add.Tensor, a, 1)
    assert meaning.of(new(aten.ne.Tensor, more, a)) == TRUTH and meaning.of(new(aten.ne.Tensor, a, a)) == FALSE
    assert meaning.of(new(aten.ne.Scalar, a, 1)) is None


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_hugging_face(family):
    """The mask that Hugging Face makes of nothing is the flag; one of padding, or of packed positions, stays."""
    tiny = {"hidden_size": 32, "intermediate_size": 24, "vocab_size": 40, "moe_intermediate_size": 12}
    model, ids = build(family, 1, **tiny), torch.randint(0, 32, (2, 8))
    for kwargs, want in (
        ({}, True), ({"attention_mask": torch.ones_like(ids)}, False),
        ({"position_ids": torch.arange(8).repeat(2, 1)}, False),
    ):  # fmt: skip
        program = moec.compile_program(model, moec.Plan(), 1, (), {"input_ids": ids, **kwargs}, training=True)
        nodes = [n for n in program.graph.nodes if op_name(n) == "aten.scaled_dot_product_attention"]
        assert nodes and all(bool(n.kwargs.get("is_causal")) is want for n in nodes), (kwargs, nodes)
