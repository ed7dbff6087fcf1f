/* Winograd's transforms of cpu.h, the same for every line of a tile: down its columns, then across its rows. They make
 * floats, or pairs of bfloat16. */
#include "vectors.h"

/* F(2, 3), F(4, 3), and two pixels of a line after nearest 2x and with stride 2. */
enum { TWO, FOUR, UP, STRIDED };

INLINE int numbers(int way) { return way == FOUR ? 6 : way == STRIDED ? 5 : way == TWO ? 4 : 3; }
INLINE int filters(int way) { return way == STRIDED ? 4 : numbers(way); }
INLINE int pixels_of(int way) { return way == FOUR ? 4 : 2; }
INLINE int step_of(int way) { return way == UP ? 1 : way == STRIDED ? 4 : pixels_of(way); }

/* Points of FOUR besides 0 and infinity: P, -P, Q and -Q, which round less than 1 and 2; P * Q = 1. */
#define P1 (2 / 3.)
#define P2 (4 / 9.)
#define P3 (8 / 27.)
#define Q1 (3 / 2.)
#define Q2 (9 / 4.)
#define Q3 (27 / 8.)

/* n = B^T d, of equal length. */
INLINE void line_in(int way, vf *n, const vf *d) {
    if (way == TWO) {
        n[0] = d[0] - d[2], n[1] = d[1] + d[2], n[2] = d[2] - d[1], n[3] = d[1] - d[3];
    } else if (way == UP) {
        n[0] = d[0] - d[1], n[1] = d[1], n[2] = d[2] - d[1];
    } else if (way == STRIDED) {
        n[0] = d[0] - d[2], n[1] = d[2], n[2] = d[4] - d[2], n[3] = d[1], n[4] = d[3];
    } else {
        const vf p_even = d[4] - d[2] * splat(Q2), p_odd = (d[3] - d[1] * splat(Q2)) * splat(P1);
        const vf q_even = d[4] - d[2] * splat(P2), q_odd = (d[3] - d[1] * splat(P2)) * splat(Q1);
        n[0] = d[0] + d[4] - d[2] * splat(P2 + Q2), n[5] = d[1] + d[5] - d[3] * splat(P2 + Q2);
        n[1] = p_even + p_odd, n[2] = p_even - p_odd, n[3] = q_even + q_odd, n[4] = q_even - q_odd;
    }
}

/* n = G g, from three taps. */
INLINE void line_weights(int way, vf *n, vf g0, vf g1, vf g2) {
    n[0] = g0, n[numbers(way) - 1] = g2;
    if (way == STRIDED) {
        n[1] = g0 + g2, n[2] = g2, n[3] = g1;
    } else if (way == TWO) {
        n[1] = (g0 + g2 + g1) * splat(.5), n[2] = (g0 + g2 - g1) * splat(.5);
    } else if (way == UP) {
        n[1] = g0 + g2 + g1;
    } else {
        const vf p = splat(.5 / (P2 * (P2 - Q2))), q = splat(.5 / (Q2 * (Q2 - P2)));
        const vf p_even = g0 + g2 * splat(P2), p_odd = g1 * splat(P1), q_even = g0 + g2 * splat(Q2),
                 q_odd = g1 * splat(Q1);
        n[1] = (p_even + p_odd) * p, n[2] = (p_even - p_odd) * p, n[3] = (q_even + q_odd) * q,
        n[4] = (q_even - q_odd) * q;
    }
}

/* y = A^T n. */
INLINE void line_out(int way, vf *y, const vf *n) {
    if (way == TWO) {
        y[0] = n[0] + n[1] + n[2], y[1] = n[1] - n[2] - n[3];
    } else if (way == UP) {
        y[0] = n[0] + n[1], y[1] = n[1] + n[2];
    } else if (way == STRIDED) {
        y[0] = n[0] + n[1] + n[3], y[1] = n[1] + n[2] + n[4];
    } else {
        const vf p_even = n[1] + n[2], p_odd = n[1] - n[2], q_even = n[3] + n[4], q_odd = n[3] - n[4];
        y[0] = n[0] + p_even + q_even;
        y[1] = p_odd * splat(P1) + q_odd * splat(Q1);
        y[2] = p_even * splat(P2) + q_even * splat(Q2);
        y[3] = p_odd * splat(P3) + q_odd * splat(Q3) + n[5];
    }
}

/* Rounds to bfloat16 in one instruction, if there is one. */
#ifndef VM_ROUND
#define VM_ROUND(X) VM_NARROW(round_to_bfloat16(X))
#endif

