"""An all-to-all between CPUs as receives and sends, the receives first.

gloo's own all-to-all asks for what it is to receive behind what it sends: a rank that comes a moment later than its
peer first writes all of its own rows, and only then does the peer hear that it may send.  Two directions of a link that
could be busy at once then take turns, more often than not (measured on 1 Gbit/s: 4 MB each way in 36 to 75 ms, and in
34 to 38 ms as below).  Nor does a transfer take one of the two threads that a gloo group has for its collectives.

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

import torch.distributed as dist
from torch import Tensor

from .torch_compat import process_group

BETWEEN = "|"
"""Stands between the two names in the ``group`` of an exchange that has a group for each direction."""


def both_ways(group: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The process groups of a ``group`` of a lowered graph: to higher ranks, to lower ranks; the same if it names one.

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
    if x.device.type != "cpu" or "gloo" not in dist.get_backend(group):
        work = dist.all_to_all_single(out, x, list(recv), list(send), group=group, async_op=True)
        return [] if work is None else [work]
    mine, size = group.rank(), group.size()
    incoming, outgoing = out.split(list(recv)), x.split(list(send))
    around = [(mine + i) % size for i in range(1, size)]  # not everyone to rank 0 first
    up, down = group, back or group
    os.sched_yield()
    works = [dist.irecv(incoming[r], group=up if r < mine else down, group_src=r) for r in reversed(around) if recv[r]]
    incoming[mine].copy_(outgoing[mine])
    os.sched_yield()
    works += [dist.isend(outgoing[r], group=up if r > mine else down, group_dst=r) for r in around if send[r]]
    os.sched_yield()
    return [w for w in works if w is not None]
