"""Capture: a plain model in, a ``Program`` out."""

from moec.program import MoEBlock

from .examples import capture_key
from .export import capture
from .probe import ProbeReport
from .skeleton import skeleton


def probe(block: MoEBlock) -> ProbeReport:
    """Prove a captured block once more: the raised form against the module, in float64, on random inputs."""
    return block.guide.prove()


__all__ = ["ProbeReport", "capture", "capture_key", "probe", "skeleton"]
