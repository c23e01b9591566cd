"""Ranks as a mesh of atomic axes, fine enough for the dense and the expert factorisation at once.

Rank order is row-major, outermost first: dense ``(dp, cp, tp)`` and expert ``(edp, ep, etp)`` factor the *same* ranks
(parallel folding).  Cutting the ranks at every boundary of either factorisation gives *atomic axes*; each of
dp, cp, tp, edp, ep, etp is then a set of atomic axes, and a value crosses from the dense to the expert mesh without any
operation.  An axis is named after its two roles: ``dp_ep`` belongs to dp and to ep.

With FSDP the ranks are also cut between copies that replicate the parameters (outer) and those that share them (inner,
``fsdp`` of the dp ranks).  Axes of the first kind are named ``dpr_…``; ``role("fsdp")`` are the dp axes that dense
parameters are sharded over, ``role("efsdp")`` the edp axes that expert parameters are sharded over.

With ``ranks_per_node`` they are cut between nodes too: axes whose ranks lie in different nodes are marked ``nodes``,
and their names end in ``_n``.

Example: 4 ranks, dp=2, tp=2, ep=4 gives the axes ``dp_ep`` (2) and ``tp_ep`` (2); ep is both of them.

A *group key* is how graphs name a process group before it exists: axis names joined by commas, in mesh order
(``"dp_ep,tp_ep"``).  Behind a ``#`` may stand what the group is for (``"dp_ep#exchange"``): the same ranks, and a
process group of its own, so that what is in flight for one purpose does not queue behind another's.  A key that ends in
``-back`` is of a second such group, over which an exchange sends to lower ranks (``peers.py`` says why).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from .errors import MoecError

DENSE_ROLES = ("dp", "cp", "tp")
EXPERT_ROLES = ("edp", "ep", "etp")


def axes_of(key: str) -> str:
    """A group key without its purpose."""
    return key.partition("#")[0]


GRADIENTS, PARAMETERS, EXCHANGE, COUNTS = "gradients", "parameters", "exchange", "counts"
"""Purposes of groups: sums of gradients; gathers of parameters and what becomes their gradients; rows of tokens that go
to experts; how many."""


def for_purpose(key: str, purpose: str) -> str:
    """The key of the group of the same ranks that serves ``purpose`` alone."""
    return f"{axes_of(key)}#{purpose}" if purpose else axes_of(key)


def back(key: str) -> str:
    """The key of the second group, for the way back, of a collective of pairs over ``key``."""
    return f"{key}-back" if "#" in key else f"{key}#-back"


@dataclass(frozen=True)
class Axis:
    """One atomic axis: ``size`` ranks with the role ``dense`` for dense values and ``expert`` for expert values."""

    name: str
    size: int
    dense: str
    expert: str
    shares: bool = False
    """FSDP: the ranks of this axis share parameters, rather than hold copies of them."""
    nodes: bool = False
    """The ranks of this axis lie in different nodes (where it is known how many ranks a node has)."""


@dataclass(frozen=True)
class Mesh:
    """Atomic axes, outermost first.  Axes of size 1 do not exist; one rank has no axis at all."""

    axes: tuple[Axis, ...] = ()

    @staticmethod
    def of(
        dp: int = 1, tp: int = 1, ep: int = 1, etp: int = 1, cp: int = 1, fsdp: int = 1, ranks_per_node: int = 0
    ) -> Mesh:
        """Build the mesh of ``dp * cp * tp`` ranks; edp is what ep and etp leave.  ``fsdp`` of the dp ranks share
        parameters (1: each dp rank holds a copy).  ``ranks_per_node`` neighbours make a node (0: not known).

        Raises MoecError when ``ep * etp`` or ``ranks_per_node`` does not divide the ranks, ``fsdp`` does not divide dp,
        or the factorisations do not nest.
        """
        world, dense = dp * cp * tp, f"dp={dp}, {f'cp={cp}, ' if cp > 1 else ''}tp={tp}"
        if world % (ep * etp):
            raise MoecError(f"ep*etp = {ep}*{etp} does not divide the {world} ranks of {dense}", where="plan")
        if dp % fsdp:
            raise MoecError(f"fsdp={fsdp} does not divide dp={dp}", where="plan")
        if ranks_per_node and world % ranks_per_node:
            raise MoecError(f"ranks_per_node={ranks_per_node} does not divide the {world} ranks", where="plan")
        copy = fsdp * cp * tp if fsdp > 1 else 0  # ranks that together hold one copy of the parameters
        # Strides (innermost first) at which each factorisation passes from one role to the next.
        cuts = sorted({1, tp, cp * tp, etp, etp * ep, world, *(c for c in (copy, ranks_per_node) if c)})
        axes = []
        for inner, outer in pairwise(cuts):
            if outer % inner:
                raise MoecError(
                    f"the dense ({dense}) and expert (ep={ep}, etp={etp}) factorisations do not nest"
                    f"{f' with fsdp={fsdp}' if copy else ''}"
                    f"{f' with ranks_per_node={ranks_per_node}' if ranks_per_node else ''}: "
                    f"{inner} does not divide {outer}",
                    where="plan",
                    way_out="choose tp, cp*tp, etp and ep*etp so that each divides the next larger one",
                )
            role = "tp" if outer <= tp else "cp" if outer <= cp * tp else "dp"
            expert = "etp" if outer <= etp else "ep" if outer <= etp * ep else "edp"
            shares = outer <= copy
            nodes = bool(ranks_per_node) and inner >= ranks_per_node
            name = f"{'dpr' if copy and not shares else role}_{expert}{'_n' if nodes else ''}"
            axes.append(Axis(name, outer // inner, role, expert, shares, nodes))
        return Mesh(tuple(reversed(axes)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def world(self) -> int:
        return prod(self.shape)

    def axis(self, name: str) -> Axis:
        return next(a for a in self.axes if a.name == name)

    def role(self, role: str) -> tuple[str, ...]:
        """Names of the atomic axes that make up a role (dp, cp, tp, edp, ep, etp, fsdp or efsdp), in mesh order."""
        if role in ("fsdp", "efsdp"):
            of = {"fsdp": "dp", "efsdp": "edp"}[role]
            return tuple(a.name for a in self.axes if a.shares and of in (a.dense, a.expert))
        return tuple(a.name for a in self.axes if role in (a.dense, a.expert))

    def is_key(self, key: str) -> bool:
        """Is it a group key of this mesh, with a purpose or without?"""
        axes = axes_of(key)
        return bool(axes) and self.key(axes.split(",")) == axes

    def size(self, axes: str | Iterable[str]) -> int:
        """Number of ranks in a group over ``axes`` (a group key or axis names)."""
        return prod(self.axis(n).size for n in self._split(axes))

    def key(self, axes: Iterable[str]) -> str:
        """The group key of a set of axes: mesh order, whatever order they come in."""
        wanted = set(axes)
        return ",".join(n for n in self.names if n in wanted)

    def coords(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on each axis."""
        out: dict[str, int] = {}
        for a in reversed(self.axes):
            rank, out[a.name] = divmod(rank, a.size)
        return out

    def index(self, rank: int, axes: str | Iterable[str]) -> int:
        """Position of ``rank`` within its group over ``axes`` (major axis first)."""
        at, i = self.coords(rank), 0
        for n in self._split(axes):
            i = i * self.axis(n).size + at[n]
        return i

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks of ``rank``'s group over ``axes``, ordered by index (which is ascending rank order)."""
        return next(g for g in self.groups(axes) if rank in g)

    def groups(self, axes: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Every group over ``axes``; together they hold each rank once."""
        inside = set(self._split(axes))
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(product(*(range(s) for s in self.shape))):
            outside = tuple(i for n, i in zip(self.names, at, strict=True) if n not in inside)
            found.setdefault(outside, []).append(rank)
        return tuple(tuple(g) for g in found.values())

    def _split(self, axes: str | Iterable[str]) -> tuple[str, ...]:
        names = axes_of(axes).split(",") if isinstance(axes, str) else tuple(axes)
        return tuple(n for n in self.names if n in set(names))
