/* A convolution pass on any CPU: cut the output into tiles, bring a tile's input into the thread's
 * own scratch (normalised, activated and padded on the way, so no such copy is ever stored whole),
 * multiply, store, and measure what was stored for the next GroupNorm while it is in cache.
 *
 *   prepared: job | scale, shift, sums | x offsets
 *   scratch:  thread 0: x tile, y pixels | thread 1 ...
 *   x tile:   [c/16][rows + halo][columns + halo][16]
 *
 * A long sum is made of short ones, over one or a few blocks of input channels at a time: that keeps
 * a run's weights in L1 while the tile passes by, and rounds as a sum of sums does, not as one of
 * thousands of terms. The partial results wait in y itself.
 *
 * Tiles follow from the shape alone, never from the number of threads, and every element is summed
 * in one fixed order: the result is bitwise the same for any number of threads. */
#include <math.h>
#include <string.h>

#include "cpu.h"

enum {
    STEPS = 128,     /* products summed in one go, at least: their weights for two blocks (16 KiB) stay in L1 */
    TILE_WIDTH = 64, /* pixels; the x tile should stay in a core's L2 beside the weights of two blocks */
    TILE_ROWS = 2,   /* flat tiles keep rings of streamed rows short */
    TILE_BYTES = 768 * 1024,
    TILES_WANTED = 32 /* enough to share among threads when the image is small */
};

static vm_grid make_grid(const vm_pass *p) {
    vm_grid g = vm_grid_of(p, 1);
    const size_t columns = (g.width + TILE_WIDTH - 1) / TILE_WIDTH, tile_w = (g.width + columns - 1) / columns;
    const size_t row_bytes = (tile_w * g.step + g.overlap) * VM_BLOCKS(p->x.c) * VM_BLOCK * sizeof(float);
    const size_t fit = TILE_BYTES / row_bytes, share = g.height * columns / TILES_WANTED;
    const size_t cached = fit > g.overlap ? (fit - g.overlap) / g.step : 1;
    vm_grid_cut(&g, VM_MIN(VM_MIN(cached, share), TILE_ROWS), tile_w);
    return g;
}

typedef struct layout {
    size_t work, offsets, prepared; /* bytes from the pass's prepared memory, where the job lies first */
    size_t y_pixels, scratch;       /* bytes from the thread's own, where the x tile begins */
    size_t taps, depth, batches;
    size_t run;     /* batches that are multiplied at once */
    size_t w_block; /* floats between blocks of output channels */
} layout;

typedef struct job {
    vm_work work;
    vm_grid g;
    layout l;
    ptrdiff_t *offsets;
} job;

static layout make_layout(const vm_pass *p, const vm_grid *g, size_t at_once) {
    const vm_cut cut = vm_grid_rows(g);
    layout l = {0};
    const size_t xb = VM_BLOCKS(p->x.c), block = VM_BLOCK * sizeof(float);
    l.taps = (size_t)(p->ksize * p->ksize);
    l.depth = VM_MIN(p->x.c, VM_BLOCK);
    l.batches = xb * l.taps;
    l.run = VM_MAX(STEPS / (l.taps * l.depth), 1) * l.taps;
    l.w_block = l.batches * l.depth * VM_BLOCK;
    vm_put_bytes(&l.prepared, sizeof(job), VM_ALIGN);
    l.work = vm_put_bytes(&l.prepared, vm_work_bytes(p, &cut, at_once), VM_ALIGN);
    l.offsets = vm_put_bytes(&l.prepared, l.batches * sizeof(ptrdiff_t), VM_ALIGN);
    vm_put_bytes(&l.scratch, VM_PRODUCT(xb, g->input_h, g->input_w, block), VM_ALIGN);
    l.y_pixels =
        vm_put_bytes(&l.scratch, p->y_format == VM_ROWS ? 0 : VM_PRODUCT(2, g->tile_h, g->tile_w, block), VM_ALIGN);
    return l;
}

static vm_cut direct_cut(const vm_pass *pass) {
    const vm_grid g = make_grid(pass);
    return vm_grid_rows(&g);
}

static size_t direct_prepared(const vm_pass *pass, size_t at_once) {
    const vm_grid g = make_grid(pass);
    return make_layout(pass, &g, at_once).prepared;
}

static size_t direct_scratch(const vm_pass *pass) {
    const vm_grid g = make_grid(pass);
    return make_layout(pass, &g, 0).scratch;
}

/* The part of the grid that one task computes. */
typedef struct tile {
    vm_tile at;
    float *x, *y_pixels; /* the thread's own */
} tile;

/* ---- store to the user's pixels ---- */

static uint8_t to_byte(float v) {
    v = (v + 1) * 127.5f;
    if (!(v > 0)) return 0; /* NaN too */
    return v >= 255 ? 255 : (uint8_t)lrintf(v);
}

static void store_pixels(const job *j, const float *src, size_t block, size_t y, size_t x, size_t n) {
    const vm_shape *s = &j->work.pass->y;
    for (size_t c = block * VM_BLOCK; c < VM_MIN((block + 1) * VM_BLOCK, s->c); c++)
        for (size_t i = 0; i < n; i++) {
            float v = src[i * VM_BLOCK + c % VM_BLOCK];
            if (c >= j->work.pass->clamp_from) v = v < -30 ? -30 : v > 20 ? 20 : v;
            if (j->work.pass->y_format == VM_U8_NHWC)
                ((uint8_t *)j->work.at.y_pixels)[(y * s->w + x + i) * s->c + c] = to_byte(v);
            else
                ((float *)j->work.at.y_pixels)[(c * s->h + y) * s->w + x + i] = v;
        }
}

