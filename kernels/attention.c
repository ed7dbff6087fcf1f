/* One-headed attention over the pixels of a tensor, by online softmax: no h*w x h*w matrix.
 *
 * x holds q, k and v side by side in its channels; y takes q's place (a task reads its queries
 * before it writes them, and no other task reads them). With scores kept transposed, s[key][query],
 * a lane is a query from beginning to end and nothing is reduced across lanes. Both products have
 * the form of a convolution's: pixels by channels times weights, for 16 queries.
 *
 *   for each run of keys, copied to k [c/16][key][16] and v [key/16][c][16]:
 *       s[key][query]  = sum over c of k[key][c] * q[c][query]
 *       softmax step over the keys, per query
 *       o[c][query]    = o * keep + sum over keys of v[c][key] * s[key][query]
 *
 *   prepared: job | offsets of k's blocks of channels | of v's blocks of keys
 *   scratch:  thread 0 | thread 1 ...
 *   thread:   q [16 queries][c][16] | o, likewise | s [16 queries][key][16], of two | k | v | top, sum, keep
 *
 * The order of keys is fixed and a task's queries are its own, so threads do not change a bit. */
#include <math.h>
#include <string.h>

#include "cpu.h"

enum {
    QUERIES = 16,      /* blocks of 16 in a task: keys and values are read and copied once for each task */
    QUERIES_LEAST = 4, /* when the image is small and threads want their share */
    TASKS_WANTED = 16,
    KEYS =
        112, /* in a run: it and what two blocks of queries need stay in L2. A multiple of 16, and of 14, which are the
                   pixels of AVX-512's products */
    RUN = 8  /* blocks of channels multiplied in one go: 128 products, q's share stays in L1 (as in conv.c) */
};

typedef struct layout {
    size_t c;                              /* channels of one head, padded */
    size_t queries;                        /* blocks in a task */
    size_t k_offsets, v_offsets, prepared; /* bytes from the pass's prepared memory, where the job lies first */
    size_t o, s, k, v, softmax, scratch;   /* bytes from the thread's own, where q lies first */
} layout;

typedef struct job {
    const vm_cpu_ops *ops;
    const vm_pass *pass;
    vm_operands at;
    layout l;
    ptrdiff_t *k_offsets, *v_offsets;
} job;

static layout make_layout(const vm_pass *p) {
    const size_t cb = VM_BLOCKS(p->y.c), share = p->x.h * p->x.w / VM_BLOCK / TASKS_WANTED;
    layout l = {.c = cb * VM_BLOCK, .queries = VM_ROUND_UP(VM_MAX(VM_MIN(share, QUERIES), QUERIES_LEAST), 2)};
    const size_t line = VM_BLOCK * sizeof(float);
    vm_put_bytes(&l.prepared, sizeof(job), VM_ALIGN);
    l.k_offsets = vm_put_bytes(&l.prepared, cb * sizeof(ptrdiff_t), VM_ALIGN);
    l.v_offsets = vm_put_bytes(&l.prepared, KEYS / VM_BLOCK * sizeof(ptrdiff_t), VM_ALIGN);
    vm_put_bytes(&l.scratch, VM_PRODUCT(l.queries, l.c, line), VM_ALIGN);
    l.o = vm_put_bytes(&l.scratch, VM_PRODUCT(l.queries, l.c, line), VM_ALIGN);
    l.s = vm_put_bytes(&l.scratch, 2 * KEYS * line, VM_ALIGN);
    l.k = vm_put_bytes(&l.scratch, VM_PRODUCT(cb, KEYS, line), VM_ALIGN);
    l.v = vm_put_bytes(&l.scratch, VM_PRODUCT(cb, KEYS, line), VM_ALIGN);
    l.softmax = vm_put_bytes(&l.scratch, VM_PRODUCT(3, l.queries, line), VM_ALIGN);
    return l;
}

/* What a thread works on. */
typedef struct task {
    const job *j;
    float *q, *o, *s, *k, *v;
    float *softmax; /* top, sum, keep of each block of queries */
} task;

/* Lines (a pixel of one block of channels each) of pixels [first, first + n), counted row by row. */
static void load_lines(const job *j, float *lines, size_t block, size_t first, size_t n) {
    const size_t w = j->pass->x.w;
    for (size_t i = 0, some; i < n; i += some) {
        const size_t y = (first + i) / w, x = (first + i) % w;
        some = VM_MIN(n - i, w - x);
        memcpy(lines + i * VM_BLOCK, vm_row(&j->at.x, y) + block * j->at.x.block + x * VM_BLOCK,
               some * VM_BLOCK * sizeof *lines);
    }
}

