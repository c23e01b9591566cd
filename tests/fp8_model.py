"""The FP8 recipes once more, in numpy and float64, from their definition (no code is shared): what tests compare with.

Numbers of a format are listed from their bits; rounding looks for the nearest.
"""

import numpy as np

FORMATS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
# recipe -> (format of gradients, tile of rows, tile of weights, kind of scales); a tile along the product: (1, size)
RECIPES = {
    "delayed": ("e5m2", (None, None), (None, None), "fp32"),
    "current": ("e5m2", (None, None), (None, None), "fp32"),
    "rowwise": ("e4m3", (1, None), (1, None), "fp32"),
    "blockwise": ("e4m3", (1, 128), (128, 128), "power"),
    "mxfp8": ("e4m3", (1, 32), (1, 32), "power"),
}


def numbers(fmt):
    """Bits -> value, of the non-negative finite numbers of a format."""
    exponent_bits, mantissa_bits, bias = FORMATS[fmt]
    found = {}
    for bits in range(1 << (exponent_bits + mantissa_bits)):
        e, m = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
        fraction = m / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias)
        if value <= LARGEST[fmt]:
            found[bits] = value
    return found


TABLES = {fmt: np.array(list(numbers(fmt).values())) for fmt in FORMATS}


def rounded(x, fmt):
    """The nearest number of the format, of two equally near the one with even bits; magnitudes are within the
    largest."""
    table, magnitude = TABLES[fmt], np.abs(x)
    above = np.searchsorted(table, magnitude).clip(0, len(table) - 1)
    below = (above - 1).clip(0)
    up, down = table[above] - magnitude, magnitude - table[below]
    take_up = (up < down) | ((up == down) & (above % 2 == 0))
    return np.copysign(np.where(take_up, table[above], table[below]), x)


def scale_of(amax, fmt, kind, margin=0):
    largest = LARGEST[fmt]
    if amax == 0:
        return 1.0
    if kind == "fp32":
        return float(np.float32(max(float(np.float32(amax / largest)), 2.0**-126)) * 2.0**margin)
    scale = 2.0**-126
    while amax / scale > largest:
        scale *= 2
    return scale


def quantised(x, recipe, role, transposed, amaxes=None, margin=0):
    """``(values on the format's grid, scales, the scale of every element)`` of a float32 matrix."""
    grads, rows, weights, kind = RECIPES[recipe]
    fmt = grads if role == "grad" else "e4m3"
    tile = weights if role in ("weight", "stack") else rows
    if transposed != (role == "stack"):
        tile = tile[::-1]
    x = x.astype(np.float64)
    R, C = x.shape
    height, width = tile[0] or max(R, 1), tile[1] or max(C, 1)
    tiles = (-(-R // height) if tile[0] else 1, -(-C // width) if tile[1] else 1)
    q, scales, each = np.zeros_like(x), np.ones(tiles), np.ones_like(x)
    for i in range(tiles[0]):
        for j in range(tiles[1]):
            at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            part = x[at]
            finite = np.isfinite(part)
            amax = np.abs(part[finite]).max(initial=0.0) if amaxes is None else amaxes[i, j]
            scale = scales[i, j] = each[at] = scale_of(float(amax), fmt, kind, margin)
            over = np.where(finite, part, 0.0) / scale
            over = over.astype(np.float32).astype(np.float64)  # a quotient rounded twice is rounded once: 53 ≥ 2·24 + 2
            q[at] = np.where(finite, rounded(np.clip(over, -LARGEST[fmt], LARGEST[fmt]), fmt), np.nan)
    return q, scales, each
