/* One-headed attention over the pixels of a tensor, by online softmax: no h*w x h*w matrix.
 *
 * x holds q, k and v side by side in its channels; y takes q's place (a task reads its queries before it writes them,
 * and no other task reads them). Scores are transposed, s[key][query]: a lane is a query throughout, so nothing is
 * reduced across lanes. Both products have the form of a convolution's, pixels by channels (x) times weights (w) for 16
 * queries:
 *
 *   for each run of keys:
 *       s[key][query]  = sum over c of k[key][c] * q[c][query]
 *       softmax step over the keys, per query
 *       o[c][query]    = o * keep + sum over keys of v[c][key] * s[key][query]
 *
 * k is stored as [c/16][key][16 c], v as [key/16][c][16 keys]. With pairs, a pair in the place of a float holds two
 * neighbours of the sum: channels in the first product, keys in the second. If numbers are split, a second set of k and
 * v holds the rests, and each 16 lines of weights are followed by theirs. Each task copies the keys, run by run: cheap
 * compared with its products, and no extra memory.
 *
 *   prepared: job | offsets of batches of k | of v
 *   scratch:  thread 0 | thread 1 ...
 *   thread:   q [16 queries][c][16] | o, likewise | s [16 queries][key][16], of two | its pairs | top, sum, keep
 *             | k | v
 *
 * The order of keys is fixed and a task's queries are its own, so the number of threads changes no bit. */
#include <math.h>
#include <string.h>

#include "cpu.h"

enum {
    QUERIES = 16,      /* blocks of 16 in a task, twice as many with pairs: each task reads and copies the keys once */
    QUERIES_LEAST = 4, /* if the image is small and all threads need work */
    TASKS_WANTED = 16,
    KEYS = 112, /* in a run: stays in L2 with two blocks of queries. A multiple of 16, and of AVX-512's 14 pixels */
    LINES = VM_BLOCK * VM_BLOCK /* numbers in 16 lines, summed by one product */
};

/* Numbers are floats or pairs of bfloat16, four bytes each. */
typedef struct layout {
    size_t c, blocks;                       /* channels of one head, padded, and blocks of them */
    size_t queries;                         /* blocks in a task */
    size_t in_number, parts;                /* values in a number; sets of k, of v and of lines of weights */
    size_t k_batches, v_batches;            /* in the products of a full run */
    size_t rows;                            /* numbers of a batch's weights */
    size_t keys;                            /* of a full run */
    size_t k_set, v_set;                    /* numbers */
    size_t k_offsets, v_offsets, prepared;  /* bytes into the pass's prepared memory, which begins with the job */
    size_t o, s, p, softmax, k, v, scratch; /* bytes into the thread's scratch, which begins with q */
} layout;

typedef struct job {
    const vm_cpu *cpu;
    const vm_pass *pass;
    vm_operands at;
    layout l;
    ptrdiff_t *k_offsets, *v_offsets;
} job;

static size_t pixels_of(const vm_pass *p) { return p->x.h * p->x.w; } /* of a frame, which sees only itself */

