/* One-headed attention over the pixels of a tensor, by online softmax: no h*w x h*w matrix.
 *
 * x holds q, k and v side by side in its channels; y takes q's place (a task reads its queries
 * before it writes them, and no other task reads them). With scores kept transposed, s[key][query],
 * a lane is a query from beginning to end: nothing is reduced across lanes, keys and values are
 * used as they lie, and only a task's queries are transposed (in) and its result transposed back (out).
 *
 *   for each run of keys (some rows of the image, or a piece of one):
 *       s[key][query]  = sum over c of k[key][c] * q[c][query]       k broadcast, q as weights
 *       softmax step over the keys, per query
 *       o[c][query]    = o * keep + sum over keys of v[key][c] * s[key][query]
 *
 *   thread's scratch:  q [16-query block][c][16] | s [block][key][16] | o [block][c][16] | top, sum, keep | offsets
 *
 * The order of keys is fixed and a task's queries are its own, so threads do not change a bit. */
#include <math.h>
#include <string.h>

#include "cpu.h"

enum {
    QUERIES = 8, /* blocks of 16 in a task: keys and values are read once for 128 queries */
    KEYS = 256   /* in a step: such a piece of k and of v, and the task's q, s and o, stay in L2 */
};

typedef struct layout {
    size_t q, s, o, top, offsets; /* floats from the thread's own; top: top, sum, keep of each block;
                                     offsets: of k's channel blocks, then of the rows of a run */
    size_t scratch;               /* bytes */
    size_t c;                     /* channels of one head, padded */
} layout;

static layout make_layout(const vm_pass *p) {
    layout l = {.c = VM_BLOCKS(p->y.c) * VM_BLOCK};
    const size_t lanes = QUERIES * VM_BLOCK;
    l.s = l.q + lanes * l.c;
    l.o = l.s + lanes * KEYS;
    l.top = l.o + lanes * l.c;
    l.offsets = l.top + 3 * lanes;
    l.scratch = VM_ROUND_UP(l.offsets * sizeof(float) + (VM_BLOCKS(p->y.c) + KEYS) * sizeof(ptrdiff_t), VM_ALIGN);
    return l;
}

typedef struct job {
    const vm_cpu *cpu;
    const vm_pass *pass;
    vm_operands at;
    layout l;
    vm_view rows; /* q, k and v in float32: x itself, or a copy */
} job;

/* Task queries in 16s: pixel i of the task lies at image pixel first + i. */
static void transpose(const job *j, float *mine, size_t first, size_t n, bool in) {
    const size_t w = j->pass->x.w, c = j->l.c;
    for (size_t i = 0; i < n; i++) {
        const size_t y = (first + i) / w, x = (first + i) % w;
        float *lane = mine + i / VM_BLOCK * c * VM_BLOCK + i % VM_BLOCK;
        for (size_t b = 0; b < c / VM_BLOCK; b++) {
            float row[VM_BLOCK], *px = in ? vm_pixel(&j->rows, y, b, x) : row;
            for (size_t l = 0; l < VM_BLOCK; l++) {
                float *at = lane + (b * VM_BLOCK + l) * VM_BLOCK;
                if (in)
                    *at = px[l];
                else
                    px[l] = *at;
            }
            if (!in) j->cpu->ops->store(vm_pixel(&j->at.y, y, b, x), j->at.y.dtype, row, 1, 1, NULL);
        }
    }
}

/* Keys: `rows` rows from y, `width` pixels of each from x0; rows * width <= KEYS. */
static void attend(const job *j, float *own, size_t blocks, size_t y, size_t rows, size_t x0, size_t width) {
    const layout *l = &j->l;
    const vm_view *v = &j->rows;
    const size_t cb = l->c / VM_BLOCK, keys = rows * width;
    const ptrdiff_t *block_offsets = (const ptrdiff_t *)(own + l->offsets), *row_offsets = block_offsets + cb;
    const float *k = vm_pixel(v, y, cb, x0), *value = k + cb * v->block;
    const float scale = 1 / sqrtf((float)j->pass->scale_channels);
    const size_t o_pixels = j->cpu->ops->floats.max_pixels >= 8 ? 8 : 4; /* neighbours in a block of channels */
    float *s = own + l->s, *o = own + l->o;
    for (size_t q = 0; q < blocks; q += 2) {
        const size_t pair = VM_MIN(blocks - q, 2);
        for (size_t r = 0; r < rows; r++)
            for (size_t i = 0; i < width; i += j->cpu->ops->floats.max_pixels) {
                vm_gemm g = {
                    .pixels = VM_MIN(j->cpu->ops->floats.max_pixels, width - i),
                    .blocks = pair,
                    .batches = cb,
                    .depth = VM_BLOCK,
                    .x = k + r * v->row + i * VM_BLOCK,
                    .x_offset = block_offsets,
                    .x_pixel = VM_BLOCK,
                    .x_step = 1,
                    .w = own + l->q + q * l->c * VM_BLOCK,
                    .w_block = (ptrdiff_t)(l->c * VM_BLOCK),
                    .y = s + (q * KEYS + r * width + i) * VM_BLOCK,
                    .y_pixel = VM_BLOCK,
                    .y_block = KEYS * VM_BLOCK,
                };
                j->cpu->ops->floats.gemm(&g);
            }
        for (size_t b = q; b < q + pair; b++) {
            float *top = own + l->top + b * 3 * VM_BLOCK, *sum = top + VM_BLOCK, *keep = sum + VM_BLOCK;
            j->cpu->ops->softmax(s + b * KEYS * VM_BLOCK, keys, scale, top, sum, keep);
            j->cpu->ops->rescale(o + b * l->c * VM_BLOCK, l->c, keep);
        }
        for (size_t c = 0; c < l->c; c += o_pixels) {
            float *out = o + (q * l->c + c) * VM_BLOCK;
            vm_gemm g = {
                .pixels = o_pixels,
                .blocks = pair,
                .batches = rows,
                .depth = width,
                .x = value + c / VM_BLOCK * v->block + c % VM_BLOCK,
                .x_offset = row_offsets,
                .x_pixel = 1,
                .x_step = VM_BLOCK,
                .w = s + q * KEYS * VM_BLOCK,
                .w_block = KEYS * VM_BLOCK,
                .add = out,
                .add_pixel = VM_BLOCK,
                .add_block = (ptrdiff_t)(l->c * VM_BLOCK),
                .y = out,
                .y_pixel = VM_BLOCK,
                .y_block = (ptrdiff_t)(l->c * VM_BLOCK),
            };
            j->cpu->ops->floats.gemm(&g);
        }
    }
}

