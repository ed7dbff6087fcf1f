/* The operations of cpu.h for any instruction set with vectors of VM_LANES floats (16, 8 or 4), in the compiler's
 * vector extension: one source, built once per ISA folder with that folder's flags. The includer defines VM_LANES,
 * VM_PIXELS, VM_VECTORS and VM_OPS. */
#include <math.h>
#include <string.h>

#include "gemm.h"

typedef uint32_t vu __attribute__((vector_size(4 * VM_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * VM_LANES), aligned(2), may_alias));

INLINE vu pick_bits(vi mask, vu yes, vu no) { return (yes & (vu)mask) | (no & ~(vu)mask); }

/* ---- rows of any type ---- */

/* 16 bits to 32, and the lower half of 32. One instruction; the compiler would use several. */
#ifndef VM_WIDEN
#define VM_WIDEN(HALF) __builtin_convertvector(HALF, vu)
#define VM_NARROW(BITS) __builtin_convertvector(BITS, vh)
#endif

/* Converts the bits of halves to floats. */
INLINE vf of_half(vm_dtype dtype, vu half) {
    if (dtype == VM_BF16) return (vf)(half << 16);
    /* the exponent is 112 too small; the product corrects it exactly, for subnormals too */
    const vu size = half & 0x7fff, high = (vu)((vf)(size << 13) * splat(0x1p112f));
    return (vf)(pick_bits((vi)(size >= 0x7c00), size << 13 | 0x7f800000, high) | (half & 0x8000) << 16);
}

/* VM_LANES numbers from element i on. */
INLINE vf widened(vm_dtype dtype, const void *x, size_t i) {
    if (dtype == VM_F32) return at((const float *)x + i);
    return of_half(dtype, VM_WIDEN(*(const vh *)((const uint16_t *)x + i)));
}

