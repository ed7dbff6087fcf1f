/* The plain C path: what every operation means, and what runs where nothing better is known.
 * Built with the compiler's baseline flags; the loops over 16 lanes are left to its vectoriser. */
#include <math.h>

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

/* A product of bfloat16 is exact in float32, so this sums as fused multiply-adds do: the upper halves first, as vdpbf16ps. */
static float add_products(float sum, uint32_t x, uint32_t w) {
    sum += vm_float_of_bits(x & 0xffff0000) * vm_float_of_bits(w & 0xffff0000);
    return sum + vm_float_of_bits(x << 16) * vm_float_of_bits(w << 16);
}

static void gemm_pairs(const vm_gemm *g) {
    for (size_t o = 0; o < g->blocks; o++)
        for (size_t p = 0; p < g->pixels; p++) {
            float sum[L] = {0};
            const float *w = g->w + (ptrdiff_t)o * g->w_block;
            for (size_t b = 0; b < g->batches; b++)
                for (size_t k = 0; k < g->depth; k++, w += L) {
                    const float x = g->x[g->x_offset[b] + (ptrdiff_t)p * g->x_pixel + (ptrdiff_t)k];
                    for (size_t l = 0; l < L; l++)
                        sum[l] = add_products(sum[l], vm_bits_of_float(x), vm_bits_of_float(w[l]));
                }
            finish(g, o, p, sum);
        }
}

static float element_at(const vm_source *from, size_t i) {
    const float x = vm_element(from->dtype, from->x, i);
    const float v = from->scale ? x * from->scale[i % L] + from->shift[i % L] : x;
    return from->silu ? v / (1 + expf(-v)) : v;
}

static void load(float *y, const vm_source *from) {
    for (size_t i = 0; i < from->pixels * L; i++) y[i] = element_at(from, i);
}

void vm_load_pairs_ref(uint16_t *y, uint16_t *rest, const vm_source *from) {
    for (size_t i = 0; i < from->pixels * L; i++) {
        const float v = element_at(from, i);
        const size_t at = i / L * 2 * L + i % L;
        y[at] = vm_to_bfloat16(v);
        if (rest) rest[at] = vm_to_bfloat16(v - vm_element(VM_BF16, y, at));
    }
}

static bool store_rows(void *y, vm_dtype dtype, const float *x, size_t pixels, float factor, const void *add) {
    bool finite = true;
    for (size_t i = 0; i < pixels * L; i++) {
        float v = x[i] * factor;
        if (add) v += vm_element(dtype, add, i);
        vm_set_element(dtype, y, i, v);
        finite &= isfinite(vm_element(dtype, y, i)) != 0;
    }
    return finite;
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

static void winograd_in(float *v, size_t v_step, const float *x, size_t x_row, size_t tiles) {
    for (size_t i = 0; i < tiles * L; i++) {
        const float *d = x + i / L * 2 * L + i % L;
        float t[4][4]; /* B^T d */
        for (size_t c = 0; c < 4; c++) {
            const float d0 = d[c * L], d1 = d[x_row + c * L], d2 = d[2 * x_row + c * L], d3 = d[3 * x_row + c * L];
            t[0][c] = d0 - d2, t[1][c] = d1 + d2, t[2][c] = d2 - d1, t[3][c] = d1 - d3;
        }
        for (size_t r = 0; r < 4; r++) { /* times B */
            v[(4 * r + 0) * v_step + i] = t[r][0] - t[r][2];
            v[(4 * r + 1) * v_step + i] = t[r][1] + t[r][2];
            v[(4 * r + 2) * v_step + i] = t[r][2] - t[r][1];
            v[(4 * r + 3) * v_step + i] = t[r][1] - t[r][3];
        }
    }
}

static void winograd_weights(float *u, size_t u_step, const float *w, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float t[4][3]; /* G g */
        for (size_t c = 0; c < 3; c++) {
            const float g0 = w[c * n + i], g1 = w[(3 + c) * n + i], g2 = w[(6 + c) * n + i];
            t[0][c] = g0, t[1][c] = (g0 + g2 + g1) * 0.5f, t[2][c] = (g0 + g2 - g1) * 0.5f, t[3][c] = g2;
        }
        for (size_t r = 0; r < 4; r++) { /* times G^T */
            u[(4 * r + 0) * u_step + i] = t[r][0];
            u[(4 * r + 1) * u_step + i] = (t[r][0] + t[r][2] + t[r][1]) * 0.5f;
            u[(4 * r + 2) * u_step + i] = (t[r][0] + t[r][2] - t[r][1]) * 0.5f;
            u[(4 * r + 3) * u_step + i] = t[r][2];
        }
    }
}

