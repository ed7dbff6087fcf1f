/* The operations of cpu.h for any instruction set with vectors of VM_LANES floats (16, 8 or 4), in the
 * compiler's vector extension: one source, built once per ISA folder with that folder's flags.
 * The includer defines VM_LANES, VM_PIXELS, VM_VECTORS and VM_OPS. */
#include <math.h>
#include <string.h>

#include "gemm.h"

typedef uint32_t vu __attribute__((vector_size(4 * VM_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * VM_LANES), aligned(2), may_alias));

INLINE vu pick_bits(vi mask, vu yes, vu no) { return (yes & (vu)mask) | (no & ~(vu)mask); }

/* ---- rows of any type ---- */

/* VM_LANES numbers from element i on. */
INLINE vf widened(vm_dtype dtype, const void *x, size_t i) {
    if (dtype == VM_F32) return at((const float *)x + i);
    const vu half = __builtin_convertvector(*(const vh *)((const uint16_t *)x + i), vu);
    if (dtype == VM_BF16) return (vf)(half << 16);
    /* an exponent that is 112 too small is put right exactly, of subnormals too */
    const vu size = half & 0x7fff, high = (vu)((vf)(size << 13) * splat(0x1p112f));
    return (vf)(pick_bits((vi)(size >= 0x7c00), size << 13 | 0x7f800000, high) | (half & 0x8000) << 16);
}

/* Rounds to the nearest, to even of two; NaN stays NaN, and what is too large becomes Inf. Not 0 where a result is not
 * finite. */
