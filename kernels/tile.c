/* Tiles, and the two ends of one, whatever is computed between them: its input, normalised, activated and
 * zero-padded into a thread's scratch, and the sums of its output for the next GroupNorm. */
#include <string.h>

#include "cpu.h"

typedef struct layout {
    size_t channels, sums, parts, bytes;
} layout;

static layout make_layout(const vm_pass *pass, const vm_cut *cut, size_t at_once) {
    const size_t channels = pass->norm || pass->affine ? VM_BLOCKS(pass->x.c) * VM_BLOCK : 0;
    const size_t sum = pass->stats ? vm_stats_floats(pass->y.c) : 0;
    layout l = {0};
    l.channels = vm_put_bytes(&l.bytes, 2 * channels * sizeof(float), VM_ALIGN);
    l.sums = vm_put_bytes(&l.bytes, sum * sizeof(double), VM_ALIGN);
    l.parts = vm_put_bytes(&l.bytes, VM_PRODUCT(at_once, cut->columns, sum, sizeof(float)), VM_ALIGN);
    return l;
}

size_t vm_work_bytes(const vm_pass *pass, const vm_cut *cut, size_t at_once) {
    return make_layout(pass, cut, at_once).bytes;
}

vm_work vm_work_begin(const vm_cpu_ops *ops, const vm_pass *pass, const vm_operands *at, const vm_cut *cut, void *to) {
    const layout l = make_layout(pass, cut, at->at_once);
    const size_t padded = VM_BLOCKS(pass->x.c) * VM_BLOCK;
    char *base = to;
    vm_work w = {.ops = ops, .pass = pass, .at = *at, .cut = *cut};
    if (pass->stats) {
        w.sums = (double *)(void *)(base + l.sums);
        w.parts = (float *)(void *)(base + l.parts);
    }
    if (!pass->norm && !pass->affine) return w;
    float *scale = (float *)(void *)(base + l.channels), *shift = scale + padded;
    w.scale = scale;
    w.shift = shift;
    if (pass->norm)
        vm_norm_scale(scale, shift, pass, at);
    else
        for (size_t i = 0; i < padded; i++) {
            scale[i] = i < pass->x.c ? pass->in_scale : 0;
            shift[i] = i < pass->x.c ? pass->in_shift : 0;
        }
    return w;
}

vm_grid vm_grid_of(const vm_pass *pass, size_t cell) {
    const size_t k = (size_t)pass->ksize, stride = (size_t)pass->stride;
    return (vm_grid){.cell = cell,
                     .step = pass->up ? 1 : cell * stride,
                     .overlap = k - stride,
                     .pad = stride == 1 ? k / 2 : 0,
                     .height = (pass->y.h + cell - 1) / cell,
                     .width = (pass->y.w + cell - 1) / cell,
                     .output_h = pass->y.h,
                     .output_w = pass->y.w};
}

void vm_grid_cut(vm_grid *g, size_t tile_h, size_t tile_w) {
    g->tile_h = VM_MAX(VM_MIN(tile_h, g->height), 1);
    g->tile_w = tile_w;
    g->rows = (g->height + g->tile_h - 1) / g->tile_h;
    g->columns = (g->width + tile_w - 1) / tile_w;
    g->input_h = g->tile_h * g->step + g->overlap;
    g->input_w = g->tile_w * g->step + g->overlap;
}

vm_tile vm_grid_tile(const vm_grid *g, size_t task) {
    vm_tile t = {.y0 = task / g->columns * g->tile_h, .x0 = task % g->columns * g->tile_w};
    t.h = VM_MIN(g->tile_h, g->height - t.y0);
    t.w = VM_MIN(g->tile_w, g->width - t.x0);
    return t;
}

vm_box vm_tile_input(const vm_grid *g, const vm_tile *t) {
    return (vm_box){(ptrdiff_t)(t->y0 * g->step) - (ptrdiff_t)g->pad, (ptrdiff_t)(t->x0 * g->step) - (ptrdiff_t)g->pad,
                    t->h * g->step + g->overlap, t->w * g->step + g->overlap};
}

vm_box vm_tile_output(const vm_grid *g, const vm_tile *t) {
    const size_t top = t->y0 * g->cell, left = t->x0 * g->cell;
    return (vm_box){(ptrdiff_t)top, (ptrdiff_t)left, VM_MIN(t->h * g->cell, g->output_h - top),
                    VM_MIN(t->w * g->cell, g->output_w - left)};
}

vm_cut vm_grid_rows(const vm_grid *g) {
    return (vm_cut){.rows = g->rows,
                    .columns = g->columns,
                    .out_rows = g->tile_h * g->cell,
                    .in_step = g->tile_h * g->step,
                    .in_rows = g->input_h,
                    .pad = g->pad};
}

static float pixel_at(const vm_work *j, size_t c, size_t y, size_t x) {
    const vm_shape *s = &j->pass->x;
    if (j->pass->x_format == VM_U8_NHWC)
        return (float)((const uint8_t *)j->at.x_pixels)[(y * s->w + x) * s->c + c] / 127.5f - 1;
    return ((const float *)j->at.x_pixels)[(c * s->h + y) * s->w + x];
}

static void load_pixels(const vm_work *j, float *dst, size_t block, size_t y, size_t x, size_t n) {
    const size_t c0 = block * VM_BLOCK, lanes = VM_MIN(j->pass->x.c - c0, VM_BLOCK);
    for (size_t i = 0; i < n; i++, dst += VM_BLOCK) {
        for (size_t l = 0; l < lanes; l++) dst[l] = pixel_at(j, c0 + l, y, x + i);
        memset(dst + lanes, 0, (VM_BLOCK - lanes) * sizeof *dst);
    }
    dst -= n * VM_BLOCK;
    if (j->scale) j->ops->load(dst, dst, n, j->scale + c0, j->shift + c0, false);
}

void vm_load_box(const vm_work *j, const vm_box *box, float *x, size_t plane, size_t row) {
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
            const vm_view *v = &j->at.x;
            const float *src = vm_row(v, (size_t)y) + b * v->block + x0 * VM_BLOCK;
            j->ops->load(dst, src, n, j->scale ? j->scale + b * VM_BLOCK : NULL,
                         j->shift ? j->shift + b * VM_BLOCK : NULL, j->pass->silu);
        }
}

void vm_measure_box(const vm_work *j, const vm_box *box, size_t task, size_t block) {
    const size_t padded = VM_BLOCKS(j->pass->y.c) * VM_BLOCK;
    const vm_view *v = &j->at.y;
    float *part = j->parts + task % (j->at.at_once * j->cut.columns) * vm_stats_floats(j->pass->y.c);
    float *mean = part + VM_BLOCK + block * VM_BLOCK;
    part[0] = (float)(box->rows * box->width);
    j->ops->stats(mean, mean + padded, vm_row(v, (size_t)box->top) + block * v->block + (size_t)box->left * VM_BLOCK,
                  box->rows, v->row, box->width);
}