/* ---- multiply ---- */

/* What a tile's pixels are written to: y itself, or scratch before the user's own format. */
static vm_view destination(const job *j, const tile *t, size_t block, size_t y, size_t x) {
    if (j->work.pass->y_format != VM_ROWS) {
        const size_t row = t->at.w * VM_BLOCK;
        return (vm_view){t->y_pixels + (y - t->at.y0) * row + (x - t->at.x0) * VM_BLOCK, t->at.h * row, row, SIZE_MAX};
    }
    const vm_view *v = &j->work.at.y;
    return (vm_view){vm_row(v, y) + block * v->block + x * VM_BLOCK, v->block, v->row, SIZE_MAX};
}

/* One row of a tile, for one or two blocks of output channels and one run of batches. */
static void multiply_row(const job *j, const tile *t, size_t block, size_t blocks, size_t row, size_t first) {
    const vm_pass *p = j->work.pass;
    const size_t s = (size_t)p->stride, y = t->at.y0 + row;
    const size_t groups = (t->at.w + j->work.ops->max_pixels - 1) / j->work.ops->max_pixels;
    for (size_t i = 0; i < groups; i++) {
        const size_t from = t->at.w * i / groups, x = t->at.x0 + from;
        const vm_view to = destination(j, t, block, y, x);
        vm_gemm g = {
            .pixels = t->at.w * (i + 1) / groups - from,
            .blocks = blocks,
            .batches = VM_MIN(j->l.run, j->l.batches - first),
            .depth = j->l.depth,
            .x = t->x + (row * s * j->g.input_w + from * s) * VM_BLOCK,
            .x_offset = j->offsets + first,
            .x_pixel = (ptrdiff_t)s * VM_BLOCK,
            .x_step = 1,
            .w = j->work.at.weight + block * j->l.w_block + first * j->l.depth * VM_BLOCK,
            .w_block = (ptrdiff_t)j->l.w_block,
            .y = to.data,
            .y_pixel = VM_BLOCK,
            .y_block = (ptrdiff_t)to.block,
        };
        if (first) { /* add to the partial sum of the runs before */
            g.add = g.y;
            g.add_pixel = g.y_pixel;
            g.add_block = g.y_block;
        } else {
            g.bias = j->work.at.bias + block * VM_BLOCK;
            if (p->add) {
                const vm_view *a = &j->work.at.add;
                g.add = vm_row(a, y) + block * a->block + x * VM_BLOCK;
                g.add_pixel = g.y_pixel;
                g.add_block = (ptrdiff_t)a->block;
            }
        }
        j->work.ops->gemm(&g);
    }
}

/* Two blocks of output channels at most. */
static void multiply(const job *j, const tile *t, size_t block, size_t blocks) {
    for (size_t first = 0; first < j->l.batches; first += j->l.run)
        for (size_t row = 0; row < t->at.h; row++) multiply_row(j, t, block, blocks, row, first);
    if (j->work.pass->y_format == VM_ROWS) return;
    for (size_t o = 0; o < blocks; o++)
        for (size_t row = 0; row < t->at.h; row++)
            store_pixels(j, t->y_pixels + (o * t->at.h + row) * t->at.w * VM_BLOCK, block + o, t->at.y0 + row, t->at.x0,
                         t->at.w);
}

static void conv_tile(const void *context, size_t task, unsigned thread) {
    const job *j = context;
    const vm_pass *p = j->work.pass;
    char *own = (char *)j->work.at.scratch + thread * j->work.at.scratch_each;
    const tile t = {.at = vm_grid_tile(&j->g, task), .x = (float *)own, .y_pixels = (float *)(own + j->l.y_pixels)};
    const vm_box input = vm_tile_input(&j->g, &t.at), output = vm_tile_output(&j->g, &t.at);
    vm_load_box(&j->work, &input, t.x, j->g.input_h * j->g.input_w * VM_BLOCK, j->g.input_w * VM_BLOCK);
    for (size_t b = 0, yb = VM_BLOCKS(p->y.c); b < yb; b += 2) {
        const size_t blocks = VM_MIN(yb - b, 2);
        multiply(j, &t, b, blocks);
        for (size_t o = 0; p->stats && o < blocks; o++) vm_measure_box(&j->work, &output, task, b + o);
    }
}

/* ---- prepare ---- */

static void make_offsets(const job *j) {
    const size_t k = (size_t)j->work.pass->ksize;
    ptrdiff_t *out = j->offsets;
    for (size_t b = 0; b < VM_BLOCKS(j->work.pass->x.c); b++)
        for (size_t tap = 0; tap < j->l.taps; tap++)
            *out++ = (ptrdiff_t)(((b * j->g.input_h + tap / k) * j->g.input_w + tap % k) * VM_BLOCK);
}

static vm_status direct_prepare(const vm_cpu_ops *ops, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                                vm_tasks *out) {
    (void)exec;
    char *prepared = at->prepared;
    job *j = at->prepared;
    *j = (job){.g = make_grid(pass)};
    const vm_cut cut = vm_grid_rows(&j->g);
    j->l = make_layout(pass, &j->g, at->at_once);
    j->work = vm_work_begin(ops, pass, at, &cut, prepared + j->l.work);
    j->offsets = (ptrdiff_t *)(prepared + j->l.offsets);
    make_offsets(j);
    *out = (vm_tasks){conv_tile, j, pass->stats ? vm_merge_rows : NULL};
    return VM_OK;
}

const vm_method vm_direct = {direct_cut, direct_prepared, direct_scratch, direct_prepare};
