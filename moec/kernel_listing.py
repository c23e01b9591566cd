"""What generated kernels a program will run on a GPU: their sources, and which nodes of which module each is for.

``write_kernels(program, directory)`` puts every kernel of every fused experts block there, once however many layers
use it, and an ``index.txt``: a line for each node with its module, body and files.  Shapes are those of the graph, so
nothing has to run; the tiles are those of an sm_90 without a table and 1024 rows an expert, since neither the GPU nor
the routing is known.
"""

from __future__ import annotations

from pathlib import Path

from torch import fx

from moec.program import Program, op_name
from moec.runtime.body import Body
from moec.runtime.kernels import block
from moec.runtime.kernels.block import Block
from moec.runtime.kernels.source import write as write_source

ARCH, ROWS = "sm_90", 1024


def write_kernels(program: Program, directory: Path) -> None:
    """Nothing is written for a program without fused experts."""
    lines = []
    for node in program.graph.nodes:
        described = of_node(node)
        if described is None:
            continue
        lines.append(f"{node.name} ({op_name(node)}) of {node.meta.get('where') or 'the model'}: {described.body}")
        for name, spec in block.specs(described, ARCH).items():
            path = write_source(block.source(spec), spec.name, directory)
            lines.append(f"    {path.name}: {name}")
    if lines:
        (directory / "index.txt").write_text("\n".join(lines) + "\n")


def of_node(node: fx.Node) -> Block | None:
    """The block that a node computes; None for other nodes, and for dtypes without a GPU kernel."""
    if op_name(node) == "moec.experts":
        _, ids, _, w_in, b_in, w_out, b_out, body, _ = node.args
        choices = int(ids.meta["val"].shape[1])
    elif op_name(node) == "moec.experts_rows":
        _, _, w_in, b_in, w_out, b_out, body = node.args
        choices = 0
    else:
        return None
    values, out = [w.meta["val"] for w in w_in], w_out.meta["val"]
    if "float64" in str(out.dtype) or Body.parse(body).rows:
        return None
    sizes = [int(n) for n in values[0].shape[:2]]
    return Block(
        body, sizes[0], sizes[1], tuple(int(w.shape[2]) for w in values), int(out.shape[2]),
        tuple(_strides(w) for w in values), _strides(out), bool(b_in), b_out is not None, out.dtype, choices, ROWS,
    )  # fmt: skip


def _strides(w) -> tuple[int, int, int]:
    a, b, c = (int(s) for s in w.stride())
    return a, b, c