static void attention_task(const void *context, size_t task, unsigned thread) {
    const job *j = context;
    const layout *l = &j->l;
    float *own = (float *)((char *)j->at.scratch + thread * j->at.scratch_each);
    const size_t first = task * QUERIES * VM_BLOCK, n = VM_MIN(j->pass->x.h * j->pass->x.w - first, QUERIES * VM_BLOCK);
    const size_t blocks = VM_BLOCKS(n);
    memset(own + l->q, 0, blocks * l->c * VM_BLOCK * sizeof(float));
    memset(own + l->o, 0, blocks * l->c * VM_BLOCK * sizeof(float));
    ptrdiff_t *offsets = (ptrdiff_t *)(own + l->offsets);
    for (size_t b = 0; b < l->c / VM_BLOCK; b++) *offsets++ = (ptrdiff_t)(b * j->rows.block);
    for (size_t r = 0; r < KEYS; r++) *offsets++ = (ptrdiff_t)(r * j->rows.row);
    for (size_t i = 0; i < blocks * 3 * VM_BLOCK; i++) own[l->top + i] = i % (3 * VM_BLOCK) < VM_BLOCK ? -INFINITY : 0;
    transpose(j, own + l->q, first, n, true);
    const size_t w = j->pass->x.w, h = j->pass->x.h, rows = VM_MAX(KEYS / w, 1);
    for (size_t y = 0; y < h; y += rows)
        for (size_t x = 0; x < w; x += KEYS) attend(j, own, blocks, y, VM_MIN(rows, h - y), x, VM_MIN(KEYS, w - x));
    for (size_t b = 0; b < blocks; b++) {
        float *sum = own + l->top + (b * 3 + 1) * VM_BLOCK, inverse[VM_BLOCK];
        for (size_t i = 0; i < VM_BLOCK; i++) inverse[i] = 1 / sum[i];
        j->cpu->ops->rescale(own + l->o + b * l->c * VM_BLOCK, l->c, inverse);
    }
    transpose(j, own + l->o, first, n, false);
}

static vm_cut attention_cut(const vm_cpu *cpu, const vm_pass *p) {
    (void)cpu;
    const size_t pixels = p->x.h * p->x.w, each = QUERIES * VM_BLOCK;
    return (vm_cut){.rows = 1, .columns = (pixels + each - 1) / each, .out_rows = p->y.h, .in_rows = p->x.h};
}

static size_t attention_prepared(const vm_cpu *cpu, const vm_pass *p, size_t at_once) {
    (void)at_once;
    const size_t copy = cpu->dtype == VM_F32 ? 0 : VM_PRODUCT(VM_BLOCKS(p->x.c), VM_BLOCK, p->x.h, p->x.w, 4);
    return vm_sum(VM_ROUND_UP(sizeof(job), VM_ALIGN), vm_round_up(copy, VM_ALIGN));
}

static size_t attention_scratch(const vm_cpu *cpu, const vm_pass *p) {
    (void)cpu;
    return make_layout(p).scratch;
}

static void widen_row(const void *context, size_t y, unsigned thread) {
    (void)thread;
    const job *j = context;
    for (size_t b = 0; b < VM_BLOCKS(j->pass->x.c); b++)
        j->cpu->ops->load(vm_pixel(&j->rows, y, b, 0),
                          &(vm_source){vm_pixel(&j->at.x, y, b, 0), j->at.x.dtype, j->pass->x.w});
}

static vm_status attention_prepare(const vm_cpu *cpu, const vm_pass *pass, const vm_operands *at, const vm_exec *exec,
                                   vm_tasks *out) {
    job *j = at->prepared;
    *j = (job){.cpu = cpu, .pass = pass, .at = *at, .l = make_layout(pass), .rows = at->x};
    *out = (vm_tasks){attention_task, j, NULL};
    if (cpu->dtype == VM_F32) return VM_OK;
    const size_t block = pass->x.w * VM_BLOCK;
    void *copy = (char *)at->prepared + VM_ROUND_UP(sizeof(job), VM_ALIGN);
    j->rows = (vm_view){copy, VM_F32, block, VM_BLOCKS(pass->x.c) * block, SIZE_MAX};
    return exec->each(exec->pool, pass->x.h, 0, widen_row, j);
}

const vm_method vm_attention = {attention_cut, attention_prepared, attention_scratch, attention_prepare};
