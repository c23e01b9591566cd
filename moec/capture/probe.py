"""Probe: the proof that a raised block computes what the module computes.

Both run eagerly in float64 on the same random parameters and inputs: the module itself, and the guided forward with the
canonical operations.  Outputs and the gradients of every input and parameter must agree to 1e-9 (relative to the
largest entry).  The cases: other sizes, one token, routing so skewed that experts go empty, scores that tie, large
negative activations.

``fabricate`` makes the inputs: the shapes are those seen in the fake forward, sizes being expressions of symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from moec.grouped import PlainGroupedMM
from moec.runtime.torch_compat import expr

from .guide import Guide
from .owners import Owner, walk
from .skeleton import replica
from .steps import Refused

TOLERANCE = 1e-9
TIES = {"ties": True}
"""A style: all that is no expert's parameter is zero, so that the router scores all experts alike."""
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = frozenset({"float", "half", "bfloat16"})


@dataclass(frozen=True)
class ProbeReport:
    max_rel_error: float
    cases: int
    worst: str = ""
    factor: int = 1
    """The proof ran on a twin of the block that is narrower by this factor (``shrink``)."""


@dataclass(frozen=True)
class Recipe:
    """The arguments of a call: constants, and tensors by dtype and symbolic shape."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def of(args: tuple, kwargs: dict[str, Any]) -> Recipe:
        def plan(x: Any) -> Any:
            return (x.dtype, tuple(expr(s) for s in x.shape)) if isinstance(x, Tensor) else x

        leaves, spec = pytree.tree_flatten((args, kwargs))
        return Recipe(tuple(plan(x) for x in leaves), spec)

    def narrowed(self, widths: Collection[int], factor: int) -> Recipe:
        """The same with sizes that are one of ``widths`` divided by ``factor``."""

        def one(x: Any) -> Any:
            return (x[0], tuple(s // factor if s.is_Integer and s in widths else s for s in x[1])) if _is_plan(x) else x

        return self if factor == 1 else replace(self, leaves=tuple(map(one, self.leaves)))

    def symbols(self) -> list[sympy.Symbol]:
        found: dict[sympy.Symbol, None] = {}
        for x in self.leaves:
            if _is_plan(x):
                for size in x[1]:
                    found.update(dict.fromkeys(sorted(size.free_symbols, key=str)))
        return list(found)

    def make(
        self,
        sizes: dict[sympy.Symbol, int],
        experts: int,
        generator: torch.Generator,
        *,
        skew: bool = False,
        scale: float = 1.0,
        shift: float = 0.0,
        promote: bool = False,
        device: str = "cpu",
    ) -> tuple[tuple, dict[str, Any]]:
        routed = {x[1] for x in self.leaves if _is_plan(x) and x[0].is_floating_point}

        def one(x: Any) -> Any:
            if not _is_plan(x):
                return x
            dtype, shape = x[0], tuple(int(s.subs(sizes)) for s in x[1])
            if device == "meta":
                return torch.empty(shape, dtype=dtype, device="meta")
            if dtype.is_floating_point:
                t = torch.randn(shape, generator=generator, dtype=torch.float64)
                if skew and t.dim() >= 2:
                    t = torch.randn(shape[-1], generator=generator, dtype=torch.float64) + 1e-3 * t
                t = t * scale + shift
                return t if promote else t.to(dtype)
            if dtype == torch.bool:
                return torch.ones(shape, dtype=dtype)
            if x[1] in routed or len(shape) == 1:  # ids beside weights: distinct in a row
                pool = max(shape[-1], 1) if skew and len(shape) > 1 else experts
                noise = torch.rand(*shape[:-1], max(pool, shape[-1]), generator=generator) if len(shape) > 1 else None
                if noise is None:
                    return torch.randint(0, experts, shape, generator=generator).to(dtype)
                return noise.argsort(-1)[..., : shape[-1]].to(dtype)
            return torch.randint(0, experts, shape, generator=generator).to(dtype)

        return pytree.tree_unflatten([one(x) for x in self.leaves], self.spec)


def _is_plan(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], torch.dtype)


def randomised(
    module: nn.Module, generator: torch.Generator, *, training: bool, promote: bool, grad: bool
) -> nn.Module:
    """A real copy with random parameters; buffers keep their values where they have any."""

    def fill(t: Tensor, is_param: bool) -> Tensor:
        dtype = torch.float64 if promote and t.dtype in _NARROW else t.dtype
        if not is_param and not t.is_meta:
            return t.detach().cpu().to(dtype, copy=True)
        if not dtype.is_floating_point:
            return torch.zeros(t.shape, dtype=dtype)
        if t.dim() < 2:
            return (0.3 * torch.randn(t.shape, generator=generator)).to(dtype)
        # Rows and columns of nearly equal length: a router with such weights reaches every expert.
        size = 0.7 + 0.6 * torch.rand(t.shape, generator=generator)
        sign = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
        return (size * sign / max(t.shape[-1], 1) ** 0.5).to(dtype)

    twin = replica(module, fill, training=training)
    for p in twin.parameters():
        p.requires_grad_(grad and p.is_floating_point())
    return twin


class Promote(TorchFunctionMode):
    """Every dtype below float64 that a call names becomes float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _CASTS:
            return Tensor.double(args[0])
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda d: torch.float64 if d in _NARROW else d, (args, kwargs))
        return func(*args, **kwargs)


