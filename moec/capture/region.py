"""Region: the calls of a located block that are not run again, because its combined output replaces them.

They are what follows from the choice of experts or from their parameters, except what the ids, tokens, weights and the
base themselves are computed from.
"""

from __future__ import annotations

from dataclasses import dataclass

from .observe import Tape
from .params import ExpertValues
from .steps import Refused

_DATA = frozenset(
    {"__bool__", "item", "tolist", "__int__", "__index__", "__float__", "numpy", "__contains__", "__len__"}
)


@dataclass(frozen=True)
class Region:
    calls: frozenset[int]
    """Indices of the calls that are not run again."""
    tainted: frozenset[int]
    """Values that only the region makes."""
    of_experts: frozenset[int]
    """Values that depend on an expert parameter, up to the combined output."""


def region(
    tape: Tape, values: ExpertValues, choice: set[int], kept: set[int], outs: frozenset[int], out_call: int
) -> Region:
    """``choice``: what says which expert a token goes to; ``kept``: the values that are computed still.

    Raises Refused if the block writes to a parameter or input, or overwrites what is kept before it is used."""
    _, needed = ancestors(tape, kept)
    made_of = values.all()
    tainted = {*choice, *made_of}
    calls: set[int] = set()
    for call in tape.calls:
        if call.index in needed:
            continue
        hit = any(v in tainted for v in call.reads) or any(v in made_of for v in call.makes)
        if call.is_query and call.name not in _DATA:
            hit = any(v in tainted and v not in choice for v in call.reads)
        if hit:
            calls.add(call.index)
            new = {*call.makes, *(n for _, n in call.overwrites)}
            tainted.update(v for v in new if v not in outs)
    mutated = {old for i in calls for old, _ in tape.calls[i].overwrites}
    written = [tape.params.get(v, "an input") for v in mutated if tape.maker[v] < 0]
    if written:
        raise Refused(f"its forward writes to {written[0]}")
    for v in kept:
        # What the region itself overwrites stays as it is, for the region is not run.
        if tape.maker[v] >= out_call or not (tape.valid_at(v, out_call) or tape.died[v] in calls):
            raise Refused("its ids, weights or tokens are overwritten before the experts are combined")
    return Region(frozenset(calls), frozenset(tainted - choice), frozenset(descendants(tape, made_of, outs)))


def descendants(tape: Tape, seeds: set[int], stop: frozenset[int] = frozenset()) -> set[int]:
    found = set(seeds)
    for call in tape.calls:
        if any(v in found for v in call.reads):
            found.update(v for v in (*call.makes, *(new for _, new in call.overwrites)) if v not in stop)
    return found


def ancestors(tape: Tape, seeds: set[int]) -> tuple[set[int], set[int]]:
    """Values and calls that the seeds depend on."""
    values: set[int] = set()
    calls: set[int] = set()
    todo = list(seeds)
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
