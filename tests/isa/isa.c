/* Every operation of one instruction set (kernels/cpu.h) beside float64, on random shapes: tails, aliasing, NaN and Inf, odd
 * addresses. Built and run by tests/test_isa.py, natively or for another machine under its emulator:
 *
 *     isa NAME [rounds]
 *
 * Arrays end at a page that may not be touched, or a few guard floats before it, and guard floats stand in front of them: a
 * write outside is seen, and a read behind. A new set is a line in `sets`.
 *
 * Tolerances: u = 2^-24 is half a step of float32; a sum of n terms is off by at most (n + 2) u sum|terms|, in whatever
 * order and with or without fused multiply-add. Where float64 has no finite result, neither may the operation. */
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../kernels/cpu.h"

typedef struct set {
    const char *name;
    const vm_cpu_ops *ops;
    const vm_products *pairs; /* with Winograd's transforms; or NULL */
} set;

static const set sets[] = {
    {"ref", &vm_cpu_ref, &vm_pairs_ref},
#ifdef VM_HAVE_X86
    {"sse", &vm_cpu_sse, NULL},          {"avx2", &vm_cpu_avx2, NULL},
    {"avx512", &vm_cpu_avx512, NULL},    {"avx512bf16", &vm_cpu_avx512, &vm_pairs_avx512bf16},
#endif
#ifdef VM_HAVE_NEON
    {"neon", &vm_cpu_neon, NULL},
#endif
};

enum { L = VM_BLOCK };
static const double U = 1. / (1 << 24), HALF = 1. / (1 << 8) /* half a step of bfloat16 */,
                    TINY = 1e-35 /* e^x is not computed below e^-87 */;

/* ---- numbers ---- */

static uint64_t state = 1;

static uint64_t bits(void) { /* xorshift64* (Vigna 2016) */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 2685821657736338717u >> 16;
}
static size_t below(size_t n) { return bits() % n; }
static size_t from_to(size_t low, size_t high) { return low + below(high - low + 1); }
static bool one_in(size_t n) { return !below(n); }
static float number(void) { return (float)below(1 << 24) / (1 << 22) - 2; } /* -2 to 2 */
static float nonfinite(void) { /* an infinity, or a quiet NaN with anything in it */
    const uint32_t word =
        0x7f800000 | (uint32_t)below(2) << 31 | (one_in(3) ? 0 : 0x400000 | (uint32_t)below(0x400000));
    float v;
    return *(float *)memcpy(&v, &word, sizeof v);
}

/* ---- arrays ---- */

enum { ARRAYS = 24, GUARDS = 16 };
static const float GUARD = 12345.678f;
static const char *operation = "";
static size_t round_number;
static struct {
    char *pages;
    size_t bytes, items, behind;
    float *data;
} arrays[ARRAYS];
static size_t used;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s, round %zu: ", operation, round_number);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static void outside(int signal) { fail("touched what lies behind an array (signal %d)", signal); }

/* n random numbers, one of them not finite if so wanted. */
static float *array(size_t n, bool broken) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), behind = one_in(2) ? 0 : below(GUARDS);
    const size_t bytes = ((GUARDS + n + behind) * sizeof(float) + page - 1) / page * page;
    char *pages = used == ARRAYS ? MAP_FAILED
                                 : mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + bytes, page, PROT_NONE)) fail("no memory for %zu floats", n);
    float *data = (float *)(pages + bytes) - behind - n;
    for (float *p = data - GUARDS; p < (float *)(pages + bytes); p++) *p = GUARD;
    for (size_t i = 0; i < n; i++) data[i] = number();
    if (broken && n) data[below(n)] = nonfinite();
    arrays[used].pages = pages, arrays[used].bytes = bytes + page;
    arrays[used].data = data, arrays[used].items = n, arrays[used].behind = behind;
    used++;
    return data;
}

static float *filled(size_t n, float v) {
    float *data = array(n, false);
    for (size_t i = 0; i < n; i++) data[i] = v;
    return data;
}

