"""moe_stats: statistics of the MoE blocks of a parallel module, over the global batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from moec.accounts import AUX_COUNTS, TALLY
from moec.module import ParallelModule


@dataclass(frozen=True)
class MoEStats:
    """One MoE block, over the global batch of every training forward since the last reset; padding is left out."""

    tokens_per_expert: Tensor
    """[E], int64: pairs that each expert took."""
    dropped: int
    """Pairs that a capacity dropped."""
    tokens: int
    entropy: float | None
    """Of the router's distribution over the experts, in nats, mean over the tokens; None where the router is the user's
    own (``program.why_not`` says why it was not raised)."""
    losses: dict[str, float]
    """Each balancing loss, with its coefficient, mean over the forwards."""

    @property
    def max_over_mean(self) -> float:
        """The largest load over the mean load; 1 when balanced."""
        loads = self.tokens_per_expert.double()
        return float(loads.max() / loads.mean().clamp_min(1e-300)) if loads.any() else 1.0


def moe_stats(model: ParallelModule, *, reset: bool = False) -> dict[str, MoEStats]:
    """Statistics of every MoE block, by the path of the module that owns its experts.

    Over the global batches of all training forwards since the last ``reset``: N ranks say what one would.  Collective
    (every rank must ask), one reduction for all blocks.  Empty before the first training forward.
    """
    account = model.accounts.trained
    totals = account.total(model.groups)
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in totals.items():
        path, _, what = name.partition(":")
        if what not in (TALLY, AUX_COUNTS):
            losses[path][what] = float(value) / max(account.forwards, 1)
    found = {}
    for block in model.program.blocks:
        if (tally := totals.get(f"{block.path}:{TALLY}")) is not None:
            E = block.num_experts
            tokens = int(tally[E + 1])
            entropy = float(tally[E + 2]) / max(tokens, 1) if tally.numel() > E + 2 else None
            found[block.path] = MoEStats(tally[:E].long(), int(tally[E]), tokens, entropy, losses[block.path])
    if reset:
        account.clear()
    return found