INLINE vi narrow(vm_dtype dtype, void *y, size_t i, vf x) {
    const vu bits = (vu)x, size = bits & 0x7fffffff;
    vu half;
    if (dtype == VM_F32) {
        put((float *)y + i, x);
        return (vi)(size >= 0x7f800000);
    }
    if (dtype == VM_BF16) {
        half = pick_bits((vi)(size > 0x7f800000), bits | 0x400000, bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        *(vh *)((uint16_t *)y + i) = __builtin_convertvector(half, vh);
        return (vi)((half & 0x7f80) == 0x7f80);
    }
    /* 0.5 has the step of float16's subnormals in its last place, so a sum with it rounds as they do */
    half = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    half = pick_bits((vi)(size < 0x38800000), (vu)((vf)size + splat(0.5f)) - 0x3f000000, half);
    half = pick_bits((vi)(size >= 0x47800000),
                     pick_bits((vi)(size > 0x7f800000), half - half + 0x7e00, half - half + 0x7c00), half);
    *(vh *)((uint16_t *)y + i) = __builtin_convertvector(half | (bits >> 16 & 0x8000), vh);
    return (vi)(half >= 0x7c00);
}

/* A call whose first argument is a constant in each of three. */
#define VM_FOR_DTYPE(DTYPE, CALL, ...)     \
    switch (DTYPE) {                       \
    case VM_F32:                           \
        return CALL(VM_F32, __VA_ARGS__);  \
    case VM_F16:                           \
        return CALL(VM_F16, __VA_ARGS__);  \
    default:                               \
        return CALL(VM_BF16, __VA_ARGS__); \
    }

/* ---- exp ---- */

/* e^x, about 1 ulp where the result is normal; below -87.3 the smallest normal, above 88.3 e^88.3;
 * NaN stays NaN. Reduction by ln 2 in two parts; the polynomial is Cephes expf's. */
INLINE vf vexp(vf x) {
    vf t = pick(x < splat(-87.3f), splat(-87.3f), x);
    t = pick(t > splat(88.3f), splat(88.3f), t);
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
    vf e = (vf)((vi)p + (((vi)shifted - (vi)magic) << 23));
    return pick(x == x, e, x);
}

/* ---- the rest: a lane is a channel (or, in softmax, a query), so nothing is ever reduced across lanes ---- */

INLINE void load_as(vm_dtype dtype, float *y, const vm_source *from) {
    for (size_t l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf a = from->scale ? at(from->scale + l) : splat(1), b = from->scale ? at(from->shift + l) : splat(0);
        for (size_t i = l; i < from->pixels * VM_BLOCK; i += VM_BLOCK) {
            vf x = widened(dtype, from->x, i) * a + b;
            if (from->silu) x /= splat(1) + vexp(-x);
            put(y + i, x);
        }
    }
}

static void load(float *y, const vm_source *from) {
    const bool copied = !from->scale && !from->silu && from->dtype == VM_F32;
    if (copied) {
        memcpy(y, from->x, from->pixels * VM_BLOCK * sizeof *y);
        return;
    }
    VM_FOR_DTYPE(from->dtype, load_as, y, from)
}

INLINE bool store_as(vm_dtype dtype, void *y, const float *x, size_t pixels, float factor, const void *add) {
    const vf f = splat(factor);
    vi bad = {0};
    for (size_t i = 0; i < pixels * VM_BLOCK; i += VM_LANES) {
        vf v = at(x + i) * f;
        if (add) v += widened(dtype, add, i);
        bad |= narrow(dtype, y, i, v);
    }
    int32_t any = 0;
    for (int l = 0; l < VM_LANES; l++) any |= bad[l];
    return !any;
}

static bool store_rows(void *y, vm_dtype dtype, const float *x, size_t pixels, float factor,
                       const void *add){VM_FOR_DTYPE(dtype, store_as, y, x, pixels, factor, add)}

INLINE void stats_as(vm_dtype dtype, float *mean, float *m2, const void *x, size_t rows, size_t x_row, size_t pixels) {
    for (size_t l = 0; l < VM_BLOCK; l += VM_LANES) {
        vf sum = {0}, dev = {0};
        for (size_t r = 0; r < rows; r++)
            for (size_t p = 0; p < pixels; p++) sum += widened(dtype, x, r * x_row + p * VM_BLOCK + l);
        const vf m = sum / splat((float)(rows * pixels));
        for (size_t r = 0; r < rows; r++)
            for (size_t p = 0; p < pixels; p++) {
                vf d = widened(dtype, x, r * x_row + p * VM_BLOCK + l) - m;
                dev += d * d;
            }
        put(mean + l, m);
        put(m2 + l, dev);
    }
}

static void stats(float *mean, float *m2, const void *x, vm_dtype dtype, size_t rows, size_t x_row, size_t pixels) {
    VM_FOR_DTYPE(dtype, stats_as, mean, m2, x, rows, x_row, pixels)
}

static void softmax(float *s, size_t keys, float scale, float *top, float *sum, float *keep) {
    for (int l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf c = splat(scale), old = at(top + l);
        /* four at a time, since a maximum waits for the one before it; the last key may come twice */
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

/* The even (from 0) or odd (from half the lanes) half of a and b taken in turns. */
INLINE vf zip(vf a, vf b, int from) {
#ifdef __clang__ /* which sees one instruction in this, and has no __builtin_shuffle; GCC would move number by number */
    vf y = a;
    UNROLL for (int i = 0; i < VM_LANES; i++) y[i] = i % 2 ? b[from + i / 2] : a[from + i / 2];
    return y;
#else
    vi lanes;
    UNROLL for (int i = 0; i < VM_LANES; i++) lanes[i] = from + i / 2 + i % 2 * VM_LANES;
    return __builtin_shuffle(a, b, lanes);
#endif
}

/* Rows of a square zipped with those half the square away, as often as its side can be halved, are its columns. */
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

static void winograd_in(float *v, size_t v_step, const float *x, size_t x_row, size_t tiles) {
    for (size_t i = 0; i < tiles * VM_BLOCK; i += VM_LANES) {
        const float *d = x + i / VM_BLOCK * 2 * VM_BLOCK + i % VM_BLOCK;
        vf t[4][4];
        UNROLL for (int c = 0; c < 4; c++) {
            const vf d0 = at(d + c * VM_BLOCK), d1 = at(d + x_row + c * VM_BLOCK);
            const vf d2 = at(d + 2 * x_row + c * VM_BLOCK), d3 = at(d + 3 * x_row + c * VM_BLOCK);
            t[0][c] = d0 - d2, t[1][c] = d1 + d2, t[2][c] = d2 - d1, t[3][c] = d1 - d3;
        }
        UNROLL for (int r = 0; r < 4; r++) {
            float *to = v + 4 * (size_t)r * v_step + i;
            put(to, t[r][0] - t[r][2]);
            put(to + v_step, t[r][1] + t[r][2]);
            put(to + 2 * v_step, t[r][2] - t[r][1]);
            put(to + 3 * v_step, t[r][1] - t[r][3]);
        }
    }
}

static void winograd_weights(float *u, size_t u_step, const float *w, size_t n) {
    const vf half = splat(0.5f);
    for (size_t i = 0; i < n; i += VM_LANES) {
        vf t[4][3];
        UNROLL for (int c = 0; c < 3; c++) {
            const vf g0 = at(w + c * n + i), g1 = at(w + (3 + c) * n + i), g2 = at(w + (6 + c) * n + i);
            t[0][c] = g0, t[1][c] = (g0 + g2 + g1) * half, t[2][c] = (g0 + g2 - g1) * half, t[3][c] = g2;
        }
        UNROLL for (int r = 0; r < 4; r++) {
            float *to = u + 4 * (size_t)r * u_step + i;
            put(to, t[r][0]);
            put(to + u_step, (t[r][0] + t[r][2] + t[r][1]) * half);
            put(to + 2 * u_step, (t[r][0] + t[r][2] - t[r][1]) * half);
            put(to + 3 * u_step, t[r][2]);
        }
    }
}

static void upsampled_in(float *v, size_t v_step, const float *x, size_t x_row, size_t tiles) {
    for (size_t i = 0; i < tiles * VM_BLOCK; i += VM_LANES) {
        const float *d = x + i;
        vf t[3][3];
        UNROLL for (int c = 0; c < 3; c++) {
            const vf d1 = at(d + x_row + c * VM_BLOCK);
            t[0][c] = at(d + c * VM_BLOCK) - d1, t[1][c] = d1, t[2][c] = at(d + 2 * x_row + c * VM_BLOCK) - d1;
        }
        UNROLL for (int r = 0; r < 3; r++) {
            float *to = v + 3 * (size_t)r * v_step + i;
            put(to, t[r][0] - t[r][1]);
            put(to + v_step, t[r][1]);
            put(to + 2 * v_step, t[r][2] - t[r][1]);
        }
    }
}

static void upsampled_weights(float *u, size_t u_step, const float *w, size_t n) {
    for (size_t i = 0; i < n; i += VM_LANES) {
        vf t[3][3];
        UNROLL for (int c = 0; c < 3; c++) {
            const vf g0 = at(w + c * n + i), g2 = at(w + (6 + c) * n + i);
            t[0][c] = g0, t[1][c] = g0 + g2 + at(w + (3 + c) * n + i), t[2][c] = g2;
        }
        UNROLL for (int r = 0; r < 3; r++) {
            float *to = u + 3 * (size_t)r * u_step + i;
            put(to, t[r][0]);
            put(to + u_step, t[r][0] + t[r][2] + t[r][1]);
            put(to + 2 * u_step, t[r][2]);
        }
    }
}

/* The two numbers that A^T makes of `side` ones, the nearer pixel's and the farther one's. */
static inline vf near_pixel(int side, vf t0, vf t1, vf t2) { return side == 4 ? t0 + t1 + t2 : t0 + t1; }
static inline vf far_pixel(int side, vf t1, vf t2, vf t3) { return side == 4 ? t1 - t2 - t3 : t1 + t2; }

static inline __attribute__((always_inline)) void store(int side, float *y, size_t y_row, const float *m, size_t m_step,
                                                        size_t rows, size_t width, const float *bias, const float *add,
                                                        size_t add_row) {
    for (int l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf b = at(bias + l);
        for (size_t x = 0; x < width; x += 2) {
            vf t[4][2];
            UNROLL for (int r = 0; r < side; r++) {
                const float *f = m + (size_t)(side * r) * m_step + x / 2 * VM_BLOCK + l;
                const vf f1 = at(f + m_step), f2 = at(f + 2 * m_step);
                t[r][0] = near_pixel(side, at(f), f1, f2);
                t[r][1] = far_pixel(side, f1, f2, at(f + (size_t)(side - 1) * m_step));
            }
            for (size_t c = 0; c < VM_MIN(width - x, 2); c++)
                for (size_t r = 0; r < rows; r++) {
                    vf v = r ? far_pixel(side, t[1][c], t[2][c], t[side - 1][c])
                             : near_pixel(side, t[0][c], t[1][c], t[2][c]);
                    v += b;
                    if (add) v += at(add + r * add_row + (x + c) * VM_BLOCK + l);
                    put(y + r * y_row + (x + c) * VM_BLOCK + l, v);
                }
        }
    }
}

static void winograd_out(float *y, size_t y_row, const float *m, size_t m_step, size_t rows, size_t width,
                         const float *bias, const float *add, size_t add_row) {
    store(4, y, y_row, m, m_step, rows, width, bias, add, add_row);
}

static void upsampled_out(float *y, size_t y_row, const float *m, size_t m_step, size_t rows, size_t width,
                          const float *bias, const float *add, size_t add_row) {
    store(3, y, y_row, m, m_step, rows, width, bias, add, add_row);
}

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

const vm_cpu_ops VM_OPS = {{VM_PIXELS, VM_ROWS_FLAT, VM_STEPS, gemm, NULL, burn},
                           load,
                           store_rows,
                           stats,
                           softmax,
                           rescale,
                           transpose,
                           {4, winograd_in, winograd_weights, winograd_out},
                           {3, upsampled_in, upsampled_weights, upsampled_out}};