static float *copy(const float *from, size_t n) { return memcpy(array(n, false), from, n * sizeof *from); }

/* Gives all arrays back. */
static void release(void) {
    while (used--) {
        const float *data = arrays[used].data, *end = data + arrays[used].items;
        for (size_t i = 1; i <= GUARDS; i++)
            if (data[-(ptrdiff_t)i] != GUARD) fail("wrote %zu floats before an array of %zu", i, arrays[used].items);
        for (size_t i = 0; i < arrays[used].behind; i++)
            if (end[i] != GUARD) fail("wrote %zu floats behind an array of %zu", i + 1, arrays[used].items);
        munmap(arrays[used].pages, arrays[used].bytes);
    }
    used = 0;
}

/* ---- what is wanted ---- */

/* A sum in float64, and how large its terms are. */
typedef struct sum {
    double value, size;
} sum;

static void add(sum *s, double term) { s->value += term, s->size += fabs(term); }

static void check(float got, double want, double within, const char *what, size_t i) {
    const bool right = isfinite(want) ? fabs(got - want) <= within : !isfinite(got);
    if (!right) fail("%s[%zu] is %.9g, want %.9g within %.2g", what, i, got, want, within);
}

static void check_sum(float got, sum want, size_t terms, const char *what, size_t i) {
    check(got, want.value, (double)(terms + 2) * U * want.size, what, i);
}

/* ---- the operations ---- */

static void test_gemm(const vm_cpu_ops *ops) {
    vm_gemm g = {
        .rows = 1, .pixels = from_to(1, ops->floats.max_pixels), .blocks = from_to(1, 2), .batches = from_to(1, 12)};
    g.depth = from_to(1, L), g.x_pixel = L * (ptrdiff_t)from_to(1, 2);
    const size_t apart = below(200), x_last = (g.pixels - 1) * (size_t)g.x_pixel + g.depth - 1;
    const size_t w_items = g.batches * g.depth * L;
    ptrdiff_t offsets[12];
    for (size_t b = 0; b < g.batches; b++) offsets[b] = (ptrdiff_t)(below(g.batches) * apart);
    size_t furthest = 0;
    for (size_t b = 0; b < g.batches; b++) furthest = VM_MAX(furthest, (size_t)offsets[b]);
    g.x = array(furthest + x_last + 1, one_in(4)), g.x_offset = offsets;
    g.w_block = (ptrdiff_t)(w_items + below(3) * L);
    g.w = array((g.blocks - 1) * (size_t)g.w_block + w_items, one_in(8));
    g.y_pixel = L * (ptrdiff_t)from_to(1, 2), g.y_block = g.y_pixel * (ptrdiff_t)(g.pixels + below(3));
    const size_t y_items = (g.blocks - 1) * (size_t)g.y_block + (g.pixels - 1) * (size_t)g.y_pixel + L;
    g.y = array(y_items, false);
    g.bias = one_in(3) ? NULL : array(g.blocks * L, one_in(8));
    if (!one_in(3)) {
        g.add = one_in(2) ? g.y : array(y_items, one_in(8));
        g.add_pixel = g.y_pixel, g.add_block = g.y_block;
    }
    sum *want = calloc(y_items, sizeof *want);
    if (!want) fail("no memory");
    for (size_t i = 0; i < y_items; i++) want[i].value = g.y[i]; /* what lies between pixels stays */
    for (size_t o = 0; o < g.blocks; o++)
        for (size_t p = 0; p < g.pixels; p++)
            for (size_t l = 0; l < L; l++) {
                const size_t at = o * (size_t)g.y_block + p * (size_t)g.y_pixel + l;
                sum s = {0, 0};
                if (g.bias) add(&s, g.bias[o * L + l]);
                if (g.add) add(&s, g.add[at]);
                for (size_t b = 0; b < g.batches; b++)
                    for (size_t k = 0; k < g.depth; k++)
                        add(&s, (double)g.x[offsets[b] + (ptrdiff_t)p * g.x_pixel + (ptrdiff_t)k] *
                                    g.w[(ptrdiff_t)o * g.w_block + (ptrdiff_t)((b * g.depth + k) * L + l)]);
                want[at] = s;
            }
    ops->floats.gemm(&g);
    for (size_t i = 0; i < y_items; i++) check_sum(g.y[i], want[i], g.batches * g.depth + 2, "y", i);
    free(want);
}

