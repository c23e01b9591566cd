"""Tile: how a kernel cuts its work, and which tile a shape gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a block, warps and stages of the software pipeline, programs a multiprocessor holds."""

    m: int
    n: int
    k: int
    warps: int = 8
    stages: int = 3
    programs: int = 1


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(device: torch.device, tile: Tile) -> int:
    """How many persistent programs fill the device; a CPU (the interpreter) runs them one after the other: 3."""
    if device.type != "cuda":
        return 3
    return _multiprocessors(device.index or 0) * tile.programs
