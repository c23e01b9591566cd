"""Experts' rows, aligned for FP8 products (part of ``cast_fp8``).

Rows [N, ·] in order of experts become rows [A, ·], where each expert's begin at a multiple: a region of the graph is
written anew for aligned rows, and the rest sees what it saw.

1. A product's rows are aligned where they come from: of a ``moec::permute`` there is a ``moec::permute_aligned``; other
   rows pass ``moec::align_rows``.
2. What computes row by row from products (by its factor rule: dim 0 is dim 0 of every operand that has it) is copied
   for aligned rows, its other operands being aligned too; biases take the aligned counts.
3. Whoever else reads one of these values reads ``moec::unalign_rows`` of it; an unpermute of the rows that the permute
   made takes the aligned rows with their numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from moec.passes.rewrite import new
from moec.passes.shard.rule import is_getitem, operands, result_shapes, same_size, shape
from moec.passes.shard.rules import rule_for
from moec.passes.typed import result, sweep, typed
from moec.program import Program, op_name
from moec.runtime.errors import MoecError
from moec.runtime.torch_compat import resized

aten, moec_ops = torch.ops.aten, torch.ops.moec
Product = Callable[[fx.Node, fx.Node, fx.Node], fx.Node]
"""(product, its aligned rows, counts) -> the node that stands for it."""
UNPERMUTES = ("moec.unpermute", "moec.unpermute_add")
SIZED = ("aten.reshape", "aten.expand")
"""Ops that have sizes among their arguments."""


def align(program: Program, counts: fx.Node, products: list[fx.Node], alignment: int, product: Product) -> None:
    """Rewrite ``products``, all over rows of ``counts``."""
    _Region(program, counts, alignment, products[0].args[0]).rewrite(products, product)


class _Region:
    def __init__(self, program: Program, counts: fx.Node, alignment: int, rows: fx.Node) -> None:
        self.program, self.counts, self.alignment, self.rows = program, counts, alignment, rows
        self.sources: dict[fx.Node, fx.Node] = {}
        """Rows from elsewhere -> the same, aligned."""
        self.of: dict[fx.Node, fx.Node] = {}
        """Node of the region -> the one for aligned rows."""
        self.numbers: dict[fx.Node, fx.Node] = {}
        """The number of each pair's row -> that of its aligned row."""

    def rewrite(self, products: list[fx.Node], product: Product) -> None:
        for node in list(self.program.graph.nodes):
            if node in products:
                rows = self.aligned(node, node.args[0])  # first: the counts may change
                self.of[node] = product(node, rows, self.counts)
            elif self.by_rows(node):
                self.of[node] = self.copied(node)
        for node, made in self.of.items():  # 3
            if outside := [u for u in node.users if u not in self.of]:
                self.leave(node, made, outside)
        for node in reversed([n for n in self.program.graph.nodes if n in self.of]):
            if not node.users:
                self.program.graph.erase_node(node)
        permutes = dict.fromkeys(was.args[0] for was in self.numbers)
        for dead in [x for x in (*self.sources, *(u for p in permutes for u in p.users)) if not x.users]:
            if dead in self.program.graph.nodes:
                sweep(dead)

    # -- 1

    def aligned(self, at: fx.Node, x: fx.Node) -> fx.Node:
        """``x`` for aligned rows, available at ``at``."""
        if x in self.of:
            return self.of[x]
        if x not in self.sources:
            permuted = is_getitem(x) and x.args[1] == 0 and op_name(x.args[0]) == "moec.permute"
            if permuted and _item(x.args[0], 1) is self.counts:
                self.sources[x] = self.permuted(x.args[0])
            else:
                args = (x, self.counts, self.alignment)
                self.sources[x] = _padded(typed(self.program, at, moec_ops.align_rows.default, *args), x)
        return self.sources[x]

    def permuted(self, permute: fx.Node) -> fx.Node:
        args = (*permute.args, self.alignment, "none")
        made = typed(self.program, permute, moec_ops.permute_aligned.default, *args)
        rows, _, counts, row_of = (_padded(result(self.program, made, i), permute) for i in range(4))
        self.counts.replace_all_uses_with(counts)
        self.counts = counts
        if (was := _item(permute, 2)) is not None:
            self.numbers[was] = row_of
        return rows

    # -- 2

    def by_rows(self, node: fx.Node) -> bool:
        """Does it compute row by row from a value of this region?"""
        if node.op != "call_function" or not any(n in self.of for n in node.all_input_nodes):
            return False
        if is_getitem(node):
            return True
        name = op_name(node)
        if name == "moec.grouped_add":
            return node.args[2] is self.counts
        if name in SIZED or not name.startswith("aten."):
            return False
        try:
            rule = rule_for(node)
        except MoecError:
            return False
        row = {dims[0] for dims, x in zip(rule.operands, operands(node), strict=False) if x in self.of}
        each = [(dims, x) for dims, x in zip(rule.operands, operands(node), strict=False) if row & set(dims)]
        return (
            len(row) == 1 and None not in row and not row & rule.blocked
            and all(dims[0] in row and self.is_rows(x) for dims, x in each)
            and all(dims[0] in row and same_size(s[0], shape(self.rows)[0])
                    for dims, s in zip(rule.results, result_shapes(node), strict=True))
        )  # fmt: skip

    def is_rows(self, x: fx.Node) -> bool:
        return same_size(shape(x)[0], shape(self.rows)[0])

    def copied(self, node: fx.Node) -> fx.Node:
        if op_name(node) == "moec.grouped_add":
            args = (self.of[node.args[0]], node.args[1], self.padded_counts(node))
            return _padded(typed(self.program, node, node.target, *args), node)

        def more(val: torch.Tensor) -> torch.Tensor:
            # Not inferred: recorded shapes are global, and sizes among the arguments are a rank's.
            return resized(val, (shape(next(iter(self.sources.values())))[0], *val.shape[1:]))

        def take(x: fx.Node) -> fx.Node:
            rows = isinstance(x.meta.get("val"), torch.Tensor) and x.meta["val"].ndim and self.is_rows(x)
            return self.aligned(node, x) if x in self.of or rows else x

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), take)
        val = node.meta["val"]
        val = type(val)(more(v) for v in val) if isinstance(val, (tuple, list)) else more(val)
        return _padded(typed(self.program, node, node.target, *args, val=val, **kwargs), node)

    def padded_counts(self, at: fx.Node) -> fx.Node:
        more = typed(self.program, at, aten.add.Tensor, self.counts, self.alignment - 1)
        whole = typed(self.program, at, aten.floor_divide.default, more, self.alignment)
        return typed(self.program, at, aten.mul.Tensor, whole, self.alignment)

    # -- 3

    def leave(self, node: fx.Node, made: fx.Node, outside: list[fx.Node]) -> None:
        others = []
        for user in outside:
            *front, weights, row_of = user.args if op_name(user) in UNPERMUTES else (None, None, None)
            if row_of in self.numbers and front[-1] is node:
                user.args = (*front[:-1], made, weights, self.numbers[row_of])
            else:
                others.append(user)
        if not others:
            return
        size = new(node, aten.sym_size.int, (self.rows, 0), shape(self.rows)[0])
        made.append(size)
        args = (made, self.counts, self.alignment, size)
        back = typed(self.program, size.next, moec_ops.unalign_rows.default, *args, val=node.meta["val"])
        _padded(back, node)
        for user in others:
            user.replace_input_with(node, back)


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((u for u in node.users if u.args[1] == index), None)


def _padded(made: fx.Node, like: fx.Node) -> fx.Node:
    """Of padded tokens rows are more than those recorded."""
    if "padded" in like.meta or any("padded" in n.meta for n in like.all_input_nodes):
        made.meta["padded"] = True
    return made
