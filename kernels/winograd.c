/* 3x3 convolutions by Winograd's F(2x2, 3x3): 16 products for four outputs instead of 36, the same in
 * real arithmetic. Every 4x4 piece of the input (overlapping by two) and every 3x3 of weights become
 * 16 numbers; per number, a plain product over the channels; 16 results become 2x2 pixels.
 *
 *   scratch:  scale | shift | x offsets | u [16][y block][x block][16][16] | thread 0 | thread 1 ...
 *   thread:   x tile [x block][row][column][16] | v [16][x block][tile][16] | m [16][y block][tile][16]
 *
 * A region of about TILES tiles is a task. Only sums, differences and halves are added to what is
 * multiplied, which costs about one bit beside a direct sum; docs/SPEED.md has both. The weights are
 * turned when the pass begins, so that the model keeps one copy. */
#include "cpu.h"

enum {
    TILES = 128,      /* in a task: u is read once for each task, v and m are written and read */
    TILES_LEAST = 64, /* when the image is small and threads want their share */
    TASKS_WANTED = 16,
    TILES_ACROSS = 32,
    WORTH = 1024, /* pixels: below, turning the weights costs more than it saves */
    RUN = 8       /* blocks of x multiplied in one go: 128 products, their weights stay in L1 (as in conv.c) */
};

bool vm_winograd_wanted(const vm_pass *p) {
    return p->kind == VM_PASS_CONV && p->ksize == 3 && p->stride == 1 && !p->up && p->x_format == VM_ROWS &&
           p->y_format == VM_ROWS && p->x.c >= 2 * VM_BLOCK && p->y.c >= 2 * VM_BLOCK && p->y.h * p->y.w >= WORTH;
}

/* Regions, in tiles of 2x2 pixels. */
typedef struct grid {
    size_t down, across;  /* tiles of the image */
    size_t tall, wide;    /* tiles of a full region */
    size_t rows, columns; /* regions */
} grid;

static grid make_grid(const vm_pass *p) {
    grid g = {.down = (p->y.h + 1) / 2, .across = (p->y.w + 1) / 2};
    g.columns = (g.across + TILES_ACROSS - 1) / TILES_ACROSS;
    g.wide = (g.across + g.columns - 1) / g.columns;
    const size_t share = g.down * g.across / TASKS_WANTED;
    const size_t tiles = VM_MAX(VM_MIN(share, TILES), TILES_LEAST);
    g.tall = VM_MIN(VM_MAX(tiles / g.wide, 1), g.down);
    g.rows = (g.down + g.tall - 1) / g.tall;
    return g;
}

typedef struct layout {
    size_t scale, shift, offsets, u, threads; /* bytes from scratch */
    size_t v, m, per_thread, total;           /* bytes from the thread's own, where the x tile begins */
    size_t x_row, x_plane, v_step, m_step, u_step;
} layout;

static layout make_layout(const vm_pass *p, const grid *g, unsigned threads) {
    layout l = {0};
    const size_t xb = VM_BLOCKS(p->x.c), yb = VM_BLOCKS(p->y.c), tiles = g->tall * g->wide;
    l.x_row = (2 * g->wide + 2) * VM_BLOCK;
    l.x_plane = (2 * g->tall + 2) * l.x_row;
    l.v_step = xb * tiles * VM_BLOCK;
    l.m_step = yb * tiles * VM_BLOCK;
    l.u_step = yb * xb * VM_BLOCK * VM_BLOCK;
    l.scale = vm_put_bytes(&l.total, p->norm || p->affine ? xb * VM_BLOCK * sizeof(float) : 0);
    l.shift = vm_put_bytes(&l.total, p->norm || p->affine ? xb * VM_BLOCK * sizeof(float) : 0);
    l.offsets = vm_put_bytes(&l.total, xb * sizeof(ptrdiff_t));
    l.u = vm_put_bytes(&l.total, 16 * l.u_step * sizeof(float));
    l.threads = l.total;
    vm_put_bytes(&l.per_thread, xb * l.x_plane * sizeof(float));
    l.v = vm_put_bytes(&l.per_thread, 16 * l.v_step * sizeof(float));
    l.m = vm_put_bytes(&l.per_thread, 16 * l.m_step * sizeof(float));
    l.total += threads * l.per_thread;
    return l;
}

size_t vm_winograd_scratch(const vm_pass *pass, unsigned threads) {
    grid g = make_grid(pass);
    return make_layout(pass, &g, threads).total;
}

size_t vm_winograd_parts(const vm_pass *pass) {
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
} job;

typedef struct region {
    size_t y0, x0, tall, wide; /* in tiles */
    float *x, *v, *m;
} region;

static void turn_weights(const void *context, size_t task, unsigned thread) {
    (void)thread;
    const job *j = context;
    enum { N = VM_BLOCK * VM_BLOCK };
    const size_t xb = VM_BLOCKS(j->pass->x.c);
    float *u = (float *)(j->scratch + j->l.u);
    for (size_t b = task * xb; b < (task + 1) * xb; b++)
        j->ops->winograd_weights(u + b * N, j->l.u_step, j->at->weight + b * 9 * N);
}

