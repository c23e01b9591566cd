"""update_expert_bias: balancing without a loss (``Router.expert_bias``), as DeepSeek-V3 does.

After every optimizer step each expert's bias moves by the rate towards the mean load: b += rate · sign(mean − count).
"""

from __future__ import annotations

import torch

from moec.accounts import TALLY
from moec.module import ParallelModule
from moec.runtime.errors import MoecError

BIAS = "expert_bias"


def update_expert_bias(model: ParallelModule) -> None:
    """Move the expert biases; call it once after every ``optimizer.step()``.

    Counts are those of every training forward since the last update, over the global batch, padding left out; without
    such a forward nothing moves.  Collective (every rank must call it), one reduction for all blocks.

    Raises:
        MoecError: the plan has no ``Router(expert_bias=rate)``.
    """
    router = model.program.router
    if router is None or router.expert_bias is None:
        raise MoecError(
            "the plan gives routers no bias", where=BIAS, way_out="Plan(router=Router(expert_bias=0.001)), say"
        )
    totals = model.accounts.step.total(model.groups)
    for block in model.program.blocks:
        tally = totals.get(f"{block.path}:{TALLY}")
        if tally is not None:
            counts_E = tally[: block.num_experts]
            bias_E = model.get_buffer(f"{block.path}.{BIAS}")
            move_E = torch.sign(counts_E.mean() - counts_E) * router.expert_bias
            bias_E += move_E.to(bias_E)
    model.accounts.step.clear()
