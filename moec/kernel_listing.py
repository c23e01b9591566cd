"""What generated kernels a program will run on a GPU: their sources, and which nodes of which module each is for.

``write_kernels(program, directory)`` puts every kernel of every fused experts block there, and every generated FP8
product, once however many layers use it, and an ``index.txt``: a line for each node with its module, body and files.
Shapes are those of the graph, so nothing has to run; the tiles are those of an sm_90 without a table and 1024 rows an
expert, since neither the GPU nor the routing is known; a linear's rows are taken to be whole blocks of the recipe's.
"""

from __future__ import annotations

from pathlib import Path

from torch import fx

from moec.program import Program, op_name
from moec.runtime.body import Body
from moec.runtime.fp8 import Recipe
from moec.runtime.kernels import block, scaled_catalog
from moec.runtime.kernels.block import Block
from moec.runtime.kernels.fp8_ways import GROUPS, LINEARS, Product, fit, way
from moec.runtime.kernels.scaled_outer import ScaledOuter
from moec.runtime.kernels.scaled_rows import ScaledRows
from moec.runtime.kernels.source import write as write_source

ARCH, CAPABILITY, ROWS = "sm_90", (9, 0), 1024


def write_kernels(program: Program, directory: Path) -> None:
    """Nothing is written for a program without fused experts or such products."""
    lines = []
    for node in program.graph.nodes:
        described, products = of_node(node), fp8_products(node)
        if described is not None:
            what, found = described.body, [
                (name, spec.name, block.source(spec)) for name, spec in block.specs(described, ARCH).items()
            ]
        elif products:
            what, found = "FP8 products", [(name, spec.name, scaled_catalog.source(spec)) for name, spec in products]
        else:
            continue
        lines.append(f"{node.name} ({op_name(node)}) of {node.meta.get('where') or 'the model'}: {what}")
        for name, kernel, text in found:
            lines.append(f"    {write_source(text, kernel, directory).name}: {name}")
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


def fp8_products(node: fx.Node) -> list[tuple[str, ScaledRows | ScaledOuter]]:
    """Those of a node and of its backward that moec generates."""
    if op_name(node) not in ("moec.fp8_linear", "moec.fp8_grouped_mm", "moec.fp8_grouped_act"):
        return []
    x, w, recipe = node.args[0], node.args[1], Recipe.parse(node.args[-2])
    dtype, found = x.meta["val"].dtype, []
    for n, of in enumerate(w if isinstance(w, (list, tuple)) else [w]):
        *experts, K, M = (int(size) for size in of.meta["val"].shape)
        linear, E = not experts, experts[0] if experts else 1
        if linear:
            K, M = M, K
        made: dict[Product, ScaledRows | ScaledOuter] = {
            "forward": scaled_catalog.rows_spec(recipe, ARCH, E, K, M, linear, dtype, ROWS),
            "dgrad": scaled_catalog.rows_spec(recipe, ARCH, E, M, K, not linear, dtype, ROWS),
            "wgrad": scaled_catalog.outer_spec(recipe, ARCH, E, M, K, 0, dtype),
        }
        for product, spec in made.items():
            by = way(LINEARS if linear else GROUPS, recipe.name, product, dtype, CAPABILITY)
            if fit(K, M) and by is not None and by.name == "generated":
                found.append((f"{product} of weight {n}", spec))
    return found


def _strides(w) -> tuple[int, int, int]:
    a, b, c = (int(s) for s in w.stride())
    return a, b, c
