"""RouteSpec: what ``moec::route`` computes, as one immutable value that travels through a graph as text.

Legend: T tokens, E experts, K choices per token, G groups.

From logits [T, E] a router chooses K experts a token and weighs them:

1. ``force``: benchmarks replace the logits, gradients pass straight through (None: they stay).
2. **Scores** (``score``), in fp32: ``softmax_pre`` softmax over E; ``softmax_post`` the logits themselves, softmaxed
   over the K chosen ones; ``sigmoid``; ``sqrtsoftplus`` √softplus.
3. **Selection** by score + bias (an operand of the op; weights never see it).  Experts outside of the ``kept_groups``
   best of ``groups`` groups of neighbours are out (−inf, not 0); the score of a group is its ``max``, the sum of its
   best two (``top2``), or of its best K // kept_groups (``topk``).  On equal scores the lowest index wins, everywhere.
4. **Weights**: the chosen scores; ``normalize`` divides by their sum + 1e-20 if K > 1; times ``scaling``.
5. **Padding** (an operand): a padded token's ids are −1 and its weights 0.
6. **Capacity**: an expert takes C = min(T, max(``min_capacity``, ceil(T·K/E · ``capacity_factor``))) pairs, those of
   the largest weights (``drop="probs"``, of equal ones the first) or of the first tokens (``"position"``); T counts
   padding too, since sizes must not depend on data.  Dropped pairs have id −1 and weight 0, get no gradient, and do not
   change other weights.  ``level`` says whose tokens compete: those of the ``global`` batch, or of each dp shard
   (``dp_shard``).  The tokens of a tensor may be those of several dp ranks: they are ``shards`` equal runs, each with
   a capacity and a competition of its own, so that one device can compute what many do.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from .errors import MoecError

SCORES = ("softmax_pre", "softmax_post", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("max", "top2", "topk")
DROPS = ("probs", "position")
LEVELS = ("global", "dp_shard")
FORCES = (None, "random", "round_robin")


@dataclass(frozen=True)
class RouteSpec:
    """Raises MoecError for a combination without meaning."""

    num_experts: int
    top_k: int
    score: str = "softmax_pre"
    normalize: bool = False
    scaling: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "max"
    capacity_factor: float | None = None
    """None: dropless."""
    min_capacity: int = 1
    drop: str = "probs"
    level: str = "global"
    shards: int = 1
    """Of level ``dp_shard``: how many dp ranks' tokens these are; 1 once they are sharded."""
    force: str | None = None
    """``random``: other logits, drawn anew for every token number; ``round_robin``: token t takes the experts t·K …
    t·K + K − 1 modulo E, so that loads differ by at most one."""
    seed: int = 0
    """Of ``force="random"``."""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise MoecError("; ".join(problems), where="route", way_out="moec.runtime.route_spec says what each means")

    def capacity(self, num_tokens: int) -> int | None:
        """Pairs that an expert takes of ``num_tokens`` tokens of one run; None without a limit."""
        if self.capacity_factor is None:
            return None
        wanted = math.ceil(num_tokens * self.top_k / self.num_experts * self.capacity_factor)
        return min(num_tokens, max(self.min_capacity, wanted))

    def text(self) -> str:
        """Fields that differ from their defaults, as JSON: what a graph shows and ``parse`` reads."""
        return json.dumps({k: v for k, v in asdict(self).items() if v != _DEFAULTS.get(k, _MISSING)})

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> RouteSpec:
        return RouteSpec(**json.loads(text))

    def _problems(self) -> list[str]:
        E, K, G, kept = self.num_experts, self.top_k, self.groups, self.kept_groups
        problems = [
            f"{name}={value!r} is none of {', '.join(map(repr, known))}"
            for name, value, known in (
                ("score", self.score, SCORES), ("group_score", self.group_score, GROUP_SCORES),
                ("drop", self.drop, DROPS), ("level", self.level, LEVELS), ("force", self.force, FORCES),
            )
            if value not in known
        ]  # fmt: skip
        if not 1 <= K <= E:
            problems.append(f"top_k={K} of num_experts={E}")
        if G < 1 or E % G:
            problems.append(f"groups={G} does not divide num_experts={E}")
        elif not 1 <= kept <= G:
            problems.append(f"kept_groups={kept} of groups={G}")
        elif kept * (E // G) < K:
            problems.append(f"top_k={K} of the {kept * (E // G)} experts in kept_groups={kept}")
        elif G > 1 and self.group_score == "top2" and E // G < 2:
            problems.append(f"group_score='top2' of groups of {E // G}")
        elif G > 1 and self.group_score == "topk" and kept > K:
            problems.append(f"group_score='topk' sums the best top_k // kept_groups = {K} // {kept} = 0 scores")
        if self.score == "softmax_post" and K == 1:
            problems.append("score='softmax_post' with top_k=1 weighs everything with 1: the router gets no gradient")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            problems.append(f"capacity_factor={self.capacity_factor!r} is not positive")
        if self.shards < 1 or (self.shards > 1 and (self.level != "dp_shard" or self.capacity_factor is None)):
            problems.append(f"shards={self.shards} is for a capacity of level='dp_shard'")
        if self.min_capacity < 0:
            problems.append(f"min_capacity={self.min_capacity} is negative")
        return problems


_MISSING: Any = object()
_DEFAULTS = {f.name: f.default for f in fields(RouteSpec)}
