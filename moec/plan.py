"""Plan: how a model is to be laid out over the ranks; what a user writes, in Python or YAML.

A plan says nothing about the model's code.  ``dp`` copies share the batch, ``cp`` ranks share each sequence, ``tp``
ranks share each dense layer, ``ep`` ranks share the experts, ``etp`` ranks share each expert; (dp, cp, tp) and
(edp, ep, etp) factor the *same* ranks.

``resolve`` fills what depends on the world, ``mesh`` cuts the ranks into atomic axes, ``validate`` reports everything
that is wrong at once together with the nearest plan that would work.  A plan never changes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from math import gcd, log2
from typing import TYPE_CHECKING, Any, Literal

import yaml

from moec.overlap import Overlap
from moec.precision import Precision
from moec.router import Router
from moec.runtime.errors import MoecError
from moec.runtime.mesh import Mesh

if TYPE_CHECKING:
    from moec.program import Program

STYLES = ("column", "row", "replicate")
BACKENDS = ("eager", "te")
OUTPUTS = ("sharded", "full", "drop")
DISPATCHERS = ("auto", "alltoall", "allgather", "dedup", "hierarchical", "static")
SUMMED_ON_THE_WAY = ("allgather", "dedup", "hierarchical")
"""Dispatchers that send sums of experts' results."""
DEGREES = ("dp", "cp", "tp", "ep", "etp")
OPTIONS: dict[str, Any] = {"router": Router, "precision": Precision, "overlap": Overlap}
"""Fields that are mappings in YAML."""


@dataclass(frozen=True)
class Limit:
    """The degree of ``role`` must divide ``size``: what a model demands of a plan.

    Example: ``Limit("tp", 4, "key/value heads", "model.layers.0.self_attn.k_proj")``.
    """

    role: Literal["dp", "cp", "tp", "ep", "etp"]
    size: int
    what: str
    where: str = ""
    why: str = ""

    def allows(self, plan: Plan) -> bool:
        return self.size % getattr(plan, self.role) == 0


