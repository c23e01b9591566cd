"""Tile: how a kernel cuts its work, and which tile a shape gets.

A table (``tiles.json`` beside this file, and one of the user's that ``moec tune`` writes, which goes first) has tiles
per *family* of kernels and *shape*: architecture, dtype, columns N and depth K of the product, and a bucket of rows per
expert (the next power of two).  What is not in it gets a default that compiles without register spills everywhere.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch

from ..errors import MoecError
from .source import cache_directory

FAMILIES = (
    "experts_forward", "experts_backward", "grouped_rows", "grouped_outer", "blockwise_rows", "blockwise_outer",
    "mxfp8_rows", "mxfp8_outer", "whole_rows", "whole_outer",
)  # fmt: skip
"""The last six are FP8 products (``scaled.py``), by their recipes."""
NATIVE_E8M0 = ("sm_100", "sm_103", "gfx950")
"""Whose tensor cores apply scales of 32 elements."""


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a block, warps, stages of the software pipeline, programs on a multiprocessor."""

    m: int
    n: int
    k: int
    warps: int = 8
    stages: int = 3
    programs: int = 1


INTERPRETED = Tile(64, 64, 64)
"""For CPU tensors: an interpreter takes its time per block."""


@dataclass(frozen=True)
class Shape:
    """Of a product: ``columns`` N, ``depth`` K, ``rows`` per expert on average."""

    columns: int
    depth: int
    rows: int
    dtype: torch.dtype
    steps: int = 0
    """Of the body behind the product, where there is one: what they compute stays in registers beside the product."""

    def key(self) -> str:
        """As the table names it: dtype, N, K and the bucket."""
        bucket = 1 << max(self.rows - 1, 0).bit_length()
        return f"{str(self.dtype).removeprefix('torch.')} N{self.columns} K{self.depth} rows{bucket}"


def choose(family: str, shape: Shape, device: torch.device) -> Tile:
    """The tile of the table, or the default."""
    if device.type != "cuda":
        return INTERPRETED
    arch = architecture(device.index or 0)
    found = table().get(arch, {}).get(family, {}).get(shape.key())
    return Tile(*found) if found else default(family, shape, arch)


def default(family: str, shape: Shape, arch: str) -> Tile:
    """A tile that fits the registers and the shared memory of every architecture of tests/test_aot.py."""
    amd = arch.startswith("gfx")
    if shape.dtype in (torch.float32, torch.float64):
        # Without tensor cores: accumulators and operands both live in registers.
        return Tile(64, 64, 16, warps=8, stages=2, programs=2)
    stages = 2 if amd else 3
    if shape.dtype == torch.float8_e4m3fn:
        if not family.startswith("mxfp8") or arch in NATIVE_E8M0:  # scaled in tensor cores only if 128 rows high
            return Tile(128, 128, 128, stages=stages)
        low = shape.rows <= 64 and family == "mxfp8_rows"
        return Tile(64, 128, 32, warps=4, stages=4, programs=2) if low else Tile(128, 128, 32, stages=4)
    if family == "experts_backward":
        # What the derivative of a long body computes takes the registers that more columns would take.
        columns = 64 if shape.steps > 8 else 128
        if shape.rows > 64:
            return Tile(128, columns, 64, warps=8, stages=stages)
        few = Tile(32, 64, 64, warps=4, stages=stages, programs=2)
        return Tile(64, columns, 64, stages=stages) if shape.rows > 32 else few
    rows = 128 if shape.rows > 64 or family == "grouped_outer" else 64 if shape.rows > 32 else 32
    return Tile(rows, 128, 64, stages=stages) if rows == 128 else Tile(rows, 128, 64, 4, stages, programs=2)


@cache
def architecture(index: int) -> str:
    """``sm_90``, ``gfx942`` …"""
    properties = torch.cuda.get_device_properties(index)
    name = getattr(properties, "gcnArchName", "")
    return name.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


@cache
def table() -> dict[str, dict[str, dict[str, list[int]]]]:
    """Architecture -> family -> shape -> tile, of both files."""
    merged: dict[str, dict[str, dict[str, list[int]]]] = {}
    for path in (Path(__file__).parent / "tiles.json", user_table()):
        for arch, families in read(path).items():
            for family, shapes in families.items():
                merged.setdefault(arch, {}).setdefault(family, {}).update(shapes)
    return merged


def user_table() -> Path:
    return cache_directory() / "tiles.json"


def read(path: Path) -> dict[str, dict[str, dict[str, list[int]]]]:
    """A table of a file; empty where there is none.  Raises MoecError for what is no table."""
    try:
        data = json.loads(path.read_text()) if path.is_file() else {}
        for families in data.values():
            for family, shapes in families.items():
                if family not in FAMILIES:
                    raise ValueError(f"{family!r} is none of {', '.join(FAMILIES)}")
                for tile in shapes.values():
                    Tile(*tile)
    except (ValueError, TypeError, AttributeError) as e:
        raise MoecError(f"no table of tiles: {e}", where=str(path), way_out="delete it and run `moec tune`") from None
    return data


def record(path: Path, arch: str, family: str, shape: Shape, tile: Tile) -> None:
    """Put a tile into the table of a file."""
    data = read(path)
    data.setdefault(arch, {}).setdefault(family, {})[shape.key()] = list(astuple(tile))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


@cache
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(device: torch.device, tile: Tile) -> int:
    """How many persistent programs fill the device; a CPU (the interpreter) runs them one after the other: 3."""
    if device.type != "cuda":
        return 3
    return multiprocessors(device.index or 0) * tile.programs
