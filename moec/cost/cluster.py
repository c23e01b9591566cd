"""Cluster: the few numbers about machines and wires that costs are computed from.

Presets are in ``clusters.yaml``; ``moec calibrate`` measures the same numbers on a machine and writes a file of the
same form (one cluster, its fields at top level).  All times are seconds, all rates are a second's, and all are what
*one rank* gets while every rank of its node does the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from math import exp, isfinite, log
from pathlib import Path
from typing import Any

import yaml

from moec.runtime.errors import MoecError

Curve = tuple[tuple[float, float], ...]
"""(size, rate) by growing size.  Between two points log(rate) is linear in log(size), outside it is constant."""

SCOPES = ("node", "network")
"""Between ranks of one node; between nodes."""


def rate(curve: Curve, size: float) -> float:
    """The rate of a curve at a size."""
    at = bisect_right(curve, (size, float("inf")))
    if at in (0, len(curve)):
        return curve[min(at, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[at - 1 : at + 1]
    return exp(log(y0) + (log(y1) - log(y0)) * (log(size) - log(x0)) / (log(x1) - log(x0)))


@dataclass(frozen=True)
class Link:
    """A collective over this link takes ``alpha_s`` and its wire bytes by ``bytes_per_s``."""

    alpha_s: float
    bytes_per_s: float
    primitives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The same pair for a kind of collective that was measured on its own (``all_reduce``, ``exchange`` …).  The bytes
    are those of a ring even if the backend uses another algorithm: its rate is what makes the time right."""

    def of(self, primitive: str) -> tuple[float, float]:
        return self.primitives.get(primitive, (self.alpha_s, self.bytes_per_s))


