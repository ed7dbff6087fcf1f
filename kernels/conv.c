/* A convolution pass on any CPU. It cuts the output into tiles. For each it loads the input into the thread's scratch
 * (normalised, activated and padded, so no such copy is ever stored whole), multiplies, stores, and measures the output
 * for the next GroupNorm while it is in cache.
 *
 *   prepared: job | scale, shift, sums | x offsets | filters, unless packed ones are used directly
 *   scratch:  thread 0: x tile, inverse lengths of its pixels, y tile | thread 1 ...
 *   x tile:   [plane][frame][rows + halo][columns + halo][16]    a plane is 16 channels, or 32 as pairs of bfloat16
 *
 * A long sum is made of short ones, over one or a few blocks of input channels at a time. That keeps a run's weights in
 * L1 while the tile passes by, and rounds like a sum of sums, not like a sum of thousands of terms. (AMX sums
 * everything at once: vm_products.steps.) The partial results wait in y itself, or in the y tile if results are not
 * written in place.
 *
 * After nearest 2x, unless Winograd's method runs, a cell is 2x2 output pixels. Each of the four is its own 2x2
 * convolution (a phase); its taps are sums of those that meet the same pixel.
 *
 * A convolution over time is one of an image with three times the channels: those of this frame and of the two before.
 * So a tile has one frame of y, and its x tile three.
 *
 * Tiles depend only on the shape, never on the number of threads, and every element is summed in one fixed order: the
 * result is bitwise the same for any number of threads. */
#include <string.h>

#include "cpu.h"

enum {
    TILE_WIDTH = 64, /* pixels; the x tile should stay in a core's L2 next to the weights of two blocks */
    TILE_BYTES = 768 * 1024,
    TILES_WANTED = 16 /* enough for all threads if the image is small */
};

static vm_grid make_grid(const vm_cpu *cpu, const vm_pass *p) {
    vm_grid g = vm_grid_of(p, p->up ? 2 : 1, p->up ? 2 : 1, 1);
    const size_t columns = (g.width + TILE_WIDTH - 1) / TILE_WIDTH, tile_w = (g.width + columns - 1) / columns;
    const size_t planes = vm_planes(cpu, p->x.c) * p->slices;
    const size_t row_bytes = (tile_w * g.step_w + g.overlap) * planes * VM_BLOCK * sizeof(float);
    const size_t fit = TILE_BYTES / row_bytes, share = g.length * g.height * columns / TILES_WANTED;
    const size_t cached = fit > g.overlap ? (fit - g.overlap) / g.step_h : 1;
    vm_grid_cut(&g, VM_MIN(VM_MIN(cached, share), cpu->products->rows), tile_w, 1);
    return g;
}

/* Numbers are floats or pairs of bfloat16, four bytes each. */
typedef struct layout {
    size_t work, offsets, filters, prepared; /* bytes into the pass's prepared memory, which begins with the job */
    size_t inverses, y, scratch;             /* bytes into the thread's scratch, which begins with the x tile */
    size_t phases, taps, depth, batches;     /* filters side by side; taps and numbers of a batch */
    size_t blocks;                           /* of output channels, of all of a pixel's sums */
    size_t run;                              /* batches multiplied at once */
    size_t rows;                             /* rows of weights per batch: with the rests, if numbers are split */
    size_t w_block;                          /* between blocks of output channels */
    size_t rest;                             /* from x to its rests, if numbers are split */
} layout;

typedef struct job {
    vm_work work;
    vm_grid g;
    layout l;
    const float *filters; /* numbers [phase][out/16][batch][depth][16 out]; a batch is [slice][block][tap] */
    ptrdiff_t *offsets;
} job;

/* Returns: whether the packed weights are used directly. */
static bool as_packed(const vm_cpu *cpu, const vm_pass *p) {
    return !p->up && (cpu->pairs ? cpu->pairs == 1 && cpu->dtype == VM_BF16 : cpu->dtype == VM_F32);
}

/* Returns: floats of a plane of the x tile. */
static size_t plane_of(const vm_grid *g) { return g->input_f * g->input_h * g->input_w * VM_BLOCK; }

