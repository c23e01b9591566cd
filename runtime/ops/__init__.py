"""The ``moec::`` ops: importing this package registers them all."""

from . import (
    blocked_logsumexp,
    boundary,
    convert,
    drop,
    exchange,
    grouped_add,
    grouped_mm,
    lookup,
    pack,
    pad_rows,
    permute,
    pick,
    route,
    sort_chunks,
    unpermute,
)

__all__ = [
    "blocked_logsumexp",
    "boundary",
    "convert",
    "drop",
    "exchange",
    "grouped_add",
    "grouped_mm",
    "lookup",
    "pack",
    "pad_rows",
    "permute",
    "pick",
    "route",
    "sort_chunks",
    "unpermute",
]
