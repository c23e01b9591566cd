"""Templates of generated source: text with ``<names>``, filled in with strings and blocks of lines.

* A line that is nothing but ``<name>`` becomes the block of that name, every line indented like the placeholder; an
  empty block leaves no line behind.
* Elsewhere ``<name>`` becomes the string of that name.
* A placeholder without a value, or a value without a placeholder, is an error: nothing is left out silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PLACEHOLDER = re.compile(r"<([a-z_]+)>")


def fill(template: str, **values: str | int | Iterable[str]) -> str:
    """``template`` with every placeholder replaced."""
    unused = set(values)
    out: list[str] = []
    for line in template.splitlines():
        names = PLACEHOLDER.findall(line)
        unused -= set(names)
        if len(names) == 1 and line.strip() == f"<{names[0]}>" and not isinstance(values[names[0]], (str, int)):
            indent = line[: len(line) - len(line.lstrip())]
            out += [indent + inner if inner else "" for inner in values[names[0]]]  # type: ignore[union-attr]
        else:
            out.append(PLACEHOLDER.sub(lambda m: str(values[m[1]]), line))
    if unused:
        raise KeyError(f"the template has no place for {', '.join(sorted(unused))}")
    return "\n".join(out) + "\n"


def identifiers(text: str) -> set[str]:
    """Every word of a text that could be a name: what names put into it must not be."""
    return set(re.findall(r"[A-Za-z_]\w*", text))


def mask(*conditions: str) -> str:
    """The last arguments of a load whose values count where all conditions hold (empty ones always do), else are 0."""
    found = [c for c in conditions if c]
    return f", mask={' & '.join(found)}, other=0.0" if found else ""


def plus(expression: str, number: int) -> str:
    return f"{expression} + {number}" if number else expression


def times(expression: str, number: int) -> str:
    return expression if number == 1 else f"{expression} * {number}"


def across(expression: str, suffix: str = "") -> str:
    """A vector as a row of a block."""
    return f"{expression if expression.isidentifier() else f'({expression})'}[None, :]{suffix}"