static layout make_layout(const vm_cpu *cpu, const vm_pass *p, const vm_grid *g, vm_manner manner) {
    const size_t number = sizeof(float), block = VM_BLOCK * number, steps = cpu->pairs ? (p->x.c + 1) / 2 : p->x.c;
    layout l = {
        .phases = p->up ? 4 : 1, .taps = p->up ? 4 : (size_t)(p->ksize * p->ksize), .depth = VM_MIN(steps, VM_BLOCK)};
    const size_t each = l.taps * l.depth * VM_MAX(cpu->pairs, 1), split = vm_parts(cpu) - 1;
    l.batches = p->slices * VM_BLOCKS(steps) * l.taps;
    l.blocks = (p->time == VM_TIME_DOUBLED ? 2 : 1) * VM_BLOCKS(p->y.c);
    l.run = VM_MIN(VM_MAX(cpu->products->steps / each, 1) * l.taps, l.batches);
    l.rows = vm_parts(cpu) * l.depth * VM_BLOCK;
    l.w_block = l.batches * l.rows;
    if (as_packed(cpu, p)) l.w_block += p->skipped * VM_BLOCKS(steps) * l.taps * l.rows;
    l.rest = split * vm_planes(cpu, p->x.c) / 2 * plane_of(g);
    vm_put_bytes(&l.prepared, sizeof(job), VM_ALIGN);
    l.work = vm_put_bytes(&l.prepared, vm_work_bytes(p, g, manner.at_once), VM_ALIGN);
    l.offsets = vm_put_bytes(&l.prepared, l.batches * sizeof(ptrdiff_t), VM_ALIGN);
    l.filters =
        vm_put_bytes(&l.prepared, as_packed(cpu, p) ? 0 : VM_PRODUCT(l.phases, l.blocks, l.w_block, number), VM_ALIGN);
    vm_put_bytes(&l.scratch, VM_PRODUCT(vm_planes(cpu, p->x.c), plane_of(g), number), VM_ALIGN);
    l.inverses = vm_put_bytes(&l.scratch, vm_inverse_bytes(p, g), VM_ALIGN);
    l.y = vm_put_bytes(&l.scratch,
                       vm_in_place(cpu, p) ? 0 : VM_PRODUCT(2, g->tile_h, g->cell_h, g->tile_w, g->cell_w, block),
                       VM_ALIGN);
    return l;
}

static vm_cut direct_cut(const vm_cpu *cpu, const vm_pass *pass) {
    const vm_grid g = make_grid(cpu, pass);
    return vm_grid_rows(&g);
}

static vm_needs direct_needs(const vm_cpu *cpu, const vm_pass *pass, vm_manner manner) {
    const vm_grid g = make_grid(cpu, pass);
    const layout l = make_layout(cpu, pass, &g, manner);
    return (vm_needs){.prepared = l.prepared, .scratch = l.scratch};
}

/* One task's part of the grid. */
typedef struct tile {
    vm_tile at;
    vm_box out;
    float *x, *y; /* the thread's own; y: [2 blocks][rows][columns][16], if results are not written in place */
} tile;

/* ---- multiply ---- */

/* A block of y's channels in one of its frames. */
typedef struct target {
    size_t block, frame;
} target;

/* Returns: where a block of sums goes. If frames are doubled, each half of the sums is a frame. */
static target target_of(const job *j, const tile *t, size_t block) {
    const size_t frame = (size_t)t->out.first, each = VM_BLOCKS(j->work.pass->y.c);
    if (j->work.pass->time != VM_TIME_DOUBLED) return (target){block, frame};
    return (target){block % each, 2 * frame - 1 + block / each};
}