static layout make_layout(const vm_cpu *cpu, const vm_pass *p) {
    layout l = {.blocks = VM_BLOCKS(p->y.c), .in_number = cpu->pairs ? 2 : 1, .parts = vm_parts(cpu)};
    const size_t number = sizeof(float), line = VM_BLOCK * number, deep = VM_BLOCK * l.in_number;
    l.c = l.blocks * VM_BLOCK;
    l.queries = VM_MIN(pixels_of(p) / VM_BLOCK / TASKS_WANTED, QUERIES * l.in_number);
    l.queries = VM_ROUND_UP(VM_MAX(l.queries, QUERIES_LEAST), 2);
    l.keys = VM_MIN(KEYS * l.in_number, VM_ROUND_UP(pixels_of(p), deep));
    l.k_batches = (l.c + deep - 1) / deep;
    l.v_batches = l.keys / deep;
    l.rows = l.parts * LINES;
    l.k_set = l.k_batches * l.keys * VM_BLOCK;
    l.v_set = l.v_batches * l.c * VM_BLOCK;
    vm_put_bytes(&l.prepared, sizeof(job), VM_ALIGN);
    l.k_offsets = vm_put_bytes(&l.prepared, l.k_batches * sizeof(ptrdiff_t), VM_ALIGN);
    l.v_offsets = vm_put_bytes(&l.prepared, l.v_batches * sizeof(ptrdiff_t), VM_ALIGN);
    vm_put_bytes(&l.scratch, VM_PRODUCT(l.queries, l.k_batches, l.rows, number), VM_ALIGN);
    l.o = vm_put_bytes(&l.scratch, VM_PRODUCT(l.queries, l.c, line), VM_ALIGN);
    l.s = vm_put_bytes(&l.scratch, 2 * l.keys * line, VM_ALIGN);
    l.p = vm_put_bytes(&l.scratch, cpu->pairs ? 2 * l.v_batches * l.rows * number : 0, VM_ALIGN);
    l.softmax = vm_put_bytes(&l.scratch, VM_PRODUCT(3, l.queries, line), VM_ALIGN);
    l.k = vm_put_bytes(&l.scratch, VM_PRODUCT(l.parts, l.k_set, number), VM_ALIGN);
    l.v = vm_put_bytes(&l.scratch, VM_PRODUCT(l.parts, l.v_set, number), VM_ALIGN);
    return l;
}

/* A thread's current task. */
typedef struct task {
    const job *j;
    size_t frame;
    float *q, *o, *s, *p, *k, *v;
    float *softmax; /* top, sum, keep for each block of queries */
} task;

/* ---- numbers, from x ---- */

/* Loads one block of channels of n pixels from `first` on, counted row by row, by vm_products.load. */
static void load(const task *t, void *to, void *rest, size_t block, size_t first, size_t n) {
    const job *j = t->j;
    const size_t w = j->pass->x.w;
    for (size_t i = 0; i < n;) { /* runs of adjacent pixels */
        const size_t y = (first + i) / w, x = (first + i) % w, at = i * VM_BLOCK * sizeof(float);
        const vm_source from = {vm_pixel(&j->at.x, y, block, t->frame * w + x), j->at.x.dtype, VM_MIN(n - i, w - x)};
        j->cpu->products->load((char *)to + at, rest ? (char *)rest + at : NULL, &from);
        i += from.pixels;
    }
}

static uint16_t *halves_of(float *pairs) { return (uint16_t *)(void *)pairs; }

/* Loads lines [pixel][16] of numbers, of channels from a block on; the rests `set` numbers after. */
static void load_lines(const task *t, float *to, size_t set, size_t base, size_t block, size_t first, size_t n) {
    const job *j = t->j;
    for (size_t half = 0; half < j->l.in_number; half++) {
        uint16_t *high = halves_of(to) + half * VM_BLOCK;
        uint16_t *low = j->l.parts > 1 ? halves_of(to + set) + half * VM_BLOCK : NULL;
        if (block + half < j->l.blocks) {
            load(t, high, low, base + block + half, first, n);
            continue;
        }
        for (size_t i = 0; i < n; i++) { /* the last block has no neighbour */
            memset(high + 2 * i * VM_BLOCK, 0, VM_BLOCK * sizeof *high);
            if (low) memset(low + 2 * i * VM_BLOCK, 0, VM_BLOCK * sizeof *low);
        }
    }
}

/* Makes 16 lines of pairs of neighbouring pixels, n of them, from [pixel][32]. */
static void pair_pixels(float *to, uint16_t *from, size_t n) {
    memset(from + 2 * n * VM_BLOCK, 0, 2 * (2 * VM_BLOCK - n) * VM_BLOCK * sizeof *from);
    for (size_t i = 0; i < VM_BLOCK; i++)
        for (size_t l = 0; l < VM_BLOCK; l++) {
            halves_of(to)[2 * (i * VM_BLOCK + l)] = from[4 * i * VM_BLOCK + l];
            halves_of(to)[2 * (i * VM_BLOCK + l) + 1] = from[(4 * i + 2) * VM_BLOCK + l];
        }
}

