/* The operations of cpu.h for any instruction set with vectors of VM_LANES floats (16, 8 or 4), in the compiler's
 * vector extension: one source, built once per ISA folder with that folder's flags. The includer defines VM_LANES,
 * VM_PIXELS, VM_VECTORS and VM_OPS. */
#include <math.h>
#include <string.h>

#include "gemm.h"
#include "winograd.h"

/* ---- rows of any type ---- */

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
        half = round_to_bfloat16(x);
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

/* Of halves, if the instruction set has a faster way that is exact enough for them. */
#ifndef VM_ACTIVATED
#define VM_ACTIVATED(DTYPE, ACT, X) activated(ACT, X)
#endif

INLINE void load_as(vm_dtype dtype, float *y, const vm_source *from, vm_act act) {
    for (size_t l = 0; l < VM_BLOCK; l += VM_LANES) {
        const vf a = from->scale ? at(from->scale + l) : splat(1), b = from->scale ? at(from->shift + l) : splat(0);
        for (size_t i = l; i < from->pixels * VM_BLOCK; i += VM_BLOCK) {
            vf x = widened(dtype, from->x, i);
            if (from->factor) x *= splat(from->factor[i / VM_BLOCK]);
            x = x * a + b;
            put(y + i, dtype == VM_F32 ? activated(act, x) : VM_ACTIVATED(dtype, act, x));
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

VM_TRANSFORMS(winograd, VM_F32, TWO, FOUR, VM_TWO_FOUR)
VM_TRANSFORMS(upsampled, VM_F32, UP, UP, VM_UPSAMPLED)
VM_TRANSFORMS(strided, VM_F32, STRIDED, STRIDED, VM_STRIDED)

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
