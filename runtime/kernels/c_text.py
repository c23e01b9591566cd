"""The elementwise body of an expert as C: one pass over a row forward, one backward, for a core's vector units.

    void forward(h_RA, h_row, a_RI, a_row, R, I)
    void backward(h_RA, h_row, d_RI, d_row, weight_R, dweight_R, a_RI, a_row, dh_RA, dh_row, R, I)

Legend: R rows, I columns of the body's result, A columns of all first products, ``*_row`` elements from a row to the
next one (columns are neighbours).  ``forward``: a = body(h).  ``backward``, the result having the gradient d · weight:
dh = its derivative, dweight = body(h) · d (a sum over the columns), a = body(h) · weight.  ``weight_R`` and
``dweight_R`` are fp32, and may each be null: a weight of 1, a gradient that nobody wants.

Arithmetic is fp32, storage fp32 or bf16 (rounded to nearest, ties to even), as everywhere (``moec.runtime.body``): the
activation is rounded before it is weighted.  ``exp`` is a polynomial (Cephes' coefficients, about 2 ulp) with the range
and the NaN of a real one, so that any compiler can vectorise it without giving up infinities.

A body has no C text if a step has none here (``log``, ``erf`` and what needs it: PyTorch's are vectorised, C's are
not), if it reads numbers of rows, or if its inputs do not divide the first products (every column is one input's).
"""

from __future__ import annotations

import math

import torch

from ..body import Body, Input, Operand, Step

STORAGE = {
    torch.float32: """\
typedef float real;
static inline float load(real v) { return v; }
static inline real store(float v) { return v; }
""",
    torch.bfloat16: """\
typedef uint16_t real;
static inline float load(real v) { uint32_t u = (uint32_t)v << 16; float f; memcpy(&f, &u, 4); return f; }
static inline real store(float v) {
    uint32_t u; memcpy(&u, &v, 4);
    uint32_t near = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return v != v ? 0x7fc0 : near;
}
""",
}

PRELUDE = """\
static inline float scale(int32_t k) { int32_t i = (k + 127) << 23; float f; memcpy(&f, &i, 4); return f; }
static inline float exp_(float x) {
    float b = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;
    b = b == b ? b : 0.0f;
    float k = rintf(b * 1.44269504088896341f);
    float r = b - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t n = (int32_t)k, half = n >> 1;
    return x == x ? p * scale(half) * scale(n - half) : x;
}
static inline float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }
static inline float tanh_(float x) {
    float q = x * x, near = x * (1.0f - q * (1.0f / 3.0f) + q * q * (2.0f / 15.0f));
    return q < 0.02f ? near : 2.0f * sigmoid_(2.0f * x) - 1.0f;
}
static inline float inner_(float x) { return 0.7978845608028654f * (x + 0.044715f * x * x * x); }
static inline float gelu_tanh_slope_(float x) {
    float t = tanh_(inner_(x)), s = 0.7978845608028654f * (1.0f + 0.134145f * x * x);
    return 0.5f * (1.0f + t + x * s * (1.0f - t * t));
}
static inline float silu_slope_(float x) { float s = sigmoid_(x); return s * (1.0f + x * (1.0f - s)); }
"""

C = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "maximum": "({0} > {1} || {0} != {0}) ? {0} : {1}", "minimum": "({0} < {1} || {0} != {0}) ? {0} : {1}",
    "clamp": "{0} < {1} ? {1} : {0} > {2} ? {2} : {0}", "abs": "fabsf({0})", "square": "{0} * {0}", "exp": "exp_({0})",
    "sqrt": "sqrtf({0})", "rsqrt": "1.0f / sqrtf({0})", "tanh": "tanh_({0})",
    "sigmoid": "sigmoid_({0})", "silu": "{0} * sigmoid_({0})",
    "relu": "{0} < 0.0f ? 0.0f : {0}", "gelu_tanh": "0.5f * {0} * (1.0f + tanh_(inner_({0})))",
    "rounded": "load(store({0}))", "sign": "{0} > 0.0f ? 1.0f : {0} < 0.0f ? -1.0f : 0.0f",
    "above": "{0} > {1} ? 1.0f : {0} < {1} ? 0.0f : 0.5f", "within": "{0} >= {1} && {0} <= {2} ? 1.0f : 0.0f",
    "tanh_backward": "{0} * (1.0f - {1} * {1})", "sigmoid_backward": "{0} * {1} * (1.0f - {1})",
    "silu_backward": "{0} * silu_slope_({1})", "relu_backward": "{1} > 0.0f ? {0} : 0.0f",
    "gelu_tanh_backward": "{0} * gelu_tanh_slope_({1})",
}  # fmt: skip
"""Primitive -> expression of its operands."""


