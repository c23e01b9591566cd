"""check: proof, for a user's own model and plan, that the parallel program computes what their module computes.

One process, a simulated world, no GPU.  Everything runs in float64 (``moec.promote``): the user's module in eager mode
on the global batch is the oracle; the captured graph and the graph after every pass must equal it, outputs and every
parameter's gradient, and ranks that hold the same value must agree.  What the graph counts (``program.statistics``)
must stay what it was before sharding.  The first pass that does not is named.

``cast_bf16`` changes nothing that can be seen in float64, so what it does to the graph is proved like everything else;
what rounding does is measured, the finished program in its own dtypes against the module in float64, and bounded.

A pass that changes values on purpose (``configure_router``: what ``Plan.router`` asks for) has no module to compare
with.  From there on the oracle is its own program on one rank: every later pass must compute what one device would.
``cast_fp8`` rounds on purpose, and so does what travels as a payload (``commute_quantise``): such a program is compared
with what the plan makes of the model on one rank, rounded too (the same products, the same rows), and whatever comes
later with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moec import simulate
from moec.capture.examples import dummy_examples, flatten_call
from moec.capture.skeleton import replica
from moec.compiler import compile_program, expanded
from moec.grouped import PlainGroupedMM
from moec.inputs import counts_as_tensors
from moec.plan import Plan
from moec.program import PENDING, ParamSpec, Program
from moec.promote import Promoted, promote_program, up
from moec.runtime.errors import MoecError
from moec.runtime.fp8 import Recipe

TOLERANCE = 1e-12
"""Relative, in float64.  Clean programs stay below 1e-13; a dropped collective or a wrong dual is above 1e-3."""

BF16 = (0.01, 0.05, 0.2)
"""Largest distances of a program that computes in bf16: losses, outputs, gradients."""

TILES = 0.05
"""Largest distance of gradients where tiles along tokens, which are those of a rank, share scales (``blockwise``,
``mxfp8``): other tokens share one on one rank."""

VANISHING = 1e-2
"""A gradient whose norm is below this share of the largest one is compared on that scale: some vanish identically
(a key bias under softmax), and relative to rounding noise nothing would agree."""


@dataclass
class PassReport:
    name: str
    outputs: dict[str, float]
    grads: dict[str, float]
    disagreement: float
    """Largest relative difference between ranks that should hold the same value."""
    oracle: bool = False
    """A pass that changes values: what it computes on one rank is what later ones are compared with."""
    loose: float | None = None
    """How far gradients may be, where that is more than the report's tolerance."""

    def failure(self, tolerance: float) -> tuple[str, float] | None:
        """What is too far off, None where nothing is."""
        bounded = {n: e if self.loose is None or not e <= self.loose else 0.0 for n, e in self.grads.items()}
        what, error = replace(self, grads=bounded).worst()
        return None if error <= tolerance else (what, error)

    def worst(self) -> tuple[str, float]:
        """The output or parameter that is furthest off, with its relative error."""
        everything = {**{f"output {k}": v for k, v in self.outputs.items()}, **self.grads, "(ranks)": self.disagreement}
        # max would skip a nan silently
        return max(everything.items(), key=lambda kv: float("inf") if kv[1] != kv[1] else kv[1])


@dataclass
class Rounding:
    """How far the program in its own dtypes is from the module in float64, and how far it may be."""

    scalars: float
    """Largest relative distance of a scalar output: a loss."""
    outputs: float
    """Of a tensor, in its norm."""
    gradients: float
    """Of all gradients as one vector."""
    bounds: tuple[float, float, float]

    @property
    def ok(self) -> bool:
        return all(x <= b for x, b in zip((self.scalars, self.outputs, self.gradients), self.bounds, strict=True))


