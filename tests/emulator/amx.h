/* AMX on a processor that has none: the intrinsics that kernels/amx uses, in plain C, after the instructions' description in
 * Intel's manual (Software Developer's Manual, volume 2; LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS). What the
 * processor answers with an exception ends the program with a sentence. Each thread has its own tiles.
 *
 * To be compiled with fused multiply-add (-mfma): there is one rounding in it, as in the instruction. */
#ifndef VM_EMULATED_AMX_H
#define VM_EMULATED_AMX_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* <immintrin.h> may have them as macros. */
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_loadconfig
#define _tile_release amx_release
#define _tile_zero amx_zero
#define _tile_loadd amx_loadd
#define _tile_stored amx_stored
#define _tile_dpbf16ps amx_dpbf16ps

enum { AMX_TILES = 8, AMX_ROWS = 16, AMX_BYTES = 64 };

typedef struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} amx_config;

typedef struct amx_state {
    amx_config config;
    uint32_t tile[AMX_TILES][AMX_ROWS][AMX_BYTES / 4];
} amx_state;

static _Thread_local amx_state amx;

/* For tests: whether this thread holds tiles. */
int amx_in_use(void);
int amx_in_use(void) { return amx.config.palette != 0; }

static inline void amx_check(int holds, const char *instruction, const char *wanted) {
    if (holds) return;
    fprintf(stderr, "AMX emulator: %s wants %s\n", instruction, wanted);
    abort();
}

static inline void amx_loadconfig(const void *from) {
    amx_config c;
    memcpy(&c, from, sizeof c);
    int zero = 1, shapes = 1;
    for (int i = 0; i < 14; i++) zero &= c.reserved[i] == 0;
    for (int t = 0; t < 16; t++) {
        shapes &= c.bytes[t] <= AMX_BYTES && c.rows[t] <= AMX_ROWS && !c.bytes[t] == !c.rows[t];
        if (t >= AMX_TILES) zero &= c.bytes[t] == 0 && c.rows[t] == 0;
    }
    amx_check(c.palette == 1 && c.start_row == 0, "ldtilecfg", "palette 1 from row 0 on (or tilerelease)");
    amx_check(zero, "ldtilecfg", "zeros for what is reserved and for tiles that there are not");
    amx_check(shapes, "ldtilecfg", "at most 16 rows of at most 64 bytes, and both or neither");
    memset(&amx, 0, sizeof amx);
    amx.config = c;
}

static inline void amx_release(void) { memset(&amx, 0, sizeof amx); }

static inline void amx_check_tile(int t, const char *instruction) {
    amx_check(t >= 0 && t < AMX_TILES && amx.config.palette == 1 && amx.config.rows[t], instruction,
              "a configured tile");
}

static inline void amx_zero(int t) {
    amx_check_tile(t, "tilezero");
    memset(amx.tile[t], 0, sizeof amx.tile[t]);
}

static inline void amx_loadd(int t, const void *base, ptrdiff_t stride) {
    amx_check_tile(t, "tileloadd");
    memset(amx.tile[t], 0, sizeof amx.tile[t]);
    for (int r = 0; r < amx.config.rows[t]; r++)
        memcpy(amx.tile[t][r], (const char *)base + r * stride, amx.config.bytes[t]);
}

static inline void amx_stored(int t, void *base, ptrdiff_t stride) {
    amx_check_tile(t, "tilestored");
    for (int r = 0; r < amx.config.rows[t]; r++) memcpy((char *)base + r * stride, amx.tile[t][r], amx.config.bytes[t]);
}

static inline float amx_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A row of the sums. Out of line, so that no operation leaves the rounding and flushing that its caller sets. */
static __attribute__((noinline)) void amx_row(float *sum, const uint32_t *x, uint32_t w[][AMX_BYTES / 4], int pairs) {
    float lower[AMX_BYTES / 4] = {0}, upper[AMX_BYTES / 4] = {0};
    for (int k = 0; k < pairs; k++)
        for (int n = 0; n < AMX_BYTES / 4; n++) {
            lower[n] = __builtin_fmaf(amx_float(x[k] << 16), amx_float(w[k][n] << 16), lower[n]);
            upper[n] = __builtin_fmaf(amx_float(x[k] & 0xffff0000), amx_float(w[k][n] & 0xffff0000), upper[n]);
        }
    for (int n = 0; n < AMX_BYTES / 4; n++) sum[n] += lower[n] + upper[n];
}

/* c += x * w: c[m][n] += sum over k of the lower halves' products, plus the sum of the upper halves' ones. */
static inline void amx_dpbf16ps(int c, int x, int w) {
    const amx_config *g = &amx.config;
    amx_check_tile(c, "tdpbf16ps"), amx_check_tile(x, "tdpbf16ps"), amx_check_tile(w, "tdpbf16ps");
    amx_check(c != x && c != w && x != w, "tdpbf16ps", "three different tiles");
    amx_check(g->bytes[c] % 4 == 0 && g->bytes[x] % 4 == 0 && g->bytes[w] % 4 == 0, "tdpbf16ps", "rows of whole pairs");
    amx_check(g->rows[c] == g->rows[x] && g->bytes[c] == g->bytes[w] && g->bytes[x] / 4 == g->rows[w], "tdpbf16ps",
              "as many rows of sums as of x, as many columns as w has, and a row of w for each pair of x");
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* to nearest, numbers below the smallest normal one are zero before and after, no exceptions */
    for (int m = 0; m < g->rows[c]; m++) {
        float sum[AMX_BYTES / 4];
        memcpy(sum, amx.tile[c][m], sizeof sum);
        amx_row(sum, amx.tile[x][m], amx.tile[w], g->bytes[x] / 4);
        memcpy(amx.tile[c][m], sum, g->bytes[c]);
    }
    _mm_setcsr(mode);
}

#endif
