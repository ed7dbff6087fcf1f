/* AMX: products of tiles of 16 pixels by 16 outputs, four tiles of pixels at a time for each tile of weights. A tile of
 * x is 16 pixels with up to 16 pairs each, unchanged; a tile of w up to 16 rows of weights. tdpbf16ps adds up a batch's
 * products of the lower halves and those of the upper ones, each from zero on, and then both to the sum: c + (lower +
 * upper). It rounds to nearest in any mode of the thread, and flushes subnormal numbers to zero. A sum begins with bias
 * or add, and is stored once, after all batches. A product takes 16 cycles, a load from L1 8 of them, and a store 16
 * that overlap with nothing (benchmarks/amx_cycles.c).
 *
 * The four tiles of pixels lie one below the other if there are several rows: their taps share lines of x, so each tile
 * brings few new ones. The last pixels of a row have tiles of their own size.
 *
 * Another library may use the tiles between two calls, so each call configures and releases them. */
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
    LINE = 64, /* bytes */
    SUMS = 4   /* tiles that share a tile of weights */
};

/* Registers, in the assembler's numbers. */
#define SUM_0 0
#define SUM_1 1
#define SUM_2 2
#define SUM_3 3
#define X 4
#define W 5
#define W_REST 6

/* The operand of ldtilecfg. */
typedef struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} config;

/* GCC's intrinsics do not declare what they read; without this, it could be written later. */
static void written(const void *all) { __asm__ volatile("" : : "r"(all) : "memory"); }

/* Configures tiles of `pixels` pixels of `depth` pairs each. */
static void configure(size_t pixels, size_t depth) {
    const uint8_t p = (uint8_t)pixels, d = (uint8_t)depth;
    const uint16_t pairs = (uint16_t)(4 * depth);
    const config c = {
        .palette = 1, .bytes = {LINE, LINE, LINE, LINE, pairs, LINE, LINE}, .rows = {p, p, p, p, p, d, d}};
    written(&c);
    _tile_loadconfig(&c);
}

/* After about a thousand cycles without vector operations on floats the processor powers their units down, and the next
 * store of a vector or tile waits as long again. Neither tiles nor integers keep them awake. */
static inline __attribute__((always_inline)) void stay_awake(void) {
#ifdef __AVX512F__
    __asm__ volatile("vaddps %0, %0, %%zmm31" : : "v"(_mm512_setzero_ps()) : "xmm31");
#endif
}

/* Where a tile of sums begins: its pixels, bias or add, and its outputs. */
typedef struct place {
    const float *x, *add;
    float *y;
} place;

static place place_of(const vm_gemm *g, size_t block, size_t row, size_t pixel) {
    static const float nothing[VM_BLOCK];
    const ptrdiff_t o = (ptrdiff_t)block, r = (ptrdiff_t)row, p = (ptrdiff_t)pixel;
    return (place){.x = g->x + r * g->x_row + p * g->x_pixel,
                   .add = g->add    ? g->add + o * g->add_block + r * g->add_row + p * g->add_pixel
                          : g->bias ? g->bias + o * VM_BLOCK
                                    : nothing,
                   .y = g->y + o * g->y_block + r * g->y_row + p * g->y_pixel};
}

/* Adds a batch to the first n sums. */
#define ADD_TO(SUM, I)                             \
    if (n > (I)) {                                 \
        _tile_loadd(X, at[I].x + offset, x);       \
        _tile_dpbf16ps(SUM, X, W);                 \
        if (split) _tile_dpbf16ps(SUM, X, W_REST); \
    }
#define ADD_RESTS_TO(SUM, I)                             \
    if (n > (I)) {                                       \
        _tile_loadd(X, at[I].x + offset + g->x_rest, x); \
        _tile_dpbf16ps(SUM, X, W);                       \
    }