@dataclass
class CheckReport:
    plan: Plan
    world_size: int
    tolerance: float
    passes: list[PassReport] = field(default_factory=list)
    rounding: Rounding | None = None
    """Of a plan that computes in bf16."""

    @property
    def ok(self) -> bool:
        rounded = self.rounding is None or self.rounding.ok
        return bool(self.passes) and rounded and self.first_failure is None

    @property
    def first_failure(self) -> tuple[str, str, float] | None:
        """(pass, parameter or output, relative error) of the first pass that is off, None if none is."""
        for p in self.passes:
            if (found := p.failure(self.tolerance)) is not None:
                return p.name, *found
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "plan": self.plan.to_dict(),
            "world_size": self.world_size,
            "tolerance": self.tolerance,
            "first_failure": self.first_failure,
            "passes": [asdict(p) for p in self.passes],
            "rounding": self.rounding and {**asdict(self.rounding), "ok": self.rounding.ok},
        }

    def __str__(self) -> str:
        lines = [
            f"plan {self.plan.to_dict()} on {self.world_size} simulated ranks, float64",
            "",
            f"{'after pass':<12} {'outputs':>10} {'gradients':>10} {'ranks':>10}  worst",
        ]
        for p in self.passes:
            lines.append(
                f"{p.name:<12} {max(p.outputs.values(), default=0):>10.1e} {max(p.grads.values(), default=0):>10.1e} "
                f"{p.disagreement:>10.1e}  {'(on one rank: the oracle from here on)' if p.oracle else p.worst()[0]}"
            )
        fail = self.first_failure
        lines += [
            "",
            f"ok: all within {self.tolerance:.0e}"
            if fail is None
            else f"FAILED after {fail[0]}: {fail[1]} differs by {fail[2]:.3g} (relative), "
            f"tolerance {self.tolerance:.0e}",
        ]
        if (r := self.rounding) is not None:
            pairs = zip(("losses", "outputs", "gradients"), (r.scalars, r.outputs, r.gradients), r.bounds, strict=True)
            lines.append(
                f"{'' if r.ok else 'TOO FAR: '}in bf16, relative to float64: "
                + ", ".join(f"{what} {x:.1e} (at most {bound:.0e})" for what, x, bound in pairs)
            )
        return "\n".join(lines)


def check(
    model: nn.Module,
    plan: Plan,
    *,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    world_size: int,
    loss_fn: Callable[..., Any] | None = None,
    tolerance: float = TOLERANCE,
) -> CheckReport:
    """Prove ``plan`` for ``model`` on ``world_size`` simulated ranks.

    ``example_inputs`` and ``example_kwargs`` are one *global* batch (dp must divide it); Hugging Face models need none.
    A model on the meta device is checked with random values.  Raises MoecError when the model or the plan is refused.
    """
    plan.validate(world_size)
    resolved = plan.resolve(world_size)
    kwargs = counts_as_tensors(example_kwargs or {})
    args, kwargs = _global_batch(model, tuple(example_inputs), kwargs, resolved)
    oracle = _Oracle(model, args, kwargs, loss_fn)
    report = CheckReport(resolved, world_size, tolerance)

    before: Program | None = None

    def one_rank(program: Program) -> Program:
        """What the plan makes of the model on one rank, with the same products in FP8 and the same payloads."""
        assert resolved.precision is not None
        sums = tuple(why.partition(":")[0] for why in program.why_not if PENDING in why)
        precision = replace(resolved.precision, exclude=(*resolved.precision.exclude, *sums))
        if "commuted" not in program.facts:
            precision = replace(precision, dispatch=None, combine=None)
        alone = Plan(inputs=plan.inputs, outputs=plan.outputs, router=plan.router, precision=precision)
        return expanded(compile_program(model, alone, 1, args, kwargs, training=model.training, loss_fn=loss_fn))

    def observe(name: str, program: Program) -> None:
        nonlocal before
        if name == "captured":
            report.passes.clear()  # equal layers turned out to be unlike, and everything starts again
            oracle.changed = None
        if "configured" in program.facts and (before is None or "configured" not in before.facts):
            report.passes.append(oracle.follow(name, expanded(program)))
        elif _rounds(before, program, resolved):
            report.passes.append(oracle.rounded(name, expanded(program), one_rank(program)))
        elif report.passes and _unchanged(before, program):
            report.passes.append(replace(report.passes[-1], name=name))
        else:
            report.passes.append(oracle.compare(name, expanded(program)))
        before = program

    program = compile_program(
        model, plan, world_size, args, kwargs, training=model.training, loss_fn=loss_fn, observe=observe
    )
    if program.dtype_choices:
        report.rounding = oracle.rounding(expanded(program))
    return report


def _rounds(before: Program | None, after: Program, plan: Plan) -> bool:
    """Has the pass between them rounded values?"""
    new, p = after.facts - (before.facts if before is not None else set()), plan.precision
    payloads = p is not None and (p.dispatch is not None or p.combine is not None)
    return "fp8" in new or ("commuted" in new and payloads)