/* Rounds to nearest, ties to even; NaN stays, overflow becomes Inf. Returns: not 0 if not finite. */
INLINE vi narrow(vm_dtype dtype, void *y, size_t i, vf x) {
    const vu bits = (vu)x, size = bits & 0x7fffffff;
    vu half;
    if (dtype == VM_F32) {
        put((float *)y + i, x);
        return (vi)(size >= 0x7f800000);
    }
    if (dtype == VM_BF16) {
        half = pick_bits((vi)(size > 0x7f800000), bits | 0x400000, bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        *(vh *)((uint16_t *)y + i) = VM_NARROW(half);
        return (vi)((half & 0x7f80) == 0x7f80);
    }
    /* 0.5 has the step of float16's subnormals in its last place, so a sum with it rounds as they do */
    half = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    half = pick_bits((vi)(size < 0x38800000), (vu)((vf)size + splat(0.5f)) - 0x3f000000, half);
    half = pick_bits((vi)(size >= 0x47800000),
                     pick_bits((vi)(size > 0x7f800000), half - half + 0x7e00, half - half + 0x7c00), half);
    *(vh *)((uint16_t *)y + i) = VM_NARROW(half | (bits >> 16 & 0x8000));
    return (vi)(half >= 0x7c00);
}

/* A call with the dtype as a constant in each of three branches. */
#define VM_FOR_DTYPE(DTYPE, CALL, ...)             \
    switch (DTYPE) {                               \
    case VM_F32: return CALL(VM_F32, __VA_ARGS__); \
    case VM_F16: return CALL(VM_F16, __VA_ARGS__); \
    default: return CALL(VM_BF16, __VA_ARGS__);    \
    }

/* ---- exp ---- */

/* x, bounded below or above; NaN stays NaN. One instruction if the instruction set names it. */
#ifndef VM_NO_LESS
#define VM_NO_LESS(BOUND, X) pick((X) < (BOUND), BOUND, X)
#define VM_NO_MORE(BOUND, X) pick((X) > (BOUND), BOUND, X)
#endif

/* e^x, about 1 ulp if the result is normal; below -87.3 the smallest normal, above 88.3 e^88.3; NaN stays NaN.
 * Reduction by ln 2 in two parts; the polynomial is Cephes expf's. */
INLINE vf vexp(vf x) {
    const vf t = VM_NO_MORE(splat(88.3f), VM_NO_LESS(splat(-87.3f), x));
    const vf magic = splat(12582912.f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = t * splat(1.44269504f) + magic, n = shifted - magic;
    vf r = t - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.f);
#ifdef VM_SCALED
    return VM_SCALED(p, n);
#else
    vf e = (vf)((vi)p + (((vi)shifted - (vi)magic) << 23));
    return pick(x == x, e, x);
#endif
}

/* ---- the rest: a lane is a channel (in softmax, a query), so nothing is reduced across lanes ---- */

INLINE vf activated(vm_act act, vf x) {
    if (act == VM_ACT_SILU) return x / (splat(1) + vexp(-x));
    if (act == VM_ACT_RELU) return VM_NO_LESS(splat(0), x);
    if (act == VM_ACT_BOUND) return splat(3) - splat(6) / (splat(1) + vexp(x * splat(2 / 3.f)));
    return x;
}

INLINE void load_as(vm_dtype dtype, float *y, const vm_source *from, vm_act act) {
    for (size_t l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf a = from->scale ? at(from->scale + l) : splat(1), b = from->scale ? at(from->shift + l) : splat(0);
        for (size_t i = l; i < from->pixels * VM_BLOCK; i += VM_BLOCK) {
            vf x = widened(dtype, from->x, i);
            if (from->factor) x *= splat(from->factor[i / VM_BLOCK]);
            x = x * a + b;
            put(y + i, activated(act, x));
        }
    }
}

static void load(void *y, void *rest, const vm_source *from) {
    (void)rest;
    const bool copied = !from->scale && !from->act && from->dtype == VM_F32;
    if (copied) {
        memcpy(y, from->x, from->pixels * VM_BLOCK * sizeof(float));
        return;
    }
    if (from->act == VM_ACT_SILU) VM_FOR_DTYPE(from->dtype, load_as, y, from, VM_ACT_SILU) /* the hot case */
    VM_FOR_DTYPE(from->dtype, load_as, y, from, from->act)
}

INLINE bool store_as(vm_dtype dtype, void *y, const float *x, size_t pixels, float factor, const void *add, bool relu) {
    const vf f = splat(factor);
    vi bad = {0};
    for (size_t i = 0; i < pixels * VM_BLOCK; i += VM_LANES) {
        vf v = at(x + i) * f;
        if (add) v += widened(dtype, add, i);
        if (relu) v = VM_NO_LESS(splat(0), v);
        bad |= narrow(dtype, y, i, v);
    }
    int32_t any = 0;
    for (int l = 0; l < VM_LANES; l++) any |= bad[l];
    return !any;
}

static bool store_rows(void *y, vm_dtype dtype, const float *x, size_t pixels, float factor, const void *add,
                       bool relu){VM_FOR_DTYPE(dtype, store_as, y, x, pixels, factor, add, relu)}

INLINE void squares_as(vm_dtype dtype, float *sum, const void *x, size_t pixels) {
    for (size_t i = 0; i < pixels * VM_BLOCK; i += VM_LANES) {
        const vf v = widened(dtype, x, i);
        put(sum + i, at(sum + i) + v * v);
    }
}

static void squares(float *sum, const void *x, vm_dtype dtype,
                    size_t pixels){VM_FOR_DTYPE(dtype, squares_as, sum, x, pixels)}

/* The sum of x, or of (x - mean)^2: four chains, since each addition waits for the one before it. */
INLINE vf sum_of(vm_dtype dtype, const void *x, size_t rows, size_t x_row, size_t pixels, const vf *mean) {
    vf sum[4] = {0};
    for (size_t r = 0; r < rows; r++)
        for (size_t p = 0; p < pixels; p += 4) {
            UNROLL for (size_t i = 0; i < 4; i++) {
                if (p + i >= pixels) break;
                vf v = widened(dtype, x, r * x_row + (p + i) * VM_BLOCK);
                if (mean) v = (v - *mean) * (v - *mean);
                sum[i] += v;
            }
        }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

INLINE void stats_as(vm_dtype dtype, float *mean, float *m2, const void *x, size_t rows, size_t x_row, size_t pixels) {
    for (size_t l = 0; l < VM_BLOCK; l += VM_LANES) {
        const void *lanes = (const char *)x + l * vm_dtype_bytes(dtype);
        const vf m = sum_of(dtype, lanes, rows, x_row, pixels, NULL) / splat((float)(rows * pixels));
        put(mean + l, m);
        put(m2 + l, sum_of(dtype, lanes, rows, x_row, pixels, &m));
    }
}

static void stats(float *mean, float *m2, const void *x, vm_dtype dtype, size_t rows, size_t x_row, size_t pixels) {
    VM_FOR_DTYPE(dtype, stats_as, mean, m2, x, rows, x_row, pixels)
}

static void softmax(float *s, size_t keys, float scale, float *top, float *sum, float *keep) {
    for (int l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf c = splat(scale), old = at(top + l);
        /* four chains, since each maximum waits for the one before it; the last key may count twice */
        vf tops[4] = {old, old, old, old}, total;
        for (size_t k = 0; k < keys; k += 4) {
            UNROLL for (size_t i = 0; i < 4; i++) {
                const vf v = at(s + VM_MIN(k + i, keys - 1) * VM_BLOCK + l) * c;
                tops[i] = pick(v > tops[i], v, tops[i]);
            }
        }
        UNROLL for (int i = 1; i < 4; i++) tops[0] = pick(tops[i] > tops[0], tops[i], tops[0]);
        const vf best = tops[0];
        const vf factor = vexp(old - best);
        total = at(sum + l) * factor;
        for (size_t k = 0; k < keys; k++) {
            vf e = vexp(at(s + k * VM_BLOCK + l) * c - best);
            put(s + k * VM_BLOCK + l, e);
            total += e;
        }
        put(top + l, best);
        put(sum + l, total);
        put(keep + l, factor);
    }
}

static void rescale(float *x, size_t rows, const float *keep) {
    for (int l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf f = at(keep + l);
        for (size_t r = 0; r < rows; r++) put(x + r * VM_BLOCK + l, at(x + r * VM_BLOCK + l) * f);
    }
}

/* Interleaves the even (from 0) or odd (from half the lanes) halves of a and b. */
INLINE vf zip(vf a, vf b, int from) {
#ifdef __clang__ /* clang needs this: it has no __builtin_shuffle; GCC would move number by number */
    vf y = a;
    UNROLL for (int i = 0; i < VM_LANES; i++) y[i] = i % 2 ? b[from + i / 2] : a[from + i / 2];
    return y;
#else
    vi lanes = {0};
    UNROLL for (int i = 0; i < VM_LANES; i++) lanes[i] = from + i / 2 + i % 2 * VM_LANES;
    return __builtin_shuffle(a, b, lanes);
#endif
}

/* Zips rows of a square with those half the square away, log2(side) times: its columns. */
static void transpose(float *y, const float *x) {
    for (int r = 0; r < VM_BLOCK; r += VM_LANES)
        for (int l = 0; l < VM_BLOCK; l += VM_LANES) {
            vf t[VM_LANES], zipped[VM_LANES];
            UNROLL for (int i = 0; i < VM_LANES; i++) t[i] = at(x + (r + i) * VM_BLOCK + l);
            UNROLL for (int side = VM_LANES; side > 1; side /= 2) {
                UNROLL for (int i = 0; i < VM_LANES / 2; i++) {
                    zipped[2 * i] = zip(t[i], t[i + VM_LANES / 2], 0);
                    zipped[2 * i + 1] = zip(t[i], t[i + VM_LANES / 2], VM_LANES / 2);
                }
                UNROLL for (int i = 0; i < VM_LANES; i++) t[i] = zipped[i];
            }
            UNROLL for (int i = 0; i < VM_LANES; i++) put(y + (l + i) * VM_BLOCK + r, t[i]);
        }
}

static void unpack(float *y, vm_dtype dtype, const uint16_t *x, size_t steps) {
    for (size_t s = 0; s < steps; s++, x += 2 * VM_BLOCK, y += 2 * VM_BLOCK)
        for (size_t l = 0; l < VM_BLOCK; l += VM_LANES) {
            const vu two = (vu)at((const float *)(const void *)x + l), one = two & 0xffff, other = two >> 16;
            put(y + l, dtype == VM_F16 ? of_half(VM_F16, one) : of_half(VM_BF16, one));
            put(y + VM_BLOCK + l, dtype == VM_F16 ? of_half(VM_F16, other) : of_half(VM_BF16, other));
        }
}

/* ---- Winograd's transforms, the same for every line of a tile: down its columns, then across its rows ---- */

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

INLINE void tiles_in(int down, int across, float *v, size_t v_step, const float *x, size_t x_row, size_t tiles) {
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
                put(v + (size_t)(r * numbers(across) + c) * v_step + i, n[c]);
        }
    }
}

