"""The always-on checks: what must hold of a graph after every pass.  Each raises MoecError naming node and module.

``structure``  the graph is well formed; each start has one wait; collectives name groups of the mesh
``reinfer``    every op, run on fakes of the local shapes, gives what the types say of the recorded global shapes
``types``      the SPMD types, re-derived from placeholders and collectives alone, equal the recorded ones
"""

from __future__ import annotations

from moec.passes.verify.reinfer import check_shapes
from moec.passes.verify.structure import check_structure
from moec.passes.verify.types import check_types
from moec.program import Program


def verify(program: Program) -> None:
    check_structure(program)
    check_shapes(program)
    if "sharded" in program.facts:
        check_types(program)


__all__ = ["check_shapes", "check_structure", "check_types", "verify"]