def _unchanged(before: Program | None, after: Program) -> bool:
    """Would the simulated world run the very same?  Then it need not."""
    return (
        before is not None
        and before.facts - {"irredundant"} == after.facts - {"irredundant"}
        and all(getattr(before, f) == getattr(after, f) for f in ("params", "inputs", "outputs", "grad_reductions"))
        and before.render() == after.render()
    )


class _Oracle:
    """The user's module in eager mode, promoted to float64, on the global batch."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict, loss_fn: Callable[..., Any] | None) -> None:
        generator = torch.Generator().manual_seed(0)

        def fill(t: Tensor, _: bool) -> Tensor:
            if t.is_meta:
                t = (
                    torch.randn(t.shape, generator=generator) * 0.1
                    if t.is_floating_point()
                    else torch.zeros(t.shape, dtype=t.dtype)
                )
            return up(t.detach().clone())

        self.module = replica(model, fill, training=model.training)
        self.tensors = dict(self.module.named_parameters(remove_duplicate=False)) | dict(
            self.module.named_buffers(remove_duplicate=False)
        )
        self.changed: simulate.Result | None = None
        """What a pass that changes values made of it, on one rank."""
        self.args, self.kwargs = pytree.tree_map_only(Tensor, up, (args, kwargs))
        with PlainGroupedMM(), Promoted():
            out = self.module(*self.args, **self.kwargs)
            if loss_fn is not None:
                out = {"loss": loss_fn(out, *self.args, **self.kwargs), "output": out}
            self.leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            roots = [x for x in self.leaves if x.requires_grad]
            self.cotangents = {
                id(x): torch.ones_like(x)
                if x.ndim == 0
                else torch.randn(x.shape, generator=generator, dtype=x.dtype) / x.numel()
                for x in roots
            }
            if roots:
                torch.autograd.backward(roots, [self.cotangents[id(x)] for x in roots])
        self.counted: dict[str, Tensor] = {}
        """Statistics of the global batch, before sharding."""

    def compare(self, name: str, program: Program) -> PassReport:
        got = self._run(program)
        want = self.changed or self._truth(program)
        outputs = {path: _relative(got.outputs[path], want.outputs[path]) for path in got.outputs}
        for what, value in got.statistics.items():
            if "sharded" not in program.facts:
                self.counted[what] = value
            elif what in self.counted:
                outputs[f"statistic {what}"] = _relative(value, self.counted[what])
        trained = {ph: s for ph, s in program.params.items() if s.requires_grad and not s.buffer}
        scale = max((float(g.norm()) for ph in trained if (g := want.grads[ph]) is not None), default=0.0) * VANISHING
        zero, grads = torch.zeros(()), {}
        for ph, spec in trained.items():
            mine, truth = (zero if (g := r.grads[ph]) is None else g for r in (got, want))
            grads[spec.name] = _relative(mine, truth, scale)
        for ph, spec in program.params.items():
            if spec.history and (noted := want.grads.get(ph)) is not None:
                grads[spec.name] = _relative(got.grads[ph], noted)  # type: ignore[arg-type]  # the same products
        return PassReport(name, outputs, grads, got.disagreement)

    def follow(self, name: str, program: Program) -> PassReport:
        """What ``program`` computes on one rank is the truth from now on."""
        self.changed = self._run(program)
        self.counted |= self.changed.statistics
        return PassReport(name, {}, {}, self.changed.disagreement, oracle=True)

    def rounded(self, name: str, program: Program, alone: Program) -> PassReport:
        """``program`` rounds, as ``alone`` does on one rank; later ones must compute what it does."""
        self.changed = self._run(alone)
        self.counted |= self.changed.statistics  # routers downstream choose otherwise
        report = self.compare(name, program)
        quantised = program.graph.find_nodes(op="call_function", target=torch.ops.moec.quantise.default)
        tiles = any(Recipe.parse(n.args[4]).shared == "block" for n in quantised)
        self.changed = self._run(program)
        return replace(report, loose=TILES if tiles else None)

    def rounding(self, program: Program) -> Rounding:
        """``program`` in its own dtypes against the truth."""
        got, want = self._run(program, promoted=False), self.changed or self._truth(program)
        apart = {path: _relative(x.to(torch.float64), want.outputs[path]) for path, x in got.outputs.items()}
        scalars = [e for path, e in apart.items() if not want.outputs[path].ndim]
        tensors = [e for path, e in apart.items() if want.outputs[path].ndim]
        pairs = [(got.grads[ph], g) for ph, g in want.grads.items() if g is not None]
        square = sum(float(((0.0 if mine is None else mine.to(torch.float64)) - g).square().sum()) for mine, g in pairs)
        length = sum(float(g.square().sum()) for _, g in pairs)
        gradients = (square / max(length, 1e-300)) ** 0.5
        return Rounding(max(scalars, default=0.0), max(tensors, default=0.0), gradients, BF16)

    def _run(self, program: Program, promoted: bool = True) -> simulate.Result:
        by_path = flatten_call(self.args, self.kwargs).tensors()
        inputs = {ph: _input(by_path, spec.path) for ph, spec in program.inputs.items()}
        if wrong := program.size_problems({ph: tuple(x.shape) for ph, x in inputs.items()}):
            raise MoecError(wrong[0], where="check")
        params = {ph: self._full(spec) for ph, spec in program.params.items()}
        cot = {path: self.cotangents[id(x)] for path, x in self._leaves(program).items() if id(x) in self.cotangents}
        if promoted:
            return simulate.run(promote_program(program), params, inputs, cot)
        params = {ph: x.to(program.params[ph].dtype) for ph, x in params.items()}
        inputs = {ph: x.to(program.inputs[ph].dtype) for ph, x in inputs.items()}
        return simulate.run(program, params, inputs, cot)

    def _leaves(self, program: Program) -> dict[str, Tensor]:
        outs = [o for o in program.outputs if not (o.index is None and o.constant is not None)]
        return dict(zip([o.path for o in outs], self.leaves, strict=False))

    def _truth(self, program: Program) -> simulate.Result:
        outputs = {path: x.detach() for path, x in self._leaves(program).items()}
        trained = {ph: s for ph, s in program.params.items() if s.requires_grad and not s.buffer}
        return simulate.Result(outputs, {ph: self._full_grad(s) for ph, s in trained.items()}, 0.0, [], {})

    def _full(self, spec: ParamSpec) -> Tensor:
        if spec.members:
            return torch.stack([self.tensors[m].detach() for m in spec.members])
        if spec.initial is not None:
            return _drawn(spec)
        return self.tensors[spec.name]

    def _full_grad(self, spec: ParamSpec) -> Tensor | None:
        if not spec.members:
            return self.tensors[spec.name].grad
        parts = [self.tensors[m].grad for m in spec.members]
        if all(p is None for p in parts):
            return None
        return torch.stack(
            [torch.zeros_like(self.tensors[m]) if p is None else p for m, p in zip(spec.members, parts, strict=True)]
        )


def _drawn(spec: ParamSpec) -> Tensor:
    """A value for a buffer that a pass made: one that matters, and the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    if spec.history:  # magnitudes
        return torch.rand(spec.shape, generator=generator, dtype=torch.float64) + 1
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.1
    return torch.randint(1, 9, spec.shape, generator=generator, dtype=spec.dtype)


