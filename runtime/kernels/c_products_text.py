"""Products of groups of rows with one matrix each, as C for a core's vector units: what experts multiply with.

    void dots(groups, lengths, experts, x_RK, x_row, w_ENK, w_expert, w_row, y_RN, y_row, K, N, add, room)
    void rows(groups, lengths, experts, x_RK, x_row, w_EKN, w_expert, w_row, y_RN, y_row, K, N, add)
    void outers(groups, lengths, experts, a_RM, a_row, g_RN, g_row, dw_EMN, dw_expert, dw_row, M, N, add, room)

Legend: R rows, the next ``lengths[i]`` of which belong to ``experts[i]``; E experts, K columns of x, N columns of the
result (of g), M columns of a; ``*_row`` and ``*_expert`` are elements from a row, an expert, to the next one (columns
are neighbours).  ``dots`` and ``rows``: y = x wᵀ and y = x w of each group, added to y if ``add``.  ``outers``: dw =
aᵀ g of each group, added to dw if ``add``.  N of ``rows`` and ``outers`` is a multiple of 8.  ``room``: floats for
packed operands, ``room_of_dots`` and ``room_of_outers`` of them.

All three are one microkernel: a tile of the result stays in vector registers while, for each k, one vector of columns
and one number of every row are multiplied.  They differ in what the columns of the tile are:

* ``rows``: columns of w as they lie; the numbers are x's.
* ``dots``: rows of x, which are packed (turned) for that, so that w, of which every number is used once a group, is
  read as it lies; the tile is turned again as it is stored.
* ``outers``: columns of g, packed; k counts rows.

While one block of w is used the next is fetched: with few rows in a group, memory is what limits.

An element of y is one sum in the order of k whatever the rows beside it: it is the same wherever in its group a row is
(``dots`` adds up pieces of ``DEPTH``).  An element of dw is one sum in the order of the rows, in pieces of about RUN.
"""

from __future__ import annotations

LANES = (16, 8)
"""Floats of a vector that there are texts for."""
TILES = {16: (8, 48), 8: (4, 24)}
"""Lanes -> rows and columns of a tile: what 32 and 16 registers hold."""
DEPTH = 512
"""k of ``dots`` at a time: a packed panel of rows stays in the cache of the second level."""
SLAB = 128
"""k of ``rows`` at a time: what all columns of them need stays in the first and second level."""
RUN = 384
"""Rows of ``outers`` at a time."""

PRELUDE = """\
#ifndef __has_builtin
#define __has_builtin(x) 0
#endif
static inline long least(long a, long b) { return a < b ? a : b; }
static inline void turn(v8 *t) { /* 8 x 8, in place */
#if __has_builtin(__builtin_shufflevector)
    v8 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(t[i], t[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = __builtin_shufflevector(t[i], t[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = i; j < i + 2; j++) {
            b[j] = __builtin_shufflevector(a[j], a[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[j + 2] = __builtin_shufflevector(a[j], a[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        t[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        t[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
#else
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < i; j++) {
            float kept = t[i][j];
            t[i][j] = t[j][i];
            t[j][i] = kept;
        }
#endif
}
/* packed[k][r] = x[r][k] of n rows, in columns of a whole number of eights: the last row fills them up */
static void pack(const float *x, long x_row, long n, long K, float *packed, long width) {
    for (long r = 0; r < n; r += 8) {
        const float *p[8];
        long k = 0;
        for (int i = 0; i < 8; i++) p[i] = x + least(r + i, n - 1) * x_row;
        for (; k + 8 <= K; k += 8) {
            v8 t[8];
            for (int i = 0; i < 8; i++) t[i] = *(const u8 *)(p[i] + k);
            turn(t);
            for (int j = 0; j < 8; j++) *(u8 *)(packed + (k + j) * width + r) = t[j];
        }
        for (; k < K; k++)
            for (int i = 0; i < 8; i++) packed[k * width + r + i] = p[i][k];
    }
}
"""

