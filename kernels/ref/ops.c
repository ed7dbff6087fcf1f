/* The plain C path: it defines every operation, and runs on processors without a better one. Built with the compiler's
 * baseline flags, whose vectoriser handles the loops over 16 lanes. */
#include <math.h>
#include <string.h>

#include "../cpu.h"

enum { L = VM_BLOCK, PIXELS = 4 };

static void finish(const vm_gemm *g, size_t o, size_t p, const float sum[L]) {
    float *y = g->y + (ptrdiff_t)o * g->y_block + (ptrdiff_t)p * g->y_pixel;
    const float *add = g->add ? g->add + (ptrdiff_t)o * g->add_block + (ptrdiff_t)p * g->add_pixel : NULL;
    for (size_t l = 0; l < L; l++) {
        float v = sum[l];
        if (g->bias) v += g->bias[o * L + l];
        if (add) v += add[l];
        y[l] = v;
    }
}

static void gemm_block(const vm_gemm *g, size_t o) {
    float sum[PIXELS][L] = {{0}};
    const float *w = g->w + (ptrdiff_t)o * g->w_block;
    for (size_t b = 0; b < g->batches; b++) {
        const float *x = g->x + g->x_offset[b];
        for (size_t k = 0; k < g->depth; k++, w += L)
            for (size_t p = 0; p < PIXELS; p++) { /* a short tile computes its last pixel again */
                float v = x[(ptrdiff_t)VM_MIN(p, g->pixels - 1) * g->x_pixel + (ptrdiff_t)k];
                for (size_t l = 0; l < L; l++) sum[p][l] += v * w[l];
            }
    }
    for (size_t p = 0; p < g->pixels; p++) finish(g, o, p, sum[p]);
}

static void gemm(const vm_gemm *g) {
    for (size_t o = 0; o < g->blocks; o++) gemm_block(g, o);
}

/* A product of bfloat16 is exact in float32: it sums as fused multiply-adds do, upper halves first, like vdpbf16ps. */
static float add_products(float sum, uint32_t x, uint32_t w) {
    sum += vm_float_of_bits(x & 0xffff0000) * vm_float_of_bits(w & 0xffff0000);
    return sum + vm_float_of_bits(x << 16) * vm_float_of_bits(w << 16);
}

static void add_batch(float sum[L], const float *x, const float *w, size_t depth) {
    for (size_t k = 0; k < depth; k++, w += L)
        for (size_t l = 0; l < L; l++) sum[l] = add_products(sum[l], vm_bits_of_float(x[k]), vm_bits_of_float(w[l]));
}

static void gemm_pairs(const vm_gemm *g) {
    for (size_t o = 0; o < g->blocks; o++)
        for (size_t p = 0; p < g->pixels; p++) {
            float sum[L] = {0};
            const float *w = g->w + (ptrdiff_t)o * g->w_block;
            const float *x = g->x + (ptrdiff_t)p * g->x_pixel;
            const size_t rows = g->depth * L;
            for (size_t b = 0; b < g->batches; b++, w += g->x_rest ? 2 * rows : rows) {
                const float *of = x + g->x_offset[b];
                add_batch(sum, of, w, g->depth);
                if (!g->x_rest) continue;
                add_batch(sum, of, w + rows, g->depth);
                add_batch(sum, of + g->x_rest, w, g->depth);
            }
            finish(g, o, p, sum);
        }
}

static float element_at(const vm_source *from, size_t i) {
    const float x = vm_element(from->dtype, from->x, i) * (from->factor ? from->factor[i / L] : 1);
    const float v = from->scale ? x * from->scale[i % L] + from->shift[i % L] : x;
    switch (from->act) {
    case VM_ACT_SILU: return v / (1 + expf(-v));
    case VM_ACT_RELU: return v < 0 ? 0 : v;
    case VM_ACT_BOUND: return 3 * tanhf(v / 3);
    default: return v;
    }
}

static void load(void *y, void *rest, const vm_source *from) {
    (void)rest;
    for (size_t i = 0; i < from->pixels * L; i++) vm_set_element(VM_F32, y, i, element_at(from, i));
}

void vm_load_pairs_ref(void *y, void *rest, const vm_source *from) {
    for (size_t i = 0; i < from->pixels * L; i++) {
        const float v = element_at(from, i);
        const size_t at = i / L * 2 * L + i % L;
        vm_set_element(VM_BF16, y, at, v);
        if (rest) vm_set_element(VM_BF16, rest, at, v - vm_element(VM_BF16, y, at));
    }
}

