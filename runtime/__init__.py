"""moec.runtime: what a compiled program runs on.  Importing it registers the ``moec::`` ops."""

from . import ops

__all__ = ["ops"]