static void test_load(const vm_cpu_ops *ops) {
    const size_t pixels = below(20), n = pixels * L;
    const vm_act act = (vm_act)below(4);
    const bool affine = one_in(2);
    const float *scale = affine ? array(L, one_in(8)) : NULL, *shift = affine ? array(L, one_in(8)) : NULL;
    const vm_dtype dtype = one_in(2) ? VM_F32 : one_in(2) ? VM_F16 : VM_BF16;
    float *x = array(n, one_in(4));
    if (one_in(2)) /* where e^x overflows and where it vanishes */
        for (size_t i = 0; i < n; i++) x[i] *= 100;
    float *halves = array(n / 2, false), *before = copy(x, n);
    for (size_t i = 0; dtype != VM_F32 && i < n; i++) {
        vm_set_element(dtype, halves, i, x[i]);
        before[i] = vm_element(dtype, halves, i);
    }
    float *y = one_in(2) ? x : array(n, false);
    const float *factor = affine && one_in(2) ? array(pixels, false) : NULL;
    ops->floats.load(y, NULL,
                     &(vm_source){.x = dtype == VM_F32 ? x : halves,
                                  .dtype = dtype,
                                  .pixels = pixels,
                                  .scale = scale,
                                  .shift = shift,
                                  .factor = factor,
                                  .act = act});
    for (size_t i = 0; i < n; i++) {
        sum s = {0, 0};
        const double times = (affine ? (double)scale[i % L] : 1) * (factor ? (double)factor[i / L] : 1);
        add(&s, before[i] * times);
        if (affine) add(&s, shift[i % L]);
        /* the affine is two roundings, a factor one, which SiLU's slope makes 1.1 times as large; then e^x, the sum and
         * the quotient */
        const double t = s.value, relu = t < 0 ? 0 : t;
        const double want[] = {t, t / (1 + exp(-t)), relu, 3 * tanh(t / 3)}; /* the bound is made of numbers up to 6 */
        const double sigmoid = dtype == VM_F32 ? 6 * U : dtype == VM_F16 ? 64 * U : 4096 * U; /* of halves on AVX-512 */
        const double made[] = {0, sigmoid * fabs(want[VM_ACT_SILU]) + TINY, 0, dtype == VM_F32 ? 36 * U : 400 * U};
        check(y[i], want[act], (affine ? 4.4 * U * s.size : 0) + made[act], "y", i);
    }
}

static void test_squares(const vm_cpu_ops *ops) {
    const size_t pixels = from_to(1, 40);
    float *x = array(pixels * L, one_in(4)), *sums = array(pixels * L, false);
    const float *before = copy(sums, pixels * L);
    ops->squares(sums, x, VM_F32, pixels);
    for (size_t i = 0; i < pixels * L; i++) {
        const double square = (double)x[i] * x[i];
        check(sums[i], before[i] + square, 2 * U * (fabs(before[i]) + square), "sum", i);
    }
}

