"""Structure: a well-formed graph whose placeholders are all accounted for and whose communication is complete.

The sequence of collectives is the same on every rank of a group because there is one graph and nothing in it branches;
what remains to check is that every op is a plain call, that groups belong to the mesh, and that no start is left
without its wait or read before it.
"""

from __future__ import annotations

from moec.program import Program
from moec.runtime.collectives import collective, group_of, is_start, is_wait
from moec.runtime.errors import MoecError


def check_structure(program: Program) -> None:
    program.graph.lint()
    seen = set()
    for node in program.graph.nodes:
        where = node.meta.get("where", "")
        if node.op == "placeholder":
            if (node.name in program.params) == (node.name in program.inputs):
                raise MoecError(f"placeholder {node.name} is not exactly one of parameter and input", where=where)
            seen.add(node.name)
        elif node.op not in ("call_function", "get_attr", "output"):
            raise MoecError(f"{node.name} is a {node.op}, which may branch", where=where)
        elif node.op == "call_function":
            _check_collective(program, node)
    if missing := (program.params.keys() | program.inputs.keys()) - seen:
        raise MoecError(f"no placeholder for {sorted(missing)}", where="program")
    n = len(next(iter(reversed(program.graph.nodes))).args[0])
    wanted = [o.index for o in program.outputs if o.index is not None] + [s.index for s in program.statistics.values()]
    if sorted(set(wanted)) != list(range(n)):
        raise MoecError(
            f"the graph returns {n} values, the output contract names {sorted(set(wanted))}", where="program"
        )


def _check_collective(program: Program, node) -> None:
    where = node.meta.get("where", "")
    if is_wait(node.target) and not is_start(node.args[0].target):
        raise MoecError(f"{node.name} waits for {node.args[0].name}, which starts nothing", where=where)
    if collective(node.target) is None:
        return
    key = group_of(node)
    size = node.args[-2]
    if not key or program.mesh.key(key.split(",")) != key or program.mesh.size(key) != size:
        raise MoecError(
            f"{node.name} names the group {key!r} of size {size}, not a group of {program.mesh.axes}", where=where
        )
    if is_start(node.target):
        waits = [u for u in node.users if is_wait(u.target)]
        if len(waits) != 1 or len(node.users) != 1:
            raise MoecError(
                f"{node.name} has {len(waits)} waits and {len(node.users)} users, not exactly one wait", where=where
            )
