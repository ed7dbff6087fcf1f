/* The plain C path: what every operation means, and what runs where nothing better is known.
 * Built with the compiler's baseline flags; the loops over 16 lanes are left to its vectoriser. */
#include <math.h>

#include "../cpu.h"

enum { L = VM_BLOCK, PIXELS = 4 };

static void gemm_block(const vm_gemm *g, size_t o) {
    float sum[PIXELS][L] = {{0}};
    const float *w = g->w + (ptrdiff_t)o * g->w_block;
    for (size_t b = 0; b < g->batches; b++) {
        const float *x = g->x + g->x_offset[b];
        for (size_t k = 0; k < g->depth; k++, w += L)
            for (size_t p = 0; p < PIXELS; p++) { /* a short tile computes its last pixel again */
                float v = x[(ptrdiff_t)VM_MIN(p, g->pixels - 1) * g->x_pixel + (ptrdiff_t)k * g->x_step];
                for (size_t l = 0; l < L; l++) sum[p][l] += v * w[l];
            }
    }
    for (size_t p = 0; p < g->pixels; p++) {
        float *y = g->y + (ptrdiff_t)o * g->y_block + (ptrdiff_t)p * g->y_pixel;
        const float *add = g->add ? g->add + (ptrdiff_t)o * g->add_block + (ptrdiff_t)p * g->add_pixel : NULL;
        for (size_t l = 0; l < L; l++) {
            float v = sum[p][l];
            if (g->bias) v += g->bias[o * L + l];
            if (add) v += add[l];
            y[l] = v;
        }
    }
}

static void gemm(const vm_gemm *g) {
    for (size_t o = 0; o < g->blocks; o++) gemm_block(g, o);
}

static void load(float *y, const float *x, size_t pixels, const float *scale, const float *shift, bool silu) {
    for (size_t i = 0; i < pixels * L; i++) {
        float v = scale ? x[i] * scale[i % L] + shift[i % L] : x[i];
        y[i] = silu ? v / (1 + expf(-v)) : v;
    }
}

static void stats(float *mean, float *m2, const float *x, size_t rows, size_t x_row, size_t pixels) {
    float n = (float)(rows * pixels);
    for (size_t l = 0; l < L; l++) mean[l] = m2[l] = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < pixels * L; i++) mean[i % L] += x[r * x_row + i];
    for (size_t l = 0; l < L; l++) mean[l] /= n;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < pixels * L; i++) {
            float d = x[r * x_row + i] - mean[i % L];
            m2[i % L] += d * d;
        }
}

static void softmax(float *s, size_t keys, float scale, float *top, float *sum, float *keep) {
    for (size_t l = 0; l < L; l++) {
        float old = top[l];
        for (size_t k = 0; k < keys; k++) top[l] = s[k * L + l] * scale > top[l] ? s[k * L + l] * scale : top[l];
        keep[l] = expf(old - top[l]);
        sum[l] *= keep[l];
    }
    for (size_t i = 0; i < keys * L; i++) {
        s[i] = expf(s[i] * scale - top[i % L]);
        sum[i % L] += s[i];
    }
}

static void rescale(float *x, size_t rows, const float *keep) {
    for (size_t i = 0; i < rows * L; i++) x[i] *= keep[i % L];
}

static double burn(size_t rounds, float *sink) {
    float x[8][L] = {{0}};
    for (size_t i = 0; i < rounds; i++)
        for (size_t j = 0; j < 8; j++)
            for (size_t l = 0; l < L; l++) x[j][l] = x[j][l] * 0.999f + 0.001f;
    for (size_t j = 0; j < 8; j++)
        for (size_t l = 0; l < L; l++) *sink += x[j][l];
    return 2.0 * 8 * L * (double)rounds;
}

const vm_cpu_ops vm_cpu_ref = {PIXELS, gemm, load, stats, softmax, rescale, burn};
