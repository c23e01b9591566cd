"""Blocks: find the MoE blocks of a model and get each one ready to be raised.

``find_blocks`` runs the skeleton's forward once with fake tensors.  When a candidate owner is called, it is scouted,
observed, located and proved (see the modules of those names); the guide that comes of it takes part in the same forward
already, so that a block whose loop cannot run on fake tensors does not stop what comes after it.  Blocks that look and
are called alike are treated once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from moec.runtime import torch_compat

from .guide import Guide
from .likeness import likeness
from .locate import Located, locate
from .observe import Tape, observe
from .owners import Owner, candidates
from .probe import ProbeReport, Recipe, probe, randomised
from .shrink import narrow
from .skeleton import replica
from .steps import Refused

LEVELS = 3
"""How far above a module that holds experts the one that routes to them is looked for."""
PROPOSALS = 16
"""How many combinations that fit one observation are proved before the block is refused."""


@dataclass(frozen=True)
class Raised:
    """A raised block: what raises it, and what proved it."""

    guide: Guide
    recipe: Recipe
    report: ProbeReport
    module: nn.Module
    """The structure of the module or of its narrow twin, from which the proof makes random copies."""
    training: bool

    def prove(self) -> ProbeReport:
        """The proof once more; raises ``Refused`` if it fails."""
        twin = replace(self.guide, factor=1)
        return replace(probe(twin, self.module, self.recipe, training=self.training), factor=self.guide.factor)


@dataclass
class Blocks:
    raised: dict[str, Raised] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Path -> why the block stays as it is."""


def find_blocks(
    model: nn.Module, twin: nn.Module, call: Callable[[], Any], *, training: bool, without: Sequence[str] = ()
) -> Blocks:
    """``twin`` is the skeleton of ``model``; ``call()`` calls it with fake tensors.  ``without``: paths of modules that
    are not looked into."""
    outside = tuple(f"{path}." for path in without)
    owners = {o.path: o for o in candidates(model) if not f"{o.path}.".startswith(outside)}
    known: dict[Any, Raised | str | None] = {}
    for _ in range(LEVELS):
        if not owners:
            return Blocks()
        found, error = _find(model, twin, call, owners, known, training)
        others = {p: o for p, o in owners.items() if p in found.raised or p in found.refused}
        lifted = _lifted([o for p, o in owners.items() if p not in others], {*others, *without})
        if not lifted:
            break
        owners = {**others, **lifted}
    # Something before or after the blocks may not run on fake tensors; export says what, better than we could.
    if error is not None and not found.refused and not found.raised:
        raise error
    return found


def _lifted(silent: list[Owner], others: set[str]) -> dict[str, Owner]:
    """Owners that did not route (or were not reached), seen from the modules that hold them but none of ``others``."""
    parents = [p for o in silent if (p := o.seen_from_parent()) is not None]
    counts = Counter(p.path for p in parents)
    return {
        p.path: p
        for p in parents
        if counts[p.path] == 1 and not any((o + ".").startswith(p.path + "." if p.path else "") for o in others)
    }


def _find(
    model: nn.Module,
    twin: nn.Module,
    call: Callable[[], Any],
    owners: dict[str, Owner],
    known: dict[Any, Raised | str | None],
    training: bool,
) -> tuple[Blocks, Exception | None]:
    found = Blocks()

    def wrap(owner: Owner) -> Callable:
        module, original = twin.get_submodule(owner.path), model.get_submodule(owner.path)
        forward = module.forward

        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            recipe = Recipe.of(args, kwargs)
            with torch_compat.without_modes():
                key = (likeness(original), tuple(owner.roles), owner.num_experts, _shape_key(recipe))
                if key not in known:
                    known[key] = prepare(owner, original, recipe, training)
            verdict = known[key]
            if isinstance(verdict, Raised):
                raised, guide = verdict, replace(verdict.guide, owner=owner)
                try:
                    out = guide.forward(module, forward, args, kwargs)
                except Refused as e:
                    verdict = str(e)
                else:
                    found.raised[owner.path] = replace(raised, guide=guide)
                    return out
            if isinstance(verdict, str):
                found.refused[owner.path] = verdict
                found.raised.pop(owner.path, None)
            return forward(*args, **kwargs)

        return wrapper

    with forwards_replaced(twin, {path: wrap(o) for path, o in owners.items()}):
        try:
            call()
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as e:
            return found, e
    return found, None


@contextmanager
def forwards_replaced(root: nn.Module, forwards: dict[str, Callable]) -> Iterator[None]:
    modules = {path: root.get_submodule(path) for path in forwards}
    try:
        for path, forward in forwards.items():
            modules[path].forward = forward
        yield
    finally:
        for m in modules.values():
            vars(m).pop("forward", None)


def guided(twin: nn.Module, blocks: Blocks) -> dict[str, Callable]:
    """Replacement forwards of the raised blocks of another skeleton of the same model."""
    return {path: _guided(twin.get_submodule(path), r.guide) for path, r in blocks.raised.items()}


def _guided(module: nn.Module, guide: Guide) -> Callable:
    forward = module.forward

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return guide.forward(module, forward, args, kwargs)

    return wrapper


def prepare(owner: Owner, module: nn.Module, recipe: Recipe, training: bool) -> Raised | str | None:
    """A proved guide; or why there is none; or None if the module is no MoE block at all."""
    g = torch.Generator().manual_seed(0)
    experts = owner.num_experts
    symbols = recipe.symbols()
    sizes = dict(zip(symbols, (3, 2 * experts + 5, 2, 5, 4, 6), strict=False))
    meta = replica(module, lambda t, _: t.detach().to("meta"), training=training)
    args, kwargs = recipe.make(sizes, experts, g, device="meta")
    if not owner.routes(meta, args, kwargs):
        return None
    try:
        bare, widths, factor = narrow(module, owner, training=training)
        recipe = recipe.narrowed(widths, factor)
        for attempt in range(4):
            real = randomised(bare, g, training=training, promote=False, grad=False)
            args, kwargs = recipe.make(sizes, experts, g)
            tape = observe(real, args, kwargs, owner.path)
            try:
                return _first_proved(locate(tape, owner, real), owner, tape, bare, recipe, training, factor)
            except Refused as e:
                if "were reached" not in str(e) or attempt == 3 or not symbols:
                    raise
                sizes = {s: n * 3 if i == len(symbols[:2]) - 1 else n for i, (s, n) in enumerate(sizes.items())}
        raise AssertionError("unreachable")
    except Refused as e:
        return str(e)
    except (RuntimeError, ValueError, TypeError, IndexError) as e:
        return f"it does not run on fabricated inputs: {type(e).__name__}: {e}"


def _first_proved(
    proposals: Iterator[Located], owner: Owner, tape: Tape, bare: nn.Module, recipe: Recipe, training: bool, factor: int
) -> Raised:
    """Several combinations may fit one observation (ids and masks, say); the probe tells them apart."""
    refusal: Refused | None = None
    for found, _ in zip(proposals, range(PROPOSALS), strict=False):
        guide = Guide(owner, tape, found)
        try:
            report = replace(probe(guide, bare, recipe, training=training), factor=factor)
            return Raised(replace(guide, factor=factor), recipe, report, bare, training)
        except Refused as e:
            refusal = refusal or e
    assert refusal is not None
    raise refusal


def _shape_key(recipe: Recipe) -> tuple:
    return tuple(
        (str(x[0]), tuple(map(str, x[1]))) if isinstance(x, tuple) and x and isinstance(x[0], torch.dtype) else repr(x)
        for x in recipe.leaves
    )
