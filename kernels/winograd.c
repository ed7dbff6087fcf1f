/* 3x3 convolutions by Winograd's F(2x4, 3x3): 24 products for eight outputs instead of 72, the same in real arithmetic.
 * Every 4x6 piece of the input (overlapping by two) and every 3x3 of weights become 24 numbers; per number, a plain
 * product over the channels; 24 results become 2x4 pixels. Tiles two rows high keep rings of streamed rows short.
 *
 * Pairs of bfloat16 multiply twice as fast as floats, but round the numbers. F(2x2, 3x3) rounds less: 16 products of a
 * 4x4 piece for four outputs instead of 36.
 *
 * After nearest 2x there are 9 numbers, from a pixel and its neighbours. With a, b, c three pixels side by side and p,
 * q, r a filter's taps, b becomes the two pixels p a + (q + r) b and (p + q) b + r c. With s = (p + q + r) b, which
 * both share, these are p (a - b) + s and s + r (c - b). The same down the columns.
 *
 * With stride 2 there are 25 numbers for four outputs instead of 36 products. Of five pixels a to e side by side, the
 * even ones become the pixels p a + r c and p c + r e in the way above, with 3 products: p (a - c) + s and s + r (e -
 * c), with s = (p + r) c. The odd ones add q b and q d. The same down the columns. So 25 numbers have 16 filters.
 *
 * A 3x3x3 convolution over time takes F(2x4, 3x3) across frames and columns, with the three rows that it meets as three
 * times the channels. So its tiles are one row high, and rings of streamed rows as low as can be.
 *
 *   prepared: job | scale, shift, sums | x offsets | u [filter][y block][plane][depth][16], if it is kept
 *   scratch:  thread 0 | thread 1 ...
 *   thread:   inverse lengths of pixels | a block of x [row][column][16] | v [number][plane][tile][16]
 *             | m [number][2 y blocks][tile][16]
 *             | u [filter][2 y blocks][planes of a run][depth][16], if each task makes it
 *             | y [2 rows or frames][column][16], if results are not written in place
 *   x, m and y are floats, v and u factors of products. A plane of v is 16 channels, or 32 as pairs.
 *
 * A region of about PIXELS pixels (with stride 2, half as many) is a task. It is finished for two blocks of output
 * channels before the next two, so m stays in a core's cache. Numbers are a cache line further apart than necessary: a
 * tile writes all of them one after another, and at a distance of a power of two they would evict each other. The
 * points across are 2/3 and 3/2. Their powers stay nearer to 1 than those of 1 and 2, which rounds less (docs/SPEED.md
 * has the errors).
 *
 * The model keeps one copy of the weights. They are transformed when the pass begins. If that takes too much memory,
 * each task transforms them for two blocks of output channels and a run of input channels at a time, to the same
 * bits. */
#include <string.h>

#include "cpu.h"

enum {
    PIXELS = 512,       /* in a task: u is read once for each task, v once for two blocks of output channels */
    PIXELS_LEAST = 256, /* if the image is small and all threads need work */
    TASKS_WANTED = 16,
    ACROSS = 256,       /* flat regions keep rings of streamed rows short */
    ACROSS_FRAMES = 64, /* and regions across frames need not be flat */
    LINE = VM_ALIGN / sizeof(float),
};

/* Returns: whether a pass takes its two dimensions from frames and columns, and three rows as channels. */
static bool over_time(const vm_pass *p) { return p->slices > 1; }

/* A cell of the grid is one of Winograd's tiles, a tile of the grid a region of them. */
static vm_grid make_grid(const vm_cpu *cpu, const vm_pass *p) {
    const vm_transforms *t = vm_transforms_of(cpu, p);
    const bool frames = over_time(p);
    vm_grid g = vm_grid_of(p, frames ? 1 : t->height, t->width, frames ? t->height : 1);
    const size_t stride = (size_t)p->stride, tile = stride * t->height * t->width;
    const size_t across = (frames ? ACROSS_FRAMES : ACROSS) / stride / t->width;
    const size_t columns = (g.width + across - 1) / across, wide = (g.width + columns - 1) / columns;
    const size_t share = g.height * g.width * g.length / TASKS_WANTED;
    const size_t tiles = VM_MAX(VM_MIN(share, PIXELS / tile), PIXELS_LEAST / tile);
    size_t tall = 1; /* a power of two, so that rings may hold whole regions */
    while (2 * tall * wide <= tiles) tall *= 2;
    const size_t layers = (g.length + tall - 1) / tall, deep = (g.length + layers - 1) / layers;
    vm_grid_cut(&g, frames ? 1 : tall, wide, frames ? deep : 1);
    return g;
}

