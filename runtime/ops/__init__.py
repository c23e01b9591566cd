"""The ``moec::`` ops: importing this package registers them all."""

from . import convert, exchange, grouped_add, grouped_mm, pad_rows, permute, sort_chunks, unpermute

__all__ = ["convert", "exchange", "grouped_add", "grouped_mm", "pad_rows", "permute", "sort_chunks", "unpermute"]