typedef struct lines {
    float part[2][LINES] __attribute__((aligned(VM_ALIGN)));
} lines;

typedef struct halves {
    uint16_t part[2][4 * LINES] __attribute__((aligned(VM_ALIGN)));
} halves;

/* Loads a block of values, keys of n <= 16 numbers, as 16 lines. */
static void load_values(const task *t, float *to, size_t block, size_t first, size_t n) {
    const job *j = t->j;
    lines v;
    if (j->cpu->pairs) {
        halves h;
        // cppcheck-suppress uninitvar ; load writes it
        load(t, h.part[0], j->l.parts > 1 ? h.part[1] : NULL, block, first, n);
        // cppcheck-suppress uninitvar ; pair_pixels writes it
        for (size_t part = 0; part < j->l.parts; part++) pair_pixels(v.part[part], h.part[part], n);
    } else {
        load(t, v.part[0], NULL, block, first, n);
        memset(v.part[0] + n * VM_BLOCK, 0, (VM_BLOCK - n) * VM_BLOCK * sizeof(float));
    }
    for (size_t part = 0; part < j->l.parts; part++) j->cpu->ops->transpose(to + part * j->l.v_set, v.part[part]);
}

static void load_run(const task *t, size_t first, size_t n) {
    const job *j = t->j;
    const layout *l = &j->l;
    const size_t deep = VM_BLOCK * l->in_number;
    for (size_t b = 0; b < l->blocks; b += l->in_number)
        load_lines(t, t->k + b / l->in_number * l->keys * VM_BLOCK, l->k_set, l->blocks, b, first, n);
    for (size_t b = 0; b < l->blocks; b++)
        for (size_t i = 0; i < n; i += deep)
            load_values(t, t->v + i / deep * l->c * VM_BLOCK + b * LINES, 2 * l->blocks + b, first + i,
                        VM_MIN(n - i, deep));
}

/* Makes a batch's weights from its lines [query][16] of numbers. */
static void load_queries(const task *t, float *w, size_t block, size_t first, size_t n) {
    const job *j = t->j;
    lines q;
    memset(&q, 0, sizeof q);
    load_lines(t, q.part[0], LINES, 0, block, first, n);
    for (size_t part = 0; part < j->l.parts; part++) j->cpu->ops->transpose(w + part * LINES, q.part[part]);
}

/* ---- a task ---- */

/* A product with batches of 16 lines of weights, added to y; "pixels" are keys or channels, side by side. */
static void multiply(const job *j, vm_gemm g) {
    g.depth = g.x_pixel = g.y_pixel = g.add_pixel = VM_BLOCK;
    g.add_block = g.y_block;
    vm_multiply(j->cpu->products, g);
}

/* Makes one block's s for n keys the weights of the second product; pairs get their own memory. */
static void make_weights(const task *t, size_t block, size_t n) {
    const layout *l = &t->j->l;
    float *s = t->s + block * l->keys * VM_BLOCK, *p = t->p + block * l->v_batches * l->rows;
    if (!t->j->cpu->pairs) {
        memset(s + n * VM_BLOCK, 0, (VM_ROUND_UP(n, VM_BLOCK) - n) * VM_BLOCK * sizeof *s);
        return;
    }
    for (size_t i = 0; i < n; i += 2 * VM_BLOCK) {
        const vm_source from = {s + i * VM_BLOCK, VM_F32, VM_MIN(n - i, 2 * VM_BLOCK)};
        float *w = p + i / (2 * VM_BLOCK) * l->rows;
        halves h;
        t->j->cpu->products->load(h.part[0], l->parts > 1 ? h.part[1] : NULL, &from);
        for (size_t part = 0; part < l->parts; part++) pair_pixels(w + part * LINES, h.part[part], from.pixels);
    }
}

