"""What a pass promises: the contract that stands beside it and that the manager checks before any graph is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moec.plan import Plan
from moec.program import Program


@dataclass(frozen=True)
class PassContract:
    """``requires`` and ``provides`` are facts of a Program (``"captured"``, ``"normalized"``, ``"sharded"`` …);
    ``preserves_values``: the program after the pass computes what it did before, proved against the user's module;
    ``conflicts_with``: facts under which the pass must not run (a pass that ran already, say);
    ``copies``: every node that the pass adds is a copy of one that was checked, between values of the same types, so
    that the structure alone is checked after it."""

    name: str
    requires: frozenset[str] = field(default_factory=frozenset)
    provides: frozenset[str] = field(default_factory=frozenset)
    conflicts_with: frozenset[str] = field(default_factory=frozenset)
    preserves_values: bool = True
    copies: bool = False


@dataclass(frozen=True)
class Pass:
    """A contract and the function that rewrites.  The function gets a fork of the program and returns it rewritten.
    A pass is left out of a schedule for a plan that it does not apply to."""

    contract: PassContract
    run: Callable[[Program, Plan], Program]
    applies: Callable[[Plan], bool] = lambda plan: True

    @property
    def name(self) -> str:
        return self.contract.name
