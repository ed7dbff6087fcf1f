/* A convolution pass on any CPU: cut the output into tiles, bring a tile's input into the thread's
 * own scratch (normalised, activated and padded on the way, so no such copy is ever stored whole),
 * multiply, store, and measure what was stored for the next GroupNorm while it is in cache.
 *
 *   scratch:  scale | shift | x offsets | folded weights | thread 0: x tile, y pixels | thread 1 ...
 *   x tile:   [c/16][rows + halo][columns + halo][16]
 *
 * Nearest 2x followed by a 3x3 convolution reads each source pixel under several taps; summing
 * those taps' weights first gives four 2x2 convolutions, one per parity of the output row and
 * column: 16 instead of 36 products, the same in real arithmetic. The weights are folded when the
 * pass begins, into scratch, so that the model keeps one copy.
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
#include "fold.h"

enum {
    STEPS = 128,     /* products summed in one go, at least: their weights for two blocks (16 KiB) stay in L1 */
    TILE_WIDTH = 64, /* pixels; the x tile should stay in a core's L2 beside the weights of two blocks */
    TILE_BYTES = 768 * 1024,
    TILES_WANTED = 32 /* enough to share among threads when the image is small */
};

/* In source pixels when the pass upsamples, else in output pixels. */
typedef struct grid {
    size_t height, width;   /* of what is tiled */
    size_t tile_h, tile_w;  /* of a full tile */
    size_t rows, columns;   /* how many tiles */
    size_t x_rows, x_width; /* of a full tile's input with its halo */
} grid;

static grid make_grid(const vm_pass *p) {
    grid g;
    const size_t s = (size_t)p->stride, k = (size_t)p->ksize;
    g.height = p->up ? p->x.h : p->y.h;
    g.width = p->up ? p->x.w : p->y.w;
    g.columns = (g.width + TILE_WIDTH - 1) / TILE_WIDTH;
    g.tile_w = (g.width + g.columns - 1) / g.columns;
    g.x_width = (g.tile_w - 1) * s + k;
    const size_t row_bytes = g.x_width * VM_BLOCKS(p->x.c) * VM_BLOCK * sizeof(float);
    const size_t fit = TILE_BYTES / row_bytes, share = g.height * g.columns / TILES_WANTED;
    const size_t cached = fit > k ? (fit - k) / s + 1 : 1;
    g.tile_h = VM_MAX(VM_MIN(VM_MIN(cached, share), g.height), 1);
    g.rows = (g.height + g.tile_h - 1) / g.tile_h;
    g.x_rows = (g.tile_h - 1) * s + k;
    return g;
}

typedef struct layout {
    size_t scale, shift, offsets, folded, threads, y_pixels; /* bytes from scratch; y_pixels from the thread's own */
    size_t per_thread, total;
    size_t taps, depth, batches, phases;
    size_t run;     /* batches that are multiplied at once */
    size_t w_block; /* floats between blocks of output channels */
} layout;

static layout make_layout(const vm_pass *p, const grid *g, unsigned threads) {
    layout l = {0};
    const size_t xb = VM_BLOCKS(p->x.c), yb = VM_BLOCKS(p->y.c);
    l.phases = p->up ? 4 : 1;
    l.taps = p->up ? 4 : (size_t)(p->ksize * p->ksize);
    l.depth = VM_MIN(p->x.c, VM_BLOCK);
    l.batches = xb * l.taps;
    l.run = VM_MAX(STEPS / (l.taps * l.depth), 1) * l.taps;
    l.w_block = l.batches * l.depth * VM_BLOCK;
    const size_t channels = xb * VM_BLOCK * sizeof(float);
    l.scale = vm_put_bytes(&l.total, p->norm || p->affine ? channels : 0);
    l.shift = vm_put_bytes(&l.total, p->norm || p->affine ? channels : 0);
    l.offsets = vm_put_bytes(&l.total, l.phases * l.batches * sizeof(ptrdiff_t));
    l.folded = vm_put_bytes(&l.total, p->up ? l.phases * yb * l.w_block * sizeof(float) : 0);
    l.threads = l.total;
    vm_put_bytes(&l.per_thread, xb * g->x_rows * g->x_width * VM_BLOCK * sizeof(float));
    l.y_pixels =
        vm_put_bytes(&l.per_thread, p->y_format == VM_ROWS ? 0 : 2 * g->tile_h * g->tile_w * VM_BLOCK * sizeof(float));
    l.total += threads * l.per_thread;
    return l;
}

size_t vm_conv_scratch(const vm_pass *pass, unsigned threads) {
    if (vm_winograd_wanted(pass)) return vm_winograd_scratch(pass, threads);
    grid g = make_grid(pass);
    return make_layout(pass, &g, threads).total;
}