@dataclass(frozen=True)
class Cluster:
    name: str
    matmul_flops: Mapping[str, Curve]
    """dtype (``"float32"``) -> FLOP/s by the FLOPs of one matrix product."""
    memory_bytes: Curve
    """Bytes/s by the bytes that an op reads and writes."""
    op_overhead_s: float
    """What an op takes that has nothing to do."""
    links: Mapping[str, Link]
    """``node`` and ``network``; without the former all goes over the latter."""
    ranks_per_node: int = 1
    at_once: int = 1
    """How many reductions of one communicator run at a time; others wait for their turn."""
    comm_share: float = 0.0
    """How much of a rank's compute its communication takes while it runs (CPU: threads that send and copy)."""
    launch_s: float = 0.0
    """What starting a collective takes of a rank's compute, beyond an op's overhead."""
    dispatch_s: float = 0.0
    """What launching an op takes of the host, which runs ahead of its GPU (``cost/host.py``); 0: it computes itself."""
    sync_s: float = 0.0
    """What it takes, once the GPU has computed something, until the host has read it."""
    ops: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Op (``"aten.pow"``) -> its own overhead in seconds, and how many times its roofline it takes beyond that."""

    def __post_init__(self) -> None:
        curves = [*self.matmul_flops.values(), self.memory_bytes]
        numbers = [x for c in curves for p in c for x in p]
        numbers += [
            x for link in self.links.values() for x in (link.bytes_per_s, *(b for _, b in link.primitives.values()))
        ]
        times = [
            self.op_overhead_s,
            self.launch_s,
            self.dispatch_s,
            self.sync_s,
            *(a for link in self.links.values() for a in (link.alpha_s, *(a for a, _ in link.primitives.values()))),
        ]
        times += [overhead for overhead, _ in self.ops.values()]
        numbers += [ratio for _, ratio in self.ops.values()]
        if not all(isfinite(x) and x > 0 for x in numbers) or not all(isfinite(x) and x >= 0 for x in times):
            self._refuse("sizes and rates must be positive numbers, times not negative")
        if not self.matmul_flops or not all(curves) or any(list(c) != sorted(c) for c in curves):
            self._refuse("a curve is a list of [size, rate] by growing size, and not empty")
        if unknown := set(self.links) - set(SCOPES):
            self._refuse(f"unknown links {sorted(unknown)}; known: {', '.join(SCOPES)}")
        if self.ranks_per_node < 1 or self.at_once < 1 or not 0 <= self.comm_share < 1:
            self._refuse("ranks_per_node and at_once are at least 1, comm_share is at least 0 and below 1")

    def _refuse(self, why: str) -> None:
        raise MoecError(why, where=f"cluster {self.name!r}")

    def matmul(self, dtype: str, flops: float) -> float:
        """FLOP/s; of a dtype that is not in the file, those of float32, else of the first one.  A GPU that does not
        multiply FP8 multiplies its values in bfloat16."""
        instead = "bfloat16" if dtype.startswith("float8") and self.dispatch_s else "float32"
        known = self.matmul_flops
        curve = known.get(dtype) or known.get(instead) or known.get("float32") or next(iter(known.values()))
        return rate(curve, flops)

    def memory(self, nbytes: float) -> float:
        return rate(self.memory_bytes, nbytes)

    def link(self, scope: str) -> Link:
        found = self.links.get(scope) or self.links.get("network")
        if found is None:
            raise MoecError(
                f"the cluster has no link between ranks of different nodes ({scope})",
                where=f"cluster {self.name!r}",
                way_out="calibrate under torchrun, with as many nodes as the plan has",
            )
        return found

    # ------------------------------------------------------------------------------------------- dict and YAML
    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["matmul_flops"] = {k: [list(p) for p in c] for k, c in self.matmul_flops.items()}
        data["memory_bytes"] = [list(p) for p in self.memory_bytes]
        data["ops"] = {k: list(v) for k, v in self.ops.items()}
        for name, link in self.links.items():
            data["links"][name]["primitives"] = {k: list(v) for k, v in link.primitives.items()}
        return data

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @staticmethod
    def from_dict(data: Mapping[str, Any], name: str = "") -> Cluster:
        """Raises MoecError for fields that do not exist, lack, or have other than numbers."""
        known = [f.name for f in fields(Cluster)]
        data = {"name": name, **data}
        if unknown := sorted(set(data) - set(known)):
            raise MoecError(f"unknown fields {unknown}; known: {', '.join(known)}", where=f"cluster {data['name']!r}")
        try:
            links = {
                k: Link(
                    float(v["alpha_s"]),
                    float(v["bytes_per_s"]),
                    {p: (float(a), float(b)) for p, (a, b) in (v.get("primitives") or {}).items()},
                )
                for k, v in (data.get("links") or {}).items()
            }
            return Cluster(
                name=str(data["name"]),
                matmul_flops={k: _curve(c) for k, c in data["matmul_flops"].items()},
                memory_bytes=_curve(data["memory_bytes"]),
                op_overhead_s=float(data["op_overhead_s"]),
                links=links,
                ranks_per_node=int(data.get("ranks_per_node", 1)),
                at_once=int(data.get("at_once", 1)),
                comm_share=float(data.get("comm_share", 0.0)),
                launch_s=float(data.get("launch_s", 0.0)),
                dispatch_s=float(data.get("dispatch_s", 0.0)),
                sync_s=float(data.get("sync_s", 0.0)),
                ops={op: (float(a), float(r)) for op, (a, r) in (data.get("ops") or {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise MoecError(f"not a cluster: {type(e).__name__} {e}", where=f"cluster {data['name']!r}") from None


def _curve(data: float | Sequence[Sequence[float]]) -> Curve:
    """A number is the rate of every size."""
    if isinstance(data, (int, float, str)):
        return ((1.0, float(data)),)
    return tuple((float(x), float(y)) for x, y in data)


def presets() -> dict[str, Cluster]:
    """The clusters that come with moec, by name."""
    data = yaml.safe_load(files("moec.cost").joinpath("clusters.yaml").read_text())
    return {name: Cluster.from_dict(fields, name) for name, fields in data.items()}


def cluster(name_or_path: str | Path) -> Cluster:
    """A preset by name, or the cluster in a file.  Raises MoecError when it is neither."""
    known = presets()
    if str(name_or_path) in known:
        return known[str(name_or_path)]
    path = Path(name_or_path)
    if not path.is_file():
        raise MoecError(
            f"{str(name_or_path)!r} is neither a file nor a known cluster; known: {', '.join(known)}",
            where="cluster",
            way_out="write a file with `moec calibrate`",
        )
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as e:
        raise MoecError(f"not valid YAML: {e}", where=str(path)) from None
    if not isinstance(data, Mapping):
        raise MoecError("expected the fields of a cluster", where=str(path))
    return Cluster.from_dict(data, path.stem)
