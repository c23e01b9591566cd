"""Expert parameters in a tape: which values hold them, and what their own steps do.

A value is of *one expert* (a member of a list, a slice ``w[e]``) or *whole*: a stacked parameter ``[E, …]`` itself, a
stack of a list's members, or either looked up by expert ids (``w[ids]``), all of which hold every expert's.  In both
cases its *features* are the axes that one expert's parameter has; whatever other axes it has say which expert.  When a
body is replayed, a parameter value is ``[E, *features]``, features in order of their axes.

A stacked parameter of the router (``[E, H]``, ``[E]``) is told from an expert's by what depends on it: the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .axes import follow
from .observe import Call, Tape
from .owners import PICKS, Owner
from .steps import Env, Refused, function_name

_CASTS = frozenset({"to", "type_as", "float", "double", "half", "bfloat16"})
_SPLITS = frozenset({"chunk", "split", "tensor_split"})


@dataclass(frozen=True)
class ExpertValues:
    of: dict[int, int]
    """Value -> the one expert that it is of."""
    roles: dict[int, str]
    """Value -> role, for values that are a parameter as the module owns it."""
    whole: frozenset[int]
    uses: tuple[tuple[Call, int], ...]
    """Calls in which one expert's parameters meet something else, and that expert."""
    whole_uses: tuple[Call, ...]

    def mine(self, expert: int | None) -> frozenset[int]:
        """Values of one expert, or (None) of all."""
        return self.whole if expert is None else frozenset(v for v, e in self.of.items() if e == expert)

    def all(self) -> set[int]:
        return {*self.of, *self.whole}


def expert_values(tape: Tape, owner: Owner) -> ExpertValues:
    of: dict[int, int] = {}
    roles: dict[int, str] = {}
    whole: set[int] = set()
    home = {name: (role, e) for role, names in owner.roles.items() for e, name in enumerate(names)}
    routing = _ancestors_of_choice(tape)
    for v, name in tape.params.items():
        if name in home and owner.stacked:
            if v not in routing or tape.held(v).dim() >= 3:
                roles[v] = home[name][0]
                whole.add(v)
        elif name in home:
            roles[v], of[v] = home[name]
    uses, whole_uses = [], []
    for call in tape.calls:
        if call.is_query:
            continue
        if call.reads and call.reads[0] in roles and call.reads[0] in whole:
            slices = [(v, _slice_index(tape.values[v], tape.values[call.reads[0]])) for v in call.makes]
            if any(e is not None for _, e in slices):
                for v, e in slices:
                    if e is not None:
                        roles[v], of[v] = roles[call.reads[0]], e
                continue
        if _stacks_a_role(call, owner, roles, of):
            roles[call.makes[0]] = roles[call.reads[0]]
            whole.add(call.makes[0])
            continue
        experts = {of[v] for v in call.reads if v in of}
        if len(experts) == 1 and all(v in of for v in call.reads):
            of.update((v, next(iter(experts))) for v in call.makes)
        elif len(experts) == 1:
            uses.append((call, next(iter(experts))))
        elif any(v in whole for v in call.reads):
            if all(v in whole or _are_ids(tape, v) for v in call.reads) and not _segmented(call):
                whole.update(call.makes)
            else:
                whole_uses.append(call)
    return ExpertValues(of, roles, frozenset(whole), tuple(uses), tuple(whole_uses))


def _ancestors_of_choice(tape: Tape) -> set[int]:
    """Values that the choice of experts depends on."""
    found: set[int] = set()
    for call in reversed(tape.calls):
        if call.name in PICKS or any(v in found for v in (*call.makes, *(new for _, new in call.overwrites))):
            found.update(call.reads)
    return found


def _slice_index(part: Tensor | None, whole: Tensor | None) -> int | None:
    if part is None or whole is None or part.shape != whole.shape[1:]:
        return None
    same = (whole == part).reshape(len(whole), -1).all(1).nonzero()
    return int(same[0]) if len(same) else None


