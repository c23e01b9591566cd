"""calibrate: measure a machine, and with a process group its network, as the numbers of a :class:`moec.cost.Cluster`.

All ranks measure at the same time, since that is how they work: what they share (memory, caches, a node's adapter)
counts for each as what is left for it.

1. Matrix products of growing size, per dtype: FLOP/s by FLOPs.
2. Element-wise additions into new memory, of growing size: bytes/s by bytes; of one element: the overhead of an op.
3. Each kind of collective, between the ranks of a node and between nodes: latency from a small one, bandwidth from
   large ones, with the bytes that a ring would send (``Collective.wire_bytes``); what starting one takes.
4. Products beside long collectives: how much slower they are.
5. On a GPU, what launching an op takes of the host, and what reading a number takes beyond it.
6. The ops of a typical layer: their overheads, and how much slower than a product or an addition they are
   (``calibrate_ops``).

7. How often work is interrupted: a figure is the median over repetitions (of ranks, the mean), which leaves out what
   other programs, the kernel and the hypervisor take, and a step does not.  So products run for ``STEADY`` seconds, and
   by as much as their mean is above their median everything that was measured is slower.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor

from moec.calibrate_ops import ops
from moec.cost.cluster import Cluster, Curve, Link
from moec.runtime.collectives import PRIMITIVES
from moec.runtime.errors import MoecError
from moec.runtime.peers import Pair, start_all_gather, start_all_to_all, start_reduce_scatter
from moec.runtime.torch_compat import wait

PRODUCTS = (16, 32, 64, 128, 256, 512, 1024)
"""Rows, columns and depth of the products."""
COLD, MOST_PAIRS = 1 << 26, 256
"""Bytes of the operands that products and additions take turns with, and how many at most."""
ELEMENTS = tuple(4**k for k in range(5, 13))
"""Of the additions, fp32: 4 kB to 64 MB."""
SHARE_PRODUCT = 256
SMALL, LARGE = 256, (1 << 18, 1 << 21)
"""Elements (fp32) of a collective's whole tensor, for each rank of the group."""
WARM_UP, REPEATS, STEADY = 1, 5, 2.0


def calibrate(
    name: str = "calibrated", dtypes: tuple[str, ...] = ("float32", "bfloat16"), device: str = "cpu"
) -> Cluster:
    """Collective where a process group is initialised; without one the cluster has no links.

    ``device``: where to measure (``cpu``, or this process's ``cuda``).  Takes about half a minute on a CPU.  Raises
    MoecError for an unknown dtype, before anything is measured."""
    if unknown := [d for d in dtypes if not isinstance(getattr(torch, d, None), torch.dtype)]:
        raise MoecError(f"{unknown} is not a dtype", where="calibrate", way_out="float32, bfloat16, float16, float64 …")
    clock = _Clock(device)
    overhead = clock.time(_addition(device, 1))
    matmul = {d: _products(clock, getattr(torch, d), overhead) for d in dtypes}  # 1
    memory = _additions(clock, overhead)  # 2
    links: dict[str, Link] = {}
    local, share, launch = 1, 0.0, 0.0
    if clock.world > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", clock.world))
        links = {scope: _link(clock, groups) for scope, groups in _scopes(local).items()}  # 3
        share = _share(clock)  # 4
        launch = max(0.0, _launch(clock) - overhead)
    at_once = 2 if clock.world > 1 and dist.get_backend() == "gloo" else 1  # gloo: two threads a process group
    found = Cluster(name, matmul, memory, overhead, links, local, at_once, share, launch)
    if device != "cpu":
        dispatch, sync = _host(clock, overhead)  # 5
        found = replace(found, dispatch_s=dispatch, sync_s=sync)
    return slower(replace(found, ops=ops(found, device, clock.mean)), _interrupted(clock))  # 6 and 7


def slower(cluster: Cluster, times: float) -> Cluster:
    """Its compute takes so many times as long; transfers do not."""

    def curve(rates: Curve) -> Curve:
        return tuple((size, rate / times) for size, rate in rates)

    return replace(
        cluster,
        matmul_flops={d: curve(c) for d, c in cluster.matmul_flops.items()},
        memory_bytes=curve(cluster.memory_bytes),
        op_overhead_s=cluster.op_overhead_s * times,
        ops={op: (overhead * times, ratio) for op, (overhead, ratio) in cluster.ops.items()},
    )


