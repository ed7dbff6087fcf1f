/* The two ends of a tile, whatever is computed between them: its input, normalised, activated and
 * zero-padded into a thread's scratch, and the sums of its output for the next GroupNorm. */
#include <string.h>

#include "cpu.h"

vm_source vm_source_of(const vm_cpu_ops *ops, const vm_pass *pass, const vm_operands *at, float *scale, float *shift) {
    vm_source s = {.ops = ops, .pass = pass, .at = at};
    if (!pass->norm && !pass->affine) return s;
    s.scale = scale;
    s.shift = shift;
    if (pass->norm)
        vm_norm_scale(scale, shift, pass, at);
    else
        for (size_t i = 0; i < VM_BLOCKS(pass->x.c) * VM_BLOCK; i++) {
            scale[i] = i < pass->x.c ? pass->in_scale : 0;
            shift[i] = i < pass->x.c ? pass->in_shift : 0;
        }
    return s;
}

static float pixel_at(const vm_source *j, size_t c, size_t y, size_t x) {
    const vm_shape *s = &j->pass->x;
    if (j->pass->x_format == VM_U8_NHWC)
        return (float)((const uint8_t *)j->at->x_pixels)[(y * s->w + x) * s->c + c] / 127.5f - 1;
    return ((const float *)j->at->x_pixels)[(c * s->h + y) * s->w + x];
}

static void load_pixels(const vm_source *j, float *dst, size_t block, size_t y, size_t x, size_t n) {
    const size_t c0 = block * VM_BLOCK, lanes = VM_MIN(j->pass->x.c - c0, VM_BLOCK);
    for (size_t i = 0; i < n; i++, dst += VM_BLOCK) {
        for (size_t l = 0; l < lanes; l++) dst[l] = pixel_at(j, c0 + l, y, x + i);
        memset(dst + lanes, 0, (VM_BLOCK - lanes) * sizeof *dst);
    }
    dst -= n * VM_BLOCK;
    if (j->scale) j->ops->load(dst, dst, n, j->scale + c0, j->shift + c0, false);
}

void vm_load_box(const vm_source *j, const vm_box *box, float *x, size_t plane, size_t row) {
    const vm_shape *s = &j->pass->x;
    const size_t width = box->width, left = box->left < 0 ? (size_t)-box->left : 0; /* zero columns before and after */
    const size_t x0 = (size_t)(box->left + (ptrdiff_t)left), n = VM_MIN(s->w - x0, width - left);
    const size_t right = width - left - n;
    for (size_t b = 0; b < VM_BLOCKS(s->c); b++)
        for (size_t r = 0; r < box->rows; r++) {
            float *dst = x + b * plane + r * row;
            const ptrdiff_t y = box->top + (ptrdiff_t)r;
            if (y < 0 || y >= (ptrdiff_t)s->h) {
                memset(dst, 0, width * VM_BLOCK * sizeof *dst);
                continue;
            }
            memset(dst, 0, left * VM_BLOCK * sizeof *dst);
            memset(dst + (left + n) * VM_BLOCK, 0, right * VM_BLOCK * sizeof *dst);
            dst += left * VM_BLOCK;
            if (j->pass->x_format != VM_ROWS) {
                load_pixels(j, dst, b, (size_t)y, x0, n);
                continue;
            }
            const vm_view *v = &j->at->x;
            const float *src = v->data + (size_t)y * v->row + b * v->block + x0 * VM_BLOCK;
            j->ops->load(dst, src, n, j->scale ? j->scale + b * VM_BLOCK : NULL,
                         j->shift ? j->shift + b * VM_BLOCK : NULL, j->pass->silu);
        }
}

void vm_measure_box(const vm_source *j, const vm_box *box, size_t part, size_t block) {
    const size_t padded = VM_BLOCKS(j->pass->y.c) * VM_BLOCK;
    const vm_view *v = &j->at->y;
    float *sums = j->at->y_stats + part * vm_stats_floats(j->pass->y.c);
    float *mean = sums + VM_BLOCK + block * VM_BLOCK;
    sums[0] = (float)(box->rows * box->width);
    j->ops->stats(mean, mean + padded,
                  v->data + (size_t)box->top * v->row + block * v->block + (size_t)box->left * VM_BLOCK, box->rows,
                  v->row, box->width);
}