static void store_lines(const job *j, const float *lines, size_t block, size_t first, size_t n) {
    const size_t w = j->pass->y.w;
    for (size_t i = 0, some; i < n; i += some) {
        const size_t y = (first + i) / w, x = (first + i) % w;
        some = VM_MIN(n - i, w - x);
        memcpy(vm_row(&j->at.y, y) + block * j->at.y.block + x * VM_BLOCK, lines + i * VM_BLOCK,
               some * VM_BLOCK * sizeof *lines);
    }
}

/* The same with lines of 16 pixels of one channel each, zero beyond the n-th, to[pixel / 16 * step + channel * 16]. */
static void load_turned(const task *t, float *to, size_t step, size_t block, size_t first, size_t n) {
    const size_t rest = VM_ROUND_UP(n, VM_BLOCK) - n;
    load_lines(t->j, t->s, block, first, n); /* s holds nothing yet */
    memset(t->s + n * VM_BLOCK, 0, rest * VM_BLOCK * sizeof *t->s);
    for (size_t i = 0; i < n; i += VM_BLOCK) t->j->ops->transpose(to + i / VM_BLOCK * step, t->s + i * VM_BLOCK);
}

static void load_keys(const task *t, size_t first, size_t n) {
    const size_t c = t->j->l.c, cb = c / VM_BLOCK;
    for (size_t b = 0; b < cb; b++) {
        load_lines(t->j, t->k + b * KEYS * VM_BLOCK, cb + b, first, n);
        load_turned(t, t->v + b * VM_BLOCK * VM_BLOCK, c * VM_BLOCK, 2 * cb + b, first, n);
    }
}

/* For n "pixels" of x, which are keys or channels, in groups of what a product takes. */
static void multiply(const job *j, size_t n, vm_gemm g) {
    const float *x = g.x;
    float *y = g.y;
    const size_t groups = (n + j->ops->max_pixels - 1) / j->ops->max_pixels;
    g.depth = g.x_pixel = g.y_pixel = g.add_pixel = VM_BLOCK;
    g.x_step = 1;
    g.add_block = g.y_block;
    const bool add = g.add;
    for (size_t i = 0; i < groups; i++) {
        const size_t from = n * i / groups;
        g.pixels = n * (i + 1) / groups - from;
        g.x = x + from * VM_BLOCK;
        g.y = y + from * VM_BLOCK;
        if (add) g.add = g.y;
        j->ops->gemm(&g);
    }
}

/* One or two blocks of queries from `block` on, and a run of keys. */
static void attend(const task *t, size_t block, size_t blocks, size_t keys) {
    const job *j = t->j;
    const size_t c = j->l.c, cb = c / VM_BLOCK, padding = VM_ROUND_UP(keys, VM_BLOCK) - keys;
    const float scale = 1 / sqrtf((float)j->pass->scale_channels);
    float *o = t->o + block * c * VM_BLOCK;
    for (size_t b = 0; b < cb; b += RUN)
        multiply(j, keys,
                 (vm_gemm){.blocks = blocks,
                           .batches = VM_MIN(RUN, cb - b),
                           .x = t->k,
                           .x_offset = j->k_offsets + b,
                           .w = t->q + (block * c + b * VM_BLOCK) * VM_BLOCK,
                           .w_block = (ptrdiff_t)(c * VM_BLOCK),
                           .add = b ? t->s : NULL,
                           .y = t->s,
                           .y_block = KEYS * VM_BLOCK});
    for (size_t b = 0; b < blocks; b++) {
        float *s = t->s + b * KEYS * VM_BLOCK;
        float *top = t->softmax + (block + b) * 3 * VM_BLOCK, *sum = top + VM_BLOCK, *keep = sum + VM_BLOCK;
        j->ops->softmax(s, keys, scale, top, sum, keep);
        memset(s + keys * VM_BLOCK, 0, padding * VM_BLOCK * sizeof *s);
        j->ops->rescale(o + b * c * VM_BLOCK, c, keep);
    }
    multiply(j, c,
             (vm_gemm){.blocks = blocks,
                       .batches = VM_BLOCKS(keys),
                       .x = t->v,
                       .x_offset = j->v_offsets,
                       .w = t->s,
                       .w_block = KEYS * VM_BLOCK,
                       .add = o,
                       .y = o,
                       .y_block = (ptrdiff_t)(c * VM_BLOCK)});
}

