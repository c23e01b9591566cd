"""Attention over a shared sequence: ranks exchange their part of the sequence for some heads, and back (Ulysses).

Legend: B batch, H query heads, G key/value heads, S sequence, D head width, O ranks that share the heads already (tp),
n ranks that share the sequence.

Contract
    requires   ``scaled_dot_product_attention`` of q [B H S D], k and v [B G S D], q sharded on S over some axes
    provides   over these axes every rank attends with its share of the heads over the whole sequence, so that causal
               flags and masks mean what they say; the result is sharded on S as q was
    never      approximates: padded heads are zeros, and are dropped

Algorithm
    1. Heads that n does not divide are padded with zeros to the next multiple, of every of the O blocks by itself.
       Query heads must lie beside their key/value heads: where O·n does not divide G, these are repeated to H first.
    2. q goes from sequence to heads; the rule of attention then takes k and v along (heads are a factor, the sequence
       is blocked).  Over n ranks that are major to tp, the share of a rank is a part of every tp rank's block.
    3. The result goes back to the sequence, and padded heads are dropped.

A mask with a head dim cannot be padded here: then the sequence is gathered, by the ordinary rules.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.shard.heads import repeat_key_value_heads
from moec.passes.shard.rule import is_one, shape
from moec.placement import S
from moec.program import op_name
from moec.runtime.torch_compat import resized

aten = torch.ops.aten


class Context:
    """Shards attention.  ``ctx`` is the pass (``Sharder``): graph, mesh, convert, ``_visit``."""

    def __init__(self, ctx) -> None:
        self.ctx = ctx
        self.mesh = ctx.mesh

    def attention(self, node: fx.Node) -> None:
        """Type ``node``, whose operands are typed, and what it needs around it."""
        q = node.args[0]
        axes = [a for a, t in q.meta["types"].items() if t == S(2)]
        owners = [a for a, t in q.meta["types"].items() if t == S(1)]
        n, blocks = self.mesh.size(axes), self.mesh.size(owners)
        heads = shape(q)[1]
        if axes and (self._uneven_mask(node, heads // blocks % n) or not isinstance(heads, int)):
            axes, n = [], 1
        repeat_key_value_heads(self.ctx, node, blocks * n)  # 1
        if not axes:
            self.ctx._general(node, op_name(node))
            return
        q, k, v = node.args[:3]
        back = {a: q.meta["types"][a] for a in axes}
        padded = heads // blocks % n
        if padded:
            q, k, v = (x if is_one(shape(x)[1]) else self._pad(x, blocks, n) for x in (q, k, v))
        # A share of the heads that axes minor to these have dealt out is a share of each of their blocks.
        parts = blocks if any(self._minor(a, axes) for a in owners) else 1
        q = self.ctx.convert(q, {**q.meta["types"], **dict.fromkeys(axes, S(1, parts))})  # 2
        node.args = (q, k, v, *node.args[3:])
        whole = node.meta["val"]
        node.meta["val"] = resized(whole, [whole.shape[0], shape(q)[1], *whole.shape[2:]])
        users = list(node.users)
        self.ctx._general(node, op_name(node))
        with self.ctx.graph.inserting_before(node.next):
            out = self.ctx.convert(node, {**node.meta["types"], **back})  # 3
            if padded:
                out = self._drop(out, heads, blocks)
        for user in users:
            user.replace_input_with(node, out)

    def _uneven_mask(self, node: fx.Node, rest: int) -> bool:
        """Would heads have to be padded of which each has a mask of its own?"""
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if not rest or not isinstance(mask, fx.Node) or len(shape(mask)) < 3 or is_one(shape(mask)[-3]):
            return False
        where = node.meta.get("where", "")
        self.ctx.program.why_not.append(f"{where}: a mask for each head cannot be padded; the sequence is gathered")
        return True

    def _minor(self, axis: str, axes: list[str]) -> bool:
        names = self.mesh.names
        return names.index(axis) > max(map(names.index, axes))

    # -- ordinary nodes, typed by the ordinary rules

    def _new(self, target, args: tuple, like: fx.Node, sizes: list) -> fx.Node:
        node = self.ctx.graph.call_function(target, args)
        node.meta.update(val=resized(like.meta["val"], sizes), where=like.meta.get("where", ""))
        self.ctx._visit(node)
        return node

    def _reshape(self, x: fx.Node, sizes: list) -> fx.Node:
        return self._new(aten.reshape.default, (x, [-1]), x, sizes)  # the pass writes the local sizes

    def _pad(self, x: fx.Node, blocks: int, n: int) -> fx.Node:
        """[B H S D] -> [B H' S D], every one of the blocks padded to a multiple of n heads."""
        b, h, *rest = shape(x)
        mine = h // blocks
        more = -mine % n
        x = self._reshape(x, [b, blocks, mine, *rest])
        sizes = [b, blocks, mine + more, *rest]
        x = self._new(aten.constant_pad_nd.default, (x, [0, 0, 0, 0, 0, more], 0.0), x, sizes)
        return self._reshape(x, [b, blocks * (mine + more), *rest])

    def _drop(self, x: fx.Node, heads: int, blocks: int) -> fx.Node:
        b, h, *rest = shape(x)
        x = self._reshape(x, [b, blocks, h // blocks, *rest])
        sizes = [b, blocks, heads // blocks, *rest]
        x = self._new(aten.slice.Tensor, (x, 2, 0, heads // blocks), x, sizes)
        return self._reshape(x, [b, heads, *rest])
