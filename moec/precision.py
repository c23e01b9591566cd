"""Precision: in which dtypes a plan computes and communicates (``Plan.precision``).

None, or a field left at its default, changes nothing: values have the dtypes that the model itself gives them.

``compute="bf16"``: parameters stay as they are stored (fp32 masters, fp32 gradients and optimizer state); products of
matrices, attention and what is between them read bf16; routers, norms, softmax, the weighted sum of experts' rows and
the loss stay in fp32 (``passes/cast_bf16.py`` decides node by node, ``moec explain`` shows it).

``fp8`` names the recipe by which linears and experts' products quantise their operands (each described in
``moec.runtime.fp8``).

``dispatch`` and ``combine`` say what rows travel as, to their experts and back (``moec.runtime.fp8.payload``).  That
rounds them, on one device too, so that any number of ranks computes what one does:

=========================== ============== ============ ==========================================================
what travels                ``dispatch``   ``combine``  format of ``fp8``
=========================== ============== ============ ==========================================================
tokens, to their experts    rounded                     E4M3, the operand of the experts' first products
results, on their way back                 rounded      E4M3
gradients of results                       rounded      the recipe's for gradients (E5M2 of ``current``, else E4M3)
gradients of tokens                                     never rounded: they are added up, in the dtype of tokens
=========================== ============== ============ ==========================================================

``delayed`` rounds tokens by the history of the experts' first products, so these must be in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe

COMPUTE = ("fp32", "bf16")
RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
PAYLOADS = ("bf16", "fp8")
DEFAULT_RECIPE = "blockwise"
"""Of FP8 payloads, where ``fp8`` names none."""
ENDS = ("first", "last")
"""Words of ``Precision.exclude`` that are no patterns."""


@dataclass(frozen=True)
class Precision:
    """Raises MoecError for values without meaning."""

    compute: str = "fp32"
    """``fp32``: what the model computes in; ``bf16``."""
    fp8: str | None = None
    """``delayed``, ``current``, ``rowwise``, ``blockwise`` or ``mxfp8``; None: no FP8."""
    dispatch: str | None = None
    """What tokens travel to their experts as: ``bf16`` or ``fp8`` (of the recipe, or ``blockwise`` where ``fp8`` names
    none, with the scales that a row has of its own); None: what the experts read."""
    combine: str | None = None
    """What experts' results, and in the backward their gradients, travel as: ``bf16``, ``fp8`` (of a recipe whose rows
    have scales of their own), or None: in the dtype they are computed in."""
    exclude: tuple[str, ...] = ENDS
    """Linears and experts that stay out of FP8: patterns of module paths (``*`` matches dots too), and ``first`` and
    ``last``, the first linear of the model and its last one (the head)."""
    history: int = 16
    """``delayed``: of how many optimizer steps the largest magnitude is taken (Transformer Engine's
    ``amax_history_len`` counts micro-batches).  Of the steps before: the first one has scales of 1."""
    margin: int = 0
    """``delayed``: powers of two left free above it."""

    def __post_init__(self) -> None:
        if isinstance(self.exclude, list):  # YAML has no tuples
            object.__setattr__(self, "exclude", tuple(self.exclude))
        if problems := self._problems():
            raise MoecError("; ".join(problems), where="plan.precision")

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of the fields that differ from their defaults."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}

    def payload(self, what: str) -> str:
        """The payload (``moec.runtime.fp8.payload``) of ``dispatch`` or ``combine``, which is not None."""
        if getattr(self, what) == "bf16":
            return "bf16"
        return replace(Recipe.parse(self.fp8 or DEFAULT_RECIPE), margin=self.margin).text()

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Precision:
        known = [f.name for f in fields(Precision)]
        if not isinstance(data, Mapping) or (unknown := [k for k in data if k not in known]):
            what = f"unknown field {', '.join(map(repr, unknown))}" if isinstance(data, Mapping) else f"found {data!r}"
            raise MoecError(what, where="plan.precision", way_out=f"fields are {', '.join(known)}")
        return Precision(**data)

    def _problems(self) -> list[str]:
        problems = [
            f"{name}={value!r} is none of {', '.join(map(repr, known))}"
            for name, value, known in (
                ("compute", self.compute, COMPUTE), ("fp8", self.fp8, (None, *RECIPES)),
                ("dispatch", self.dispatch, (None, *PAYLOADS)), ("combine", self.combine, (None, *PAYLOADS)),
            )
            if value not in known
        ]  # fmt: skip
        if not isinstance(self.exclude, tuple) or not all(isinstance(p, str) for p in self.exclude):
            problems.append(f"exclude={self.exclude!r} is not a list of module patterns, 'first' and 'last'")
        for name, least in (("history", 1), ("margin", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                problems.append(f"{name}={value!r} is not an integer of at least {least}")
            elif value != _DEFAULTS[name] and self.fp8 != "delayed":
                problems.append(f"{name}={value!r} is for fp8='delayed'")
        if self.combine == "fp8" and self.fp8 in ("delayed", "current"):
            problems.append(
                f"combine='fp8' rounds gradients row by row, and fp8={self.fp8!r} has one scale for a whole tensor"
            )
        if self.fp8 is None and self.exclude != ENDS:
            problems.append(f"exclude={self.exclude!r} without an fp8 recipe")
        return problems


_DEFAULTS = {f.name: f.default for f in fields(Precision)}
