"""trace: timelines as the JSON that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show.

One process for each named timeline, in it one track for compute and one for each communication stream.  Of collectives
that run at the same time on one stream the later ones get tracks of their own.  Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moec.cost.roofline import COMPUTE
from moec.cost.timeline import Span


def trace(timelines: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """``{"traceEvents": […]}``; ``timelines``: spans by the name under which they are shown."""
    events: list[dict[str, Any]] = []
    for process, (name, spans) in enumerate(timelines.items()):
        events.append(_named("process_name", process, 0, name))
        ends: dict[str, float] = {}
        tracks: dict[str, int] = {}
        for span in sorted(spans, key=lambda s: (s.stream != COMPUTE, s.stream, s.start_s, s.end_s)):
            track = _track(span, ends)
            if track not in tracks:
                tracks[track] = len(tracks)
                events.append(_named("thread_name", process, tracks[track], track))
            ends[track] = span.end_s
            events.append(
                {
                    "ph": "X", "name": span.node, "cat": span.stream, "pid": process, "tid": tracks[track],
                    "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6, "args": {"module": span.where},
                }
            )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _track(span: Span, ends: Mapping[str, float]) -> str:
    """The first track of a stream that is free when the span begins."""
    track, n = span.stream, 1
    while ends.get(track, 0.0) > span.start_s + 1e-12:
        n += 1
        track = f"{span.stream} ({n})"
    return track
