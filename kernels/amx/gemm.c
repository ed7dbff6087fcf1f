/* AMX: products of tiles of 16 pixels by 16 outputs, 32 pixels by 2 blocks at a time in four tiles of sums. A tile of x is 16
 * pixels with up to 16 pairs each, as they lie; a tile of w up to 16 rows of weights. tdpbf16ps adds up a batch's products
 * of the lower halves and those of the upper ones, each from zero on, and then both to the sum: c + (lower + upper). It rounds
 * to nearest whatever the thread's mode, and takes numbers below the smallest normal one for zero.
 *
 * Intel's optimization manual counts 16 cycles for a product and 8 for a load from L1, 204 to configure and 13 to release the
 * tiles. A batch is four of each, so loads hide behind products as long as they come from L1. That is why a call takes several
 * pairs of tiles where it can: a run of batches whose weights stay in L1 passes over all of them, and the sums wait in
 * memory meanwhile. It is also why it has but one configuration: a last tile of fewer pixels begins earlier instead, and what
 * it computes a second time is dropped.
 *
 * Tiles belong to whoever computes (another library may use them between two calls), so each call configures and releases. */
#include "../cpu.h"

#ifdef VM_EMULATE_AMX
#include "amx.h" /* tests/emulator */
#define VM_LOAD vm_load_pairs_ref
#else
#include <immintrin.h>
#define VM_LOAD vm_load_pairs_avx512bf16
#endif

enum {
    TILE = 16,
    PIXELS = 128,        /* of a call; conv.c's rows have 64 */
    WEIGHTS = 18 * 1024, /* bytes of a run: 3x3 filters of 32 by 32 channels, in L1 beside x and 64 pixels' sums */
    LINE = 64
};

/* Registers, as the assembler wants them. */
#define SUM_00 0
#define SUM_01 1
#define SUM_10 2
#define SUM_11 3
#define X_0 4
#define X_1 5
#define W_0 6
#define W_1 7

typedef float line __attribute__((vector_size(LINE), aligned(4), may_alias));
typedef float sums[2][TILE][VM_BLOCK]; /* a tile's pixels, for two blocks */

/* What ldtilecfg reads. */
typedef struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} config;

/* GCC's intrinsics do not say what they read: without this it need not have been written yet. */
static void written(const void *all) { __asm__ volatile("" : : "r"(all) : "memory"); }

static void configure(size_t pixels, size_t depth) {
    const uint8_t p = (uint8_t)pixels, d = (uint8_t)depth;
    const uint16_t pairs = (uint16_t)(4 * depth);
    const config c = {
        .palette = 1, .bytes = {LINE, LINE, LINE, LINE, pairs, pairs, LINE, LINE}, .rows = {p, p, p, p, p, p, d, d}};
    written(&c);
    _tile_loadconfig(&c);
}

/* The next batch's weights: a run's come from L2 as it begins, and so a batch (64 cycles) before they are wanted. */
static inline __attribute__((always_inline)) void ask_for(const float *w) {
    for (size_t i = 0; i < TILE; i++) __builtin_prefetch(w + i * VM_BLOCK);
}

/* The batches [from, to) of one or two tiles of pixels, which begin at x[0] and x[1], by one or two blocks. */
static inline __attribute__((always_inline)) void multiply(const vm_gemm *g, size_t from, size_t to,
                                                           const float *const x[2], sums *at, bool two_tiles,
                                                           bool two_blocks) {
    if (from == 0) {
        _tile_zero(SUM_00);
        if (two_blocks) _tile_zero(SUM_01);
        if (two_tiles) _tile_zero(SUM_10);
        if (two_tiles && two_blocks) _tile_zero(SUM_11);
    } else {
        _tile_loadd(SUM_00, at[0][0], LINE);
        if (two_blocks) _tile_loadd(SUM_01, at[0][1], LINE);
        if (two_tiles) _tile_loadd(SUM_10, at[1][0], LINE);
        if (two_tiles && two_blocks) _tile_loadd(SUM_11, at[1][1], LINE);
    }
    const ptrdiff_t pixel = g->x_pixel * 4;
    const size_t each = g->depth * VM_BLOCK;
    const float *w_0 = g->w + from * each, *w_1 = w_0 + g->w_block;
    for (size_t b = from; b < to; b++) {
        _tile_loadd(W_0, w_0, LINE);
        _tile_loadd(X_0, x[0] + g->x_offset[b], pixel);
        _tile_dpbf16ps(SUM_00, X_0, W_0);
        ask_for(w_0 += each);
        if (two_blocks) {
            _tile_loadd(W_1, w_1, LINE);
            _tile_dpbf16ps(SUM_01, X_0, W_1);
            ask_for(w_1 += each);
        }
        if (two_tiles) {
            _tile_loadd(X_1, x[1] + g->x_offset[b], pixel);
            _tile_dpbf16ps(SUM_10, X_1, W_0);
            if (two_blocks) _tile_dpbf16ps(SUM_11, X_1, W_1);
        }
    }
    _tile_stored(SUM_00, at[0][0], LINE);
    if (two_blocks) _tile_stored(SUM_01, at[0][1], LINE);
    if (two_tiles) _tile_stored(SUM_10, at[1][0], LINE);
    if (two_tiles && two_blocks) _tile_stored(SUM_11, at[1][1], LINE);
}