@dataclass(frozen=True)
class Plan:
    dp: int | None = None
    """Ranks that share the batch; None: what the world leaves after cp and tp."""
    tp: int = 1
    """Ranks that share each dense layer (heads, widths, vocabulary)."""
    ep: int = 1
    """Ranks that share the experts of a block."""
    etp: int | None = None
    """Ranks that share each expert's width; None: tp when ep is 1, else 1."""
    cp: int = 1
    """Ranks that share each sequence (context parallelism: the activations are sharded on the sequence, attention
    exchanges it for heads)."""
    sequence_parallel: bool = False
    """Between the tensor-parallel regions the residual stream is sharded on the sequence over tp, not held by every
    rank."""
    fsdp: bool | int = False
    """Shard parameters, gradients and so optimizer state over dp (experts over edp), and gather them at their use.
    An integer: over that many of the dp ranks, copies over the rest (HSDP)."""
    reshard_after_forward: bool = True
    """FSDP: gathered parameters are freed after their use and gathered again in the backward (but for vectors and the
    last ones, which it needs at once); False keeps all till then: less communication, the memory of whole weights."""
    dispatch: str = "auto"
    """How tokens reach the ranks of their experts, where ep is above 1: ``alltoall`` (a row for every pair),
    ``allgather`` (all tokens to all ranks), ``dedup`` (a token once to each rank), ``hierarchical`` (once to each node,
    then once to each rank inside it), ``static`` (of a router with a capacity: as many slots for each expert as its
    capacity allows, used or not, so that no size depends on the routing).  ``auto``: ``static`` where
    ``router`` gives each dp rank a capacity (``level="dp_shard"``), else ``alltoall``."""
    ranks_per_node: int | None = None
    """Neighbouring ranks that make a node; ``hierarchical`` needs it."""
    layout: Literal["auto", "hf"] | Mapping[str, str] = "auto"
    """``auto``: inferred from the graph.  ``hf``: as the Hugging Face model's own plan says (``base_model_tp_plan`` …),
    what it does not name being whole.  Or {pattern of parameter names or of the modules that own them: ``column``,
    ``row`` or ``replicate``}; ``*`` matches dots too, later patterns win, and what none matches is placed as ``auto``
    would."""
    inputs: Mapping[str, int | None] | None = None
    """{input path: batch dim, or None for "has no batch dim"}, overriding what capture derives."""
    outputs: str | Mapping[str, str] = "sharded"
    """What comes back for a tensor that carries the batch dim: ``sharded`` this rank's batch slice (logits beside a
    loss as a DTensor whose vocabulary tp shards), ``full`` the global batch on every rank (gathered over dp and tp),
    ``drop`` None (and nothing is computed for it).  Or {output path: mode}; other outputs stay sharded.  Scalars are
    global in any case."""
    router: Router | None = None
    """What the routers shall compute that the model does not: balancing losses, an expert bias, a capacity … (a mapping
    of the fields of ``moec.Router`` in YAML)."""
    precision: Precision | None = None
    """In which dtypes to compute and to communicate (a mapping of the fields of ``moec.Precision`` in YAML); None: as
    the model does."""
    fuse: bool = True
    """Compute what belongs together in one op (the experts of a block: gather, products, activation, weighted sum)
    where a pass finds it spelled so; what is declined stands in ``why_not``.  False: op by op."""
    overlap: Overlap | None = None
    """How communication is hidden behind computation: token chunks, scheduling, buckets … (a mapping of the fields of
    ``moec.Overlap`` in YAML)."""
    backend: str = "eager"
    """Who computes routers, permutations, the experts' products and those in FP8: ``eager`` moec; ``te`` Transformer
    Engine, where it can express them (the rest is moec's and stands in ``why_not``), an error where it cannot be
    imported."""

    # ------------------------------------------------------------------------------------------- dict and YAML
    def to_dict(self) -> dict[str, Any]:
        """Plain dict of the fields that differ from their defaults."""
        out = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                plain = value.to_dict() if isinstance(value, Router | Precision | Overlap) else value
                out[f.name] = dict(plain) if isinstance(plain, Mapping) else plain
        return out

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        if not isinstance(data, Mapping):
            raise MoecError(f"expected a mapping of plan fields, found {type(data).__name__}: {data!r}", where="plan")
        known = [f.name for f in fields(Plan)]
        unknown = [_did_you_mean(key, known) for key in data if key not in known]
        if unknown:
            raise MoecError(
                f"unknown field {', '.join(unknown)}", where="plan", way_out=f"fields are {', '.join(known)}"
            )
        options = {k: o.from_dict(data[k]) for k, o in OPTIONS.items() if isinstance(data.get(k), Mapping)}
        return Plan(**{**data, **options})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @staticmethod
    def from_yaml(text: str) -> Plan:
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as e:
            raise MoecError(f"not valid YAML: {e}", where="plan") from None
        return Plan.from_dict({} if data is None else data)

    # ------------------------------------------------------------------------------------------- derived
    def resolve(self, world_size: int) -> Plan:
        """The same plan with dp and etp filled in.  Raises MoecError when the degrees cannot fill the world."""
        problems = self._degree_problems(world_size)
        if problems:
            raise _error(problems, None)
        return self._filled(world_size)

    def mesh(self, world_size: int) -> Mesh:
        """The atomic axes of this plan.  Raises MoecError when the two factorisations do not nest."""
        p = self.resolve(world_size)
        return p._mesh()

    def _mesh(self) -> Mesh:
        assert self.dp is not None and self.etp is not None
        return Mesh.of(
            dp=self.dp, tp=self.tp, ep=self.ep, etp=self.etp, cp=self.cp, fsdp=self.fsdp_degree,
            ranks_per_node=self.ranks_per_node or 0,
        )  # fmt: skip

    @property
    def fsdp_degree(self) -> int:
        """How many ranks share each parameter (of a resolved plan): dp, some of it, or 1."""
        return (self.dp or 1) if self.fsdp is True else int(self.fsdp) or 1

    def output_mode(self, path: str) -> str:
        """``sharded``, ``full`` or ``drop`` for the output at ``path``."""
        return self.outputs if isinstance(self.outputs, str) else self.outputs.get(path, "sharded")

    # ------------------------------------------------------------------------------------------- validation
    def validate(self, world_size: int, program: Program | None = None, limits: Iterable[Limit] = ()) -> None:
        """Raise one MoecError that lists everything wrong with this plan, or return.

        ``limits`` are what the model demands (heads, widths); the experts of ``program.blocks`` count without being
        listed, and its parameters, inputs and outputs are what patterns and paths must match.
        """
        problems = self._degree_problems(world_size) + self._option_problems()
        demands = list(limits)
        if program is not None:
            demands += [Limit("ep", b.num_experts, "experts", b.path) for b in program.blocks]
            problems += self._name_problems(program)
        demands = list(dict.fromkeys(demands))
        if self._degrees_are_numbers():
            guess = self._filled(world_size)
            problems += [
                f"{d.where + ': ' if d.where else ''}{d.role}={getattr(guess, d.role)} does not divide the "
                f"{d.size} {d.what}{' (' + d.why + ')' if d.why else ''}"
                for d in demands
                if not d.allows(guess)
            ]
        if problems:
            raise _error(problems, self.nearest(world_size, demands))

    def nearest(self, world_size: int, limits: Iterable[Limit] = ()) -> Plan | None:
        """The workable plan with the least distance to this one: sum over the degrees of |log2 ratio|.

        Only the degrees are searched; ties go to the plan that keeps tp, then ep, then etp.
        """
        if not isinstance(world_size, int) or world_size < 1:
            return None
        demands = list(limits)
        want = self._filled(world_size) if self._degrees_are_numbers() else Plan(dp=world_size, etp=1)
        dense = [(tp, cp) for tp in _divisors(world_size) for cp in _divisors(world_size // tp)]
        if want.cp == 1:  # sharing sequences is asked for, never proposed
            dense = [(tp, cp) for tp, cp in dense if cp == 1]
        best: tuple[tuple[float, ...], Plan] | None = None
        for tp, cp in dense:
            for ep in _divisors(world_size):
                for etp in _divisors(world_size // ep):
                    dp = world_size // (tp * cp)
                    plan = replace(self, dp=dp, tp=tp, cp=cp, ep=ep, etp=etp)
                    if not isinstance(self.fsdp, bool) and self.fsdp:
                        plan = replace(plan, fsdp=gcd(dp, self.fsdp))
                    if not _nests(plan) or not all(d.allows(plan) for d in demands):
                        continue
                    apart = {r: abs(log2(getattr(plan, r) / getattr(want, r))) for r in DEGREES}
                    score = (round(sum(apart.values()), 9), *(apart[r] for r in ("tp", "ep", "etp", "cp")), tp, ep, etp)
                    if best is None or score < best[0]:
                        best = (score, plan)
        return best[1] if best else None

    def _degrees_are_numbers(self) -> bool:
        return not self._number_problems()

    def _number_problems(self) -> list[str]:
        return [
            f"{role}={value!r} is not a positive integer"
            for role in DEGREES
            if (value := getattr(self, role)) is not None or role in ("cp", "tp", "ep")
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]

    def _filled(self, world_size: int) -> Plan:
        # Also called for plans that do not fit, to compare them with plans that do: hence max(1, ...).
        dp = max(1, world_size // (self.cp * self.tp)) if self.dp is None else self.dp
        etp = (self.tp if self.ep == 1 else 1) if self.etp is None else self.etp
        return replace(self, dp=dp, etp=etp)

    def _degree_problems(self, world_size: int) -> list[str]:
        if not isinstance(world_size, int) or world_size < 1:
            return [f"world size {world_size!r} is not a positive integer"]
        problems = self._number_problems()
        if not isinstance(self.fsdp, bool) and (not isinstance(self.fsdp, int) or self.fsdp < 1):
            problems.append(f"fsdp={self.fsdp!r} is neither a bool nor a positive integer")
        if self.ranks_per_node is not None and (
            not isinstance(self.ranks_per_node, int) or isinstance(self.ranks_per_node, bool) or self.ranks_per_node < 1
        ):
            problems.append(f"ranks_per_node={self.ranks_per_node!r} is neither None nor a positive integer")
        problems += [
            f"{name}={value!r} is not a bool"
            for name in ("sequence_parallel", "reshard_after_forward", "fuse")
            if not isinstance(value := getattr(self, name), bool)
        ]
        if problems:
            return problems
        p = self._filled(world_size)
        assert p.dp is not None and p.etp is not None
        dense = self.cp * self.tp
        product = f"cp*tp = {self.cp}*{self.tp} = {dense}" if self.cp > 1 else f"tp={self.tp}"
        names, values = ("dp*cp*tp", f"{p.dp}*{p.cp}*{p.tp}") if self.cp > 1 else ("dp*tp", f"{p.dp}*{p.tp}")
        if self.dp is None and world_size % dense:
            problems.append(f"{product} does not divide the {world_size} ranks of the world")
        elif p.dp * dense != world_size:
            problems.append(f"{names} = {values} = {p.dp * dense} is not the world of {world_size} ranks")
        if world_size % (p.ep * p.etp):
            problems.append(
                f"ep*etp = {p.ep}*{p.etp} = {p.ep * p.etp} does not divide the {world_size} ranks of the world"
            )
        if not problems:  # only degrees that fill the world can nest, or fail to
            try:
                p._mesh()
            except MoecError as e:
                problems.append(e.message)
        return problems

    def _option_problems(self) -> list[str]:
        problems: list[str] = []
        if self.backend not in BACKENDS:
            problems.append(f"unknown backend {_did_you_mean(self.backend, BACKENDS)}; known: {', '.join(BACKENDS)}")
        if self.dispatch not in DISPATCHERS:
            problems.append(
                f"unknown dispatch {_did_you_mean(self.dispatch, DISPATCHERS)}; known: {', '.join(DISPATCHERS)}"
            )
        elif self.dispatch == "hierarchical" and self.ranks_per_node is None and self.ep != 1:
            problems.append("dispatch='hierarchical' needs ranks_per_node: it says which ranks of ep share a node")
        wrong = {k: o for k, o in OPTIONS.items() if not isinstance(getattr(self, k), o | None)}
        problems += [f"{k}={getattr(self, k)!r} is not a moec.{o.__name__}" for k, o in wrong.items()]
        capacity = self.router.capacity_factor if isinstance(self.router, Router) else None
        if capacity is not None and self.dispatch == "alltoall":
            problems.append(
                f"router.capacity_factor={capacity} drops tokens, and dispatch='alltoall' is for "
                "dropless routing; leave the choice to dispatch='auto'"
            )
        if isinstance(p := self.precision, Precision):
            if p.combine is not None and self.ep != 1 and self.dispatch in SUMMED_ON_THE_WAY:
                problems.append(
                    f"precision.combine={p.combine!r} rounds the row of each pair, and dispatch={self.dispatch!r} "
                    "sends sums of them; dispatch='alltoall' and 'static' send rows"
                )
        if isinstance(self.layout, Mapping):
            problems += [
                f"layout: unknown style {_did_you_mean(style, STYLES)} for {pattern!r}; known: {', '.join(STYLES)}"
                for pattern, style in self.layout.items()
                if style not in STYLES
            ]
        elif self.layout not in ("auto", "hf"):
            problems.append(f'layout={self.layout!r} is neither "auto", "hf" nor a mapping of patterns to styles')
        modes = self.outputs if isinstance(self.outputs, Mapping) else {"": self.outputs}
        problems += [
            f"outputs: unknown mode {_did_you_mean(mode, OUTPUTS)}{f' for {path!r}' if path else ''}; "
            f"known: {', '.join(OUTPUTS)}"
            for path, mode in modes.items()
            if mode not in OUTPUTS
        ]
        if self.inputs is not None and not isinstance(self.inputs, Mapping):
            problems.append(f"inputs={self.inputs!r} is not a mapping of input paths to batch dims")
        elif self.inputs:
            problems += [
                f"inputs: batch dim {dim!r} of {path!r} is neither an integer nor None"
                for path, dim in self.inputs.items()
                if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool))
            ]
        return problems

    def _name_problems(self, program: Program) -> list[str]:
        problems = []
        names = [s.name for s in program.params.values()]
        if isinstance(self.layout, Mapping):
            known = sorted({*names, *(n.rpartition(".")[0] for n in names)})
            problems += [
                f"layout: pattern {_did_you_mean(pattern, known)} matches no parameter"
                for pattern in self.layout
                if not any(matches(pattern, n) for n in names)
            ]
        inputs = {s.path: s for s in program.inputs.values()}
        for path, dim in (self.inputs or {}).items() if isinstance(self.inputs, Mapping) else ():
            if path not in inputs:
                problems.append(
                    f"inputs: {_did_you_mean(path, inputs)} is not an input; inputs are {', '.join(inputs) or 'none'}"
                )
            elif isinstance(dim, int) and not -inputs[path].ndim <= dim < inputs[path].ndim:
                problems.append(f"inputs: {path!r} has {inputs[path].ndim} dims, batch dim {dim} is not one of them")
        if isinstance(self.outputs, Mapping):
            outputs = [o.path for o in program.outputs]
            problems += [
                f"outputs: {_did_you_mean(path, outputs)} is not an output; outputs are {', '.join(outputs) or 'none'}"
                for path in self.outputs
                if path not in outputs
            ]
        return problems


def _error(problems: list[str], nearest: Plan | None) -> MoecError:
    if nearest is None:
        way_out = ""
    else:
        degrees = asdict(nearest)
        shown = [r for r in DEGREES if r != "cp" or nearest.cp > 1]
        if not isinstance(nearest.fsdp, bool) and nearest.fsdp:
            shown.append("fsdp")
        way_out = "nearest degrees that work: " + ", ".join(f"{r}={degrees[r]}" for r in shown)
    text = problems[0] if len(problems) == 1 else f"{len(problems)} problems\n  - " + "\n  - ".join(problems)
    return MoecError(text, where="plan", way_out=way_out)


def _nests(plan: Plan) -> bool:
    assert plan.dp is not None and plan.etp is not None
    dense = plan.cp * plan.tp
    cuts = {1, plan.tp, dense, dense * plan.fsdp_degree, plan.etp, plan.etp * plan.ep, dense * plan.dp}
    if isinstance(plan.ranks_per_node, int):
        cuts |= {max(1, plan.ranks_per_node)}
    return all(outer % inner == 0 for inner, outer in pairwise(sorted(cuts)))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def matches(pattern: str, name: str) -> bool:
    """Whether a layout pattern speaks of the parameter ``name``: it matches the name or that of the module that owns
    it (``*`` matches dots too)."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def _did_you_mean(found: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(found), list(known), n=1, cutoff=0.5)
    return f"{found!r} (did you mean {near[0]!r}?)" if near else repr(found)