/* o over the sum of its weights, to y. */
static void store_block(const task *t, size_t block, size_t first, size_t n) {
    const job *j = t->j;
    float *o = t->o + block * j->l.c * VM_BLOCK, *sum = t->softmax + (block * 3 + 1) * VM_BLOCK, inverse[VM_BLOCK];
    for (size_t i = 0; i < VM_BLOCK; i++) inverse[i] = 1 / sum[i];
    j->ops->rescale(o, j->l.c, inverse);
    for (size_t b = 0; b < j->l.c / VM_BLOCK; b++) {
        j->ops->transpose(t->s, o + b * VM_BLOCK * VM_BLOCK);
        store_lines(j, t->s, b, first, n);
    }
}

static void attention_task(const void *context, size_t index, unsigned thread) {
    const job *j = context;
    const layout *l = &j->l;
    char *own = (char *)j->at.scratch + thread * j->at.scratch_each;
    const task t = {.j = j,
                    .q = (float *)own,
                    .o = (float *)(own + l->o),
                    .s = (float *)(own + l->s),
                    .k = (float *)(own + l->k),
                    .v = (float *)(own + l->v),
                    .softmax = (float *)(own + l->softmax)};
    const size_t pixels = j->pass->x.h * j->pass->x.w, first = index * l->queries * VM_BLOCK;
    const size_t n = VM_MIN(pixels - first, l->queries * VM_BLOCK), blocks = VM_BLOCKS(n);
    memset(t.o, 0, blocks * l->c * VM_BLOCK * sizeof *t.o);
    for (size_t i = 0; i < blocks * 3 * VM_BLOCK; i++) t.softmax[i] = i % (3 * VM_BLOCK) < VM_BLOCK ? -INFINITY : 0;
    for (size_t i = 0; i < n; i += VM_BLOCK)
        for (size_t b = 0; b < l->c / VM_BLOCK; b++)
            load_turned(&t, t.q + i * l->c + b * VM_BLOCK * VM_BLOCK, 0, b, first + i, VM_MIN(n - i, VM_BLOCK));
    for (size_t key = 0; key < pixels; key += KEYS) {
        const size_t keys = VM_MIN(KEYS, pixels - key);
        load_keys(&t, key, keys);
        for (size_t b = 0; b < blocks; b += 2) attend(&t, b, VM_MIN(blocks - b, 2), keys);
    }
    for (size_t b = 0; b < blocks; b++) store_block(&t, b, first + b * VM_BLOCK, VM_MIN(n - b * VM_BLOCK, VM_BLOCK));
}

static vm_cut attention_cut(const vm_pass *p) {
    const size_t pixels = p->x.h * p->x.w, each = make_layout(p).queries * VM_BLOCK;
    return (vm_cut){.rows = 1, .columns = (pixels + each - 1) / each, .out_rows = p->y.h, .in_rows = p->x.h};
}

static size_t attention_prepared(const vm_pass *p, size_t at_once) {
    (void)at_once;
    return make_layout(p).prepared;
}

static size_t attention_scratch(const vm_pass *p) { return make_layout(p).scratch; }

static vm_status attention_prepare(const vm_cpu_ops *ops, const vm_pass *pass, const vm_operands *at,
                                   const vm_exec *exec, vm_tasks *out) {
    (void)exec;
    char *prepared = at->prepared;
    job *j = at->prepared;
    *j = (job){.ops = ops, .pass = pass, .at = *at, .l = make_layout(pass)};
    j->k_offsets = (ptrdiff_t *)(void *)(prepared + j->l.k_offsets);
    j->v_offsets = (ptrdiff_t *)(void *)(prepared + j->l.v_offsets);
    for (size_t b = 0; b < j->l.c / VM_BLOCK; b++) j->k_offsets[b] = (ptrdiff_t)(b * KEYS * VM_BLOCK);
    for (size_t b = 0; b < KEYS / VM_BLOCK; b++) j->v_offsets[b] = (ptrdiff_t)(b * j->l.c * VM_BLOCK);
    *out = (vm_tasks){attention_task, j, NULL};
    return VM_OK;
}

const vm_method vm_attention = {attention_cut, attention_prepared, attention_scratch, attention_prepare};
