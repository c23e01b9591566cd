"""Locate: find in a tape what makes a MoE block, by dataflow, and confirm it with the recorded numbers.

The form that is looked for is ``out[t] = sum_k w[t, k] · f_{ids[t, k]}(x[t])``.

1. Values made of one expert's parameters only; the first *use* of one with something else.
2. The body ``f``: the steps that lead from the rows of that use to what the expert yields (several starts and ends are
   tried).
3. Candidates: ``ids`` from what a router returns or was handed in, ``x`` with one row a token, ``w`` shaped like ids
   (or ``[T, E]``, gathered), ``out`` after the last use.
4. The first combination whose numbers agree with the formula for every expert.
5. The *region*: calls that follow from ids or experts and that ``out`` replaces, ancestors of ids, x and w excepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .body import Body, Refused
from .observe import Call, Tape
from .owners import PICKS, Owner

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""For locating only: what is located is proved in float64 afterwards."""


@dataclass(frozen=True)
class Located:
    ids: int
    x: int
    weights: int
    dense_weights: bool
    """``weights`` is ``[T, E]`` and is gathered by ids."""
    body: Body
    outs: frozenset[int]
    """The values (views of one storage included) that are the combined output."""
    out_call: int
    top_k: int
    region: frozenset[int]
    """Indices of the calls that are not run again."""
    tainted: frozenset[int]
    """Values that only the region makes."""
    of_experts: frozenset[int]
    """Values that depend on an expert parameter."""


def locate(tape: Tape, owner: Owner, module: nn.Module) -> Located:
    made_of, role_of, uses = _parameter_values(tape, owner, module)
    if not uses:
        raise Refused("its experts were never called with rows")
    reached = {e for _, e in uses}
    if len(reached) < owner.num_experts:
        raise Refused(f"only {len(reached)} of its {owner.num_experts} experts were reached by fabricated inputs")
    of_experts = _descendants(tape, set(made_of))
    best = (float("inf"), "nothing shaped like a combined output was found")
    for body in _bodies(tape, uses[0], made_of, role_of, of_experts):
        for ids, x in _tokens(tape, owner, body, uses[0][0].index, of_experts):
            try:
                found, figure = _match(tape, owner, module, body, ids, x, uses[-1][0].index, of_experts)
            except Exception as e:  # a body that cannot be replayed on other rows is no body
                best = min(best, (float("inf"), f"the expert's body cannot be replayed: {e}"), key=lambda b: b[0])
                continue
            if found is not None:
                return _with_region(tape, found, made_of, of_experts)
            best = min(best, figure, key=lambda b: b[0])
    raise Refused(f"no output equals sum_k w[t, k] * expert_ids[t, k](x[t]); closest: {best[1]}")


# 1 ------------------------------------------------------------------------------------------------------------------


def _parameter_values(
    tape: Tape, owner: Owner, module: nn.Module
) -> tuple[dict[int, int], dict[int, str], list[tuple[Call, int]]]:
    """Value -> expert that it is made of; value -> role, for the parameters themselves; calls that use one."""
    made_of: dict[int, int] = {}
    role_of: dict[int, str] = {}
    whole: dict[int, str] = {}
    home = {name: (role, e) for role, names in owner.roles.items() for e, name in enumerate(names)}
    for v, name in tape.params.items():
        if name in home and owner.stacked:
            whole[v] = home[name][0]
        elif name in home:
            role_of[v], made_of[v] = home[name]
    uses = []
    for call in tape.calls:
        if call.is_query:
            continue
        stacked = [v for v in call.reads if v in whole]
        if stacked and call.reads[0] == stacked[0]:
            for v in call.makes:
                e = _slice_index(tape.values[v], tape.values[stacked[0]])
                if e is not None:
                    role_of[v], made_of[v] = whole[stacked[0]], e
            continue
        experts = {made_of[v] for v in call.reads if v in made_of}
        if len(experts) == 1 and all(v in made_of for v in call.reads):
            made_of.update((v, next(iter(experts))) for v in call.makes)
        elif len(experts) == 1:
            uses.append((call, next(iter(experts))))
    return made_of, role_of, uses


def _slice_index(part: Tensor | None, whole: Tensor | None) -> int | None:
    if part is None or whole is None or part.shape != whole.shape[1:]:
        return None
    same = (whole == part).flatten(1).all(1).nonzero()
    return int(same[0]) if len(same) else None


def _descendants(tape: Tape, seeds: set[int], stop: frozenset[int] = frozenset()) -> set[int]:
    found = set(seeds)
    for call in tape.calls:
        if any(v in found for v in call.reads):
            found.update(v for v in (*call.makes, *(new for _, new in call.overwrites)) if v not in stop)
    return found