typedef struct layout {
    size_t numbers, depth;                /* of a tile; input channels of a block of weights */
    size_t planes, blocks;                /* of v, and blocks of input channels in one of them */
    size_t each;                          /* planes of a row of x */
    size_t work, offsets, kept, prepared; /* bytes into the pass's prepared memory, which begins with the job */
    size_t x, v, m, made, y, scratch;     /* bytes into the thread's scratch, which begins with the inverses */
    size_t x_row;
    size_t v_step, m_step, u_step, m_block; /* floats between numbers or filters, and between blocks of m */
    size_t run;                             /* planes multiplied at once */
    size_t u_run;                           /* planes in u */
} layout;

typedef struct job {
    vm_work work;
    vm_cpu floats; /* work's: it loads x and stores y */
    vm_grid g;
    layout l;
    const vm_products *products; /* of v and u */
    const vm_transforms *transforms;
    float *u; /* kept; NULL if each task makes its own */
    ptrdiff_t *offsets;
} job;

/* Returns: rows of x that are separate planes of v; lines of x that are transformed together. */
static size_t rows_met(const vm_pass *p) { return over_time(p) ? 3 : 1; }
static size_t lines_at_once(const vm_pass *p, const vm_grid *g) { return over_time(p) ? g->input_f : g->input_h; }

static layout make_layout(const vm_cpu *cpu, const vm_pass *p, const vm_grid *g, vm_manner manner) {
    const vm_transforms *t = vm_transforms_of(cpu, p);
    layout l = {.numbers = t->rows * t->columns, .depth = VM_MIN(p->x.c, VM_BLOCK), .blocks = cpu->pairs ? 2 : 1};
    const size_t yb = VM_BLOCKS(p->y.c), tiles = g->tile_f * g->tile_h * g->tile_w;
    const vm_cpu floats = vm_with_floats(cpu);
    l.each = VM_BLOCKS(p->x.c) / l.blocks;
    l.planes = rows_met(p) * l.each;
    l.run = VM_MAX(cpu->products->steps / VM_BLOCK, 1);
    l.x_row = g->input_w * VM_BLOCK;
    l.m_block = tiles * VM_BLOCK;
    l.v_step = l.planes * l.m_block + LINE;
    l.m_step = VM_MIN(yb, 2) * l.m_block + LINE;
    l.u_run = manner.tight ? VM_MIN(l.run, l.planes) : l.planes;
    l.u_step = vm_sum(VM_PRODUCT(manner.tight ? VM_MIN(yb, 2) : yb, l.u_run, l.depth, VM_BLOCK), LINE);
    const size_t u = VM_PRODUCT(t->u_rows, t->u_columns, l.u_step, sizeof(float));
    vm_put_bytes(&l.prepared, sizeof(job), VM_ALIGN);
    l.work = vm_put_bytes(&l.prepared, vm_work_bytes(p, g, manner.at_once), VM_ALIGN);
    l.offsets = vm_put_bytes(&l.prepared, l.planes * sizeof(ptrdiff_t), VM_ALIGN);
    l.kept = vm_put_bytes(&l.prepared, manner.tight ? 0 : u, VM_ALIGN);
    vm_put_bytes(&l.scratch, vm_inverse_bytes(p, g), VM_ALIGN);
    l.x = vm_put_bytes(&l.scratch, VM_PRODUCT(lines_at_once(p, g), l.x_row, sizeof(float)), VM_ALIGN);
    l.v = vm_put_bytes(&l.scratch, VM_PRODUCT(l.numbers, l.v_step, sizeof(float)), VM_ALIGN);
    l.m = vm_put_bytes(&l.scratch, VM_PRODUCT(l.numbers, l.m_step, sizeof(float)), VM_ALIGN);
    l.made = vm_put_bytes(&l.scratch, manner.tight ? u : 0, VM_ALIGN);
    l.y = vm_put_bytes(
        &l.scratch, vm_in_place(&floats, p) ? 0 : VM_PRODUCT(t->height, t->width, g->tile_w, VM_BLOCK, sizeof(float)),
        VM_ALIGN);
    return l;
}

static vm_cut winograd_cut(const vm_cpu *cpu, const vm_pass *pass) {
    const vm_grid g = make_grid(cpu, pass);
    return vm_grid_rows(&g);
}

static vm_needs winograd_needs(const vm_cpu *cpu, const vm_pass *pass, vm_manner manner) {
    const vm_grid g = make_grid(cpu, pass);
    const layout l = make_layout(cpu, pass, &g, manner);
    return (vm_needs){.prepared = l.prepared, .scratch = l.scratch};
}

typedef struct region {
    vm_tile at;
    float *inverses, *x, *v, *m, *u, *y; /* the thread's own */
} region;

enum { FILTER = 9 * VM_BLOCK * VM_BLOCK, ROOM = FILTER + VM_BLOCK * VM_BLOCK };

