"""Values over a vocabulary that tp shards: looked up, normalised and picked from where they lie, never gathered.

Legend: N leading dims, V vocabulary, n ranks that shard it, H hidden.

Ops that mix or index one dim block it, so the ordinary rules would gather it first: a table's rows, or N·V logits.
Where that dim is sharded over tp, they are written with ops that a part of the dim can do alone; ``arange(V)``, cut as
the dim is, tells a rank which numbers its part has.

1. ``embedding``: ``lookup`` in this rank's rows; the contraction of V leaves P, which is reduced (B·S·H numbers).
2. ``log_softmax`` and ``softmax``: ``lse = logsumexp(blocked_logsumexp(x, n))``, whose n columns are gathered (N·n
   numbers), and then pointwise ops: the result stays sharded.
3. ``gather`` along that dim: ``pick``, P again (as many numbers as are picked).
4. ``cross_entropy``: lse − x[target], where what is taken from x (label smoothing wants the sum over V too) is one
   pending sum of N numbers.  Per row, with smoothing e and class weights w:

       (1 − e) · w[t] · (lse − x[t])  +  e/V · (lse · sum w − sum w·x),   0 where t is ignored

   in fp32 (fp64 for fp64), as torch computes it inside.

Every op emitted here has a factor rule and is typed by the pass like any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moec.passes.rewrite import apply
from moec.passes.shard.rule import same_size, shape
from moec.placement import P, S
from moec.program import op_name

aten, moec_ops = torch.ops.aten, torch.ops.moec


class Vocabulary:
    """Rewrites nodes during the walk.  ``ctx`` is the pass (``Sharder``): graph, mesh, visiting of new nodes."""

    def __init__(self, ctx) -> None:
        self.ctx = ctx
        self.numbers: dict[tuple[int, torch.device], fx.Node] = {}

    def rewrite(self, node: fx.Node) -> fx.Node | None:
        """The node that stands for ``node`` from now on, None where the ordinary rules do."""
        name = op_name(node)
        if name == "aten.embedding":
            return self._embedding(node) if self._shards(node.args[0], 0) > 1 and not any(node.args[3:]) else None
        if name in ("aten.log_softmax", "aten._log_softmax", "aten.softmax", "aten._softmax"):
            return self._softmax(node, name) if self._shards(node.args[0], node.args[1]) > 1 else None
        if name == "aten.gather":
            return self._gather(node) if self._shards(node.args[0], node.args[1]) > 1 else None
        if name == "aten.cross_entropy_loss":
            x, target = node.args[:2]
            if self._shards(x, 1 if len(shape(x)) > 1 else 0) == 1:
                return None
            if target.meta["val"].dtype.is_floating_point:
                self.ctx.program.why_not.append(
                    f"{node.meta.get('where') or 'the model'}: cross entropy with probabilities as targets gathers its "
                    "logits over tp; only class indices are looked up where they lie"
                )
                return None
            return self._cross_entropy(node)
        return None

    # -- 1

    def _embedding(self, node: fx.Node) -> fx.Node:
        weight, ids = node.args[:2]
        padding = node.args[2] if len(node.args) > 2 else -1
        y = self._emit(node, moec_ops.lookup.default, weight, self._vocab(node, weight, 0), ids, padding)
        # Reduced once and here: a residual stream that starts as a pending sum would be reduced at every norm.
        types = self.ctx.sequence.types(y)
        return self.ctx.convert(y, {a: self.ctx.default_type(y) if t == P else t for a, t in types.items()})

    # -- 2

    def _softmax(self, node: fx.Node, name: str) -> fx.Node:
        x, dim = node.args[0], node.args[1] % len(shape(node))
        x = self._last(node, x, dim)
        lse = self._emit(node, aten.unsqueeze.default, self._lse(node, x), -1)
        y = self._emit(node, aten.sub.Tensor, x, lse)
        if "log" not in name:
            y = self._emit(node, aten.exp.default, y)
        return self._cast(node, self._last_to(node, y, dim))

    def _lse(self, node: fx.Node, x_NV: fx.Node) -> fx.Node:
        """fp32 [N]: log of the sum of exp over the sharded last dim."""
        blocks = self._emit(node, moec_ops.blocked_logsumexp.default, x_NV, self._shards(x_NV, -1))
        return self._emit(node, aten.logsumexp.default, blocks, [-1])

    # -- 3

    def _gather(self, node: fx.Node) -> fx.Node | None:
        x, dim, ids = node.args[:3]
        dim %= len(shape(x))
        if any(d != dim and not same_size(a, b) for d, (a, b) in enumerate(zip(shape(x), shape(ids), strict=True))):
            return None  # an index may be shorter than x in other dims
        y = self._pick(node, self._last(node, x, dim), self._last(node, ids, dim))
        return self._last_to(node, y, dim)

    def _pick(self, node: fx.Node, x_NV: fx.Node, ids_NK: fx.Node) -> fx.Node:
        return self._emit(node, moec_ops.pick.default, x_NV, self._vocab(node, x_NV, -1), ids_NK)

    # -- 4

    def _cross_entropy(self, node: fx.Node) -> fx.Node:
        names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
        given: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
        given |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        x, target, weight, reduction, ignore, smoothing = (given[n] for n in names)

        def emit(op, *args) -> Any:
            return self._emit(node, op, *args)

        ignored = emit(aten.eq.Scalar, target, ignore)
        x = self._last(node, x, 1 if len(shape(x)) > 1 else 0)
        lse = self._lse(node, x)
        wide = lse.meta["val"].dtype
        taken = emit(aten.select.int, self._pick(node, x, emit(aten.unsqueeze.default, target, -1)), -1, 0)
        counted: fx.Node = emit(aten.logical_not.default, ignored)  # what a mean divides by
        if weight is not None:
            weight = self._cast_to(node, emit(aten.detach.default, weight), wide)
            w_N = emit(aten.index.Tensor, weight, [emit(aten.masked_fill.Scalar, target, ignored, 0)])
            counted = emit(aten.masked_fill.Scalar, w_N, ignored, 0.0)
            taken = emit(aten.mul.Tensor, taken, w_N)
        if smoothing:
            share = smoothing / shape(x)[-1]
            spread = self._cast_to(node, x, wide)
            spread = spread if weight is None else emit(aten.mul.Tensor, spread, weight)
            spread = emit(aten.mul.Tensor, emit(aten.sum.dim_IntList, spread, [-1]), share)
            taken = emit(aten.mul.Tensor, self._cast_to(node, taken, wide), 1.0 - smoothing)
            taken = emit(aten.add.Tensor, taken, spread)
        if weight is not None:
            scale = emit(aten.mul.Tensor, w_N, 1.0 - smoothing)
            if smoothing:
                scale = emit(aten.add.Tensor, scale, emit(aten.mul.Tensor, emit(aten.sum.default, weight), share))
            lse = emit(aten.mul.Tensor, lse, scale)
        loss = emit(aten.masked_fill.Scalar, emit(aten.sub.Tensor, lse, taken), ignored, 0.0)
        if reduction:
            loss = emit(aten.sum.default, loss)
        if reduction == 1:
            loss = emit(aten.div.Tensor, loss, emit(aten.sum.default, counted))
        return self._cast(node, loss)

    # -- small tools

    def _shards(self, x: fx.Node, dim: int) -> int:
        """Over how many tp ranks a dim is sharded; 1 where anything else cuts it, too, or it is packed."""
        dim %= max(len(shape(x)), 1)
        axes = [a for a, t in x.meta["types"].items() if t.kind == "S" and t.dim == dim]
        if not isinstance(shape(x)[dim], int) or any(
            a not in self.ctx.tp or x.meta["types"][a] != S(dim) for a in axes
        ):
            return 1
        return self.ctx.mesh.size(axes)

    def _vocab(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        """The numbers of a dim's entries: made once for each size, and cut like the dim by the rules."""
        key = shape(x)[dim], x.meta["val"].device
        if key not in self.numbers:
            self.numbers[key] = self._emit(node, aten.arange.default, key[0], dtype=torch.int64, device=key[1])
        return self.numbers[key]

    def _last(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        """``x`` with ``dim`` moved to the end."""
        rank = len(shape(x))
        order = [*(d for d in range(rank) if d != dim), dim]
        return x if dim == rank - 1 else self._emit(node, aten.permute.default, x, order)

    def _last_to(self, node: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        """The inverse of ``_last``."""
        rank = len(shape(x))
        order = list(range(rank - 1))
        order.insert(dim, rank - 1)
        return x if dim == rank - 1 else self._emit(node, aten.permute.default, x, order)

    def _cast(self, node: fx.Node, x: fx.Node) -> fx.Node:
        return self._cast_to(node, x, node.meta["val"].dtype)

    def _cast_to(self, node: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self._emit(node, aten._to_copy.default, x, dtype=dtype)

    def _emit(self, node: fx.Node, op, *args, **kwargs) -> fx.Node:
        """A new node before ``node``, of its module, with its value inferred and its types solved."""
        made = apply(node, op, *args, **kwargs)
        with self.ctx.graph.inserting_before(made):
            self.ctx._visit(made)
        return made