class _Clock:
    """Medians of seconds, agreed on by all ranks, who measure together."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def time(self, run: Callable[[], object], inner: int | None = None) -> float:
        """Seconds of ``run``, which is repeated ``inner`` times in a row (default: about a millisecond's worth)."""
        for _ in range(WARM_UP):
            run()
        if inner is None:
            inner = max(1, min(1000, int(1e-3 / max(self._once(run, 1), 1e-7))))
        inner = round(self.mean(inner))
        return self.mean(median(self._once(run, inner) for _ in range(REPEATS)))

    def _once(self, run: Callable[[], object], inner: int) -> float:
        if self.world > 1:
            dist.barrier()
        self.finish()
        began = time.perf_counter()
        for _ in range(inner):
            run()
        self.finish()
        return (time.perf_counter() - began) / inner

    def finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def mean(self, value: float) -> float:
        if self.world == 1:
            return float(value)
        total = torch.tensor(float(value), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.world


def _product(device: str, dtype: torch.dtype, n: int) -> Callable[[], Tensor]:
    """Of other operands each time: those of a step come from memory, not from the cache that the last ones left."""
    pairs = min(MOST_PAIRS, max(1, COLD // (2 * n * n * dtype.itemsize)))
    operands = cycle([tuple(torch.randn(n, n, device=device).to(dtype) for _ in range(2)) for _ in range(pairs)])

    def run() -> Tensor:
        x, y = next(operands)
        return x @ y

    return run


def _products(clock: _Clock, dtype: torch.dtype, overhead: float) -> Curve:
    found = [(2.0 * n**3, clock.time(_product(clock.device, dtype, n))) for n in PRODUCTS]
    return tuple((flops, flops / _beyond(took, overhead)) for flops, took in found)


def _beyond(took: float, overhead: float) -> float:
    """What an op took that is not its overhead."""
    return max(took - overhead, took / 2)


def _addition(device: str, n: int) -> Callable[[], Tensor]:
    several = min(MOST_PAIRS, max(1, COLD // (4 * n)))
    operands = cycle([torch.zeros(n, dtype=torch.float32, device=device) for _ in range(several)])
    return lambda: next(operands) + 1


def _additions(clock: _Clock, overhead: float) -> Curve:
    found = [(8.0 * n, clock.time(_addition(clock.device, n))) for n in ELEMENTS]
    return tuple((nbytes, nbytes / _beyond(took, overhead)) for nbytes, took in found)


def _scopes(local: int) -> dict[str, Pair]:
    """This rank's group inside its node, and the one of the ranks with its place in every node; each with a second one
    of the same ranks, for the way back of exchanges."""
    world, rank = dist.get_world_size(), dist.get_rank()
    inside = [list(range(first, first + local)) for first in range(0, world, local)]
    across = [list(range(place, world, local)) for place in range(local)]
    found = {}
    for scope, groups in (("node", inside), ("network", across)):
        for ranks in groups:
            if len(ranks) > 1:
                made = dist.new_group(ranks), dist.new_group(ranks)
                if rank in ranks:
                    found[scope] = made
    return found


def _link(clock: _Clock, groups: Pair) -> Link:
    pairs, size = {}, groups[0].size()
    for kind, make in _COLLECTIVES.items():
        alpha = clock.time(make(groups, clock.device, SMALL), inner=20)
        rates = []
        for elements in LARGE:
            took = clock.time(make(groups, clock.device, elements), inner=2) - alpha
            whole = 4 * elements * size
            times = PRIMITIVES[kind]
            assert times is not None
            rates.append(times * whole * (size - 1) / size / max(took, 1e-9))
        pairs[kind] = (alpha, median(rates))
    for kind in ("exchange", "equal", "counts"):
        pairs[kind] = pairs["all_to_all"]
    alpha, beta = pairs["all_reduce"]
    return Link(alpha, beta, pairs)


def _all_reduce(groups: Pair, device: str, n: int) -> Callable[[], object]:
    x = torch.zeros(n * groups[0].size(), device=device)
    return lambda: dist.all_reduce(x, group=groups[0])


def _all_gather(groups: Pair, device: str, n: int) -> Callable[[], object]:
    x, out = torch.zeros(n, device=device), torch.zeros(n * groups[0].size(), device=device)
    return lambda: [w.wait() for w in start_all_gather(out, x, *groups)]


def _reduce_scatter(groups: Pair, device: str, n: int) -> Callable[[], object]:
    x, out = torch.zeros(n * groups[0].size(), device=device), torch.zeros(n, device=device)
    return lambda: [w.wait() for w in start_reduce_scatter(out, x, *groups)]


def _all_to_all(groups: Pair, device: str, n: int) -> Callable[[], object]:
    x, out = torch.zeros(n * groups[0].size(), device=device), torch.zeros(n * groups[0].size(), device=device)
    splits = [n] * groups[0].size()
    return lambda: [w.wait() for w in start_all_to_all(out, x, splits, splits, *groups)]


_COLLECTIVES: dict[str, Callable[[Pair, str, int], Callable[[], object]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _launch(clock: _Clock) -> float:
    """What it takes to start a collective op, before it is waited for."""
    x, group = torch.zeros(1, device=clock.device), _everyone().group_name

    def once() -> float:
        dist.barrier()
        began = time.perf_counter()
        found = [torch.ops.moec.p_to_i(x, 0, clock.world, group) for _ in range(20)]
        took = (time.perf_counter() - began) / len(found)
        for y in found:
            wait(y)
        return took

    return clock.mean(median(once() for _ in range(REPEATS)))


def _interrupted(clock: _Clock) -> float:
    """How many times their median products take on average, at least 1; of a GPU, which nobody interrupts, 1."""
    if clock.device != "cpu":
        return 1.0
    run, took = _product(clock.device, torch.float32, 2 * SHARE_PRODUCT), list[float]()
    run()
    while sum(took) < STEADY or len(took) < 2:
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return max(1.0, clock.mean(fmean(took) / median(took)))


def _host(clock: _Clock, overhead: float) -> tuple[float, float]:
    """Seconds of launching an op, while the GPU is behind; and of reading its result, once it is there."""
    x = torch.zeros(1, dtype=torch.float32, device=clock.device)

    def launches() -> float:
        clock.finish()
        began = time.perf_counter()
        for _ in range(100):
            x + 1
        return (time.perf_counter() - began) / 100

    dispatch = clock.mean(median(launches() for _ in range(REPEATS)))
    return dispatch, max(0.0, clock.time(lambda: (x + 1).item()) - dispatch - overhead)


def _share(clock: _Clock) -> float:
    """The part of a rank's compute that is gone while it communicates: products that take about as long as the
    transfers beside them, an all-reduce and an exchange in turn."""
    run = _product(clock.device, torch.float32, SHARE_PRODUCT)
    x, out = (torch.zeros(LARGE[-1] * clock.world, device=clock.device) for _ in range(2))
    splits, back = [LARGE[-1]] * clock.world, dist.new_group()
    starts: list[Callable[[], list[dist.Work]]] = [
        lambda: [dist.all_reduce(x, async_op=True)],
        lambda: start_all_to_all(out, x, splits, splits, _everyone(), back),
    ]
    lost = []
    for start in starts:
        alone = clock.time(run)

        def transfer(start: Callable[[], list[dist.Work]] = start) -> None:
            for work in start():
                work.wait()

        times = max(1, round(clock.time(transfer, inner=1) / alone))

        def beside(start: Callable[[], list[dist.Work]] = start, times: int = times) -> float:
            """Seconds of one product, while the transfer lasts or longer."""
            works, took = start(), 0.0
            for _ in range(times):
                began = time.perf_counter()
                run()
                clock.finish()
                took += time.perf_counter() - began
            for work in works:
                work.wait()
            return took / times

        dist.barrier()
        lost.append(1 - alone / clock.mean(median(beside() for _ in range(REPEATS))))
    return min(max(0.0, sum(lost) / len(lost)), 0.95)