/* m[f] = u[f] v[f] for one f and one or two blocks of output channels. */
static void multiply(const job *j, const region *r, size_t f, size_t block, size_t blocks) {
    enum { N = VM_BLOCK * VM_BLOCK };
    const size_t xb = VM_BLOCKS(j->pass->x.c), tiles = r->tall * r->wide;
    const size_t groups = (tiles + j->ops->max_pixels - 1) / j->ops->max_pixels;
    for (size_t first = 0; first < xb; first += RUN)
        for (size_t i = 0; i < groups; i++) {
            const size_t from = tiles * i / groups;
            vm_gemm g = {
                .pixels = tiles * (i + 1) / groups - from,
                .blocks = blocks,
                .batches = VM_MIN(RUN, xb - first),
                .depth = VM_BLOCK,
                .x = r->v + f * j->l.v_step + from * VM_BLOCK,
                .x_offset = (const ptrdiff_t *)(j->scratch + j->l.offsets) + first,
                .x_pixel = VM_BLOCK,
                .x_step = 1,
                .w = (const float *)(j->scratch + j->l.u) + f * j->l.u_step + (block * xb + first) * N,
                .w_block = (ptrdiff_t)(xb * N),
                .y = r->m + f * j->l.m_step + (block * j->g.tall * j->g.wide + from) * VM_BLOCK,
                .y_pixel = VM_BLOCK,
                .y_block = (ptrdiff_t)(j->g.tall * j->g.wide * VM_BLOCK),
            };
            if (first) {
                g.add = g.y;
                g.add_pixel = g.y_pixel;
                g.add_block = g.y_block;
            }
            j->ops->gemm(&g);
        }
}

static void store(const job *j, const region *r, size_t block) {
    const vm_pass *p = j->pass;
    const vm_view *y = &j->at->y, *a = &j->at->add;
    const size_t left = 2 * r->x0, width = VM_MIN(2 * r->wide, p->y.w - left);
    for (size_t t = 0; t < r->tall; t++) {
        const size_t top = 2 * (r->y0 + t);
        j->ops->winograd_out(y->data + top * y->row + block * y->block + left * VM_BLOCK, y->row,
                             r->m + (block * j->g.tall * j->g.wide + t * r->wide) * VM_BLOCK, j->l.m_step,
                             VM_MIN(2, p->y.h - top), width, j->at->bias + block * VM_BLOCK,
                             p->add ? a->data + top * a->row + block * a->block + left * VM_BLOCK : NULL, a->row);
    }
}

static void winograd_region(const void *context, size_t task, unsigned thread) {
    const job *j = context;
    const vm_pass *p = j->pass;
    const size_t xb = VM_BLOCKS(p->x.c), yb = VM_BLOCKS(p->y.c);
    char *own = j->scratch + j->l.threads + thread * j->l.per_thread;
    region r = {.y0 = task / j->g.columns * j->g.tall,
                .x0 = task % j->g.columns * j->g.wide,
                .x = (float *)own,
                .v = (float *)(own + j->l.v),
                .m = (float *)(own + j->l.m)};
    r.tall = VM_MIN(j->g.tall, j->g.down - r.y0);
    r.wide = VM_MIN(j->g.wide, j->g.across - r.x0);
    const vm_box input = {(ptrdiff_t)(2 * r.y0) - 1, (ptrdiff_t)(2 * r.x0) - 1, 2 * r.tall + 2, 2 * r.wide + 2};
    vm_load_box(&j->source, &input, r.x, j->l.x_plane, j->l.x_row);
    for (size_t b = 0; b < xb; b++)
        for (size_t t = 0; t < r.tall; t++)
            j->ops->winograd_in(r.v + (b * j->g.tall * j->g.wide + t * r.wide) * VM_BLOCK, j->l.v_step,
                                r.x + b * j->l.x_plane + 2 * t * j->l.x_row, j->l.x_row, r.wide);
    for (size_t f = 0; f < 16; f++)
        for (size_t b = 0; b < yb; b += 2) multiply(j, &r, f, b, VM_MIN(yb - b, 2));
    const vm_box output = {(ptrdiff_t)(2 * r.y0), (ptrdiff_t)(2 * r.x0), VM_MIN(2 * r.tall, p->y.h - 2 * r.y0),
                           VM_MIN(2 * r.wide, p->y.w - 2 * r.x0)};
    for (size_t b = 0; b < yb; b++) {
        store(j, &r, b);
        if (p->stats) vm_measure_box(&j->source, &output, task, b);
    }
}

vm_status vm_winograd_run(const vm_cpu_ops *ops, const vm_pass *pass, const vm_operands *at, const vm_exec *exec) {
    job j = {.ops = ops, .pass = pass, .at = at, .g = make_grid(pass), .scratch = at->scratch};
    j.l = make_layout(pass, &j.g, exec->threads);
    j.source = vm_source_of(ops, pass, at, (float *)(j.scratch + j.l.scale), (float *)(j.scratch + j.l.shift));
    ptrdiff_t *offsets = (ptrdiff_t *)(j.scratch + j.l.offsets);
    for (size_t b = 0; b < VM_BLOCKS(pass->x.c); b++) offsets[b] = (ptrdiff_t)(b * j.g.tall * j.g.wide * VM_BLOCK);
    vm_status s = exec->each(exec->pool, VM_BLOCKS(pass->y.c), 0, turn_weights, &j);
    return s ? s : exec->each(exec->pool, j.g.rows * j.g.columns, pass->y.h, winograd_region, &j);
}
