"""Locate: find in a tape what makes a MoE block, by dataflow, and confirm it with the recorded numbers.

The form that is looked for is ``out[t] = base[t] + sum_k w[t, k] · f_{ids[t, k]}(x[t])``, the weight applied after,
before or inside of ``f``, the base often missing.

1. Values that hold expert parameters (``params``), and bodies ``f`` cut out around them (``body``).
2. Candidates: ``ids`` from what a router returns or was handed in, or from weights that are zero for all experts but
   the chosen ones; ``x`` with one row a token; ``w`` in any of its forms (``weights``); ``out`` after the last use.
3. Combinations whose numbers agree with the formula, simple ones first.  They are proved one by one by whoever asks.
4. The *region* that ``out`` replaces (``region``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from .body import Body, bodies
from .observe import Tape
from .owners import PICKS, Owner
from .params import ExpertValues, expert_values
from .region import Region, ancestors, descendants, region
from .steps import Refused
from .weights import How, Weights, candidates, chosen, combined

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""For locating only: what is located is proved in float64 afterwards."""


@dataclass(frozen=True)
class Located:
    ids: int | None
    """None: the weights say which experts a token goes to."""
    x: int
    weights: Weights
    how: How
    base: int | None
    """What the sum is added to."""
    body: Body
    outs: frozenset[int]
    """The values (views of one storage included) that are the combined output."""
    out_call: int
    top_k: int
    region: Region


def locate(tape: Tape, owner: Owner, module: nn.Module) -> Iterator[Located]:
    """Every combination that fits the recorded numbers.  Raises Refused, at the end, if there was none."""
    values = expert_values(tape, owner)
    if not values.uses and not values.whole_uses:
        raise Refused("its experts were never called with rows")
    reached = {e for _, e in values.uses}
    if values.uses and len(reached) < owner.num_experts:
        raise Refused(f"only {len(reached)} of its {owner.num_experts} experts were reached by fabricated inputs")
    search = _Search(tape, owner, module, values)
    count = 0
    for found in search.matches():
        count += 1
        yield found
    if not count:
        raise Refused(search.closest())


@dataclass(frozen=True)
class _Tokens:
    ids: int | None
    x: int
    x_TH: Tensor
    ids_TK: Tensor | None


