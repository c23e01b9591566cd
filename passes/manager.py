"""The pass manager: validates a schedule, runs it, checks the graph after every pass, and leaves a readable trail.

1. The whole schedule is validated against the contracts before any graph is touched.
2. Every pass gets a fork; what came before stays as it was, so that a failure can be looked at.
3. After every pass that changed the graph the always-on checks run (``passes/verify``).
4. With ``dump``, the graph after every pass, the op-count difference to the one before and ``why_not.txt`` are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from moec.passes.contract import Pass
from moec.passes.verify import check_structure, verify
from moec.plan import Plan
from moec.program import Program
from moec.runtime.errors import MoecError

Observer = Callable[[str, Program], None]


def validate_schedule(facts: set[str], passes: Sequence[Pass]) -> None:
    """Raise MoecError naming every pass whose requirement no earlier pass provides, or that conflicts with one."""
    have, problems = set(facts), []
    for p in passes:
        c = p.contract
        if missing := c.requires - have:
            problems.append(f"{c.name} requires {sorted(missing)}, but only {sorted(have)} holds before it")
        if clash := c.conflicts_with & have:
            problems.append(f"{c.name} must not run after {sorted(clash)}")
        have |= c.provides
    if problems:
        raise MoecError("; ".join(problems), where="schedule", way_out="put the passes in pipeline order")


def run(
    program: Program,
    plan: Plan,
    passes: Sequence[Pass],
    *,
    dump: str | Path | None = None,
    observe: Observer | None = None,
    check: bool = True,
) -> Program:
    """Run ``passes`` over ``program``; ``observe(name, program)`` is called with the input and after every pass.
    ``check``: verify the program after every pass; False for one that is only estimated."""
    passes = [p for p in passes if p.applies(plan)]
    validate_schedule(program.facts, passes)
    trail = _Trail(dump)
    trail.write(0, "captured", program, None)
    if observe:
        observe("captured", program)
    for i, p in enumerate(passes, 1):
        before = program
        program = p.run(program.fork(), plan)
        program.facts |= p.contract.provides
        try:
            if not check:
                pass
            elif p.contract.copies:
                check_structure(program)
            elif i == 1 or _changed(before, program):
                verify(program)
        except MoecError as e:
            raise MoecError(
                f"the graph after this pass does not hold: {e.message}",
                where=f"pass {p.name}, {e.where}",
                way_out=e.way_out,
            ) from e
        finally:
            trail.write(i, p.name, program, before)
        if observe:
            observe(p.name, program)
    return program


_CONTRACT = ("params", "inputs", "outputs", "statistics", "grad_reductions")


def _changed(before: Program, after: Program) -> bool:
    """Is there anything that the last check has not seen: another graph, contract, or types for the first time?"""
    return (
        str(before.graph) != str(after.graph)
        or ("sharded" in before.facts) != ("sharded" in after.facts)
        or any(getattr(before, f) != getattr(after, f) for f in _CONTRACT)
    )


class _Trail:
    """The dump directory; does nothing without one."""

    def __init__(self, dump: str | Path | None) -> None:
        self.dir = Path(dump) if dump else None
        if self.dir:
            self.dir.mkdir(parents=True, exist_ok=True)

    def write(self, i: int, name: str, program: Program, before: Program | None) -> None:
        if not self.dir:
            return
        (self.dir / f"{i:02d}_{name}.txt").write_text(program.render())
        if before is not None:
            old, new = before.op_counts(), program.op_counts()
            changed = sorted(op for op in old | new if old[op] != new[op])
            lines = [f"{op}: {old[op]} -> {new[op]} ({new[op] - old[op]:+d})" for op in changed]
            (self.dir / f"{i:02d}_{name}.ops").write_text("\n".join(lines or ["no op count changed"]) + "\n")
        (self.dir / "why_not.txt").write_text("\n".join(program.why_not or ["nothing was declined"]) + "\n")