def _ancestors(tape: Tape, seeds: set[int]) -> tuple[set[int], set[int]]:
    """Values and calls that the seeds depend on."""
    values, calls, todo = set(), set(), list(seeds)
    while todo:
        v = todo.pop()
        if v in values:
            continue
        values.add(v)
        if tape.maker[v] >= 0 and tape.maker[v] not in calls:
            call = tape.calls[tape.maker[v]]
            calls.add(call.index)
            todo.extend(call.reads)
            todo.extend(old for old, _ in call.overwrites)
    return values, calls


# 2 ------------------------------------------------------------------------------------------------------------------


def _bodies(
    tape: Tape, first: tuple[Call, int], made_of: dict[int, int], role_of: dict[int, str], of_experts: set[int]
) -> Iterator[Body]:
    call, expert = first
    params = {v: r for v, r in role_of.items() if made_of[v] == expert}
    mine = frozenset(v for v, e in made_of.items() if e == expert)
    start: int | None = next(v for v in call.reads if v not in made_of)
    for _ in range(5):
        if start is None:
            return
        inside, chosen = {start}, []
        for c in tape.calls[max(tape.maker[start], 0) :]:
            if c.makes and c.reads and all(v in inside or v in mine for v in c.reads):
                if any(v in role_of for v in c.makes):
                    continue  # the slice of a stacked parameter itself
                chosen.append(c)
                if any(v in inside for v in c.reads):
                    inside.update((*c.makes, *(new for _, new in c.overwrites)))
        lead = tape_shape(tape, start)[:-1]
        ends = [v for v in sorted(inside & of_experts, reverse=True) if tape_shape(tape, v)[:-1] == lead]
        for out in ends[:8]:
            values, calls = _ancestors_within(chosen, out)
            steps = tuple(c for c in chosen if c.index in calls)
            yield Body(start, out, steps, {v: r for v, r in params.items() if v in values}, mine)
        start = _previous(tape, start)


def tape_shape(tape: Tape, v: int) -> tuple[int, ...]:
    t = tape.values[v]
    return tuple(t.shape) if t is not None else ()


def _previous(tape: Tape, v: int) -> int | None:
    """What these rows were made from: rows of the same width, one step back."""
    if tape.maker[v] < 0:
        return None
    reads = tape.calls[tape.maker[v]].reads
    width = tape_shape(tape, v)[-1:]
    return next((r for r in reads if tape_shape(tape, r)[-1:] == width and tape_shape(tape, r)), None)


def _ancestors_within(calls: list[Call], out: int) -> tuple[set[int], set[int]]:
    values, kept = {out}, set()
    for c in reversed(calls):
        if any(v in values for v in (*c.makes, *(new for _, new in c.overwrites))):
            kept.add(c.index)
            values.update(c.reads)
            values.update(old for old, _ in c.overwrites)
    return values, kept


# 3 ------------------------------------------------------------------------------------------------------------------


def _tokens(tape: Tape, owner: Owner, body: Body, first_use: int, of_experts: set[int]) -> Iterator[tuple[int, int]]:
    """(ids, x) candidates: what a router picked, and floats with one row for each of its rows."""
    width = tape_shape(tape, body.rows)[-1]
    picked = {v for c in tape.calls if c.name in PICKS for v in c.makes} | set(tape.inputs)
    picked = _descendants(tape, picked)
    before = [v for v in range(len(tape.values)) if tape.maker[v] < first_use and v not in of_experts]
    for i in before:
        ids = tape.values[i]
        if i not in picked or ids is None or ids.dtype not in (torch.int64, torch.int32) or not ids.dim():
            continue
        if not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= owner.num_experts:
            continue
        seen: list[Tensor] = []
        for j in reversed(before):
            x = tape.values[j]
            if x is None or not x.is_floating_point() or x.dim() < 2 or x.shape[-1] != width or j in tape.params:
                continue
            tokens = x.numel() // width
            if not tokens or ids.numel() % tokens or not _rows_are(ids, tokens) or not tape.valid_at(j, first_use):
                continue
            flat = x.reshape(tokens, width)
            if not any(flat.shape == s.shape and torch.equal(flat, s) for s in seen):
                seen.append(flat)
                yield i, j


def _rows_are(ids: Tensor, tokens: int) -> bool:
    """Is ids ``[…tokens…, K]``, or ``[…tokens…]`` with K = 1, each row without repeats?"""
    k = ids.numel() // tokens
    if ids.shape[-1] != k and k != 1:
        return False
    rows = ids.reshape(tokens, k).sort(1).values
    return not bool((rows[:, 1:] == rows[:, :-1]).any())


