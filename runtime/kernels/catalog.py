"""The fixed list of kernels that are compiled ahead of time for every target; tests/aot.py is who compiles them.

Every family of kernels stands in it, forward and backward, at the shapes of models that people train.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import MoecError
from . import experts_catalog, rows_catalog, scaled_catalog
from .entry import Entry

FAMILIES: tuple[Callable[[str], list[Entry]], ...] = (
    experts_catalog.entries, rows_catalog.entries, scaled_catalog.entries,
)  # fmt: skip


def entries(arch: str) -> list[Entry]:
    """All of them, for the tile sizes of ``arch``.  Raises MoecError where two have one name."""
    found = [entry for family in FAMILIES for entry in family(arch)]
    names = [entry.name for entry in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MoecError(f"two entries are called {', '.join(twice)}", where="kernels")
    return found
