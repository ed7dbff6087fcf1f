/* Cycles of AMX's instructions that run together on one thread; benchmarks/results/amx_cycles.csv has its results.
 *
 *     gcc -O2 -mavx512f -mamx-tile -mamx-bf16 -o amx_cycles benchmarks/amx_cycles.c && ./amx_cycles
 *
 * Cycles are counted against a chain of additions, one a cycle, that runs after each measurement, since the clock is slower
 * while tiles are multiplied. A batch is four products: two tiles of pixels by two of weights. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { TILE = 256, FLOATS = 4 << 20, ROUNDS = 200, BATCHES = 720 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double hertz(void) {
    enum { ADDITIONS = 20000 };
    uint64_t sum = 0;
    const double start = now();
    for (int i = 0; i < ADDITIONS; i++) __asm__ volatile("add $1, %0" : "+r"(sum));
    return ADDITIONS / (now() - start);
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Medians: cycles of so many batches at a time, and the clock meanwhile. */
#define MEASURE(WHAT, TOGETHER, ...)                                                                         \
    do {                                                                                                     \
        double cycles[ROUNDS], rate[ROUNDS];                                                                 \
        for (int i = 0; i < ROUNDS; i++) {                                                                   \
            const double start = now();                                                                      \
            for (int r = 0; r < BATCHES / (TOGETHER); r++) __VA_ARGS__                                       \
            const double seconds = now() - start;                                                            \
            rate[i] = hertz();                                                                               \
            cycles[i] = seconds * rate[i] / (BATCHES / (TOGETHER));                                          \
        }                                                                                                    \
        qsort(cycles, ROUNDS, sizeof *cycles, by_size), qsort(rate, ROUNDS, sizeof *rate, by_size);          \
        printf("%-58s %5.0f cycles, %5d of products; %.2f GHz\n", WHAT, cycles[ROUNDS / 2], 64 * (TOGETHER), \
               rate[ROUNDS / 2] / 1e9);                                                                      \
    } while (0)

#define BATCH(X, W)                       \
    do {                                  \
        const float *x_ = (X), *w_ = (W); \
        _tile_loadd(6, w_, 64);           \
        _tile_loadd(4, x_, 64);           \
        _tile_dpbf16ps(0, 4, 6);          \
        _tile_loadd(7, w_ + TILE, 64);    \
        _tile_dpbf16ps(1, 4, 7);          \
        _tile_loadd(5, x_ + TILE, 64);    \
        _tile_dpbf16ps(2, 5, 6);          \
        _tile_dpbf16ps(3, 5, 7);          \
    } while (0)
#define LOAD_SUMS(AT)                    \
    _tile_loadd(0, AT, 64);              \
    _tile_loadd(1, (AT) + TILE, 64);     \
    _tile_loadd(2, (AT) + 2 * TILE, 64); \
    _tile_loadd(3, (AT) + 3 * TILE, 64)
#define STORE_SUMS(AT)                    \
    _tile_stored(0, AT, 64);              \
    _tile_stored(1, (AT) + TILE, 64);     \
    _tile_stored(2, (AT) + 2 * TILE, 64); \
    _tile_stored(3, (AT) + 3 * TILE, 64)

int main(void) {
    enum { TILE_DATA = 18, ARCH_REQ_XCOMP_PERM = 0x1023 };
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    float *data = aligned_alloc(4096, FLOATS * sizeof *data), *sums = aligned_alloc(4096, 4 * TILE * sizeof *sums);
    if (!data || !sums || syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA))
        return puts("no memory or no AMX"), 1;
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    memset(sums, 0, 4 * TILE * sizeof *sums);
    for (int random = 0; random < 2; random++) {
        uint16_t *half = (uint16_t *)(void *)data;
        for (int i = 0; i < 2 * FLOATS; i++) half[i] = random ? (uint16_t)((rand() & 0x81ff) | 0x3e00) : 0;
        printf(random ? "random numbers\n" : "zeros\n");
        LOAD_SUMS(sums);
        BATCH(data, data + 8 * TILE);
        MEASURE("products on registers", 1, {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        });
        MEASURE("that add to the same sum", 1, {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(0, 4, 7);
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(0, 5, 7);
        });
        MEASURE("with four loads from L1", 1, { BATCH(data + r % 4 * 2 * TILE, data + 8 * TILE + r % 4 * 2 * TILE); });
        MEASURE("with weights from L2", 1, { BATCH(data + r % 4 * 2 * TILE, data + (8 + r % 128 * 2) * TILE); });
        MEASURE("with all from L2", 1, { BATCH(data + r % 128 * 4 * TILE, data + (r % 128 * 4 + 2) * TILE); });
        MEASURE("with weights from beyond L2", 1,
                { BATCH(data + r % 4 * 2 * TILE, data + (8 + (r + i * BATCHES) % 7200 * 2) * TILE); });
        MEASURE("9 batches, four sums stored", 9, {
            for (int b = 0; b < 9; b++) BATCH(data + b * 16, data + (8 + b * 2) * TILE);
            STORE_SUMS(sums);
        });
        MEASURE("9 batches, four sums loaded and stored", 9, {
            LOAD_SUMS(sums);
            for (int b = 0; b < 9; b++) BATCH(data + b * 16, data + (8 + b * 2) * TILE);
            STORE_SUMS(sums);
        });
        MEASURE("36 batches, four sums stored", 36, {
            for (int b = 0; b < 36; b++) BATCH(data + b % 9 * 16, data + (8 + b % 9 * 2) * TILE);
            STORE_SUMS(sums);
        });
        MEASURE("the same, and an addition of floats in each batch", 36, {
            for (int b = 0; b < 36; b++) {
                __asm__ volatile("vaddps %0, %0, %%zmm31" : : "v"(_mm512_setzero_ps()) : "xmm31");
                BATCH(data + b % 9 * 16, data + (8 + b % 9 * 2) * TILE);
            }
            STORE_SUMS(sums);
        });
    }
    _tile_release();
    free(data), free(sums);
    return 0;
}