static void store(const vm_gemm *g, size_t rows, sums *at) {
    for (size_t o = 0; o < g->blocks; o++) {
        const line bias = g->bias ? *(const line *)(g->bias + o * VM_BLOCK) : (line){0};
        for (size_t p = 0; p < g->pixels; p++) {
            const size_t tile = p / TILE, row = p - VM_MIN(tile * TILE, g->pixels - rows);
            line v = *(const line *)at[tile][o][row] + bias;
            if (g->add) v += *(const line *)(g->add + (ptrdiff_t)o * g->add_block + (ptrdiff_t)p * g->add_pixel);
            *(line *)(g->y + (ptrdiff_t)o * g->y_block + (ptrdiff_t)p * g->y_pixel) = v;
        }
    }
}

static void gemm(const vm_gemm *g) {
    sums at[PIXELS / TILE] __attribute__((aligned(LINE)));
    const size_t rows = VM_MIN(g->pixels, TILE), tiles = (g->pixels + TILE - 1) / TILE;
    const size_t each = g->blocks * g->depth * LINE, run = tiles > 2 ? VM_MAX(WEIGHTS / each, 1) : g->batches;
    configure(rows, g->depth);
    for (size_t from = 0, to; from < g->batches; from = to) {
        to = VM_MIN(from + run, g->batches);
        for (size_t t = 0; t < tiles; t += 2) {
            const float *x[2];
            for (size_t i = 0; i < 2; i++)
                x[i] = g->x + (ptrdiff_t)VM_MIN((t + i) * TILE, g->pixels - rows) * g->x_pixel;
            const bool two = t + 1 < tiles;
            if (two && g->blocks == 2)
                multiply(g, from, to, x, at + t, true, true);
            else if (two)
                multiply(g, from, to, x, at + t, true, false);
            else if (g->blocks == 2)
                multiply(g, from, to, x, at + t, false, true);
            else
                multiply(g, from, to, x, at + t, false, false);
        }
    }
    _tile_release();
    store(g, rows, at);
}

static double burn(size_t rounds, float *sink) {
    sums at;
    for (size_t i = 0; i < TILE * VM_BLOCK; i++) at[0][i / VM_BLOCK][i % VM_BLOCK] = 0.5f;
    written(at);
    configure(TILE, TILE);
    _tile_zero(SUM_00);
    _tile_zero(SUM_01);
    _tile_zero(SUM_10);
    _tile_zero(SUM_11);
    _tile_loadd(X_0, at[0], LINE);
    _tile_loadd(W_0, at[0], LINE);
    for (size_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(SUM_00, X_0, W_0);
        _tile_dpbf16ps(SUM_01, X_0, W_0);
        _tile_dpbf16ps(SUM_10, X_0, W_0);
        _tile_dpbf16ps(SUM_11, X_0, W_0);
    }
    _tile_stored(SUM_00, at[0], LINE);
    _tile_stored(SUM_11, at[1], LINE);
    _tile_release();
    *sink += at[0][0][0] + at[1][0][0];
    return 4.0 * TILE * TILE * 2 * TILE * 2 * (double)rounds;
}

const vm_products vm_pairs_amx = {PIXELS, 2 * VM_ROWS_FLAT, SIZE_MAX, gemm, VM_LOAD, burn};