/* Rows of a tile's cells, for one or two blocks of output channels, one pixel of each cell and one run of batches. */
static void multiply_rows(const job *j, const tile *t, size_t block, size_t blocks, size_t row, size_t rows,
                          size_t phase, size_t first) {
    const vm_pass *p = j->work.pass;
    const vm_operands *at = &j->work.at;
    const layout *l = &j->l;
    const vm_grid *grid = &j->g;
    const bool in_place = vm_in_place(j->work.cpu, p);
    const size_t down = phase / 2, right = phase % 2, y = row * grid->cell_h + down;
    const target to = target_of(j, t, block);
    const size_t top = (size_t)t->out.top + y, left = to.frame * p->y.w + (size_t)t->out.left + right;
    vm_gemm g = {
        .rows = rows,
        .pixels = t->at.w,
        .blocks = blocks,
        .batches = VM_MIN(l->run, l->batches - first),
        .depth = l->depth,
        .x = t->x + ((row * grid->step_h + down) * grid->input_w + right) * VM_BLOCK,
        .x_offset = j->offsets + first,
        .x_rest = (ptrdiff_t)l->rest,
        .x_row = (ptrdiff_t)(grid->step_h * grid->input_w * VM_BLOCK),
        .x_pixel = (ptrdiff_t)(grid->step_w * VM_BLOCK),
        .w = j->filters + (phase * l->blocks + block) * l->w_block + first * l->rows,
        .w_block = (ptrdiff_t)l->w_block,
        .y = in_place ? vm_pixel(&at->y, top, to.block, left) : t->y + (y * t->out.width + right) * VM_BLOCK,
        .y_row = (ptrdiff_t)(grid->cell_h * t->out.width * VM_BLOCK),
        .y_pixel = (ptrdiff_t)(grid->cell_w * VM_BLOCK),
        .y_block = (ptrdiff_t)(in_place ? at->y.block : t->out.rows * t->out.width * VM_BLOCK),
    };
    g.add_row = g.y_row;
    g.add_pixel = g.y_pixel;
    g.add_block = g.y_block;
    if (first) { /* add the earlier runs' sum */
        g.add = g.y;
    } else {
        if (at->bias) g.bias = at->bias + block * VM_BLOCK;
        if (p->add && in_place) {
            g.add = vm_pixel(&at->add, top, to.block, left);
            g.add_block = (ptrdiff_t)at->add.block;
        }
    }
    vm_multiply(j->work.cpu->products, g);
}

/* At most two blocks of output channels. */
static void multiply(const job *j, const tile *t, size_t block, size_t blocks) {
    const vm_box *out = &t->out;
    const bool in_place = vm_in_place(j->work.cpu, j->work.pass);
    const size_t rows = in_place ? 1 : t->at.h; /* at once: rows written in place may lie in a ring */
    for (size_t phase = 0; phase < j->l.phases; phase++)
        for (size_t first = 0; first < j->l.batches; first += j->l.run)
            for (size_t row = 0; row < t->at.h; row += rows)
                multiply_rows(j, t, block, blocks, row, rows, phase, first);
    for (size_t o = 0; in_place && o < blocks; o++) vm_activate_box(&j->work, out, block + o);
    for (size_t o = 0; !in_place && o < blocks; o++) {
        const target to = target_of(j, t, block + o);
        for (size_t row = 0; row < out->rows; row++)
            vm_store_row(&j->work, t->y + (o * out->rows + row) * out->width * VM_BLOCK, to.block, to.frame,
                         (size_t)out->top + row, (size_t)out->left, out->width);
    }
}

/* Copies the first frame, which a change of the number of frames passes on. */
static void copy_frame(const job *j, const vm_box *out) {
    const vm_operands *at = &j->work.at;
    for (size_t block = 0; block < VM_BLOCKS(j->work.pass->y.c); block++)
        for (size_t row = 0; row < out->rows; row++) {
            const size_t y = (size_t)out->top + row, x = (size_t)out->left;
            memcpy(vm_pixel(&at->y, y, block, x), vm_pixel(&at->x, y, block, x),
                   out->width * VM_BLOCK * vm_dtype_bytes(at->y.dtype));
        }
}

static void conv_tile(const void *context, size_t task, unsigned thread) {
    const job *j = context;
    const vm_pass *p = j->work.pass;
    char *own = (char *)j->work.at.scratch + thread * j->work.at.scratch_each;
    tile t = {.at = vm_grid_tile(&j->g, task), .x = (float *)own, .y = (float *)(own + j->l.y)};
    const vm_box input = vm_tile_input(&j->g, &t.at);
    t.out = vm_tile_output(&j->g, &t.at);
    if (p->time != VM_TIME_SAME && !t.at.f0) {
        copy_frame(j, &t.out);
        return;
    }
    vm_load_box(&j->work, &input, vm_norm_by_pixel(p->norm) ? (float *)(own + j->l.inverses) : NULL, t.x,
                plane_of(&j->g), j->g.input_h * j->g.input_w * VM_BLOCK, j->g.input_w * VM_BLOCK);
    const size_t yb = VM_BLOCKS(p->y.c); /* of a frame */
    for (size_t b = 0, blocks; b < j->l.blocks; b += blocks) {
        blocks = VM_MIN(yb - b % yb, 2);
        multiply(j, &t, b, blocks);
        for (size_t o = 0; p->stats && o < blocks; o++) vm_measure_box(&j->work, &t.out, task, b + o);
    }
}

/* ---- prepare ---- */

