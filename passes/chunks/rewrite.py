"""Writes a region (``region.py``) chunk by chunk.

1. A value from outside is cut once (``moec::split_tokens``), before the first op that reads it.
2. Every op is written once a chunk, one after the other where the op was, so that whatever order was right still is.
   Sizes among its arguments become those of the chunk.  A loss is injected (``moec::inject``) with the first chunk
   alone: each injection states its whole gradient.
3. Sums over tokens are added, chunk by chunk.
4. What others read is joined (``moec::join_tokens``) behind the op that makes it.

A node of chunk i has ``meta["chunk"] = i``; its number of rows is not the recorded one (``meta["padded"]``), which is
that of an average chunk.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch import fx

from moec.passes.chunks.region import History, Region
from moec.passes.chunks.rows import ADDED, ROWS, SHARED, TOKENS
from moec.passes.chunks.types import chunk_types
from moec.passes.rewrite import new
from moec.passes.shard.sizes import Sizes
from moec.placement import Types
from moec.program import op_name
from moec.runtime.torch_compat import expr, resized, size_of

aten, moec_ops = torch.ops.aten, torch.ops.moec


def write(region: Region, count: int) -> None:
    """Rewrite the graph of ``region.program``: ``count`` chunks in place of the region."""
    _Writer(region, count).run()


class _Writer:
    def __init__(self, region: Region, count: int) -> None:
        self.region, self.count, self.program = region, count, region.program
        self.graph, self.mesh = self.program.graph, self.program.mesh
        self.sizes = Sizes(self.program, self.mesh.size(self.mesh.role("dp")))
        self.chunks: dict[fx.Node, list[fx.Node]] = {}
        self.tokens = region.tokens
        like = next(n.meta["val"] for n in region.history if isinstance(n.meta.get("val"), torch.Tensor))
        self.units = self.tokens.sequences or self.tokens.number / region.shards
        """What is dealt to chunks: sequences, or tokens of one of the ranks that share a sequence."""
        self.blocks = expr(size_of(self.units, like) // self.count)
        """Of one chunk."""
        if self.blocks == 0:  # of fixed sizes, fewer than chunks
            self.blocks = sympy.Integer(1)

    def run(self) -> None:
        order = [n for n in self.graph.nodes if n in self.region]
        for node in order:
            with self.graph.inserting_before(node):
                found = self.region.rows.of(node)
                for value in found.tokens:
                    if value not in self.region and value not in self.chunks:
                        self.chunks[value] = self._split(value, self.region.entries[value], node)  # 1
                self.chunks[node] = [self._copy(node, i) for i in range(self.count)]  # 2
                whole = None
                if found.results[0] == ADDED and isinstance(node.meta["val"], torch.Tensor):
                    whole = self._sum(node)  # 3
                elif node in self.region.exits:
                    whole = self._join(node, self.region.exits[node])  # 4
            if whole is not None:
                node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in self.region)
        for node in reversed(order):
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.program.module.recompile()

    # -- 1 and 4

    def _split(self, value: fx.Node, history: History, reader: fx.Node) -> list[fx.Node]:
        val, types = self._of_chunk(value.meta["val"], value.meta["types"], TOKENS)
        n, blocks = self.tokens.lead(value.meta["val"]), self._together(value, history)
        node = new(reader, moec_ops.split_tokens.default, (value, self.count, n, blocks), [val] * self.count)
        node.meta.update(types=[types] * self.count, grad=value.meta["grad"], padded=True)
        chunks = []
        for i in range(self.count):
            chunk = new(reader, operator.getitem, (node, i), val)
            chunk.meta.update(types=types, grad=value.meta["grad"], padded=True, chunk=i)
            chunks.append(chunk)
        return chunks

    def _join(self, node: fx.Node, history: History) -> fx.Node:
        val, types = node.meta["val"], node.meta["types"]
        sizes = []
        for dim in range(self.tokens.lead(val)):
            shards = self.mesh.size([a for a, t in types.items() if t.kind == "S" and t.dim == dim])
            sizes.append(self.sizes.local(val.shape[dim], shards))
        args = (self.chunks[node], sizes, self._together(node, history))
        joined = new(node, moec_ops.join_tokens.default, args, val)
        joined.meta.update(types=types, grad=node.meta["grad"])
        return joined

    def _together(self, value: fx.Node, history: History) -> Any:
        """``blocks`` of the ops that split and join."""
        if self.tokens.sequences is None:
            return self.region.blocks(history)
        val, types = value.meta["val"], value.meta["types"]
        shared = [a for a, t in types.items() if t.kind == "S" and t.dim == 0 and t.parts != 1]
        of_each = size_of(sympy.cancel(expr(val.shape[0]) / self.tokens.sequences), val)
        return self.sizes.local(of_each, self.mesh.size(shared))

    def _sum(self, node: fx.Node) -> fx.Node:
        total, *rest = self.chunks[node]
        for chunk in rest:
            total = new(node, aten.add.Tensor, (total, chunk), node.meta["val"])
            total.meta.update(types=node.meta["types"], grad=node.meta["grad"])
        return total

    # -- 2

    def _copy(self, node: fx.Node, i: int) -> fx.Node:
        if node.target is moec_ops.inject.default and i > 0:
            return self.chunks[node.args[0]][i]
        found = self.region.rows.of(node)

        def chunk(a: fx.Node) -> fx.Node:
            # Of a sum over tokens others read the whole.
            mine = a in self.chunks and (a is found.parent or self._kind(a) != SHARED or a not in self.region.exits)
            return self.chunks[a][i] if mine else a

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), chunk)
        copy = self.graph.call_function(node.target, self._sized(node, list(args), i), kwargs)
        copy.meta.update(node.meta)
        copy.meta.update(chunk=i, padded=True)
        val, types = node.meta.get("val"), node.meta.get("types")
        if isinstance(val, (tuple, list)):
            each = [self._of_chunk(v, t, k) for v, t, k in zip(val, types, found.results, strict=True)]
            copy.meta.update(val=type(val)(v for v, _ in each), types=[t for _, t in each])
        elif isinstance(val, torch.Tensor):
            copy.meta["val"], copy.meta["types"] = self._of_chunk(val, types, found.results[0])
        if "moves" in node.meta:
            tokens, rows = node.meta["moves"]
            copy.meta["moves"] = self._scaled(tokens), rows
        return copy

    def _kind(self, node: fx.Node) -> str:
        return self.region.rows.kind(node)

    def _sized(self, node: fx.Node, args: list[Any], i: int) -> tuple:
        """The arguments with the sizes of a chunk."""
        name = op_name(node)
        if self.region.rows.of(node).results == (TOKENS,) and name in ("aten.reshape", "aten.expand"):
            n, sizes, types = self.tokens.lead(node.meta["val"]), list(args[1]), node.meta["types"]
            sizes[0] = -1
            if n == 2:
                shared = [a for a, t in types.items() if t.kind == "S" and t.dim == 1]
                sizes[1] = -1 if name == "aten.expand" else self.region.shards // self.mesh.size(shared)
            args[1] = sizes
        elif name == "moec.take_rows":
            (value,) = [o for o in self.region.rows.of(node).tokens if o is node.args[0]]
            source = self.region.padded[self.region.history[value]]
            args[1] = self.graph.call_function(aten.sym_size.int, (self.chunks[source][i], 0))
            args[1].meta.update(val=None, types=None)
        return tuple(args)

    def _of_chunk(self, val: torch.Tensor, types: Types, kind: str) -> tuple[torch.Tensor, Types]:
        """Recorded value and types of a chunk."""
        shape = list(val.shape)
        if kind == TOKENS:
            n = self.tokens.lead(val)
            rows = sympy.cancel(expr(shape[0]) / self.units) * self.blocks
            shape[:n] = [rows] if n == 1 else [self.blocks, self.region.shards]
            types = chunk_types(types, n, self.blocks if not self.blocks.is_Integer else int(self.blocks))
        elif kind == ROWS:
            shape[0] = self._scaled(shape[0])
        return resized(val, shape), types

    def _scaled(self, size: Any) -> Any:
        """A recorded number of rows, of which each token has as many as another."""
        times = sympy.cancel(expr(size) / self.tokens.number)
        tokens = sympy.cancel(self.tokens.number / self.units) * self.blocks
        return times * tokens if not times.free_symbols else size