# 4 ------------------------------------------------------------------------------------------------------------------


def _match(
    tape: Tape, owner: Owner, module: nn.Module, body: Body, i: int, j: int, last_use: int, of_experts: set[int]
) -> tuple[Located | None, tuple[float, str]]:
    x = tape.held(j)
    x_TH = x.reshape(-1, x.shape[-1])
    ids_TK = tape.held(i).reshape(x_TH.shape[0], -1)
    pairs_TKM = _pairs(body, owner, module, x_TH, ids_TK)
    outs = [
        v
        for v in sorted(of_experts)
        if tape.maker[v] >= last_use
        and tape_shape(tape, v)[-1:] == pairs_TKM.shape[-1:]
        and tape.held(v).numel() == pairs_TKM[:, 0].numel()
        and tape.held(v).is_floating_point()
    ]
    best = (float("inf"), "no value after the last expert has one row a token")
    for w, dense, w_TK in _weights(tape, owner, ids_TK, of_experts):
        y_TM = (pairs_TKM * w_TK[..., None]).sum(1)
        for v in outs:
            out = tape.held(v).reshape(y_TM.shape)
            error = float((y_TM - out).abs().max() / out.abs().max().clamp_min(1e-30))
            if error <= TOLERANCE.get(out.dtype, 1e-4):
                call = tape.maker[v]
                same = [o for o in outs if tape.maker[o] == call]
                found = Located(i, j, w, dense, body, frozenset(same), call, ids_TK.shape[1], *(frozenset(),) * 3)
                return found, best
            best = min(best, (error, f"relative error {error:.3g} at call {tape.calls[tape.maker[v]].name}"))
    return None, best


def _pairs(body: Body, owner: Owner, module: nn.Module, x_TH: Tensor, ids_TK: Tensor) -> Tensor:
    """``f_{ids[t, k]}(x[t])`` for every pair."""
    pairs: Tensor | None = None
    for e in range(owner.num_experts):
        t, k = (ids_TK == e).nonzero(as_tuple=True)
        y = body.for_expert(x_TH[t], _parameters(owner, module, e))
        if pairs is None:
            pairs = y.new_zeros(*ids_TK.shape, y.shape[-1])
        pairs[t, k] = y
    assert pairs is not None
    return pairs


def _parameters(owner: Owner, module: nn.Module, e: int) -> Callable[[str], Tensor]:
    return lambda role: owner.member(role, module, e).detach()


def _weights(tape: Tape, owner: Owner, ids_TK: Tensor, of_experts: set[int]) -> Iterator[tuple[int, bool, Tensor]]:
    tokens, k = ids_TK.shape
    for dense, width in ((False, k), (True, owner.num_experts)):
        for v, t in enumerate(tape.values):
            if t is None or not t.is_floating_point() or v in of_experts or v in tape.params:
                continue
            if t.numel() != tokens * width or not t.dim() or (t.shape[-1] != width and width != 1):
                continue
            flat = t.reshape(tokens, width)
            yield v, dense, flat.gather(1, ids_TK.long()) if dense else flat


# 5 ------------------------------------------------------------------------------------------------------------------


def _with_region(tape: Tape, found: Located, made_of: dict[int, int], of_experts: set[int]) -> Located:
    _, needed = _ancestors(tape, {found.ids, found.x, found.weights})
    tainted = {found.ids, *made_of}
    region: set[int] = set()
    data = {"__bool__", "item", "tolist", "__int__", "__index__", "__float__", "numpy", "__contains__", "__len__"}
    for call in tape.calls:
        if call.index in needed:
            continue
        hit = any(v in tainted for v in call.reads) or any(v in made_of for v in call.makes)
        if call.is_query and call.name not in data:
            hit = any(v in tainted and v != found.ids for v in call.reads)
        if hit:
            region.add(call.index)
            new = {*call.makes, *(n for _, n in call.overwrites)}
            tainted.update(v for v in new if v not in found.outs)
    mutated = {old for i in region for old, _ in tape.calls[i].overwrites}
    kept = [tape.params.get(v, "an input") for v in mutated if tape.maker[v] < 0]
    if kept:
        raise Refused(f"its forward writes to {kept[0]}")
    for v in (found.ids, found.x, found.weights):
        if not tape.valid_at(v, found.out_call):
            raise Refused("its ids, weights or tokens are overwritten before the experts are combined")
    return Located(
        found.ids,
        found.x,
        found.weights,
        found.dense_weights,
        found.body,
        found.outs,
        found.out_call,
        found.top_k,
        frozenset(region),
        frozenset(tainted - {found.ids}),
        frozenset(_descendants(tape, set(made_of), found.outs)),
    )