/* Rows of halves: stored as plain C rounds, and loaded and unpacked exactly. */
static void test_halves(const vm_cpu_ops *ops) {
    const vm_dtype dtype = one_in(2) ? VM_F16 : VM_BF16;
    const size_t pixels = below(20), n = pixels * L;
    const float factor = one_in(2) ? 1 : 0.125f;
    float *x = array(n, one_in(4)), *y = array(n, false), *rows = array(n, false);
    if (one_in(2)) /* where float16 overflows, and its subnormals */
        for (size_t i = 0; i < n; i++) x[i] *= one_in(2) ? 65504 : 0x1p-24f;
    uint16_t *half = (uint16_t *)(void *)rows;
    const bool relu = one_in(2), finite = ops->store(half, dtype, x, pixels, factor, NULL, relu);
    bool all = true;
    for (size_t i = 0; i < n; i++) {
        const float stored = relu && x[i] < 0 ? 0 : x[i] * factor;
        const uint16_t want = dtype == VM_BF16 ? vm_to_bfloat16(stored) : vm_to_float16(stored);
        const float value = vm_element(dtype, &want, 0);
        all &= isfinite(value) != 0;
        if (half[i] != want && value == value)
            fail("half[%zu] of %.9g is %04x, want %04x", i, x[i] * factor, half[i], want);
    }
    if (finite != all) fail("store says finite %d, want %d", finite, all);
    ops->floats.load(y, NULL, &(vm_source){half, dtype, pixels, NULL, NULL, false});
    for (size_t i = 0; i < n; i++) check(y[i], vm_element(dtype, half, i), 0, "y", i);
    const size_t steps = pixels / 2; /* of pairs, a number of either in turns */
    float *unpacked = array(2 * steps * L, false);
    ops->unpack(unpacked, dtype, half, steps);
    for (size_t i = 0; i < 2 * steps * L; i++)
        check(unpacked[(i / L / 2 * 2 + i % 2) * L + i % (2 * L) / 2], vm_element(dtype, half, i), 0, "unpacked", i);
}

static void test_stats(const vm_cpu_ops *ops) {
    const size_t rows = from_to(1, 6), pixels = from_to(1, 40), row = pixels * L + below(4) * L;
    const float offset = one_in(2) ? 0 : number() * 1000;
    float *x = array((rows - 1) * row + pixels * L, one_in(4)), *mean = array(L, false), *m2 = array(L, false);
    for (size_t i = 0; i < (rows - 1) * row + pixels * L; i++) x[i] += offset;
    ops->stats(mean, m2, x, VM_F32, rows, row, pixels);
    const double n = (double)(rows * pixels);
    for (size_t l = 0; l < L; l++) {
        sum s = {0, 0};
        double squares = 0;
        for (size_t r = 0; r < rows; r++)
            for (size_t p = 0; p < pixels; p++) add(&s, x[r * row + p * L + l]);
        for (size_t r = 0; r < rows; r++)
            for (size_t p = 0; p < pixels; p++) squares += pow(x[r * row + p * L + l] - s.value / n, 2);
        /* deviations are from the rounded mean: n off^2 more; each difference, square and sum rounds */
        const double off = (n + 1) * U * s.size / n;
        check(mean[l], s.value / n, off, "mean", l);
        check(m2[l], squares, n * off * off + 2 * (n + 3) * U * squares + n * pow(U * offset, 2), "m2", l);
    }
}

static void test_softmax(const vm_cpu_ops *ops) {
    const size_t keys = from_to(1, 40);
    const float scale = 0.25f + fabsf(number());
    float *s = array(keys * L, one_in(4)), *top = array(L, false), *total = array(L, false), *keep = array(L, false);
    const bool first = one_in(2);
    for (size_t i = 0; i < keys * L; i++) s[i] *= 10;
    for (size_t l = 0; l < L; l++) top[l] = first ? -INFINITY : top[l] * 10, total[l] = first ? 0 : fabsf(total[l]);
    const float *scores = copy(s, keys * L), *old_top = copy(top, L), *old_total = copy(total, L);
    ops->softmax(s, keys, scale, top, total, keep);
    for (size_t l = 0; l < L; l++) {
        float most = old_top[l], largest = first ? 0 : fabsf(old_top[l]);
        for (size_t k = 0; k < keys; k++) {
            const float t = scores[k * L + l] * scale;
            most = t > most ? t : most;
            if (isfinite(t) && fabsf(t) > largest) largest = fabsf(t);
        }
        if (top[l] != most) fail("top[%zu] is %.9g, want %.9g", l, top[l], most);
        /* a score is rounded, and its difference, twice as large at most, from the top; e^x is good to 2 u of itself */
        const double within = (3 * (double)largest + 4) * U, factor = exp((double)old_top[l] - most);
        check(keep[l], factor, within * factor + TINY, "keep", l);
        double want_total = old_total[l] * factor;
        for (size_t k = 0; k < keys; k++) {
            const double want = exp((double)scores[k * L + l] * scale - most);
            check(s[k * L + l], want, within * want + TINY, "s", k * L + l);
            want_total += want;
        }
        check(total[l], want_total, (within + (double)(keys + 2) * U) * want_total + (double)keys * TINY, "sum", l);
    }
}

