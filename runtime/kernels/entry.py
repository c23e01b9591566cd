"""Entry: one kernel of the fixed list that is compiled ahead of time, without a GPU, for every target (catalog.py).

A family of kernels gives its own: ``entries(arch) -> list[Entry]`` in its file, for the tile sizes that it would choose
on ``arch`` (``sm_90``, ``gfx942``, ...).  What an entry holds is what a launch would hand to Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    name: str
    """Unique in the list: what is computed, dtype, shape; ``experts_up bf16 E128 H2048 I768``."""
    source: str
    """The text that ``source.load`` would get."""
    kernel: str
    """The function in it."""
    arguments: tuple[tuple[str, str], ...]
    """(parameter, type) of those that are no ``tl.constexpr``, in order: Triton's names ``*bf16``, ``*i64``, ``i32``,
    ``fp32``, with ``:16`` behind what is divisible by 16 (the address of a tensor that torch allocated is)."""
    constexprs: dict[str, int | float | bool | str | None] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    nightly: bool = False
    """Left to the long list: each default entry costs every run of the tests some five seconds."""
