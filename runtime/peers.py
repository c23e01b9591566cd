"""An all-to-all between CPUs as receives and sends, the receives first.

gloo's own all-to-all asks for what it is to receive behind what it sends: a rank that comes a moment later than its
peer first writes all of its own rows, and only then does the peer hear that it may send.  Two directions of a link that
could be busy at once then take turns, more often than not (measured on 1 Gbit/s: 4 MB each way in 36 to 75 ms, and in
34 to 38 ms as below).  Nor does a transfer take one of the two threads that a gloo group has for its collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def start_all_to_all(
    out: Tensor, x: Tensor, recv: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start to fill ``out`` with ``recv[r]`` rows of every rank r of the group, which gets the next ``send[r]`` rows of
    ``x``; both are contiguous.  Returns what has to be waited for; until then ``x`` stays as it is.

    Every rank of the group calls it, in the order of its other collectives on this group; how many rows r sends to s,
    both have to say alike."""
    if x.device.type != "cpu" or "gloo" not in dist.get_backend(group):
        work = dist.all_to_all_single(out, x, list(recv), list(send), group=group, async_op=True)
        return [] if work is None else [work]
    mine, size = group.rank(), group.size()
    incoming, outgoing = out.split(list(recv)), x.split(list(send))
    around = [(mine + i) % size for i in range(1, size)]  # not everyone to rank 0 first
    works = [dist.irecv(incoming[r], group=group, group_src=r) for r in reversed(around) if recv[r]]
    works += [dist.isend(outgoing[r], group=group, group_dst=r) for r in around if send[r]]
    incoming[mine].copy_(outgoing[mine])
    return [w for w in works if w is not None]