DRIVERS = """\
/* the kernel of the most rows, of at most those left: kernel i is of 2^i */
static inline long most(long left) { return left >= ROWS ? POWER : 63 - __builtin_clzl(left); }
static inline long eights(long n) { return (n + 7) / 8 * 8; }

void dots(long groups, const long *lengths, const long *experts, const float *x_RK, long x_row, const float *w_ENK,
          long w_expert, long w_row, float *y_RN, long y_row, long K, long N, long add, float *room) {
    for (long g = 0; g < groups; g++) {
        const long n = lengths[g];
        const float *w = w_ENK + experts[g] * w_expert;
        const float *following = w_ENK + experts[least(g + 1, groups - 1)] * w_expert;
        for (long k = 0; k < K; k += DEPTH) {
            const long depth = least(K - k, DEPTH);
            for (long r = 0; r < n; r += COLUMNS) {
                const long width = least(n - r, COLUMNS);
                pack(x_RK + r * x_row + k, x_row, width, depth, room + r * depth, eights(width));
            }
            for (long m = 0, kernel; m < N; m += 1L << kernel) {
                const float *block = w + m * w_row + k, *next = m + ROWS < N ? block + ROWS * w_row : following;
                kernel = most(N - m);
                for (long r = 0; r < n; r += COLUMNS) {
                    const long width = least(n - r, COLUMNS), padded = eights(width);
                    dots_kernels[kernel][padded / 8 - 1](block, w_row, room + r * depth, padded, depth,
                        y_RN + r * y_row + m, y_row, add || k, width, (const char *)next, r ? 0 : 4 * ROWS);
                }
            }
        }
        x_RK += n * x_row;
        y_RN += n * y_row;
    }
}

void rows(long groups, const long *lengths, const long *experts, const float *x_RK, long x_row, const float *w_EKN,
          long w_expert, long w_row, float *y_RN, long y_row, long K, long N, long add) {
    for (long g = 0; g < groups; g++) {
        const long n = lengths[g], fetching = least((n + ROWS - 1) / ROWS, 4), step = 4 * COLUMNS / fetching;
        const float *w = w_EKN + experts[g] * w_expert;
        const float *following = w_EKN + experts[least(g + 1, groups - 1)] * w_expert;
        for (long k = 0; k < K; k += SLAB) {
            const long depth = least(K - k, SLAB);
            const float *slab = w + k * w_row;
            const char *next = (const char *)(k + SLAB < K ? slab + SLAB * w_row : following);
            for (long j = 0; j < N; j += COLUMNS) {
                const long width = least(N - j, COLUMNS);
                for (long r = 0, kernel, i = 0; r < n; r += 1L << kernel, i++) {
                    kernel = most(n - r);
                    rows_kernels[kernel][width / 8 - 1](x_RK + r * x_row + k, x_row, slab + j, w_row, depth,
                        y_RN + r * y_row + j, y_row, add || k, width, next, i < fetching ? step : 0);
                    if (i < fetching) next += depth * step;
                }
            }
        }
        x_RK += n * x_row;
        y_RN += n * y_row;
    }
}

void outers(long groups, const long *lengths, const long *experts, const float *a_RM, long a_row, const float *g_RN,
            long g_row, float *dw_EMN, long dw_expert, long dw_row, long M, long N, long add, float *room) {
    float numbers[RUN * ROWS] __attribute__((aligned(64)));
    for (long g = 0; g < groups; g++) {
        const long n = lengths[g], runs = (n + RUN - 1) / RUN;
        float *dw = dw_EMN + experts[g] * dw_expert;
        for (long run = 0, start = 0; run < runs; run++) {
            const long end = n * (run + 1) / runs, R = end - start;
            const float *a = a_RM + start * a_row, *v = g_RN + start * g_row;
            for (long j = 0; j < N; j += COLUMNS) {
                const long width = least(N - j, COLUMNS);
                for (long r = 0; r < R; r++)
                    for (long i = 0; i < width; i += 8)
                        *(u8 *)(room + j * R + r * width + i) = *(const u8 *)(v + r * g_row + j + i);
            }
            for (long m = 0, kernel; m < M; m += 1L << kernel) {
                kernel = most(M - m);
                if (kernel == POWER)
                    for (long r = 0; r < R; r++) memcpy(numbers + r * ROWS, a + r * a_row + m, 4 * ROWS);
                else
                    for (long r = 0; r < R; r++)
                        for (long i = 0; i < 1L << kernel; i++) numbers[(r << kernel) + i] = a[r * a_row + m + i];
                for (long j = 0; j < N; j += COLUMNS) {
                    const long width = least(N - j, COLUMNS);
                    outers_kernels[kernel][width / 8 - 1](numbers, 0, room + j * R, width, R,
                        dw + m * dw_row + j, dw_row, add || run, width, 0, 0);
                }
            }
            start = end;
        }
        a_RM += n * a_row;
        g_RN += n * g_row;
    }
}
"""

TURNED = """\
    float t[{rows}][{columns}] __attribute__((aligned(64)));
{spill}
    for (long j = 0; j < valid; j += 8) {{
        v8 q[8] = {{{{0}}}};
        for (int i = 0; i < {rows}; i++) q[i] = *(const u8 *)(t[i] + j);
        turn(q);
        for (int i = 0; i < 8 && j + i < valid; i++) {{
            float *to = c + (j + i) * c_row;
            for (int m = 0; m < {rows}; m++) to[m] = add ? to[m] + q[i][m] : q[i][m];
        }}
    }}"""
