"""Chunks around what needs them: regions are found, written, and the reasons kept.

``Groups`` are the sites that shall be chunked, by their tokens and how these lie on the ranks outside; a site is a set
of nodes.  The sites of a group make one region (in as many pieces as they hang together).  A site that cannot be
part of it is left as it is, with the reason in ``why_not``, as are the ops at which the region ends.
"""

from __future__ import annotations

from torch import fx

from moec.passes.chunks.region import Layout, Region, find
from moec.passes.chunks.rewrite import write
from moec.passes.chunks.rows import Tokens
from moec.program import Program, op_name

Site = frozenset[fx.Node]
Groups = dict[tuple[Tokens, Layout], list[Site]]
MIXED = "its tokens and their weights lie differently on the ranks"


def chunk(program: Program, groups: Groups, count: int, *, declined: str, experts: bool = True) -> list[Site]:
    """``count`` chunks around the sites of every group.  ``experts``: what the routing deals out is chunked too.

    Returns the sites that were left."""
    left: list[Site] = []
    for (tokens, base), sites in groups.items():
        while sites:
            region = Region(program, tokens, base, frozenset().union(*sites), experts)
            whole = find(region)
            stuck = [s for s in sites if s & region.stops.keys() or not _of_one_history(region, s)]
            if whole and not stuck:
                write(region, count)
                program.why_not += dict.fromkeys(
                    f"{_at(n)}: chunks of tokens end at {op_name(n)}: {why}" for n, why in region.stops.items()
                )
                break
            stuck = stuck or sites
            for site in stuck:
                why = next((f"{op_name(n)}: {region.stops[n]}" for n in region.stops if n in site), MIXED)
                where = next((_at(n) for n in site if _at(n)), "")
                program.why_not.append(f"{where}: {declined}: {why}")
            left += stuck
            sites = [s for s in sites if s not in stuck]
    return left


def _of_one_history(region: Region, site: Site) -> bool:
    """Are all tokens that experts' rows are made of, and made of them, those of the same chunks?"""
    found = set()
    for node in site & region.history.keys() if region.experts else ():
        found |= {region.history.get(o, region.entries.get(o)) for o in region.rows.of(node).tokens}
    return len(found) <= 1


def _at(node: fx.Node) -> str:
    return node.meta.get("where", "")