static void test_rescale(const vm_cpu_ops *ops) {
    const size_t rows = below(40);
    float *x = array(rows * L, one_in(4));
    const float *keep = array(L, one_in(8)), *before = copy(x, rows * L);
    ops->rescale(x, rows, keep);
    for (size_t i = 0; i < rows * L; i++) {
        const double want = (double)before[i] * keep[i % L];
        check(x[i], want, U * fabs(want), "x", i);
    }
}

static void test_transpose(const vm_cpu_ops *ops) {
    const float *x = array(L * L, one_in(4));
    float *y = array(L * L, true);
    ops->transpose(y, x);
    for (size_t i = 0; i < L * L; i++) check(y[i], x[i % L * L + i / L], 0, "y", i);
}

/* Winograd's matrices along a line of a tile, B^T, G and A^T: of F(2, 3), of F(4, 3) at the points 0, 2/3, -2/3, 3/2, -3/2
 * and infinity, and of two pixels after nearest 2x and with stride 2 (kernels/winograd.c). */
typedef struct matrices {
    size_t numbers, filters, pixels, step; /* step: input pixels from tile to tile */
    double in[6][6], weights[6][3], out[4][6];
} matrices;

static const matrices TWO = {4,
                             4,
                             2,
                             2,
                             {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}},
                             {{1, 0, 0}, {.5, .5, .5}, {.5, -.5, .5}, {0, 0, 1}},
                             {{1, 1, 1, 0}, {0, 1, -1, -1}}};
static const matrices FOUR = {6,
                              6,
                              4,
                              4,
                              {{1, 0, -97. / 36, 0, 1, 0},
                               {0, -1.5, -2.25, 2 / 3., 1, 0},
                               {0, 1.5, -2.25, -2 / 3., 1, 0},
                               {0, -2 / 3., -4 / 9., 1.5, 1, 0},
                               {0, 2 / 3., -4 / 9., -1.5, 1, 0},
                               {0, 1, 0, -97. / 36, 0, 1}},
                              {{1, 0, 0},
                               {-81 / 130., -54 / 130., -36 / 130.},
                               {-81 / 130., 54 / 130., -36 / 130.},
                               {16 / 130., 24 / 130., 36 / 130.},
                               {16 / 130., -24 / 130., 36 / 130.},
                               {0, 0, 1}},
                              {{1, 1, 1, 1, 1, 0},
                               {0, 2 / 3., -2 / 3., 1.5, -1.5, 0},
                               {0, 4 / 9., 4 / 9., 2.25, 2.25, 0},
                               {0, 8 / 27., -8 / 27., 3.375, -3.375, 1}}};
static const matrices DOUBLED = {
    3, 3, 2, 1, {{1, -1, 0}, {0, 1, 0}, {0, -1, 1}}, {{1, 0, 0}, {1, 1, 1}, {0, 0, 1}}, {{1, 1, 0}, {0, 1, 1}}};

static const matrices HALVED = {5,
                                4,
                                2,
                                4,
                                {{1, 0, -1, 0, 0}, {0, 0, 1, 0, 0}, {0, 0, -1, 0, 1}, {0, 1, 0, 0, 0}, {0, 0, 0, 1, 0}},
                                {{1, 0, 0}, {1, 0, 1}, {0, 0, 1}, {0, 1, 0}},
                                {{1, 1, 0, 1, 0}, {0, 1, 1, 0, 1}}};