/* Taps of a stored filter are [row][column] of the picture; those made after nearest 2x are as y's rows lie. */
static void make_offsets(const job *j) {
    const vm_pass *p = j->work.pass;
    const size_t k = p->up ? 2 : (size_t)p->ksize, blocks = j->l.batches / p->slices / j->l.taps;
    const size_t frame = j->g.input_h * j->g.input_w * VM_BLOCK;
    const bool turned = p->turned && !p->up;
    for (size_t i = 0; i < j->l.batches; i++) {
        const size_t tap = i % j->l.taps, block = i / j->l.taps % blocks, slice = i / j->l.taps / blocks;
        const size_t row = turned ? tap % k : tap / k, column = turned ? tap / k : tap % k;
        j->offsets[i] = (ptrdiff_t)(block * plane_of(&j->g) + slice * frame + (row * j->g.input_w + column) * VM_BLOCK);
    }
}

/* The weights of 16 output channels for input channel i, at one tap of one phase and slice. */
static void filter_row(float row[VM_BLOCK], const job *j, const vm_filter *f, size_t phase, size_t block, size_t slice,
                       size_t i, size_t tap) {
    const vm_pass *p = j->work.pass;
    slice += p->skipped;
    if (!p->up) {
        vm_filter_row(row, f, block, slice, i, tap);
        return;
    }
    size_t y0, y1, x0, x1;
    vm_folded_taps(phase / 2, tap / 2, &y0, &y1);
    vm_folded_taps(phase % 2, tap % 2, &x0, &x1);
    memset(row, 0, VM_BLOCK * sizeof *row);
    for (size_t a = y0; a <= y1; a++)
        for (size_t b = x0; b <= x1; b++) {
            float one[VM_BLOCK];
            vm_filter_row(one, f, block, slice, i, p->turned ? b * 3 + a : a * 3 + b);
            for (size_t o = 0; o < VM_BLOCK; o++) row[o] += one[o];
        }
}

/* Makes the filters' factors for one block of output channels. */
static void make_filters(const void *context, size_t task, unsigned thread) {
    (void)thread;
    const job *j = context;
    const layout *l = &j->l;
    const size_t rest = vm_parts(j->work.cpu) > 1 ? l->depth * VM_BLOCK : 0;
    const vm_filter f = vm_filter_of(&j->work);
    float *to = (float *)j->filters + task * l->w_block;
    const size_t phase = task / l->blocks, block = task % l->blocks, each = l->batches / j->work.pass->slices;
    for (size_t i = 0; i < l->batches; i++, to += l->rows)
        for (size_t k = 0; k < l->depth; k++) {
            const size_t slice = i / each, tap = i % l->taps, step = i % each / l->taps * VM_BLOCK + k;
            float *at = to + k * VM_BLOCK, row[VM_BLOCK];
            if (!j->work.cpu->pairs) {
                filter_row(at, j, &f, phase, block, slice, step, tap);
                continue;
            }
            for (size_t half = 0; half < 2; half++) {
                uint16_t *high = (uint16_t *)(void *)at + half, *low = (uint16_t *)(void *)(at + rest) + half;
                filter_row(row, j, &f, phase, block, slice, 2 * step + half, tap);
                for (size_t o = 0; o < VM_BLOCK; o++) {
                    const uint16_t near = vm_to_bfloat16(row[o]);
                    high[2 * o] = near;
                    if (rest) low[2 * o] = vm_to_bfloat16(row[o] - vm_element(VM_BF16, &near, 0));
                }
            }
        }
}

static vm_status direct_prepare(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                                vm_tasks *out) {
    char *prepared = at->prepared;
    job *j = at->prepared;
    *j = (job){.g = make_grid(cpu, pass)};
    j->l = make_layout(cpu, pass, &j->g, at->manner);
    j->work = vm_work_begin(cpu, pass, at, &j->g, prepared + j->l.work);
    j->offsets = (ptrdiff_t *)(prepared + j->l.offsets);
    make_offsets(j);
    *out = (vm_tasks){conv_tile, j, pass->stats ? vm_merge_rows : NULL};
    if (as_packed(cpu, pass)) {
        const size_t used = j->l.batches * j->l.rows;
        j->filters = (const float *)at->weight + (j->l.w_block - used); /* after the skipped slices */
        return VM_OK;
    }
    j->filters = (float *)(prepared + j->l.filters);
    return exec->each(exec->pool, j->l.phases * j->l.blocks, 0, make_filters, j);
}

const vm_method vm_direct = {direct_cut, direct_needs, direct_prepare};
