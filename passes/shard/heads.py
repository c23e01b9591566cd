"""Query heads that are dealt to more ranks than there are key/value heads.

An attention that groups its query heads itself (``enable_gqa``) wants a whole number of key/value heads on each rank.
Where the ranks are more than these heads, every rank holds them all (``layout``: their projections are whole), and they
are repeated to one for each query head, of which the rules then take each rank's share.
"""

from __future__ import annotations

import torch
from torch import fx

from moec.passes.shard.rule import shape


def repeat_key_value_heads(ctx, node: fx.Node, dealt: int) -> None:
    """``ctx`` is the pass (``Sharder``); ``node`` an attention over [B H S D] whose operands have their types and whose
    query heads are to be dealt to ``dealt`` ranks."""
    q = node.args[0]
    heads = shape(q)[1]
    for i in (1, 2):
        x = node.args[i]
        own = shape(x)[1]
        if own == 1 or own % dealt == 0:
            continue
        val = x.meta["val"]
        with val.fake_mode:
            val = val.repeat_interleave(heads // own, 1)
        args = (x, heads // own, 1)
        repeated = ctx.call(torch.ops.aten.repeat_interleave.self_int, args, val, x.meta["types"], x.meta["grad"])
        node.update_arg(i, repeated)
