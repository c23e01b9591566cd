"""moec.runtime.kernels: what ``moec::`` ops run on a GPU: Triton source that moec writes, one family of kernels a file.

A family file holds a *generator* (what to compute -> source text), a *launcher* (a plain function on tensors of any
device: on CPU tensors it works where Triton interprets), and registers itself as the CUDA kernel of its ops.  Importing
this package does the registering and nothing else: Triton is imported by ``source.load``, when a kernel first runs.
"""

from . import (
    amax,
    decode,
    decode_operand,
    encode,
    experts,
    grouped,
    permute,
    quantise,
    quantise_act,
    router,
    router_backward,
    scaled_grouped_mm,
    scaled_mm,
    softmax_rows,
    turn,
    unpermute,
    unpermute_backward,
)

__all__ = [
    "amax",
    "decode",
    "decode_operand",
    "encode",
    "experts",
    "grouped",
    "permute",
    "quantise",
    "quantise_act",
    "router",
    "router_backward",
    "scaled_grouped_mm",
    "scaled_mm",
    "softmax_rows",
    "turn",
    "unpermute",
    "unpermute_backward",
]
