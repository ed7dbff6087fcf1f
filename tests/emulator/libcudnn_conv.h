/* The stand-in cuDNN's convolution: n h w c, packed, no padding, float sums, on one thread. */
#ifndef VM_LIBCUDNN_CONV_H
#define VM_LIBCUDNN_CONV_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { F32 = 0, F16 = 2, BF16 = 9 }; /* cudnnDataType_t */

typedef struct conv {
    int type;
    int64_t n, h, w, c, k, r, s, stride, oh, ow;
    int64_t id[3], alignment[3]; /* of x, w, y */
    bool on_handle;
} conv;

typedef struct job {
    conv conv;
    bool round, spoil; /* inputs to TF32; the result, to NaN */
    const void *x, *w;
    void *y, *workspace;
    size_t bytes;
} job;

static float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static uint32_t as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}
/* Without the lowest bits, to the nearest, ties to even; NaN and infinities as they are. */
static float without(float f, int bits) {
    const uint32_t u = as_bits(f), half = (1u << bits) / 2;
    if (!isfinite(f)) return f;
    return as_float((u + half - 1 + (u >> bits & 1)) & ~(2 * half - 1));
}

static float load(int type, const void *p, int64_t i) {
    if (type == F16) return (float)((const _Float16 *)p)[i];
    if (type == BF16) return as_float((uint32_t)((const uint16_t *)p)[i] << 16);
    return ((const float *)p)[i];
}

static void store(int type, void *p, int64_t i, float f) {
    if (type == F16)
        ((_Float16 *)p)[i] = (_Float16)f;
    else if (type == BF16)
        ((uint16_t *)p)[i] = isnan(f) ? 0x7fc0 : (uint16_t)(as_bits(without(f, 16)) >> 16);
    else
        ((float *)p)[i] = f;
}

typedef float lanes __attribute__((vector_size(64), aligned(4)));
enum { LANES = 16, TILE = 2 * LANES, PIXELS = 4 };

/* w [k][r][s][c] -> [k / TILE][r][s][c][TILE], zeros beyond k. */
static void turn(const job *j, float *out, int64_t taps) {
    const conv *v = &j->conv;
    for (int64_t k = 0; k < v->k; k++)
        for (int64_t i = 0; i < taps; i++) {
            const float f = load(v->type, j->w, k * taps + i);
            out[(k / TILE * taps + i) * TILE + k % TILE] = j->round ? without(f, 13) : f;
        }
}

/* One of n: x is its own, y is of all. */
static void convolve(const job *j, int64_t one, const float *x, const float *w, int64_t taps) {
    const conv *v = &j->conv;
    const int64_t first = one * v->oh * v->ow;
    for (int64_t oy = 0; oy < v->oh; oy++)
        for (int64_t ox = 0; ox < v->ow; ox += PIXELS)
            for (int64_t k = 0; k < v->k; k += TILE) {
                const float *wp = w + k * taps;
                lanes sum[PIXELS][2] = {{{0}}};
                for (int64_t a = 0; a < v->r; a++)
                    for (int64_t b = 0; b < v->s; b++) {
                        const float *xp[PIXELS];
                        for (int p = 0; p < PIXELS; p++) {
                            const int64_t at = ox + p < v->ow ? ox + p : v->ow - 1;
                            xp[p] = x + ((oy * v->stride + a) * v->w + at * v->stride + b) * v->c;
                        }
                        for (int64_t c = 0; c < v->c; c++, wp += TILE) {
                            const lanes w0 = *(const lanes *)wp, w1 = *(const lanes *)(wp + LANES);
                            for (int p = 0; p < PIXELS; p++) {
                                sum[p][0] += w0 * xp[p][c];
                                sum[p][1] += w1 * xp[p][c];
                            }
                        }
                    }
                for (int64_t p = 0; p < PIXELS && ox + p < v->ow; p++)
                    for (int64_t i = 0; i < TILE && k + i < v->k; i++)
                        store(v->type, j->y, (first + oy * v->ow + ox + p) * v->k + k + i,
                              j->spoil ? NAN : sum[p][i / LANES][i % LANES]);
            }
}

static inline void convolve_job(void *arg) {
    const job *j = arg;
    const conv *v = &j->conv;
    const int64_t each = v->h * v->w * v->c, pixels = v->n * each, taps = v->r * v->s * v->c;
    float *x = malloc((size_t)pixels * sizeof *x),
          *w = calloc((size_t)((v->k + TILE - 1) / TILE * TILE * taps), sizeof *w);
    if (!x || !w) {
        fprintf(stderr, "stand-in cuDNN: no memory for a convolution\n");
        abort();
    }
    for (int64_t i = 0; i < pixels; i++) {
        const float f = load(v->type, j->x, i);
        x[i] = j->round ? without(f, 13) : f;
    }
    turn(j, w, taps);
    if (j->bytes) memset(j->workspace, 0xff, j->bytes);
    for (int64_t one = 0; one < v->n; one++) convolve(j, one, x + one * each, w, taps);
    free(x);
    free(w);
}

#endif