size_t vm_conv_parts(const vm_pass *pass) {
    if (vm_winograd_wanted(pass)) return vm_winograd_parts(pass);
    grid g = make_grid(pass);
    return g.rows * g.columns;
}

typedef struct job {
    const vm_cpu_ops *ops;
    const vm_pass *pass;
    const vm_operands *at;
    vm_source source;
    grid g;
    layout l;
    char *scratch;
    const float *weight;
    ptrdiff_t *offsets;
} job;

/* The part of the grid that one task computes. */
typedef struct tile {
    size_t y0, x0, h, w; /* in the grid's pixels */
    float *x, *y_pixels; /* the thread's own */
} tile;

/* ---- store to the user's pixels ---- */

static uint8_t to_byte(float v) {
    v = (v + 1) * 127.5f;
    if (!(v > 0)) return 0; /* NaN too */
    return v >= 255 ? 255 : (uint8_t)lrintf(v);
}

static void store_pixels(const job *j, const float *src, size_t block, size_t y, size_t x, size_t n) {
    const vm_shape *s = &j->pass->y;
    for (size_t c = block * VM_BLOCK; c < VM_MIN((block + 1) * VM_BLOCK, s->c); c++)
        for (size_t i = 0; i < n; i++) {
            float v = src[i * VM_BLOCK + c % VM_BLOCK];
            if (c >= j->pass->clamp_from) v = v < -30 ? -30 : v > 20 ? 20 : v;
            if (j->pass->y_format == VM_U8_NHWC)
                ((uint8_t *)j->at->y_pixels)[(y * s->w + x + i) * s->c + c] = to_byte(v);
            else
                ((float *)j->at->y_pixels)[(c * s->h + y) * s->w + x + i] = v;
        }
}

/* ---- multiply ---- */

/* What a tile's pixels are written to: y itself, or scratch before the user's own format. */
static vm_view destination(const job *j, const tile *t, size_t block, size_t y, size_t x) {
    if (j->pass->y_format != VM_ROWS) {
        const size_t row = t->w * VM_BLOCK;
        return (vm_view){t->y_pixels + (y - t->y0) * row + (x - t->x0) * VM_BLOCK, t->h * row, row};
    }
    const vm_view *v = &j->at->y;
    return (vm_view){v->data + y * v->row + block * v->block + x * VM_BLOCK, v->block, v->row};
}

/* One row of a tile, for one or two blocks of output channels, one phase and one run of batches. */
static void multiply_row(const job *j, const tile *t, size_t block, size_t blocks, size_t row, size_t phase,
                         size_t first) {
    const vm_pass *p = j->pass;
    const size_t s = (size_t)p->stride, zoom = p->up ? 2 : 1;
    const size_t y = (t->y0 + row) * zoom + phase / 2;
    const size_t groups = (t->w + j->ops->max_pixels - 1) / j->ops->max_pixels;
    for (size_t i = 0; i < groups; i++) {
        const size_t from = t->w * i / groups, x = (t->x0 + from) * zoom + phase % 2;
        const vm_view to = destination(j, t, block, y, x);
        vm_gemm g = {
            .pixels = t->w * (i + 1) / groups - from,
            .blocks = blocks,
            .batches = VM_MIN(j->l.run, j->l.batches - first),
            .depth = j->l.depth,
            .x = t->x + (row * s * j->g.x_width + from * s) * VM_BLOCK,
            .x_offset = j->offsets + phase * j->l.batches + first,
            .x_pixel = (ptrdiff_t)s * VM_BLOCK,
            .x_step = 1,
            .w = j->weight + (phase * VM_BLOCKS(p->y.c) + block) * j->l.w_block + first * j->l.depth * VM_BLOCK,
            .w_block = (ptrdiff_t)j->l.w_block,
            .y = to.data,
            .y_pixel = (ptrdiff_t)zoom * VM_BLOCK,
            .y_block = (ptrdiff_t)to.block,
        };
        if (first) { /* go on with what is there */
            g.add = g.y;
            g.add_pixel = g.y_pixel;
            g.add_block = g.y_block;
        } else {
            g.bias = j->at->bias + block * VM_BLOCK;
            if (p->add) {
                const vm_view *a = &j->at->add;
                g.add = a->data + y * a->row + block * a->block + x * VM_BLOCK;
                g.add_pixel = g.y_pixel;
                g.add_block = (ptrdiff_t)a->block;
            }
        }
        j->ops->gemm(&g);
    }
}

/* Two blocks of output channels at most. */
static void multiply(const job *j, const tile *t, size_t block, size_t blocks) {
    for (size_t phase = 0; phase < j->l.phases; phase++)
        for (size_t first = 0; first < j->l.batches; first += j->l.run)
            for (size_t row = 0; row < t->h; row++) multiply_row(j, t, block, blocks, row, phase, first);
    if (j->pass->y_format == VM_ROWS) return;
    for (size_t o = 0; o < blocks; o++)
        for (size_t row = 0; row < t->h; row++)
            store_pixels(j, t->y_pixels + (o * t->h + row) * t->w * VM_BLOCK, block + o, t->y0 + row, t->x0, t->w);
}