def _stacks_a_role(call: Call, owner: Owner, roles: dict[int, str], of: dict[int, int]) -> bool:
    """``torch.stack`` of one role of every expert, in order."""
    reads = call.reads
    return (
        function_name(call.func) == "stack"
        and len({roles.get(v) for v in reads}) == 1
        and [of.get(v) for v in reads] == list(range(owner.num_experts))
        and call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0) == 0
    )


def _are_ids(tape: Tape, v: int) -> bool:
    t = tape.values[v]
    return t is not None and t.dtype in (torch.int64, torch.int32)


def _segmented(call: Call) -> bool:
    return function_name(call.func) in ("grouped_mm", "_grouped_mm")


# steps on parameters alone -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reshaped:
    """A step on one parameter alone: for each result which entries of which features it has, in which order."""

    call: Call
    source: int
    kept: tuple[tuple[slice | int, ...], ...]
    """Per result and feature of the source."""
    order: tuple[tuple[int, ...], ...]
    """Per result: which of the source's (remaining) features are its features."""

    def apply(self, env: Env, counts_E: Tensor) -> None:
        p = env[self.source]
        name = function_name(self.call.func)
        cut = [i for i, k in enumerate(self.kept[0]) if k != slice(0, p.shape[i + 1], 1)]
        if name in _CASTS:
            parts = [p.to(t.dtype) for t in _results(self.call)]
        elif name in _SPLITS and len(cut) == 1:  # a split stays one: its parts may be sharded block by block
            sizes = [len(range(*k[cut[0]].indices(p.shape[cut[0] + 1]))) for k in self.kept]  # type: ignore[union-attr]
            parts = list(torch.split(p, sizes, dim=cut[0] + 1))
        else:
            parts = [p[(slice(None), *k)] if cut else p for k in self.kept]
        for v, part, order in zip(self.call.makes, parts, self.order, strict=True):
            env[v] = part if order == tuple(sorted(order)) else part.permute(0, *(i + 1 for i in order))

    def widened(self, factor: int) -> Reshaped:
        """The step where every feature has ``factor`` times as many entries.  Raises Refused where that is unclear."""

        def one(k: slice | int) -> slice:
            if isinstance(k, int) or k.step != 1:
                raise Refused("at its own width an expert parameter may be cut in another way than in the narrow twin")
            return slice(k.start * factor, k.stop * factor, 1)

        return replace(self, kept=tuple(tuple(map(one, k)) for k in self.kept))


def _results(call: Call) -> list[Tensor]:
    return list(call.result) if isinstance(call.result, (tuple, list)) else [call.result]


def reshaped(tape: Tape, call: Call, features: dict[int, tuple[int, ...]]) -> tuple[Reshaped, dict[int, tuple]]:
    """The step, and the features of what it makes.  Raises Refused for anything that computes."""
    source = next(v for v in call.reads if v in features)
    name = function_name(call.func)
    if sum(v in features for v in call.reads) > 1:
        raise Refused(f"expert parameters are put together by {name}, which has no form for all experts at once")
    kept: list[list[slice | int]] = [[] for _ in call.makes]
    axes: list[list[tuple[int, int]]] = [[] for _ in call.makes]  # (axis in the result, number of the feature)
    for i, axis in enumerate(features[source]):
        if name in _CASTS:
            axes[0].append((axis, i))
            kept[0].append(slice(0, tape.held(source).shape[axis], 1))
            continue
        for r, f in enumerate(follow(tape, call, {source: axis})):
            if f.kept is None:
                raise Refused(f"an expert parameter goes through {name}, which has no form for all experts at once")
            kept[r].append(f.kept)
            if f.axis is not None:
                axes[r].append((f.axis, sum(isinstance(k, slice) for k in kept[r]) - 1))
    order = tuple(tuple(i for _, i in sorted(a)) for a in axes)
    new = {v: tuple(a for a, _ in sorted(found)) for v, found in zip(call.makes, axes, strict=True)}
    return Reshaped(call, source, tuple(map(tuple, kept)), order), new