/* Processes one or two blocks of queries from `block` on, and a run of n keys. */
static void attend(const task *t, size_t block, size_t blocks, size_t n) {
    const job *j = t->j;
    const layout *l = &j->l;
    const size_t pairs = VM_MAX(j->cpu->pairs, 1);
    const size_t steps = VM_MAX(j->cpu->products->steps / (pairs * VM_BLOCK), 1); /* batches at once */
    const float kept = j->pass->x_scale * j->pass->x_scale; /* the factor by which q times k is smaller */
    const float scale = 1 / (sqrtf((float)j->pass->scale_channels) * kept);
    for (size_t b = 0; b < l->k_batches; b += steps)
        multiply(j, (vm_gemm){.rows = 1,
                              .pixels = n,
                              .blocks = blocks,
                              .batches = VM_MIN(steps, l->k_batches - b),
                              .x = t->k,
                              .x_offset = j->k_offsets + b,
                              .x_rest = l->parts > 1 ? (ptrdiff_t)l->k_set : 0,
                              .w = t->q + (block * l->k_batches + b) * l->rows,
                              .w_block = (ptrdiff_t)(l->k_batches * l->rows),
                              .add = b ? t->s : NULL,
                              .y = t->s,
                              .y_block = (ptrdiff_t)(l->keys * VM_BLOCK)});
    float *o = t->o + block * l->c * VM_BLOCK;
    for (size_t b = 0; b < blocks; b++) {
        float *top = t->softmax + (block + b) * 3 * VM_BLOCK, *sum = top + VM_BLOCK, *keep = sum + VM_BLOCK;
        j->cpu->ops->softmax(t->s + b * l->keys * VM_BLOCK, n, scale, top, sum, keep);
        j->cpu->ops->rescale(o + b * l->c * VM_BLOCK, l->c, keep);
        make_weights(t, b, n);
    }
    const size_t deep = VM_BLOCK * l->in_number;
    multiply(j, (vm_gemm){.rows = 1,
                          .pixels = l->c,
                          .blocks = blocks,
                          .batches = (n + deep - 1) / deep,
                          .x = t->v,
                          .x_offset = j->v_offsets,
                          .x_rest = l->parts > 1 ? (ptrdiff_t)l->v_set : 0,
                          .w = j->cpu->pairs ? t->p : t->s,
                          .w_block = (ptrdiff_t)(j->cpu->pairs ? l->v_batches * l->rows : l->keys * VM_BLOCK),
                          .add = o,
                          .y = o,
                          .y_block = (ptrdiff_t)(l->c * VM_BLOCK)});
}

/* Stores o divided by the sum of its weights, with x's multiplier: a mean of finite numbers is finite. */
static void store_block(const task *t, size_t block, size_t first, size_t n) {
    const job *j = t->j;
    const vm_view *y = &j->at.y;
    const size_t w = j->pass->y.w;
    float *o = t->o + block * j->l.c * VM_BLOCK, *sum = t->softmax + (block * 3 + 1) * VM_BLOCK, inverse[VM_BLOCK];
    for (size_t i = 0; i < VM_BLOCK; i++) inverse[i] = 1 / sum[i];
    j->cpu->ops->rescale(o, j->l.c, inverse);
    for (size_t b = 0; b < j->l.blocks; b++) {
        float pixels[LINES] __attribute__((aligned(VM_ALIGN)));
        j->cpu->ops->transpose(pixels, o + b * LINES);
        for (size_t i = 0, some; i < n; i += some) {
            const size_t x = (first + i) % w;
            some = VM_MIN(n - i, w - x);
            j->cpu->ops->store(vm_pixel(y, (first + i) / w, b, t->frame * w + x), y->dtype, pixels + i * VM_BLOCK, some,
                               1, NULL, false);
        }
    }
}