static void conv_tile(const void *context, size_t task, unsigned thread) {
    const job *j = context;
    const vm_pass *p = j->pass;
    char *own = j->scratch + j->l.threads + thread * j->l.per_thread;
    tile t = {.y0 = task / j->g.columns * j->g.tile_h,
              .x0 = task % j->g.columns * j->g.tile_w,
              .x = (float *)own,
              .y_pixels = (float *)(own + j->l.y_pixels)};
    t.h = VM_MIN(j->g.tile_h, j->g.height - t.y0);
    t.w = VM_MIN(j->g.tile_w, j->g.width - t.x0);
    const size_t s = (size_t)p->stride, k = (size_t)p->ksize, pad = s == 1 ? k / 2 : 0;
    const vm_box input = {(ptrdiff_t)(t.y0 * s) - (ptrdiff_t)pad, (ptrdiff_t)(t.x0 * s) - (ptrdiff_t)pad,
                          (t.h - 1) * s + k, (t.w - 1) * s + k};
    vm_load_box(&j->source, &input, t.x, j->g.x_rows * j->g.x_width * VM_BLOCK, j->g.x_width * VM_BLOCK);
    for (size_t b = 0, yb = VM_BLOCKS(p->y.c); b < yb; b += 2) {
        const size_t blocks = VM_MIN(yb - b, 2);
        multiply(j, &t, b, blocks);
        const size_t zoom = p->up ? 2 : 1;
        const vm_box output = {(ptrdiff_t)(t.y0 * zoom), (ptrdiff_t)(t.x0 * zoom), t.h * zoom, t.w * zoom};
        for (size_t o = 0; p->stats && o < blocks; o++) vm_measure_box(&j->source, &output, task, b + o);
    }
}

/* ---- prepare ---- */

static void make_offsets(const job *j) {
    const vm_pass *p = j->pass;
    ptrdiff_t *out = j->offsets;
    for (size_t phase = 0; phase < j->l.phases; phase++)
        for (size_t b = 0; b < VM_BLOCKS(p->x.c); b++)
            for (size_t tap = 0; tap < j->l.taps; tap++) {
                const size_t k = p->up ? 2 : (size_t)p->ksize;
                const size_t dy = tap / k + phase / 2, dx = tap % k + phase % 2;
                *out++ = (ptrdiff_t)(((b * j->g.x_rows + dy) * j->g.x_width + dx) * VM_BLOCK);
            }
}

static void fold_block(const void *context, size_t task, unsigned thread) {
    (void)thread;
    const job *j = context;
    const size_t xb = VM_BLOCKS(j->pass->x.c), yb = VM_BLOCKS(j->pass->y.c), n = j->l.depth * VM_BLOCK;
    for (size_t phase = 0; phase < 4; phase++)
        for (size_t b = 0; b < xb; b++)
            for (size_t tap = 0; tap < 4; tap++) {
                float *dst =
                    (float *)(j->scratch + j->l.folded) + (phase * yb + task) * j->l.w_block + (b * 4 + tap) * n;
                const float *src = j->at->weight + (task * xb + b) * 9 * n;
                size_t y0, y1, x0, x1;
                vm_folded_taps(phase / 2, tap / 2, &y0, &y1);
                vm_folded_taps(phase % 2, tap % 2, &x0, &x1);
                memset(dst, 0, n * sizeof *dst);
                for (size_t y = y0; y <= y1; y++)
                    for (size_t x = x0; x <= x1; x++)
                        for (size_t i = 0; i < n; i++) dst[i] += src[(y * 3 + x) * n + i];
            }
}

vm_status vm_conv_run(const vm_cpu_ops *ops, const vm_pass *pass, const vm_operands *at, const vm_exec *exec) {
    if (vm_winograd_wanted(pass)) return vm_winograd_run(ops, pass, at, exec);
    job j = {.ops = ops, .pass = pass, .at = at, .g = make_grid(pass), .scratch = at->scratch, .weight = at->weight};
    j.l = make_layout(pass, &j.g, exec->threads);
    j.offsets = (ptrdiff_t *)(j.scratch + j.l.offsets);
    make_offsets(&j);
    j.source = vm_source_of(ops, pass, at, (float *)(j.scratch + j.l.scale), (float *)(j.scratch + j.l.shift));
    if (pass->up) {
        vm_status s = exec->each(exec->pool, VM_BLOCKS(pass->y.c), 0, fold_block, &j);
        if (s) return s;
        j.weight = (const float *)(j.scratch + j.l.folded);
    }
    return exec->each(exec->pool, j.g.rows * j.g.columns, pass->y.h, conv_tile, &j);
}