/* What the matrices are for, in exact numbers: a line of a tile's input and three taps become its pixels. */
static void test_matrices(const matrices *m) {
    const size_t up = m == &DOUBLED, stride = m == &HALVED ? 2 : 1;
    for (size_t d = 0; d < m->numbers; d++)
        for (size_t g = 0; g < 3; g++)
            for (size_t p = 0; p < m->pixels; p++) {
                double y = 0;
                for (size_t n = 0; n < m->numbers; n++)
                    y += m->out[p][n] * m->weights[VM_MIN(n, m->filters - 1)][g] * m->in[n][d];
                const size_t reads =
                    up ? (p + g + 1) / 2 : stride * p + g; /* the input that tap g of pixel p falls on */
                check((float)y, reads == d, 1e-6f, "pixel", p);
            }
}

/* sum over i < rows, j < columns of a[i] * b[j] * x[i*row + j*column]; where a factor is 0, x is not read. */
static sum between(const double *a, const double *b, size_t rows, size_t columns, const float *x, size_t row,
                   size_t column) {
    sum s = {0, 0};
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            if (a[i] != 0 && b[j] != 0) add(&s, a[i] * b[j] * x[i * row + j * column]);
    return s;
}

/* Half h of pair i, as a float. */
static float half_of(const float *pairs, size_t i, size_t h) { return vm_element(VM_BF16, pairs, 2 * i + h); }

/* Checks a rounded sum. */
static void check_half(float got, sum want, size_t terms, const char *what, size_t i) {
    const double size = HALF * fabs(want.value) + (double)(terms + 2) * U * want.size;
    check(got, want.value, size + TINY, what, i);
}

static void test_transforms(const vm_transforms *of, const matrices *down, const matrices *across, bool pairs) {
    const sum untouched = {777, 0};
    const size_t rows = down->numbers, columns = across->numbers, numbers = rows * columns;
    const size_t tiles = from_to(1, 9), v_step = (tiles + below(3)) * L, v_items = (numbers - 1) * v_step + tiles * L;
    const size_t x_columns = across->step * (tiles - 1) + columns, x_row = (x_columns + below(3)) * L;
    const float *x = array((rows - 1) * x_row + x_columns * L, one_in(4));
    const size_t second = pairs ? below(2) : 0; /* of the two blocks of a pair */
    float *v = filled(v_items, 777);
    test_matrices(down), test_matrices(across);
    if (of->rows != rows || of->columns != columns || of->height != down->pixels || of->width != across->pixels ||
        of->u_rows != down->filters || of->u_columns != across->filters)
        fail("a tile of other sizes");
    of->in(v + second * L / 2, v_step, x, x_row, tiles);
    for (size_t i = 0; i < v_items; i++) {
        const size_t f = i / v_step, t = i % v_step / L, l = i % L;
        const sum want = t < tiles ? between(down->in[f / columns], across->in[f % columns], rows, columns,
                                             x + t * across->step * L + l, x_row, L)
                                   : untouched;
        const size_t tile = f * v_step / L + t;
        if (!pairs || t >= tiles)
            check_sum(v[i], want, 24, "v", i);
        else
            check_half(vm_element(VM_BF16, v, 2 * L * tile + second * L + l), want, 24, "v", i);
        if (pairs && t < tiles && l < L / 2) /* the neighbour's */
            check(v[tile * L + (1 - second) * L / 2 + l], 777, 0, "v", i);
    }

    const size_t n = L * L * from_to(1, 3), u_items = pairs ? n / 2 : n, u_step = u_items + below(3) * L;
    const float *w = array(9 * n, one_in(4));
    const size_t filters = down->filters * across->filters;
    float *u = filled((filters - 1) * u_step + u_items, 777);
    of->weights(u, u_step, w, n);
    for (size_t f = 0; f < filters; f++)
        for (size_t i = 0; i < u_step && (i < u_items || f + 1 < filters); i++) {
            const size_t at = f * u_step + i, first = pairs ? i / L * 2 * L + i % L : i;
            if (i >= u_items) {
                check_sum(u[at], untouched, 0, "u", at);
                continue;
            }
            for (size_t h = 0; h < (pairs ? 2 : 1); h++) {
                const sum want = between(down->weights[f / across->filters], across->weights[f % across->filters], 3, 3,
                                         w + first + h * L, 3 * n, n);
                if (pairs)
                    check_half(half_of(u, at, h), want, 12, "u", at);
                else
                    check_sum(u[at], want, 12, "u", at);
            }
        }

    const size_t height = from_to(1, down->pixels), width = across->pixels * tiles - below(across->pixels);
    const size_t y_row = (width + below(3)) * L, y_items = (height - 1) * y_row + width * L;
    const float *products = array(v_items, one_in(4)), *bias = array(L, one_in(8));
    float *y = array(y_items, one_in(8));
    const float *to_add = one_in(3) ? NULL : one_in(2) ? y : array(y_items, one_in(8)), *before = copy(y, y_items);
    const float *added = to_add == y ? before : to_add;
    of->out(y, y_row, products, v_step, height, width, bias, to_add, y_row);
    for (size_t i = 0; i < y_items; i++) {
        const size_t r = i / y_row, c = i % y_row / L, l = i % L;
        if (c >= width) {
            if (memcmp(&y[i], &before[i], sizeof y[i])) fail("y[%zu] is between two rows, and was written", i);
            continue;
        }
        sum want = between(down->out[r], across->out[c % across->pixels], rows, columns,
                           products + c / across->pixels * L + l, columns * v_step, v_step);
        add(&want, bias[l]);
        if (added) add(&want, added[i]);
        check_sum(y[i], want, 26, "y", i);
    }
}