def probe(guide: Guide, module: nn.Module, recipe: Recipe, *, training: bool) -> ProbeReport:
    """Raises ``Refused`` with the figures where the two differ."""
    g = torch.Generator().manual_seed(20)
    worst, cases, name = 0.0, 0, ""
    first_error = None
    for sizes, style in _cases(recipe, guide.owner):
        twin = randomised(module, g, training=training, promote=True, grad=True)
        if style is TIES:
            _prefer_nothing(twin, guide)
        inputs: dict[str, Any] = {} if style is TIES else style
        args, kwargs = recipe.make(sizes, guide.owner.num_experts, g, promote=True, **inputs)
        leaves = [t.requires_grad_() if t.is_floating_point() else t for t in walk((args, kwargs))]
        try:
            with PlainGroupedMM(), Promote():
                want = _outputs_and_grads(twin, twin.forward, args, kwargs, leaves)
        except Exception as e:  # the module itself cannot do this (a single token, say): nothing to compare with
            first_error = first_error or f"{type(e).__name__}: {e}"
            continue
        if style is TIES and not all(t is None or bool(t.isfinite().all()) for t in want[1]):
            continue  # weights that are divided by their sum, which is zero
        try:
            with PlainGroupedMM(), Promote():
                got = _outputs_and_grads(twin, _raised(guide, twin), args, kwargs, leaves)
        except Refused:
            raise
        except Exception as e:
            raise Refused(f"raised, it fails for sizes {sorted(map(str, sizes.values()))}: {e}") from e
        cases += 1
        for what, a, b in zip(want[0], want[1], got[1], strict=True):
            error = _difference(a, b)
            if error > worst:
                worst, name = error, what
        if worst > TOLERANCE:
            on = _say(sizes, style)
            raise Refused(f"raised, it differs from the module by {worst:.3g} (relative) in {name}, on {on}")
    if not cases:
        raise Refused(f"the module itself fails on fabricated inputs: {first_error}")
    return ProbeReport(worst, cases, name)


def _raised(guide: Guide, twin: nn.Module) -> Callable:
    return lambda *args, **kwargs: guide.forward(twin, twin.forward, args, kwargs)


def _prefer_nothing(twin: nn.Module, guide: Guide) -> None:
    experts = {n for role in guide.found.body.params.values() for n in guide.owner.roles[role]}
    for name, p in twin.named_parameters():
        if name not in experts:
            p.detach().zero_()


def _say(sizes: dict, style: dict) -> str:
    return f"sizes {[int(s) for s in sizes.values()]}" + (f" with {style}" if style else "")


def _cases(recipe: Recipe, owner: Owner) -> list[tuple[dict[sympy.Symbol, int], dict[str, Any]]]:
    symbols = recipe.symbols()
    small = dict(zip(symbols, (3, 7, 2, 5, 4, 6), strict=False))
    large = dict(zip(symbols, (5, 2 * owner.num_experts + 1, 3, 2, 4, 7), strict=False))
    one = dict.fromkeys(symbols, 1)
    return [
        (small, {}),
        (large, {}),
        (one, {}),
        (small, {"skew": True}),
        (small, TIES),
        (small, {"scale": 20.0, "shift": -5.0}),
    ]


def _outputs_and_grads(
    module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any], inputs: list[Tensor]
) -> tuple[list[str], list[Tensor | None]]:
    params = dict(module.named_parameters())
    wrt = [*((f"the gradient of input {i}", t) for i, t in enumerate(inputs) if t.requires_grad)]
    wrt += [(f"the gradient of {n}", p) for n, p in params.items() if p.requires_grad]
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.view_as(t), (args, kwargs))
    outs = list(walk(forward(*args, **kwargs)))
    g = torch.Generator().manual_seed(7)
    weighed = [o for o in outs if o.is_floating_point() and o.requires_grad]
    total = sum((o * torch.randn(o.shape, generator=g, dtype=torch.float64)).sum() for o in weighed)
    names = [f"output {i}" for i in range(len(outs))]
    if not isinstance(total, Tensor):
        return names, [*(o.detach() for o in outs)]
    grads = torch.autograd.grad(total, [t for _, t in wrt], allow_unused=True)
    return names + [n for n, _ in wrt], [*(o.detach() for o in outs), *grads]


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None and b is None:
        return 0.0
    if a is None or b is None:  # autograd's way to say zero
        a, b = (torch.zeros_like(b), b) if b is not None else (a, torch.zeros_like(a))  # type: ignore[arg-type]
    assert a is not None and b is not None
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    scale = a.abs().max().double().clamp_min(1e-30) if a.any() else torch.tensor(1.0)
    error = float((a.double() - b.double()).abs().max() / scale)
    return float("inf") if error != error else error
