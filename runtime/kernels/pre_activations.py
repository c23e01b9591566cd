"""How the columns of the first products meet in one tile: a tile of the body's result needs all of its inputs.

Legend: N rows, E experts, H hidden, M columns of a first product, A columns of all of them, I columns of the result.

The tile of result columns ``column`` has, for every product, the blocks of columns that the body's inputs name:

* ``whole``: the same columns, one accumulator;
* ``chunk(h, parts, index)``: ``column + index * I``, an accumulator for each of the parts;
* ``every(h, 2, index)``: ``wide``, twice as many columns side by side in one accumulator that is split behind the
  product (rows of interleaved columns so are read, and written, whole);
* ``every(h, step, index)`` of other steps: ``column * step + index``, an accumulator each.

All columns of a product are in some block, whether the body looks at them or not: pre-activations are saved whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..body import Body
from ..errors import MoecError
from .template import across, plus, times


@dataclass(frozen=True)
class Block:
    """Columns ``columns`` of product number ``product``, which begins at ``offset`` among all A columns."""

    name: str
    product: int
    columns: str
    offset: int
    inputs: tuple[str | None, ...]
    """The body's input that these columns are; two of a ``wide`` block.  None: the body does not look there."""

    @property
    def wide(self) -> bool:
        return self.columns == "wide"

    def place(self, total: int) -> str:
        """Where its columns are in pre-activations of ``total`` columns."""
        return place(total, plus(self.columns, self.offset))

    @property
    def ok(self) -> str:
        return "wide_ok" if self.wide else "ok"


def place(total: int, columns: str = "column") -> str:
    """Where columns of the tile's rows are in a tensor of ``total`` columns: a scalar of 64 bits and a block of 32,
    which takes half the registers of a block of 64."""
    return f"top.to(tl.int64) * {total} + (line[:, None] * {total} + {across(columns)})"


def blocks(body: Body, widths: Sequence[int]) -> list[Block]:
    """The blocks of a body whose products have ``widths`` columns.  Raises MoecError where a product is divided in two
    ways at once, or the body wants numbers of a row."""
    columns, found, offset = body.width(widths), list[Block](), 0
    if body.rows:
        raise MoecError("a body with numbers of a row has no GPU kernel", where=f"body {body.text()!r}")
    for product, width in enumerate(widths):
        of = [i for i in body.inputs if i.form not in ("row", "grad") and i.source == product]
        ways = {(i.form, i.parts) for i in of} or {("whole", 1) if width == columns else ("chunk", width // columns)}
        if len(ways) > 1 or next(iter(ways))[1] * columns != width:
            raise MoecError(
                f"h{product} is divided in several ways, or not into equal parts", where=f"body {body.text()!r}"
            )
        ((form, parts),) = ways
        name = {i.index: i.name for i in of}
        if (form, parts) == ("every", 2):
            found.append(Block(f"{product}", product, "wide", offset, (name.get(0), name.get(1))))
        else:
            for index in range(parts):
                at = plus("column", index * columns) if form != "every" else plus(times("column", parts), index)
                label = f"{product}" if parts == 1 else f"{product}_{index}"
                found.append(Block(label, product, at, offset, (name.get(index),)))
        offset += width
    return found


def split(block: Block, value: str, rows: int, columns: int) -> list[str]:
    """Lines that make ``even_…`` and ``odd_…`` of a wide block's value; none for another block."""
    if not block.wide:
        return []
    return [f"even_{block.name}, odd_{block.name} = tl.split(tl.reshape({value}, ({rows}, {columns}, 2)))"]


def inputs(found: Sequence[Block], value: str, computing: str) -> dict[str, str]:
    """The expression of every input: ``value`` with a block's name in it holds its values."""
    out: dict[str, str] = {}
    for b in found:
        values = (f"even_{b.name}", f"odd_{b.name}") if b.wide else (value.format(b.name),)
        out |= {name: f"{v}.to({computing})" for name, v in zip(b.inputs, values, strict=True) if name}
    return out