/* Stores numbers of a channel block's v from number i on. */
INLINE void put_numbers(vm_dtype dtype, float *v, size_t i, vf n) {
    if (dtype == VM_BF16)
        *(vh *)((uint16_t *)(void *)v + 2 * i - i % VM_BLOCK) = VM_ROUND(n);
    else
        put(v + i, n);
}

INLINE void tiles_in(vm_dtype dtype, int down, int across, float *v, size_t v_step, const float *x, size_t x_row,
                     size_t tiles) {
    for (size_t i = 0; i < tiles * VM_BLOCK; i += VM_LANES) {
        const float *d = x + i / VM_BLOCK * (size_t)step_of(across) * VM_BLOCK + i % VM_BLOCK;
        vf t[6][6];
        UNROLL for (int c = 0; c < numbers(across); c++) {
            vf column[6], n[6];
            UNROLL for (int r = 0; r < numbers(down); r++) column[r] = at(d + (size_t)r * x_row + c * VM_BLOCK);
            line_in(down, n, column);
            UNROLL for (int r = 0; r < numbers(down); r++) t[r][c] = n[r];
        }
        UNROLL for (int r = 0; r < numbers(down); r++) {
            vf n[6];
            line_in(across, n, t[r]);
            UNROLL for (int c = 0; c < numbers(across); c++)
                put_numbers(dtype, v + (size_t)(r * numbers(across) + c) * v_step, i, n[c]);
        }
    }
}

/* k[6*row + column]: the numbers of VM_LANES filters, the first w's at i. */
INLINE void filter_in(int down, int across, vf *k, const float *w, size_t n, size_t i) {
    vf t[6][3];
    UNROLL for (int c = 0; c < 3; c++) {
        vf column[6];
        line_weights(down, column, at(w + (size_t)c * n + i), at(w + (size_t)(3 + c) * n + i),
                     at(w + (size_t)(6 + c) * n + i));
        UNROLL for (int r = 0; r < filters(down); r++) t[r][c] = column[r];
    }
    UNROLL for (int r = 0; r < filters(down); r++) line_weights(across, k + 6 * r, t[r][0], t[r][1], t[r][2]);
}

INLINE void filters_in(vm_dtype dtype, int down, int across, float *u, size_t u_step, const float *w, size_t n) {
    const size_t each = dtype == VM_BF16 ? 2 : 1; /* input channels in a step */
    for (size_t i = 0; i < n / each; i += VM_LANES) {
        const size_t first = i / VM_BLOCK * each * VM_BLOCK + i % VM_BLOCK;
        vf k[36], next[36];
        filter_in(down, across, k, w, n, first);
        if (each > 1) filter_in(down, across, next, w, n, first + VM_BLOCK);
        UNROLL for (int r = 0; r < filters(down); r++) UNROLL for (int c = 0; c < filters(across); c++) {
            vf step = k[6 * r + c];
            if (each > 1) step = (vf)(round_to_bfloat16(step) | round_to_bfloat16(next[6 * r + c]) << 16);
            put(u + (size_t)(r * filters(across) + c) * u_step + i, step);
        }
    }
}

INLINE void tiles_out(int down, int across, float *y, size_t y_row, const float *m, size_t m_step, size_t y_rows,
                      size_t y_width, const float *bias, const float *add, size_t add_row) {
    const size_t width = (size_t)pixels_of(across);
    for (size_t l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf b = bias ? at(bias + l) : (vf){0};
        for (size_t x = 0; x < y_width; x += width) {
            vf t[4][6];
            UNROLL for (int c = 0; c < numbers(across); c++) {
                vf column[6], k[4];
                UNROLL for (int r = 0; r < numbers(down); r++) column[r] =
                    at(m + (size_t)(r * numbers(across) + c) * m_step + x / width * VM_BLOCK + l);
                line_out(down, k, column);
                UNROLL for (int r = 0; r < pixels_of(down); r++) t[r][c] = k[r];
            }
            UNROLL for (int r = 0; r < pixels_of(down); r++) {
                vf k[4];
                if ((size_t)r >= y_rows) break;
                line_out(across, k, t[r]);
                UNROLL for (int c = 0; c < pixels_of(across); c++) {
                    if (x + (size_t)c >= y_width) break;
                    vf pixel = k[c] + b;
                    if (add) pixel += at(add + (size_t)r * add_row + (x + (size_t)c) * VM_BLOCK + l);
                    put(y + (size_t)r * y_row + (x + (size_t)c) * VM_BLOCK + l, pixel);
                }
            }
        }
    }
}