static void upsampled_in(float *v, size_t v_step, const float *x, size_t x_row, size_t tiles) {
    for (size_t i = 0; i < tiles * L; i++) {
        const float *d = x + i;
        float t[3][3];
        for (size_t c = 0; c < 3; c++) {
            const float d1 = d[x_row + c * L];
            t[0][c] = d[c * L] - d1, t[1][c] = d1, t[2][c] = d[2 * x_row + c * L] - d1;
        }
        for (size_t r = 0; r < 3; r++) {
            v[(3 * r + 0) * v_step + i] = t[r][0] - t[r][1];
            v[(3 * r + 1) * v_step + i] = t[r][1];
            v[(3 * r + 2) * v_step + i] = t[r][2] - t[r][1];
        }
    }
}

static void upsampled_weights(float *u, size_t u_step, const float *w, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float t[3][3];
        for (size_t c = 0; c < 3; c++) {
            const float g0 = w[c * n + i], g2 = w[(6 + c) * n + i];
            t[0][c] = g0, t[1][c] = g0 + g2 + w[(3 + c) * n + i], t[2][c] = g2;
        }
        for (size_t r = 0; r < 3; r++) {
            u[(3 * r + 0) * u_step + i] = t[r][0];
            u[(3 * r + 1) * u_step + i] = t[r][0] + t[r][2] + t[r][1];
            u[(3 * r + 2) * u_step + i] = t[r][2];
        }
    }
}

/* The two numbers that A^T makes of `side` ones, the nearer pixel's and the farther one's. */
static float near_pixel(size_t side, const float *t) { return side == 4 ? t[0] + t[1] + t[2] : t[0] + t[1]; }
static float far_pixel(size_t side, const float *t) { return side == 4 ? t[1] - t[2] - t[3] : t[1] + t[2]; }

static void store(size_t side, float *y, size_t y_row, const float *m, size_t m_step, size_t rows, size_t width,
                  const float *bias, const float *add, size_t add_row) {
    for (size_t x = 0; x < width; x++)
        for (size_t l = 0; l < L; l++) {
            float t[4]; /* m A, the column of this pixel */
            for (size_t r = 0; r < side; r++) {
                float f[4];
                for (size_t c = 0; c < side; c++) f[c] = m[(side * r + c) * m_step + x / 2 * L + l];
                t[r] = x % 2 ? far_pixel(side, f) : near_pixel(side, f);
            }
            for (size_t r = 0; r < rows; r++) { /* A^T times that */
                float v = (r ? far_pixel(side, t) : near_pixel(side, t)) + bias[l];
                if (add) v += add[r * add_row + x * L + l];
                y[r * y_row + x * L + l] = v;
            }
        }
}

static void winograd_out(float *y, size_t y_row, const float *m, size_t m_step, size_t rows, size_t width,
                         const float *bias, const float *add, size_t add_row) {
    store(4, y, y_row, m, m_step, rows, width, bias, add, add_row);
}

static void upsampled_out(float *y, size_t y_row, const float *m, size_t m_step, size_t rows, size_t width,
                          const float *bias, const float *add, size_t add_row) {
    store(3, y, y_row, m, m_step, rows, width, bias, add, add_row);
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

const vm_cpu_ops vm_cpu_ref = {{PIXELS, VM_ROWS_FLAT, VM_STEPS, gemm, NULL, burn},
                               load,
                               store_rows,
                               stats,
                               softmax,
                               rescale,
                               transpose,
                               {4, winograd_in, winograd_weights, winograd_out},
                               {3, upsampled_in, upsampled_weights, upsampled_out}};

const vm_products vm_pairs_ref = {PIXELS, VM_ROWS_FLAT, VM_STEPS, gemm_pairs, vm_load_pairs_ref, burn};