static void test_winograd(const vm_cpu_ops *ops) { test_transforms(ops->floats.winograd, &TWO, &FOUR, false); }
static void test_upsampled(const vm_cpu_ops *ops) { test_transforms(ops->floats.upsampled, &DOUBLED, &DOUBLED, false); }
static void test_strided(const vm_cpu_ops *ops) { test_transforms(ops->floats.strided, &HALVED, &HALVED, false); }

/* To pairs: v and u are rounded. */
static void test_pairs(const vm_products *pairs) {
    test_transforms(pairs->winograd, &TWO, &TWO, true);
    test_transforms(pairs->upsampled, &DOUBLED, &DOUBLED, true);
}

static const struct {
    const char *name;
    void (*test)(const vm_cpu_ops *ops);
} operations[] = {{"gemm", test_gemm},           {"load", test_load},           {"halves", test_halves},
                  {"squares", test_squares},     {"stats", test_stats},         {"softmax", test_softmax},
                  {"rescale", test_rescale},     {"transpose", test_transpose}, {"winograd", test_winograd},
                  {"upsampled", test_upsampled}, {"strided", test_strided},     {"pairs", NULL}};

int main(int argc, char **argv) {
    const size_t rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 300;
    signal(SIGSEGV, outside);
    signal(SIGBUS, outside);
    for (size_t i = 0; argc > 1 && i < sizeof sets / sizeof *sets; i++) {
        if (strcmp(sets[i].name, argv[1])) continue;
        for (size_t o = 0; o < sizeof operations / sizeof *operations; o++) {
            operation = operations[o].name;
            for (round_number = 0; round_number < rounds; round_number++) {
                state = round_number + 1;
                for (size_t k = 0; k < 8; k++) bits();
                if (operations[o].test)
                    operations[o].test(sets[i].ops);
                else if (sets[i].pairs)
                    test_pairs(sets[i].pairs);
                release();
            }
        }
        puts("ok");
        return 0;
    }
    fprintf(stderr, "isa: expected one of");
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) fprintf(stderr, " %s", sets[i].name);
    fprintf(stderr, ", got %s\n", argc > 1 ? argv[1] : "nothing");
    return 2;
}