/* Returns: 3x3 filters, [tap][input channel][16], of one block of input channels for y_block. Over time they are those
 * of frames and columns, for row `met`. */
static const float *filters_of(const job *j, float to[2 * ROOM], size_t y_block, size_t met, size_t x_block) {
    const vm_pass *p = j->work.pass;
    const vm_cpu_ops *ops = j->work.cpu->ops;
    const vm_filter f = vm_filter_of(&j->work);
    const size_t n = j->l.depth * VM_BLOCK;
    if (!over_time(p) && !p->turned) return vm_filter_block(to, ops, &f, y_block, p->skipped, x_block);
    float *const taken = to + ROOM;
    for (size_t a = 0; a < 3; a++) {
        const size_t slice = p->skipped + (over_time(p) ? a : 0), row = over_time(p) ? met : a;
        const float *from = vm_filter_block(to, ops, &f, y_block, slice, x_block);
        for (size_t b = 0; b < 3; b++)
            memcpy(taken + (a * 3 + b) * n, from + (p->turned ? b * 3 + row : row * 3 + b) * n, n * sizeof *taken);
    }
    return taken;
}

/* Transforms the weights for one block of output channels and `planes` of input channels. */
static void transform_weights(const job *j, float *u, size_t y_block, size_t plane, size_t planes) {
    float room[2 * ROOM];
    const size_t n = j->l.depth * VM_BLOCK, blocks = j->l.blocks, each = j->l.each * blocks;
    for (size_t b = 0; b < planes * blocks; b++) {
        const size_t at = plane * blocks + b;
        j->transforms->weights(u + b * n / blocks, j->l.u_step, filters_of(j, room, y_block, at / each, at % each), n);
    }
}

static void keep_weights(const void *context, size_t task, unsigned thread) {
    (void)thread;
    const job *j = context;
    transform_weights(j, j->u + task * j->l.u_run * j->l.depth * VM_BLOCK, task, 0, j->l.u_run);
}

/* Returns: which filter number f has. */
static size_t filter_of(const vm_transforms *t, size_t f) {
    return VM_MIN(f / t->columns, t->u_rows - 1) * t->u_columns + VM_MIN(f % t->columns, t->u_columns - 1);
}

/* Adds to m[f] the products of one run of planes, from `first` on. u begins with these, and has one or
 * two blocks of output channels. */
static void multiply(const job *j, const region *r, size_t f, const float *u, size_t blocks, size_t first) {
    const size_t batches = VM_MIN(j->l.run, j->l.planes - first);
    float *y = r->m + f * j->l.m_step;
    vm_multiply(j->products, (vm_gemm){.rows = 1,
                                       .pixels = r->at.f * r->at.h * r->at.w,
                                       .blocks = blocks,
                                       .batches = batches,
                                       .depth = j->l.depth,
                                       .x = r->v + f * j->l.v_step,
                                       .x_offset = j->offsets + first,
                                       .x_pixel = VM_BLOCK,
                                       .w = u + filter_of(j->transforms, f) * j->l.u_step,
                                       .w_block = (ptrdiff_t)(j->l.u_run * j->l.depth * VM_BLOCK),
                                       .add = first ? y : NULL,
                                       .add_pixel = VM_BLOCK,
                                       .add_block = (ptrdiff_t)j->l.m_block,
                                       .y = y,
                                       .y_pixel = VM_BLOCK,
                                       .y_block = (ptrdiff_t)j->l.m_block});
}

/* m = u v for one or two blocks of output channels, with as much of u at a time as exists. */
static void multiply_all(const job *j, const region *r, size_t block, size_t blocks) {
    const size_t planes = j->l.planes, n = j->l.depth * VM_BLOCK, u_block = j->l.u_run * n;
    for (size_t from = 0, to; from < planes; from = to) {
        const float *u = j->u ? j->u + block * u_block : r->u;
        to = VM_MIN(from + j->l.u_run, planes);
        for (size_t o = 0; !j->u && o < blocks; o++)
            transform_weights(j, r->u + o * u_block, block + o, from, to - from);
        for (size_t f = 0; f < j->l.numbers; f++)
            for (size_t first = from; first < to; first += j->l.run)
                multiply(j, r, f, u + (first - from) * n, blocks, first);
    }
}

