"""What a chunk is to the type system: each rank's own tokens, fewer of them.

A chunk of ``[B, S, …]`` is recorded as ``[c, m, …]``, m the ranks that share a sequence: as if each token were a
sequence of one token a rank.  So whatever a dim of tokens is sharded as, it stays; but rows whose sequences are sharded
(``S(0, parts=B)``) consist of c blocks.
"""

from __future__ import annotations

from moec.placement import Parts, S, Types


def chunk_types(types: Types, lead: int, blocks: Parts) -> Types:
    """The types of a value of which ``lead`` leading dims are tokens, with ``blocks`` in place of its sequences."""
    packed = {a for a, t in types.items() if t.kind == "S" and t.dim < lead and t.parts != 1}
    return {a: S(t.dim, blocks) if a in packed else t for a, t in types.items()}


def blocks_of(types: Types) -> Parts:
    """The blocks that rows consist of (1: they are no packed dim)."""
    return next((t.parts for t in types.values() if t.kind == "S" and t.dim == 0 and t.parts != 1), 1)
