"""moec.runtime: what a compiled program runs on.  Importing it registers the ``moec::`` ops and their GPU kernels."""

from . import kernels, ops

__all__ = ["kernels", "ops"]
