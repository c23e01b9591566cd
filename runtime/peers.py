"""Collectives between CPUs as receives and sends of pairs of ranks, the receives first; other devices have their
backend's own.

gloo's own all-to-all asks for what it is to receive behind what it sends: a rank that comes a moment later than its
peer first writes all of its own rows, and only then does the peer hear that it may send.  Two directions of a link that
could be busy at once then take turns, more often than not (measured on 1 Gbit/s: 4 MB each way in 36 to 75 ms, and in
34 to 38 ms as below).  Nor does a transfer take one of the two threads that a gloo group has for its collectives.

gloo has no reduce-scatter of its own: torch reduces everything everywhere and keeps a part, which sends twice as much
as needed (8 MB of two ranks: 65 ms on that link, 32 ms as below).  Its all-gather takes 33 to 44 ms for as much, and
31 ms as below; of small ones the mean falls by half.

The two directions between a pair of ranks have process groups of their own, so connections of their own.  gloo's thread
that reads what arrives does not wait for the lock of a connection but tries again and again: if the rank's own thread
has been put aside with the lock in its hand (sending: it is held while rows are copied), and both share a core, the one
spins for a whole time slice before the other may go on.  Over one connection that is likely, because both ranks of a
pair send at the same time (measured on two ranks, tiny models: 4 ms in one of six exchanges, a tenth of a step).  What
is left of it comes from the few bytes by which gloo says that a receive is ready: so the rank offers its core to that
thread before it takes a lock, and copies its own rows between receives and sends (two fifths of such calls remain).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .torch_compat import all_gather_flat, process_group, reduce_scatter_flat

Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]
"""Of the same ranks: for what goes to higher ranks, and for what goes to lower ones."""
BETWEEN = "|"
"""Stands between the two names in the ``group`` of a collective that has a group for each direction."""


def both_ways(group: str) -> Pair:
    """The process groups of a ``group`` of a lowered graph; the same twice if it names one.

    Raises MoecError where there is no group of that name."""
    up, _, down = group.partition(BETWEEN)
    first = process_group(up)
    return first, process_group(down) if down else first


def start_all_to_all(
    out: Tensor,
    x: Tensor,
    recv: Sequence[int],
    send: Sequence[int],
    group: dist.ProcessGroup,
    back: dist.ProcessGroup | None = None,
) -> list[dist.Work]:
    """Start to fill ``out`` with ``recv[r]`` rows of every rank r of the group, which gets the next ``send[r]`` rows of
    ``x``; both are contiguous.  ``back``: a group of the same ranks, for what is sent to a lower rank.  Returns what
    has to be waited for; until then ``x`` stays as it is.

    Every rank of the group calls it, in the order of its other collectives on this group; how many rows r sends to s,
    both have to say alike."""
    if not _by_pairs(x, group):
        return _handle(dist.all_to_all_single(out, x, list(recv), list(send), group=group, async_op=True))
    return _start(out.split(list(recv)), x.split(list(send)), group, back)


def start_all_gather(
    out: Tensor, x: Tensor, group: dist.ProcessGroup, back: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """Start to fill ``out`` with the ``x`` of every rank, one behind the other; otherwise as ``start_all_to_all``."""
    if not _by_pairs(x, group):
        return _handle(all_gather_flat(out, x, group=group, async_op=True))
    return _start(out.view(-1).chunk(group.size()), [x.view(-1)] * group.size(), group, back)


def start_reduce_scatter(
    out: Tensor, x: Tensor, group: dist.ProcessGroup, back: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """Start to fill ``out`` with the sum of this rank's parts of every rank's ``x``, in the order of the ranks;
    otherwise as ``start_all_to_all``.  The sum is made by who waits for it."""
    if not _by_pairs(x, group):
        return _handle(reduce_scatter_flat(out, x, group=group, async_op=True))
    parts = x.new_empty(group.size(), out.numel())
    return [_Sum(out, parts, _start(parts.unbind(), x.view(group.size(), -1).unbind(), group, back))]


class _Sum(dist.Work):
    """Over when ``out`` is the sum of ``parts``, which ``works`` bring."""

    def __init__(self, out: Tensor, parts: Tensor, works: list[dist.Work]) -> None:
        super().__init__()
        self.out, self.parts, self.works = out.view(-1), parts, works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # 0: the group's
        for work in self.works:
            work.wait()
        if len(self.parts) == 2:
            torch.add(*self.parts, out=self.out)  # several times faster
        else:
            torch.sum(self.parts, 0, dtype=self.out.dtype, out=self.out)
        return True


def _by_pairs(x: Tensor, group: dist.ProcessGroup) -> bool:
    return x.device.type == "cpu" and "gloo" in dist.get_backend(group)


def _handle(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def _start(
    incoming: Sequence[Tensor], outgoing: Sequence[Tensor], group: dist.ProcessGroup, back: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Of every rank what it gives and what it gets; nothing travels for what has no elements."""
    mine, size = group.rank(), group.size()
    around = [(mine + i) % size for i in range(1, size)]  # not everyone to rank 0 first
    up, down = group, back or group
    os.sched_yield()
    works = [
        dist.irecv(incoming[r], group=up if r < mine else down, group_src=r)
        for r in reversed(around)
        if incoming[r].numel()
    ]
    incoming[mine].copy_(outgoing[mine])
    os.sched_yield()
    works += [
        dist.isend(outgoing[r], group=up if r > mine else down, group_dst=r) for r in around if outgoing[r].numel()
    ]
    os.sched_yield()
    return [w for w in works if w is not None]