/* Returns: tasks of a frame. */
static size_t tasks_of(const vm_pass *p, const layout *l) {
    const size_t each = l->queries * VM_BLOCK;
    return (pixels_of(p) + each - 1) / each;
}

static void attention_task(const void *context, size_t index, unsigned thread) {
    const job *j = context;
    const layout *l = &j->l;
    char *own = (char *)j->at.scratch + thread * j->at.scratch_each;
    const size_t pixels = pixels_of(j->pass), tasks = tasks_of(j->pass, l);
    const task t = {.j = j,
                    .frame = index / tasks,
                    .q = (float *)own,
                    .o = (float *)(own + l->o),
                    .s = (float *)(own + l->s),
                    .p = (float *)(own + l->p),
                    .k = (float *)(own + l->k),
                    .v = (float *)(own + l->v),
                    .softmax = (float *)(own + l->softmax)};
    const size_t first = index % tasks * l->queries * VM_BLOCK;
    const size_t n = VM_MIN(pixels - first, l->queries * VM_BLOCK), blocks = VM_BLOCKS(n);
    memset(t.o, 0, blocks * l->c * VM_BLOCK * sizeof *t.o);
    for (size_t i = 0; i < blocks * 3 * VM_BLOCK; i++) t.softmax[i] = i % (3 * VM_BLOCK) < VM_BLOCK ? -INFINITY : 0;
    for (size_t i = 0; i < blocks; i++)
        for (size_t b = 0; b < l->blocks; b += l->in_number)
            load_queries(&t, t.q + (i * l->k_batches + b / l->in_number) * l->rows, b, first + i * VM_BLOCK,
                         VM_MIN(n - i * VM_BLOCK, VM_BLOCK));
    for (size_t key = 0; key < pixels; key += l->keys) {
        const size_t keys = VM_MIN(l->keys, pixels - key);
        load_run(&t, key, keys);
        for (size_t b = 0; b < blocks; b += 2) attend(&t, b, VM_MIN(blocks - b, 2), keys);
    }
    for (size_t b = 0; b < blocks; b++) store_block(&t, b, first + b * VM_BLOCK, VM_MIN(n - b * VM_BLOCK, VM_BLOCK));
}

/* ---- the pass ---- */

static vm_cut attention_cut(const vm_cpu *cpu, const vm_pass *p) {
    const layout l = make_layout(cpu, p);
    return (vm_cut){.rows = 1, .columns = p->y.f * tasks_of(p, &l), .out_rows = p->y.h, .in_rows = p->x.h};
}

static vm_needs attention_needs(const vm_cpu *cpu, const vm_pass *p, vm_manner manner) {
    (void)manner;
    const layout l = make_layout(cpu, p);
    return (vm_needs){.prepared = l.prepared, .scratch = l.scratch};
}

static void make_offsets(ptrdiff_t *offsets, size_t batches, size_t step) {
    for (size_t i = 0; i < batches; i++) offsets[i] = (ptrdiff_t)(i * step);
}

static vm_status attention_prepare(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                                   vm_tasks *out) {
    (void)exec;
    char *prepared = at->prepared;
    job *j = at->prepared;
    *j = (job){.cpu = cpu, .pass = pass, .at = *at, .l = make_layout(cpu, pass)};
    const layout *l = &j->l;
    j->k_offsets = (ptrdiff_t *)(void *)(prepared + l->k_offsets);
    j->v_offsets = (ptrdiff_t *)(void *)(prepared + l->v_offsets);
    make_offsets(j->k_offsets, l->k_batches, l->keys * VM_BLOCK);
    make_offsets(j->v_offsets, l->v_batches, l->c * VM_BLOCK);
    *out = (vm_tasks){attention_task, j, NULL};
    return VM_OK;
}

const vm_method vm_attention = {attention_cut, attention_needs, attention_prepare};