def c_text(body: Body, dtype: torch.dtype) -> str | None:
    """The C of ``body`` and its derivative for tensors of ``dtype``; None if it has none (see above)."""
    if dtype not in STORAGE or body.rows or not body.covers():
        return None
    both = body.derivative(value=True)
    if not all(s.op in C for s in (*body.steps, *both.steps)):
        return None
    offsets = _offsets(body)
    return "\n".join(
        [
            f"/* {body.text()} */",
            "#include <math.h>\n#include <stdint.h>\n#include <string.h>\n",
            STORAGE[dtype] + PRELUDE,
            _forward(body, offsets),
            _backward(both, offsets),
        ]
    )


def _offsets(body: Body) -> list[int]:
    """Where each first product begins in a row of all of them, in units of I."""
    parts = {i.source: i.parts for i in body.inputs}
    return [sum(parts[s] for s in range(source)) for source in range(body.products)]


def _column(i: Input, offsets: list[int]) -> str:
    """The index of column ``i`` of an input in a row of the first products."""
    if i.form == "every":
        return f"{offsets[i.source]} * I + i * {i.parts} + {i.index}"
    return f"{offsets[i.source] + i.index} * I + i"


def _operand(o: Operand) -> str:
    if isinstance(o, str):
        return f"v_{o}"
    return f"{'-' if o < 0 else ''}INFINITY" if math.isinf(o) else f"{o!r}f"


def _step(s: Step) -> str:
    return f"            const float v_{s.name} = {C[s.op].format(*(f'({_operand(o)})' for o in s.operands))};"


def _forward(body: Body, offsets: list[int]) -> str:
    (result,) = body.results
    return "\n".join(
        [
            "void forward(const real *h_RA, long h_row, real *a_RI, long a_row, long R, long I) {",
            "    for (long r = 0; r < R; r++) {",
            "        const real *restrict h = h_RA + r * h_row;",
            "        real *restrict a = a_RI + r * a_row;",
            "#pragma omp simd",
            "        for (long i = 0; i < I; i++) {",
            *(f"            const float v_{i.name} = load(h[{_column(i, offsets)}]);" for i in body.inputs),
            *map(_step, body.steps),
            f"            a[i] = store({_operand(result)});",
            "        }\n    }\n}\n",
        ]
    )


def _backward(both: Body, offsets: list[int]) -> str:
    value, *gradients = both.results
    inputs = [i for i in both.inputs if i.form != "grad"]
    (grad,) = (i for i in both.inputs if i.form == "grad")
    return "\n".join(
        [
            "void backward(const real *h_RA, long h_row, const real *d_RI, long d_row, const float *weight_R,",
            "              float *dweight_R, real *a_RI, long a_row, real *dh_RA, long dh_row, long R, long I) {",
            "    for (long r = 0; r < R; r++) {",
            "        const real *restrict h = h_RA + r * h_row, *restrict d = d_RI + r * d_row;",
            "        real *restrict a = a_RI + r * a_row, *restrict dh = dh_RA + r * dh_row;",
            "        const float weight = weight_R ? weight_R[r] : 1.0f;",
            "        float dweight = 0.0f;",
            "#pragma omp simd reduction(+ : dweight)",
            "        for (long i = 0; i < I; i++) {",
            *(f"            const float v_{i.name} = load(h[{_column(i, offsets)}]);" for i in inputs),
            f"            const float plain = load(d[i]), v_{grad.name} = plain * weight;",
            *map(_step, both.steps),
            f"            const float value = load(store({_operand(value)}));",
            "            dweight += value * plain;",
            "            a[i] = store(value * weight);",
            *(
                f"            dh[{_column(i, offsets)}] = store({_operand(g)});"
                for i, g in zip(inputs, gradients, strict=True)
            ),
            "        }",
            "        if (dweight_R) dweight_R[r] = dweight;",
            "    }\n}\n",
        ]
    )