class _Search:
    def __init__(self, tape: Tape, owner: Owner, module: nn.Module, values: ExpertValues) -> None:
        self.tape, self.owner, self.values = tape, owner, values
        self.of_experts = descendants(tape, values.all())
        uses = [c.index for c, _ in values.uses] or [c.index for c in values.whole_uses]
        self.first_use, self.last_use = uses[0], uses[-1]
        self.stack: Callable[[str], Tensor] = cache(lambda role: owner.stack(role, module).detach())
        self.best = (float("inf"), "no value after the last expert has one row a token")
        self.unplayed = ""
        self.tried: set[tuple[int | None, int]] = set()
        """(ids, weights) of what was proposed: the first way to combine them is the simplest."""

    def closest(self) -> str:
        if self.unplayed and self.best[0] == float("inf"):
            return f"the expert's body cannot be replayed: {self.unplayed}"
        return f"no output equals sum_k w[t, k] * expert_ids[t, k](x[t]); closest: {self.best[1]}"

    # 3
    def matches(self) -> Iterator[Located]:
        proposed = list(bodies(self.tape, self.values, self.of_experts))
        plain = [b for b in proposed if b.scale is None]
        scaled = [b for b in proposed if b.scale is not None]
        passes: list[tuple[How, list[Body]]] = [("after", plain), ("before", plain), ("inside", scaled)]
        for by_ids in (True, False):
            for with_base in (False, True):
                for how, some in passes:
                    for body in some:
                        for tokens in self._tokens(body, by_ids):
                            yield from self._match(body, tokens, how, with_base)

    def _match(self, body: Body, tokens: _Tokens, how: How, with_base: bool) -> Iterator[Located]:
        experts = self.owner.num_experts
        ids_TK = tokens.ids_TK
        k = None if ids_TK is None else ids_TK.shape[1]
        pairs: Tensor | None = None
        for weights in candidates(self.tape, len(tokens.x_TH), k, experts, self.of_experts):
            if (tokens.ids, weights.value) in self.tried:
                continue
            w = self.tape.held(weights.value)
            dense = None if ids_TK is not None else weights.dense(w, experts)
            ids = ids_TK if dense is None else chosen(dense)
            assert ids is not None
            if dense is not None and (weights.form == "pairs" or bool((ids >= 0).all())):
                continue
            w_TK = dense if dense is not None else weights.per_pair(w, ids, experts)
            try:
                if how == "after" and ids_TK is not None:  # the experts' work is the same for all weights
                    pairs = self._pairs(body, tokens.x_TH, ids) if pairs is None else pairs
                    y_TM = (pairs * w_TK[..., None]).sum(1)
                else:
                    y_TM = combined(how, body, tokens.x_TH, ids, w_TK, experts, self.stack)
            except Exception as e:  # a body that cannot be replayed on other rows is no body
                self.unplayed = str(e)
                return
            yield from self._outputs(y_TM, body, tokens, weights, how, with_base)

    def _pairs(self, body: Body, x_TH: Tensor, ids_TK: Tensor) -> Tensor:
        """``f_{ids[t, k]}(x[t])``, ``[T, K, M]``"""
        rows, counts, row_of_TK = torch.ops.moec.permute(x_TH, ids_TK, self.owner.num_experts)
        return body.grouped(rows, counts, self.stack)[row_of_TK]

    def _outputs(
        self, y_TM: Tensor, body: Body, tokens: _Tokens, weights: Weights, how: How, with_base: bool
    ) -> Iterator[Located]:
        tape = self.tape
        for v in sorted(self.of_experts):
            out = tape.values[v]
            if out is None or tape.maker[v] < self.last_use or not self._like(out, y_TM):
                continue
            out = out.reshape(y_TM.shape)
            base = None
            error = _relative(out, y_TM)
            if error > _tolerance(out):
                if not with_base:
                    self.best = min(self.best, (error, f"relative error {error:.3g} at {self._call(v)}"))
                    continue
                base = self._base(out - y_TM, out)
                if base is None:
                    continue
            elif with_base:
                continue
            call = tape.maker[v]
            outs = frozenset(o for o in self.of_experts if tape.maker[o] == call and self._like(tape.values[o], y_TM))
            kept = {u for u in (tokens.ids, tokens.x, weights.value, base) if u is not None}
            choice = {tokens.ids} if tokens.ids is not None else set()
            k = tokens.ids_TK.shape[1] if tokens.ids_TK is not None else self.owner.num_experts
            try:
                around = region(tape, self.values, choice, kept, outs, call)
            except Refused as e:
                self.best = min(self.best, (error, str(e)))
                continue
            self.tried.add((tokens.ids, weights.value))
            yield Located(tokens.ids, tokens.x, weights, how, base, body, outs, call, k, around)
            return

    def _call(self, v: int) -> str:
        return f"call {self.tape.calls[self.tape.maker[v]].name}"

    @staticmethod
    def _like(t: Tensor | None, y_TM: Tensor) -> bool:
        return (
            t is not None
            and t.is_floating_point()
            and t.dim() >= 1
            and t.shape[-1] == y_TM.shape[1]
            and t.numel() == y_TM.numel()
        )

    def _base(self, rest_TM: Tensor, out: Tensor) -> int | None:
        """The value that ``rest`` is."""
        for v, t in enumerate(self.tape.values):
            if v in self.of_experts or t is None or not self._like(t, rest_TM):
                continue
            scale = float(out.abs().max().clamp_min(1e-30))
            if float((t.reshape(rest_TM.shape) - rest_TM).abs().max()) <= _tolerance(out) * scale:
                return v
        return None

    # 2
    def _tokens(self, body: Body, by_ids: bool) -> Iterator[_Tokens]:
        """What a router picked (or None), and what the rows were made from, if it has one row a token."""
        tape, width = self.tape, self._width(body)
        sources = sorted(v for v in ancestors(tape, {body.rows})[0] - self.of_experts if tape.maker[v] < self.first_use)
        for i in self._ids() if by_ids else [None]:
            seen: list[Tensor] = []
            for j in reversed(sources):
                x = tape.values[j]
                if x is None or not x.is_floating_point() or x.dim() < 2 or x.shape[-1] != width or j in tape.params:
                    continue
                tokens = x.numel() // width
                if not tokens or not tape.valid_at(j, self.first_use):
                    continue
                ids_TK = None
                if i is not None:
                    ids = tape.held(i)
                    if ids.numel() % tokens or not _rows_are(ids, tokens):
                        continue
                    ids_TK = ids.reshape(tokens, -1).long()
                x_TH = x.reshape(tokens, width)
                if not any(x_TH.shape == s.shape and torch.equal(x_TH, s) for s in seen):
                    seen.append(x_TH)
                    yield _Tokens(i, j, x_TH, ids_TK)

    def _width(self, body: Body) -> int:
        return self.tape.held(body.rows).shape[body.layout.feature]

    def _ids(self) -> list[int]:
        tape = self.tape
        picked = descendants(tape, {v for c in tape.calls if c.name in PICKS for v in c.makes} | set(tape.inputs))
        found = []
        for v in sorted(picked - self.of_experts):
            ids = tape.values[v]
            if ids is None or ids.dtype not in (torch.int64, torch.int32) or not ids.dim() or not ids.numel():
                continue
            if int(ids.min()) >= 0 and int(ids.max()) < self.owner.num_experts:
                found.append(v)
        return found


def _rows_are(ids: Tensor, tokens: int) -> bool:
    """Is ids ``[…tokens…, K]``, or ``[…tokens…]`` with K = 1, each row without repeats?"""
    k = ids.numel() // tokens
    if ids.shape[-1] != k and k != 1:
        return False
    rows = ids.reshape(tokens, k).sort(1).values
    return not bool((rows[:, 1:] == rows[:, :-1]).any())


def _tolerance(t: Tensor) -> float:
    return TOLERANCE.get(t.dtype, 1e-4)


def _relative(out: Tensor, y: Tensor) -> float:
    return float((y - out).abs().max() / out.abs().max().clamp_min(1e-30))