/* Stores one block of output channels from m. */
static void store(const job *j, const region *r, size_t block, const float *m) {
    const vm_pass *p = j->work.pass;
    const vm_view *y = &j->work.at.y, *a = &j->work.at.add;
    const vm_box box = vm_tile_output(&j->g, &r->at);
    const size_t left = (size_t)box.left, own = box.width * VM_BLOCK, frame = p->y.w * VM_BLOCK;
    const bool in_place = vm_in_place(j->work.cpu, p), frames = over_time(p);
    for (size_t t = 0; t < (frames ? r->at.f : r->at.h); t++) {
        const size_t first = (size_t)box.first + (frames ? t * j->g.cell_f : 0), x = first * p->y.w + left;
        const size_t top = (size_t)box.top + (frames ? 0 : t * j->g.cell_h);
        const size_t lines = frames ? VM_MIN(j->g.cell_f, p->y.f - first) : VM_MIN(j->g.cell_h, p->y.h - top);
        j->transforms->out(in_place ? vm_pixel(y, top, block, x) : r->y,
                           !in_place ? own
                           : frames  ? frame
                                     : y->row,
                           m + t * r->at.w * VM_BLOCK, j->l.m_step, lines, box.width,
                           j->work.at.bias ? j->work.at.bias + block * VM_BLOCK : NULL,
                           in_place && p->add ? vm_pixel(a, top, block, x) : NULL, frames ? frame : a->row);
        for (size_t i = 0; !in_place && i < lines; i++)
            vm_store_row(&j->work, r->y + i * own, block, first + (frames ? i : 0), top + (frames ? 0 : i), left,
                         box.width);
    }
    if (in_place) vm_activate_box(&j->work, &box, block);
}

/* Makes v's planes of the rows `input`, whose first is `first`. */
static void transform_input(const job *j, const region *r, const vm_box *input, size_t first) {
    const bool frames = over_time(j->work.pass);
    const size_t step = (frames ? j->g.step_f : j->g.step_h) * j->l.x_row;
    if (r->inverses) vm_invert_lengths(&j->work, input, r->inverses);
    for (size_t b = 0; b < VM_BLOCKS(j->work.pass->x.c); b++) {
        vm_load_block(&j->work, input, r->inverses, r->x, b, j->l.x_row);
        float *v =
            r->v + (first + b / j->l.blocks) * j->l.m_block + b % j->l.blocks * VM_BLOCK / 2; /* half of a pair's */
        for (size_t t = 0; t < (frames ? r->at.f : r->at.h); t++)
            j->transforms->in(v + t * r->at.w * VM_BLOCK, j->l.v_step, r->x + t * step, j->l.x_row, r->at.w);
    }
}

static void winograd_region(const void *context, size_t task, unsigned thread) {
    const job *j = context;
    const vm_pass *p = j->work.pass;
    const size_t yb = VM_BLOCKS(p->y.c);
    char *own = (char *)j->work.at.scratch + thread * j->work.at.scratch_each;
    const region r = {.at = vm_grid_tile(&j->g, task),
                      .inverses = vm_norm_by_pixel(p->norm) ? (float *)own : NULL,
                      .x = (float *)(own + j->l.x),
                      .v = (float *)(own + j->l.v),
                      .m = (float *)(own + j->l.m),
                      .u = (float *)(own + j->l.made),
                      .y = (float *)(own + j->l.y)};
    const vm_box input = vm_tile_input(&j->g, &r.at), output = vm_tile_output(&j->g, &r.at);
    for (size_t met = 0; met < rows_met(p); met++) {
        vm_box box = input;
        if (over_time(p)) box.rows = 1, box.top += (ptrdiff_t)met;
        transform_input(j, &r, &box, met * j->l.each);
    }
    for (size_t b = 0; b < yb; b += 2) {
        const size_t blocks = VM_MIN(yb - b, 2);
        multiply_all(j, &r, b, blocks);
        for (size_t o = 0; o < blocks; o++) {
            store(j, &r, b + o, r.m + o * j->l.m_block);
            if (p->stats) vm_measure_box(&j->work, &output, task, b + o);
        }
    }
}

static vm_status winograd_prepare(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                                  vm_tasks *out) {
    char *prepared = at->prepared;
    job *j = at->prepared;
    *j = (job){.floats = vm_with_floats(cpu),
               .g = make_grid(cpu, pass),
               .products = cpu->products,
               .transforms = vm_transforms_of(cpu, pass)};
    j->l = make_layout(cpu, pass, &j->g, at->manner);
    j->work = vm_work_begin(&j->floats, pass, at, &j->g, prepared + j->l.work);
    if (!at->manner.tight) j->u = (float *)(prepared + j->l.kept);
    j->offsets = (ptrdiff_t *)(prepared + j->l.offsets);
    for (size_t i = 0; i < j->l.planes; i++) j->offsets[i] = (ptrdiff_t)(i * j->l.m_block);
    *out = (vm_tasks){winograd_region, j, pass->stats ? vm_merge_rows : NULL};
    return j->u ? exec->each(exec->pool, VM_BLOCKS(pass->y.c), 0, keep_weights, j) : VM_OK;
}

const vm_method vm_winograd = {winograd_cut, winograd_needs, winograd_prepare};