TURNED_EIGHT = """\
    float t[8][{columns}] __attribute__((aligned(64)));
{spill}
    for (long j = 0; j < valid; j += 8) {{
        v8 q[8];
        for (int i = 0; i < 8; i++) q[i] = *(const u8 *)(t[i] + j);
        turn(q);
        for (int i = 0; i < 8; i++)
            if (j + i < valid) {{
                u8 *to = (u8 *)(c + (j + i) * c_row);
                if (add) q[i] += *to;
                *to = q[i];
            }}
    }}"""


def room_of_dots(most_rows: int, K: int) -> int:
    """Floats that ``dots`` packs, with groups of at most ``most_rows``."""
    return (most_rows + 7) * min(K, DEPTH)


def room_of_outers(most_rows: int, N: int) -> int:
    """Floats that ``outers`` packs, with groups of at most ``most_rows``."""
    return min(most_rows, RUN) * N


def c_text(lanes: int) -> str:
    """The C for vectors of ``lanes`` floats."""
    rows, columns = TILES[lanes]
    powers, widths = range(rows.bit_length()), range(8, columns + 1, 8)
    types = [
        f"typedef float v{n} __attribute__((vector_size({4 * n})));\n"
        f"typedef float u{n} __attribute__((vector_size({4 * n}), aligned(4), may_alias));"
        for n in sorted({8, lanes})
    ]
    kernels = [
        _kernel(kind, 1 << power, width, lanes)
        for kind in ("dots", "rows", "outers")
        for power in powers
        for width in widths
    ]
    tables = [
        f"static kernel *const {kind}_kernels[{len(powers)}][{len(widths)}] = {{\n"
        + "".join(f"    {{{', '.join(f'{kind}_{1 << p}_{w}' for w in widths)}}},\n" for p in powers)
        + "};"
        for kind in ("dots", "rows", "outers")
    ]
    constants = {"ROWS": rows, "POWER": powers[-1], "COLUMNS": columns, "DEPTH": DEPTH, "SLAB": SLAB, "RUN": RUN}
    return "\n".join(
        [
            f"/* Products of groups of rows with one matrix each: vectors of {lanes}, tiles of {rows} x {columns} */",
            "#include <string.h>",
            *(f"#define {name} {value}" for name, value in constants.items()),
            *types,
            PRELUDE,
            *kernels,
            "typedef void kernel(const float *, long, const float *, long, long, float *, long, long, long,",
            "                    const char *, long);",
            *tables,
            DRIVERS,
        ]
    )


def _kernel(kind: str, rows: int, columns: int, lanes: int) -> str:
    """c [rows, columns] (+)= numbers · vectors: ``K`` numbers of each row (``s``), as many vectors (``v``)."""
    vectors, start = list[tuple[int, int]](), 0  # the first column of each, and how many
    while start < columns:
        vectors.append((start, lanes if columns - start >= lanes else 8))
        start += vectors[-1][1]
    every = [(m, j, at, n) for m in range(rows) for j, (at, n) in enumerate(vectors)]
    in_place = [f"        c{m}_{j} = *(const u{n} *)(c + {m} * c_row + {at});" for m, j, at, n in every]
    stored = [f"    *(u{n} *)(c + {m} * c_row + {at}) = c{m}_{j};" for m, j, at, n in every]
    turned = TURNED_EIGHT if rows == 8 else TURNED
    spill = "\n".join(f"    *(u{n} *)(t[{m}] + {at}) = c{m}_{j};" for m, j, at, n in every)
    numbers = [f"s[{m}]" if kind == "outers" else f"s{m}[k]" for m in range(rows)]
    return "\n".join(
        [
            f"static void {kind}_{rows}_{columns}(const float *s, long s_row, const float *v, long v_row, long K,",
            "        float *c, long c_row, long add, long valid, const char *next, long step) {",
            *(f"    const float *s{m} = s + {m} * s_row;" for m in range(rows) if kind != "outers"),
            *(f"    v{n} c{m}_{j} = {{0}};" for m, j, _, n in every),
            *(["    if (add) {", *in_place, "    }"] if kind != "dots" else []),
            "    for (long k = 0; k < K; k++) {",
            *(["        __builtin_prefetch(next);", "        next += step;"] if kind != "outers" else []),
            *(f"        const v{n} v_{j} = *(const u{n} *)(v + {at});" for j, (at, n) in enumerate(vectors)),
            "        v += v_row;",
            *(f"        c{m}_{j} += {numbers[m]} * v_{j};" for m, j, _, _ in every),
            *([f"        s += {rows};"] if kind == "outers" else []),
            "    }",
            *([turned.format(rows=rows, columns=columns, spill=spill)] if kind == "dots" else stored),
            "}",
        ]
    )
