"""text: numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def human(n: int) -> str:
    return f"{n} B" if n < 10_000 else f"{n / 1e3:.1f} kB" if n < 10_000_000 else f"{n / 1e6:.1f} MB"


def ms(seconds: float) -> str:
    """Milliseconds, to three digits behind the point or four in all."""
    return f"{seconds * 1e3:.3f}" if seconds < 1e-2 else f"{seconds * 1e3:.4g}"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table, indented by two."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [header, *rows]]