static bool store_rows(void *y, vm_dtype dtype, const float *x, size_t pixels, float factor, const void *add,
                       bool relu) {
    bool finite = true;
    for (size_t i = 0; i < pixels * L; i++) {
        float v = x[i] * factor;
        if (add) v += vm_element(dtype, add, i);
        if (relu && v < 0) v = 0;
        vm_set_element(dtype, y, i, v);
        finite &= isfinite(vm_element(dtype, y, i)) != 0;
    }
    return finite;
}

static void squares(float *sum, const void *x, vm_dtype dtype, size_t pixels) {
    for (size_t i = 0; i < pixels * L; i++) sum[i] += vm_element(dtype, x, i) * vm_element(dtype, x, i);
}

static void stats(float *mean, float *m2, const void *x, vm_dtype dtype, size_t rows, size_t x_row, size_t pixels) {
    float n = (float)(rows * pixels);
    for (size_t l = 0; l < L; l++) mean[l] = m2[l] = 0;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < pixels * L; i++) mean[i % L] += vm_element(dtype, x, r * x_row + i);
    for (size_t l = 0; l < L; l++) mean[l] /= n;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < pixels * L; i++) {
            float d = vm_element(dtype, x, r * x_row + i) - mean[i % L];
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

static void transpose(float *y, const float *x) {
    for (size_t r = 0; r < L; r++)
        for (size_t l = 0; l < L; l++) y[l * L + r] = x[r * L + l];
}

static void unpack(float *y, vm_dtype dtype, const uint16_t *x, size_t steps) {
    for (size_t i = 0; i < 2 * steps * L; i++) y[(i / 2 / L * 2 + i % 2) * L + i / 2 % L] = vm_element(dtype, x, i);
}

/* ---- Winograd's transforms: Y = A^T [(G g G^T) * (B^T d B)] A, with other matrices down than across ---- */

typedef struct line {
    size_t numbers, filters, pixels, step;
    float in[6][6], weights[6][3], out[4][6]; /* B^T, G, A^T */
} line;

static const line two = {4,
                         4,
                         2,
                         2,
                         {{1, 0, -1, 0}, {0, 1, 1, 0}, {0, -1, 1, 0}, {0, 1, 0, -1}},
                         {{1, 0, 0}, {.5, .5, .5}, {.5, -.5, .5}, {0, 0, 1}},
                         {{1, 1, 1, 0}, {0, 1, -1, -1}}};

/* The points are 0, p, -p, q, -q and infinity, with p q = 1. */
#define P (2 / 3.f)
#define Q (3 / 2.f)
#define U (.5f / (P * P * (P * P - Q * Q)))
#define V (.5f / (Q * Q * (Q * Q - P * P)))
static const line four = {6,
                          6,
                          4,
                          4,
                          {{1, 0, -P * P - Q * Q, 0, 1, 0},
                           {0, -Q, -Q * Q, P, 1, 0},
                           {0, Q, -Q * Q, -P, 1, 0},
                           {0, -P, -P * P, Q, 1, 0},
                           {0, P, -P * P, -Q, 1, 0},
                           {0, 1, 0, -P * P - Q * Q, 0, 1}},
                          {{1, 0, 0},
                           {U, U * P, U * P * P},
                           {U, -U * P, U * P * P},
                           {V, V * Q, V * Q * Q},
                           {V, -V * Q, V * Q * Q},
                           {0, 0, 1}},
                          {{1, 1, 1, 1, 1, 0},
                           {0, P, -P, Q, -Q, 0},
                           {0, P * P, P * P, Q * Q, Q * Q, 0},
                           {0, P * P * P, -P * P * P, Q * Q * Q, -Q * Q * Q, 1}}};

/* After nearest 2x, from a pixel and its neighbours. */
static const line doubled = {
    3, 3, 2, 1, {{1, -1, 0}, {0, 1, 0}, {0, -1, 1}}, {{1, 0, 0}, {1, 1, 1}, {0, 0, 1}}, {{1, 1, 0}, {0, 1, 1}}};

/* With stride 2: three numbers of the even pixels, and the odd ones, which share a filter. */
static const line halved = {5,
                            4,
                            2,
                            4,
                            {{1, 0, -1, 0, 0}, {0, 0, 1, 0, 0}, {0, 0, -1, 0, 1}, {0, 1, 0, 0, 0}, {0, 0, 0, 1, 0}},
                            {{1, 0, 0}, {1, 0, 1}, {0, 0, 1}, {0, 1, 0}},
                            {{1, 1, 0, 1, 0}, {0, 1, 1, 0, 1}}};

/* y[row][column] = sum of down[row][i] * across[column][j] * x[i*x_row + j*x_column], of 16 numbers each. */
static void between(float y[L], const float *down, const float *across, size_t rows, size_t columns, const float *x,
                    size_t x_row, size_t x_column) {
    memset(y, 0, L * sizeof *y);
    for (size_t i = 0; i < rows; i++) {
        float sum[L] = {0};
        for (size_t j = 0; j < columns; j++)
            for (size_t l = 0; across[j] != 0 && l < L; l++) sum[l] += across[j] * x[i * x_row + j * x_column + l];
        for (size_t l = 0; down[i] != 0 && l < L; l++) y[l] += down[i] * sum[l];
    }
}

/* Stores 16 numbers of dtype to y, `each` apart. */
static void put(vm_dtype dtype, void *y, size_t each, const float numbers[L]) {
    for (size_t l = 0; l < L; l++) vm_set_element(dtype, y, each * l, numbers[l]);
}

static void tiles_in(vm_dtype dtype, const line *down, const line *across, float *v, size_t v_step, const float *x,
                     size_t x_row, size_t tiles) {
    for (size_t r = 0; r < down->numbers; r++)
        for (size_t c = 0; c < across->numbers; c++, v += v_step)
            for (size_t t = 0; t < tiles; t++) {
                float numbers[L];
                between(numbers, down->in[r], across->in[c], down->numbers, across->numbers, x + t * across->step * L,
                        x_row, L);
                put(dtype, v + t * L, 1, numbers);
            }
}

static void filters_in(vm_dtype dtype, const line *down, const line *across, float *u, size_t u_step, const float *w,
                       size_t n) {
    const size_t each = dtype == VM_BF16 ? 2 : 1; /* input channels in a step */
    for (size_t r = 0; r < down->filters; r++)
        for (size_t c = 0; c < across->filters; c++, u += u_step)
            for (size_t i = 0; i < n / L; i++) {
                float numbers[L];
                between(numbers, down->weights[r], across->weights[c], 3, 3, w + i * L, 3 * n, n);
                char *step = (char *)(u + i / each * L);
                put(dtype, step + i % each * vm_dtype_bytes(dtype), each, numbers);
            }
}

static void tiles_out(const line *down, const line *across, float *y, size_t y_row, const float *m, size_t m_step,
                      size_t y_rows, size_t y_width, const float *bias, const float *add, size_t add_row) {
    for (size_t r = 0; r < y_rows; r++)
        for (size_t x = 0; x < y_width; x++) {
            float pixel[L];
            between(pixel, down->out[r], across->out[x % across->pixels], down->numbers, across->numbers,
                    m + x / across->pixels * L, across->numbers * m_step, m_step);
            for (size_t l = 0; l < L; l++) {
                if (bias) pixel[l] += bias[l];
                if (add) pixel[l] += add[r * add_row + x * L + l];
                y[r * y_row + x * L + l] = pixel[l];
            }
        }
}

VM_TRANSFORMS(winograd, VM_F32, &two, &four, VM_TWO_FOUR)
VM_TRANSFORMS(upsampled, VM_F32, &doubled, &doubled, VM_UPSAMPLED)
VM_TRANSFORMS(strided, VM_F32, &halved, &halved, VM_STRIDED)
VM_TRANSFORMS(winograd_pairs, VM_BF16, &two, &two, VM_TWO_TWO)
VM_TRANSFORMS(upsampled_pairs, VM_BF16, &doubled, &doubled, VM_UPSAMPLED)

static double burn(size_t rounds, float *sink) {
    float x[8][L] = {{0}};
    for (size_t i = 0; i < rounds; i++)
        for (size_t j = 0; j < 8; j++)
            for (size_t l = 0; l < L; l++) x[j][l] = x[j][l] * 0.999f + 0.001f;
    for (size_t j = 0; j < 8; j++)
        for (size_t l = 0; l < L; l++) *sink += x[j][l];
    return 2.0 * 8 * L * (double)rounds;
}

const vm_cpu_ops vm_cpu_ref = {VM_CPU_OPS(PIXELS)};
const vm_products vm_pairs_ref = {1,    PIXELS,          VM_ROWS_FLAT,     VM_STEPS, gemm_pairs, vm_load_pairs_ref,
                                  burn, &winograd_pairs, &upsampled_pairs, NULL};
