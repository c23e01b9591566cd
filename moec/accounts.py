"""Accounts: what a parallel module's graphs counted of this rank's tokens, added up; communicated when asked for.

Every training forward adds to them (``passes/statistics.py``).  A forward that is recomputed within a backward does not
count again, and evaluation never does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moec.program import Program
from moec.runtime.groups import Groups
from moec.runtime.torch_compat import in_backward

TALLY = "tally"
AUX_COUNTS = "aux_counts"
"""What the counts of the global balancing loss grow by, and the buffer that has them (``passes/router_losses.py``)."""


@dataclass
class Account:
    """Sums of statistics of this rank, by ``<block>:<what>``."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    """Group key over which a sum is still to be taken."""
    forwards: int = 0

    def add(self, values: Mapping[str, Tensor], program: Program) -> None:
        self.forwards += 1
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            self.pending[name] = program.mesh.key(program.statistics[name].pending)

    def total(self, groups: Groups | None) -> dict[str, Tensor]:
        """The sums over all ranks.  Collective: one all-reduce for all that is pending over the same group."""
        found = dict(self.sums)
        by_key: dict[str, list[str]] = defaultdict(list)
        for name in self.sums:
            if self.pending[name]:
                by_key[self.pending[name]].append(name)
        for key, names in sorted(by_key.items()):
            assert groups is not None
            flat = torch.cat([self.sums[n].reshape(-1) for n in names])
            dist.all_reduce(flat, group=groups.group(key))
            parts = flat.split([self.sums[n].numel() for n in names])
            found |= {n: p.view_as(self.sums[n]) for n, p in zip(names, parts, strict=True)}
        return found

    def clear(self) -> None:
        self.sums, self.pending, self.forwards = {}, {}, 0


def pending_groups(program: Program) -> set[str]:
    """Group keys that the program's statistics are summed over."""
    return {program.mesh.key(s.pending) for s in program.statistics.values()} - {""}


class Accounts:
    """What a parallel module keeps."""

    def __init__(self) -> None:
        self.last = Account()
        """The last forward, training or not."""
        self.trained = Account()
        """Training forwards since ``moe_stats(reset=True)``."""
        self.step = Account()
        """Training forwards of this optimizer step, until ``update_expert_bias``."""
        self.steps = 0
        """Optimizer steps begun."""
        self._versions: tuple[int, ...] = ()
        self._gradients = False
        """Has a backward made gradients since the step began?"""

    def begin(self, parameters: Iterable[Tensor], running: Mapping[str, Tensor], training: bool) -> None:
        """Before a forward.  A training forward begins a new optimizer step if the ``parameters`` were changed since
        the last, or if gradients were made and are gone: a foreach optimizer changes DTensors behind their version.
        ``running``: buffers that take what this step has summed so far, by the statistic's name."""
        if in_backward():  # recomputed: it meets what it met when it ran first
            return
        parameters = tuple(parameters)
        versions = tuple(p._version for p in parameters)
        gone = self._gradients and all(p.grad is None for p in parameters)
        if training and (versions != self._versions or gone):
            self.step.clear()
            self.steps += 1
            self._versions, self._gradients = versions, False
        for name, buffer in running.items():
            since = self.step.sums.get(name)
            buffer.zero_() if since is None else buffer.copy_(since)

    def backward(self, grad: Tensor) -> None:
        """Hook of every output: a gradient has reached it."""
        self._gradients = True

    def forward(self, program: Program, results: tuple[Tensor, ...], training: bool) -> None:
        if in_backward():  # recomputed: counted when it ran first
            return
        values = {name: results[s.index].detach() for name, s in program.statistics.items()}
        self.last = Account()
        for account in (self.last, self.trained, self.step) if training else (self.last,):
            account.add(values, program)


def expert_load(account: Account, program: Program, groups: Groups | None) -> dict[str, Tensor]:
    """[E], int64: pairs that each expert of a block took.  Collective."""
    totals = account.total(groups)
    return {
        b.path: totals[f"{b.path}:{TALLY}"][: b.num_experts].long()
        for b in program.blocks
        if f"{b.path}:{TALLY}" in totals
    }
