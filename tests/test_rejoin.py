"""rejoin: a chunk that was joined only to be cut again passes as it is, and nothing else changes.

Values are compared with the graph as it was, for chunks that meet and for chunks that only look as if they did.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from moec.overlap import Overlap
from moec.passes.rejoin import JOIN, SPLIT, rejoin
from moec.plan import Plan
from moec.program import Program

PLAN = Plan(overlap=Overlap(chunks=2))
SHAPE = (4, 6, 5)
"""Batch, sequence and features of what is cut: a number of tokens, or of tokens in blocks."""
Cut = tuple[int, int, int]
"""Chunks, leading dims that are tokens, blocks."""


def two_layers(first: Cut, second: Cut, reader: bool = False) -> Program:
    """x, cut by ``first``, joined, cut by ``second``, joined.  ``reader``: of what is joined between."""
    graph = fx.Graph()
    x, outputs = graph.placeholder("x"), []
    for i, (count, lead, blocks) in enumerate((first, second)):
        cut = graph.call_function(SPLIT, (x, count, lead, blocks))
        parts = [graph.call_function(operator.getitem, (cut, c)) for c in range(count)]
        parts = [graph.call_function(torch.ops.aten.mul.Tensor, (p, c + 2 + i)) for c, p in enumerate(parts)]
        x = graph.call_function(JOIN, (parts, list(SHAPE[:lead]), blocks))
        if i == 0:
            x.meta["boundary"] = True
            if reader:
                outputs.append(graph.call_function(torch.ops.aten.neg.default, (x,)))
    graph.output((x, *outputs))
    return Program(fx.GraphModule(nn.Module(), graph), {}, {}, [], pytree.tree_structure(0))


def counts(program: Program) -> tuple[int, int]:
    return tuple(len(program.graph.find_nodes(op="call_function", target=t)) for t in (SPLIT, JOIN))


def rejoined(program: Program) -> Program:
    """The program after the pass, which must compute the same bits."""
    after = rejoin.run(program.fork(), PLAN)
    x = torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float64).reshape(SHAPE)
    for a, b in zip(program.module(x), after.module(x), strict=True):
        assert torch.equal(a, b)
    return after


@pytest.mark.parametrize("how", [(2, 1, 1), (3, 2, 1), (2, 2, 2)])
def test_the_same_chunks_pass_as_they_are(how):
    after = rejoined(two_layers(how, how))
    assert counts(after) == (1, 1)
    marked = [n for n in after.graph.nodes if n.meta.get("boundary")]
    assert [n.target for n in marked] == [torch.ops.aten.mul.Tensor]  # the layer's end is where its last chunk is


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((2, 2, 1), (3, 2, 1), id="another number"),
        pytest.param((2, 2, 2), (2, 2, 1), id="another number of blocks"),
        pytest.param((2, 2, 1), (2, 1, 1), id="other dims"),
    ],
)
def test_other_chunks_are_joined_and_cut(first, second):
    program = two_layers(first, second)
    after = rejoined(program)
    assert counts(after) == (2, 2)
    assert after.module.code == program.module.code


def test_a_join_with_another_reader_stays_for_it():
    after = rejoined(two_layers((2, 2, 1), (2, 2, 1), reader=True))
    assert counts(after) == (1, 2)
    (first, _) = after.graph.find_nodes(op="call_function", target=JOIN)
    assert first.meta["boundary"]
