"""Router: what a plan changes about the routers of a model (``Plan.router``).

What a model computes for itself stays as it is; these are options for models that lack them.  All of them mean the
global batch: any number of ranks computes what one device does.  See ``moec.runtime.route_spec`` for what a router is.

Losses (training only; padding excluded; p are the probabilities of ``moec::balance``, over T tokens):

* ``micro_batch``: coeff · E / (K·T²) · Σᵢ cᵢ · Σₜ pₜᵢ, cᵢ the tokens that have expert i among the K of largest p
  (neither bias nor groups are asked).  Exactly coeff where all experts are alike.
* ``sequence``: the same of every sequence by itself, averaged over those that have a token.
* ``global``: the same, cᵢ being the mean over the forwards since the last optimizer step.
* ``z_loss``: coeff · mean(logsumexp(logits)²).

They enter the gradients, not the loss that the model returns.  Each backward adds the gradient of its own forward's
losses: who accumulates n micro-batches divides the coefficients by n, as their own loss.  The mean over n micro-batches
of ``sequence`` and ``z_loss`` is that of the batch (of equal shapes without padding); ``micro_batch``, ``global`` and a
capacity are *by definition* those of each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moec.runtime.errors import MoecError
from moec.runtime.route_spec import DROPS, LEVELS

LOSSES = ("micro_batch", "sequence", "global")
DTYPES = ("float32", "float64")
FORCED = ("random", "round_robin")


@dataclass(frozen=True)
class Router:
    """Raises MoecError for values without meaning."""

    aux_loss: float | Mapping[str, float] | None = None
    """Load-balancing loss: the coefficient of ``micro_batch``, or a coefficient each of ``micro_batch``, ``sequence``,
    ``global``."""
    z_loss: float | None = None
    """Coefficient."""
    expert_bias: float | None = None
    """Balancing without a loss: a bias of the selection in a buffer ``<block>.expert_bias`` (fp32, whatever the model
    is cast to), beside what bias the model has of its own; the rate at which an update moves it."""
    force_balance: str | None = None
    """For benchmarks: ``random`` or ``round_robin`` routing instead of the router's."""
    seed: int = 0
    """Of ``random``."""
    capacity_factor: float | None = None
    """An expert takes at most ceil(T·K/E · factor) tokens."""
    min_capacity: int = 1
    drop: str = "probs"
    """Who stays: ``probs`` the largest weights, ``position`` the first tokens."""
    level: str = "global"
    """Whose tokens compete: those of the ``global`` batch, or of each dp rank by itself (``dp_shard``)."""
    dtype: str | None = None
    """Logits are computed in ``float32`` or ``float64``, from inputs and weights cast to it.  (What follows never is in
    less than float32.)"""
    padding: str | None = None
    """Path of the [B, S] input that is 0 or False at padding; None: ``attention_mask`` where there is such an input."""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise MoecError("; ".join(problems), where="plan.router")

    @property
    def losses(self) -> dict[str, float]:
        """Coefficient of each loss, ``z`` among them, in the order in which programs report them."""
        aux = self.aux_loss if isinstance(self.aux_loss, Mapping) else {"micro_batch": self.aux_loss}
        named = {**{name: aux.get(name) for name in LOSSES}, "z": self.z_loss}
        return {name: c for name, c in named.items() if c is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of the fields that differ from their defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in given.items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Router:
        known = [f.name for f in fields(Router)]
        if not isinstance(data, Mapping) or (unknown := [k for k in data if k not in known]):
            what = f"unknown field {', '.join(map(repr, unknown))}" if isinstance(data, Mapping) else f"found {data!r}"
            raise MoecError(what, where="plan.router", way_out=f"fields are {', '.join(known)}")
        return Router(**data)

    def _problems(self) -> list[str]:
        aux = self.aux_loss if isinstance(self.aux_loss, Mapping) else {}
        problems = [f"aux_loss: {name!r} is none of {', '.join(LOSSES)}" for name in aux if name not in LOSSES]
        positive: dict[str, Any] = {f"aux_loss {name}": c for name, c in aux.items()}
        if not isinstance(self.aux_loss, Mapping):
            positive["aux_loss"] = self.aux_loss
        elif not aux:
            problems.append("aux_loss names no loss")
        positive |= {n: getattr(self, n) for n in ("z_loss", "expert_bias", "capacity_factor")}
        given = {n: c for n, c in positive.items() if c is not None}
        problems += [f"{n}={c!r} is not a positive number" for n, c in given.items() if not _positive(c)]
        problems += [
            f"{name}={value!r} is none of {', '.join(map(repr, known))}"
            for name, value, known in (
                ("force_balance", self.force_balance, (None, *FORCED)), ("drop", self.drop, DROPS),
                ("level", self.level, LEVELS), ("dtype", self.dtype, (None, *DTYPES)),
            )
            if value not in known
        ]  # fmt: skip
        if not isinstance(self.min_capacity, int) or isinstance(self.min_capacity, bool) or self.min_capacity < 0:
            problems.append(f"min_capacity={self.min_capacity!r} is not a number of pairs")
        if self.capacity_factor is None:
            idle = [n for n in ("min_capacity", "drop", "level") if getattr(self, n) != _DEFAULTS[n]]
            problems += [f"{n}={getattr(self, n)!r} without a capacity_factor" for n in idle]
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            problems.append(f"seed={self.seed!r} is not an integer")
        elif self.seed and self.force_balance != "random":
            problems.append(f"seed={self.seed} is for force_balance='random'")
        if self.padding is not None and not isinstance(self.padding, str):
            problems.append(f"padding={self.padding!r} is not the path of an input")
        if self.force_balance and (self.losses or self.expert_bias):
            problems.append(f"force_balance={self.force_balance!r} takes away the choice that losses or a bias balance")
        return problems


def _positive(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x > 0


_DEFAULTS = {f.name: f.default for f in fields(Router)}
