"""Small programs with collectives, shared by the tests of the ops and of the lockstep world (not a test itself)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

import moec.runtime  # noqa: F401  registers the ops
from moec.runtime.collectives import CONVERSIONS, MAXIMA, TABLE
from moec.runtime.mesh import Mesh
from moec.runtime.torch_compat import WAIT

MESH = Mesh.of(dp=2, tp=2, ep=4)  # axes dp_ep, tp_ep
KEYS = ("dp_ep", "tp_ep", "dp_ep,tp_ep")
moec_ops = torch.ops.moec


@dataclass(frozen=True)
class Case:
    """One typed conversion of a tensor of ``shape``."""

    kind: str
    key: str
    dims: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...] = (4, 8, 4)

    def graph(self, group: str) -> fx.GraphModule:
        return conversion(self.kind, self.dims, MESH.size(self.key), group)

    def input(self, rank: int) -> Tensor:
        """Small integers, so that sums are exact in every dtype and results compare bit by bit."""
        gen = torch.Generator().manual_seed(7 + rank)
        x = torch.randint(-8, 9, self.shape, generator=gen).to(self.dtype)
        return x.requires_grad_(self.dtype.is_floating_point)

    def cotangent(self, y: Tensor, rank: int) -> Tensor:
        return torch.randint(-8, 9, y.shape, generator=torch.Generator().manual_seed(99 + rank)).to(y.dtype)


def conversion(kind: str, dims: tuple[int, ...], size: int, group: str) -> fx.GraphModule:
    """x -> op -> (wait) -> output."""
    graph = fx.Graph()
    y = graph.call_function(TABLE[kind].op, (graph.placeholder("x"), *dims, size, group))
    if TABLE[kind].needs_wait:
        y = graph.call_function(WAIT, (y,))
    graph.output((y,))
    return fx.GraphModule(torch.nn.Module(), graph)


def dims_of(kind: str) -> list[tuple[int, ...]]:
    if kind == "s_to_s":
        return [(0, 1), (1, 0), (2, 1), (0, 2), (-1, 0)]
    return [(0,), (1,), (-1,)] if "s" in kind else [(0,)]


def cases() -> list[Case]:
    kinds = (*CONVERSIONS, *MAXIMA)
    out = [Case(kind, key, dims, torch.float64) for kind in kinds for key in KEYS for dims in dims_of(kind)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        out += [Case(kind, KEYS[2], dims_of(kind)[-1], dtype) for kind in kinds]
    out += [Case(kind, KEYS[0], dims_of(kind)[0], torch.float32, (0, 0, 3)) for kind in kinds]
    return out


def exchange_graph(kind: str, size: int, group: str) -> fx.GraphModule:
    """(x, send, recv) -> all_to_all or all_to_all_rows (as many rows as x has) -> wait -> output."""
    graph = fx.Graph()
    x, send, recv = (graph.placeholder(n) for n in ("x", "send", "recv"))
    rows = [graph.call_function(torch.ops.aten.sym_size.int, (x, 0))] if kind == "all_to_all_rows" else []
    y = graph.call_function(TABLE[kind].op, (x, send, recv, *rows, size, group))
    graph.output((graph.call_function(WAIT, (y,)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def exchange_inputs(key: str, seed: int, rank: int, rows: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Uneven splits with zeros among them; one source sends nothing at all, and no source sends its last rows."""
    size = MESH.size(key)
    send_RR = torch.randint(0, 5, (size, size), generator=torch.Generator().manual_seed(seed))
    send_RR[seed % size] = 0
    send_RR[0, -1] = 0
    me = MESH.index(rank, key)
    x = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 31 * rank))
    return x.requires_grad_(), send_RR[me].clone(), send_RR[:, me].clone()


def ep_moe(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_EHH: Tensor, b_EH: Tensor, E: int, R: int, group: str):
    """Experts dealt to the R ranks of ``group``: permute, exchange, compute, exchange back, unpermute.

    ``w_EHH`` and ``b_EH`` hold the E/R experts of this rank.
    """
    permuted = moec_ops.permute.default(x_TH, ids_TK, E)
    rows, counts_E, row_of = permuted[0], permuted[1], permuted[2]
    recv_RE = WAIT(moec_ops.exchange_counts.default(counts_E, R, group))
    send_R, recv_R = counts_E.view(R, E // R).sum(1), recv_RE.sum(1)
    arrived = WAIT(moec_ops.all_to_all.default(rows, send_R, recv_R, R, group))
    mine = moec_ops.sort_chunks.default(arrived, recv_RE, False)
    counts = recv_RE.sum(0)
    mine = moec_ops.grouped_add.default(moec_ops.grouped_mm.default(mine, w_EHH, counts), b_EH, counts)
    mine = torch.ops.aten.tanh.default(mine)
    back = moec_ops.sort_chunks.default(mine, recv_RE, True)
    home = WAIT(moec_ops.all_to_all.default(back, recv_R, send_R, R, group))
    return moec_ops.unpermute.default(home, weights_TK, row_of)


def dense_moe(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_EHH: Tensor, b_EH: Tensor) -> Tensor:
    """The same on one device, every expert on every token."""
    y_ETH = (torch.einsum("th,ehm->etm", x_TH, w_EHH) + b_EH[:, None]).tanh()
    hot_TKE = (ids_TK[..., None] == torch.arange(w_EHH.shape[0])).to(x_TH.dtype)
    return torch.einsum("tk,tke,eth->th", weights_TK, hot_TKE, y_ETH)


def moe_inputs(tokens: list[int], E: int, K: int, H: int, seed: int) -> dict[str, list[Tensor] | Tensor]:
    """Global parameters and every rank's tokens; routing is skewed, some pairs are dropped, an expert stays empty."""
    gen = torch.Generator().manual_seed(seed)
    used = max(K, E - 1)
    ids = [(torch.rand(T, used, generator=gen) ** torch.arange(1, used + 1)).argsort(1)[:, :K] for T in tokens]
    return {
        "x": [torch.randn(T, H, dtype=torch.float64, generator=gen) for T in tokens],
        "ids": [torch.where(torch.rand(i.shape, generator=gen) < 0.2, -1, i) for i in ids],
        "weights": [torch.rand(T, K, dtype=torch.float64, generator=gen) for T in tokens],
        "w": torch.randn(E, H, H, dtype=torch.float64, generator=gen) / H**0.5,
        "b": torch.randn(E, H, dtype=torch.float64, generator=gen),
    }