def _relative(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    if got.shape != want.shape and got.ndim and want.ndim:
        raise MoecError(f"shape {tuple(got.shape)} instead of {tuple(want.shape)}", where="check")
    if not want.is_floating_point():
        return float((got != want).any())
    return float((got - want).norm()) / max(float(want.norm()), floor, 1e-300)


def _global_batch(model: nn.Module, args: tuple, kwargs: dict, plan: Plan) -> tuple[tuple, dict]:
    """The given examples, or random ones for a model that says how it is called: two sequences a dp rank of nine
    tokens (or the next length that the ranks can share), with ignored labels spread unevenly over the ranks."""
    if args or kwargs:
        return args, kwargs
    args, kwargs = dummy_examples(model, training=model.training)
    generator = torch.Generator().manual_seed(1)
    vocab = getattr(getattr(model, "config", None), "vocab_size", 8)
    shared = plan.cp * (plan.tp if plan.sequence_parallel else 1)
    shape = (2 * (plan.dp or 1), -(-9 // shared) * shared)
    for k, v in kwargs.items():
        if isinstance(v, Tensor) and not v.is_floating_point() and v.ndim == 2:
            kwargs[k] = torch.randint(0, vocab, shape, generator=generator)
    if "labels" in kwargs:
        kwargs["labels"][0] = -100
        kwargs["labels"][-1, : shape[1] // 2] = -100
    return args, kwargs


def _input(by_path: dict[str, Tensor], path: str) -> Tensor:
    if path not in by_path:
        raise MoecError(f"no example for input {path!r}; there are {sorted(by_path)}", where="check")
    return by_path[path]