INLINE void filters_in(int down, int across, float *u, size_t u_step, const float *w, size_t n) {
    for (size_t i = 0; i < n; i += VM_LANES) {
        vf t[6][3];
        UNROLL for (int c = 0; c < 3; c++) {
            vf k[6];
            line_weights(down, k, at(w + (size_t)c * n + i), at(w + (size_t)(3 + c) * n + i),
                         at(w + (size_t)(6 + c) * n + i));
            UNROLL for (int r = 0; r < filters(down); r++) t[r][c] = k[r];
        }
        UNROLL for (int r = 0; r < filters(down); r++) {
            vf k[6];
            line_weights(across, k, t[r][0], t[r][1], t[r][2]);
            UNROLL for (int c = 0; c < filters(across); c++)
                put(u + (size_t)(r * filters(across) + c) * u_step + i, k[c]);
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

VM_TRANSFORMS(winograd, TWO, FOUR)
VM_TRANSFORMS(upsampled, UP, UP)
VM_TRANSFORMS(strided, STRIDED, STRIDED)

static double burn(size_t rounds, float *sink) {
    vf x[12]; /* a latency of 4 cycles on two ports needs at least 8 in flight */
    UNROLL for (int j = 0; j < 12; j++) x[j] = splat((float)j);
    const vf a = splat(0.999f), b = splat(0.001f);
    for (size_t i = 0; i < rounds; i++) {
        UNROLL for (int j = 0; j < 12; j++) x[j] = x[j] * a + b;
    }
    for (int j = 0; j < 12; j++)
        for (int l = 0; l < VM_LANES; l++) *sink += x[j][l];
    return 2.0 * 12 * VM_LANES * (double)rounds;
}

const vm_cpu_ops VM_OPS = {VM_CPU_OPS(VM_PIXELS)};