/* n <= SUMS tiles. */
static inline __attribute__((always_inline)) void multiply(const vm_gemm *g, const float *w, const place *at, size_t n,
                                                           bool split) {
    const ptrdiff_t x = g->x_pixel * 4, y = g->y_pixel * 4;
    const ptrdiff_t add = g->add ? g->add_pixel * 4 : 0; /* a bias is the same line for all pixels */
    const size_t rows = g->depth * VM_BLOCK;
    _tile_loadd(SUM_0, at[0].add, add);
    if (n > 1) _tile_loadd(SUM_1, at[1].add, add);
    if (n > 2) _tile_loadd(SUM_2, at[2].add, add);
    if (n > 3) _tile_loadd(SUM_3, at[3].add, add);
    for (size_t b = 0; b < g->batches; b++, w += split ? 2 * rows : rows) {
        const ptrdiff_t offset = g->x_offset[b];
        stay_awake();
        _tile_loadd(W, w, LINE);
        if (split) _tile_loadd(W_REST, w + rows, LINE);
        ADD_TO(SUM_0, 0)
        ADD_TO(SUM_1, 1)
        ADD_TO(SUM_2, 2)
        ADD_TO(SUM_3, 3)
        if (!split) continue;
        ADD_RESTS_TO(SUM_0, 0)
        ADD_RESTS_TO(SUM_1, 1)
        ADD_RESTS_TO(SUM_2, 2)
        ADD_RESTS_TO(SUM_3, 3)
    }
    _tile_stored(SUM_0, at[0].y, y);
    if (n > 1) _tile_stored(SUM_1, at[1].y, y);
    if (n > 2) _tile_stored(SUM_2, at[2].y, y);
    if (n > 3) _tile_stored(SUM_3, at[3].y, y);
}

static inline __attribute__((always_inline)) void multiply_some(const vm_gemm *g, const float *w, const place *at,
                                                                size_t n, bool split) {
    switch (n) {
    case 1: multiply(g, w, at, 1, split); break;
    case 2: multiply(g, w, at, 2, split); break;
    case 3: multiply(g, w, at, 3, split); break;
    default: multiply(g, w, at, 4, split);
    }
}

/* Columns of tiles, from a pixel on; `each` pixels per tile. */
static void multiply_columns(const vm_gemm *g, size_t first, size_t columns, size_t each) {
    if (!columns) return;
    configure(each, g->depth);
    for (size_t o = 0; o < g->blocks; o++) {
        const float *w = g->w + (ptrdiff_t)o * g->w_block;
        place at[SUMS];
        for (size_t t = 0, n, tiles = columns * g->rows; t < tiles; t += n) { /* down the rows, then the next column */
            n = VM_MIN(tiles - t, SUMS);
            for (size_t i = 0; i < n; i++) at[i] = place_of(g, o, (t + i) % g->rows, first + (t + i) / g->rows * TILE);
            if (g->x_rest)
                multiply_some(g, w, at, n, true);
            else
                multiply_some(g, w, at, n, false);
        }
    }
    _tile_release();
}

static void gemm(const vm_gemm *g) {
    const size_t full = g->pixels / TILE, last = g->pixels % TILE;
    multiply_columns(g, 0, full, TILE);
    multiply_columns(g, full * TILE, last > 0, last);
}

static double burn(size_t rounds, float *sink) {
    float at[2][TILE * VM_BLOCK] __attribute__((aligned(LINE)));
    for (size_t i = 0; i < TILE * VM_BLOCK; i++) at[0][i] = 0.5f;
    written(at);
    configure(TILE, TILE);
    _tile_zero(SUM_0);
    _tile_zero(SUM_1);
    _tile_zero(SUM_2);
    _tile_zero(SUM_3);
    _tile_loadd(X, at[0], LINE);
    _tile_loadd(W, at[0], LINE);
    for (size_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(SUM_0, X, W);
        _tile_dpbf16ps(SUM_1, X, W);
        _tile_dpbf16ps(SUM_2, X, W);
        _tile_dpbf16ps(SUM_3, X, W);
    }
    _tile_stored(SUM_0, at[0], LINE);
    _tile_stored(SUM_3, at[1], LINE);
    _tile_release();
    *sink += at[0][0] + at[1][0];
    return 4.0 * TILE * TILE * 2 * TILE * 2 * (double)rounds;
}

const vm_products vm_pairs_amx = {VM_MANY, VM_MANY, 2 * VM_ROWS_FLAT, SIZE_MAX, gemm, VM_LOAD, burn, NULL, NULL, NULL};
