/* The batched product of cpu.h for vectors of VM_LANES floats: one source for floats and for pairs of bfloat16. The
 * includer defines VM_LANES, VM_PIXELS, VM_VECTORS; for pairs, VM_MULTIPLY. */
#include "vectors.h"

/* ---- P pixels by V vectors of accumulators, one broadcast, V weights ---- */

/* A step: a number of x, or a pair, in every lane of a vector, times a row of weights. */
#ifndef VM_MULTIPLY
#define VM_MULTIPLY(SUM, X, W) ((SUM) += (X) * (W))
#endif

/* Strides are constants, so addresses are immediates; vector v is part v % VM_SUBS of block v / VM_SUBS. */
#define VM_GEMM(P, V, PIXEL, NAME)                                                                                     \
    static void NAME(const vm_gemm *g) {                                                                               \
        vf sum[P][V];                                                                                                  \
        UNROLL for (int p = 0; p < P; p++) UNROLL for (int v = 0; v < V; v++) sum[p][v] = (vf){0};                     \
        const float *w = g->w;                                                                                         \
        const ptrdiff_t w_block = g->w_block;                                                                          \
        for (size_t b = 0; b < g->batches; b++) {                                                                      \
            const float *x = g->x + g->x_offset[b];                                                                    \
            for (size_t k = 0; k < g->depth; k++, w += VM_BLOCK, x++) {                                                \
                vf wv[V];                                                                                              \
                UNROLL for (int v = 0; v < V; v++) wv[v] = at(w + (v / VM_SUBS) * w_block + (v % VM_SUBS) * VM_LANES); \
                UNROLL for (int p = 0; p < P; p++) {                                                                   \
                    vf xv = splat(x[p * (PIXEL)]);                                                                     \
                    UNROLL for (int v = 0; v < V; v++) VM_MULTIPLY(sum[p][v], xv, wv[v]);                              \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        UNROLL for (int v = 0; v < V; v++) {                                                                           \
            const int o = v / VM_SUBS, l = (v % VM_SUBS) * VM_LANES;                                                   \
            const vf bias = g->bias ? at(g->bias + o * VM_BLOCK + l) : (vf){0};                                        \
            UNROLL for (int p = 0; p < P; p++) {                                                                       \
                vf r = sum[p][v] + bias;                                                                               \
                if (g->add) r += at(g->add + o * g->add_block + p * g->add_pixel + l);                                 \
                put(g->y + o * g->y_block + p * g->y_pixel + l, r);                                                    \
            }                                                                                                          \
        }                                                                                                              \
    }

#include "gemm_tiles.h"

static void gemm(const vm_gemm *g) {
    const int kind = g->x_pixel != VM_BLOCK;
    if (g->blocks * VM_SUBS <= VM_VECTORS) {
        tiles[kind][g->blocks - 1][g->pixels - 1](g);
        return;
    }
    for (size_t i = 0; i < g->blocks * VM_BLOCK; i += VM_PART * VM_LANES) { /* too few registers: a part at a time */
        const ptrdiff_t o = (ptrdiff_t)(i / VM_BLOCK), l = (ptrdiff_t)(i % VM_BLOCK);
        vm_gemm one = *g;
        one.w += o * g->w_block + l;
        one.y += o * g->y_block + l;
        if (one.bias) one.bias += i;
        if (one.add) one.add += o * g->add_block + l;
        tiles[kind][0][g->pixels - 1](&one);
    }
}
