/* Where every byte of a run lies, known before it.
 *
 * Each value, each pass's scratch and each set of partial sums is a piece: so many bytes, from one
 * step to another. Pieces whose steps overlap must not share bytes. They are placed one after another,
 * large ones first, each at the lowest offset that is free for all of its steps:
 *
 *   offset
 *     ^   h h h   h h     q k v
 *     |  x x x x x x x | up up up up        a column is a step; the arena is as high as the
 *     0  ------------------------> step      highest column
 *
 * For the shipped models this leaves no hole under the peak (a test holds it to that). */
#include <stdio.h>
#include <string.h>

#include "vm.h"

static bool overlap(const vm_piece *a, const vm_piece *b) { return a->first <= b->last && b->first <= a->last; }

/* Lowest offset where p meets no placed piece that it overlaps in time. */
static size_t lowest_offset(const vm_plan *plan, const vm_piece *p) {
    for (size_t offset = 0;;) {
        const vm_piece *hit = NULL;
        for (size_t i = 0; i < plan->pieces && !hit; i++) {
            const vm_piece *q = &plan->piece[i];
            if (q->placed && overlap(p, q) && offset < vm_sum(q->offset, q->bytes) &&
                q->offset < vm_sum(offset, p->bytes))
                hit = q;
        }
        if (!hit) return offset;
        offset = vm_sum(hit->offset, hit->bytes);
    }
}

/* Which pieces are placed first: those with the most bytes, or with the most bytes times steps. Neither order is always
 * better, so both are tried. */
typedef double (*vm_weigh)(const vm_piece *p);
static double by_bytes(const vm_piece *p) { return (double)p->bytes; }
static double by_bytes_and_steps(const vm_piece *p) { return (double)p->bytes * (p->last - p->first + 1); }

/* Fills the offsets; returns the height of the arena. */
static size_t place_by(vm_plan *plan, vm_weigh weigh) {
    size_t height = 0;
    for (size_t i = 0; i < plan->pieces; i++) plan->piece[i].placed = false;
    for (size_t n = 0; n < plan->pieces; n++) {
        size_t next = plan->pieces;
        for (size_t i = 0; i < plan->pieces; i++)
            if (!plan->piece[i].placed && (next == plan->pieces || weigh(&plan->piece[i]) > weigh(&plan->piece[next])))
                next = i;
        vm_piece *p = &plan->piece[next];
        p->offset = lowest_offset(plan, p);
        p->placed = true;
        height = VM_MAX(height, vm_sum(p->offset, p->bytes));
    }
    return height;
}

static void place(vm_plan *plan) {
    const size_t other = place_by(plan, by_bytes_and_steps);
    plan->arena_bytes = place_by(plan, by_bytes);
    if (other < plan->arena_bytes) plan->arena_bytes = place_by(plan, by_bytes_and_steps);
}

static int add_piece(vm_plan *plan, vm_category category, size_t bytes, int first, int last) {
    plan->piece[plan->pieces] =
        (vm_piece){category, first, last, vm_round_up(bytes, plan->ask.backend->device->align), 0, false};
    return (int)plan->pieces++;
}

static float scale_of(const vm_request *r, const vm_graph *g, int value) {
    return value == VM_NONE || g->value[value].exact || !r->scale ? 1 : r->scale;
}

/* A tenth of T, the largest tensor of 128 channels: with the rest of the peak that stays within 3.2 T. */
static size_t default_stripe_bytes(const vm_request *r, const vm_arch *arch) {
    enum { LEAST = 1 << 20 };
    const size_t c = VM_BLOCKS(arch->block_out_channels[0]) * VM_BLOCK;
    return VM_MAX(VM_PRODUCT(c, r->height, r->width, r->backend->element) / 10, LEAST);
}

static void set_shapes(const vm_request *r, const vm_graph *g, const vm_node *n, vm_step *step, const vm_arch *arch) {
    vm_pass *p = &step->pass;
    *p = n->pass;
    p->x.h = r->height >> n->x_level;
    p->x.w = r->width >> n->x_level;
    p->y.h = r->height >> n->y_level;
    p->y.w = r->width >> n->y_level;
    p->x_scale = scale_of(r, g, n->x);
    p->y_scale = scale_of(r, g, n->y);
    if (n->x == VM_NONE) p->x_format = r->in;
    if (n->y == VM_NONE) p->y_format = r->out;
    if (n->x == VM_NONE && r->op == VM_DECODE && r->scaled) {
        p->affine = true;
        p->in_scale = 1 / arch->scaling_factor;
        p->in_shift = arch->shift_factor;
    }
}

/* Pieces of the values: from the first node that touches one to the last. */
static void add_values(vm_plan *plan, const vm_graph *g) {
    const vm_request *r = &plan->ask;
    for (size_t v = 0; v < g->values; v++) {
        const vm_value *value = &g->value[v];
        int first = VM_NONE, last = VM_NONE;
        for (size_t i = 0; i < g->nodes; i++) {
            const vm_node *n = &g->node[i];
            if (n->x != (int)v && n->y != (int)v && n->add != (int)v) continue;
            if (first == VM_NONE) first = (int)i;
            last = (int)i;
        }
        const size_t bytes = VM_PRODUCT(VM_BLOCKS(value->c) * VM_BLOCK, r->height >> value->level,
                                        r->width >> value->level, r->backend->element);
        plan->piece_of[v] = add_piece(plan, VM_ACTIVATIONS, bytes, first, last);
    }
}

static int last_reader_of_stats(const vm_graph *g, size_t node) {
    for (size_t i = g->nodes; i-- > 0;)
        if (g->node[i].x_stats == (int)node) return (int)i;
    return (int)node;
}

static vm_status add_steps(vm_plan *plan, const vm_graph *g) {
    const vm_backend *b = plan->ask.backend;
    const vm_limits *limits = &plan->ask.limits;
    const int *piece_of = plan->piece_of;
    for (size_t i = 0; i < g->nodes; i++) {
        const vm_node *n = &g->node[i];
        vm_step *s = &plan->step[i];
        s->x = n->x == VM_NONE ? VM_NONE : piece_of[n->x];
        s->y = n->y == VM_NONE ? VM_NONE : piece_of[n->y];
        s->add = n->add == VM_NONE ? VM_NONE : piece_of[n->add];
        s->y_stats = s->x_stats = VM_NONE;
        const size_t parts = n->pass.stats ? b->parts(b, &s->pass, limits) : 0;
        if (parts)
            s->y_stats = add_piece(plan, VM_SCRATCH, VM_PRODUCT(parts, vm_stats_floats(s->pass.y.c), sizeof(float)),
                                   (int)i, last_reader_of_stats(g, i));
        if (n->x_stats != VM_NONE) {
            s->x_stats = plan->step[n->x_stats].y_stats;
            s->parts = b->parts(b, &plan->step[n->x_stats].pass, limits);
        }
        s->scratch = add_piece(plan, VM_SCRATCH, b->scratch(b, &s->pass, limits), (int)i, (int)i);
        s->workspace = VM_NONE;
        size_t bytes = 0;
        const vm_status status = b->workspace(b, &s->pass, limits, &bytes);
        if (status) {
            char sentence[VM_SENTENCE];
            snprintf(sentence, sizeof sentence, "%s", b->device->error());
            return vm_fail(status, "%s: %s", n->name, sentence);
        }
        if (bytes) s->workspace = add_piece(plan, VM_WORKSPACE, bytes, (int)i, (int)i);
    }
    return VM_OK;
}

/* The user's arrays on their way through the arena. With a batch they are there all the time, so that one item's
 * copies run beside the next one's passes. */
static void add_staging(vm_plan *plan) {
    const int last = (int)plan->steps - 1, whole = plan->ask.batch > 1;
    plan->in = plan->out = VM_NONE;
    if (!plan->staged) return;
    plan->in = add_piece(plan, VM_ACTIVATIONS, plan->in_bytes, 0, whole ? last : 0);
    plan->out = add_piece(plan, VM_OUTPUT, plan->out_bytes, whole ? 0 : last, last);
}

static size_t sum(const size_t bytes[VM_CATEGORIES]) {
    size_t total = 0;
    for (int c = 0; c < VM_CATEGORIES; c++) total = vm_sum(total, bytes[c]);
    return total;
}

static void count_live(const vm_model *m, vm_plan *plan) {
    const size_t output = plan->ask.own_output ? VM_PRODUCT(plan->out_bytes, plan->ask.batch) : 0;
    const size_t weights = vm_mem_usage(m->mem).live[VM_WEIGHTS];
    plan->own_bytes = m->mem == m->host ? plan->plan_bytes + plan->pool_bytes : 0;
    for (size_t i = 0; i < plan->steps; i++) {
        size_t *live = plan->step[i].live;
        live[VM_WEIGHTS] = weights;
        live[VM_OUTPUT] = output;
        live[VM_SCRATCH] = plan->own_bytes;
        for (size_t p = 0; p < plan->pieces; p++) {
            size_t *bytes = &live[plan->piece[p].category];
            if (plan->piece[p].first <= (int)i && (int)i <= plan->piece[p].last)
                *bytes = vm_sum(*bytes, plan->piece[p].bytes);
        }
        if (sum(live) <= sum(plan->peak)) continue;
        memcpy(plan->peak, live, sizeof plan->peak);
        plan->peak_step = i;
    }
    plan->reserved = sum((const size_t[VM_CATEGORIES]){weights, output, plan->own_bytes, plan->arena_bytes});
}

/* Bytes of one batch item of the user's pixels: images at full size, latents (or moments) at the lowest level. */
static size_t pixel_bytes(const vm_request *r, vm_format format, size_t channels, size_t divisor) {
    const size_t item = format == VM_U8_NHWC ? 1 : format == VM_F32_NCHW ? 4 : 2;
    return VM_PRODUCT(channels, item, r->height / divisor, r->width / divisor);
}

static vm_status check_request(const vm_model *m, const vm_request *r) {
    const size_t factor = vm_arch_factor(&m->arch), height = r->height, width = r->width;
    const vm_op op = r->op;
    if (!(m->parts & 1u << op))
        return vm_fail(VM_EINVAL, "%s: this VAE was loaded without its %s", op == VM_ENCODE ? "encode" : "decode",
                       op == VM_ENCODE ? "encoder" : "decoder");
    if (!r->batch) return vm_fail(VM_EINVAL, "batch: want 1 or more, got 0");
    if (!height || height % factor)
        return vm_fail(VM_EINVAL, "height: want a positive multiple of %zu, got %zu", factor, height);
    if (!width || width % factor)
        return vm_fail(VM_EINVAL, "width: want a positive multiple of %zu, got %zu", factor, width);
    if (r->scaled && !m->arch.scaling_known)
        return vm_fail(VM_EINVAL,
                       "scaled: the weights do not tell the scaling factor (sd15 and sdxl have the same "
                       "tensors); load with model= or config=");
    return VM_OK;
}

static vm_status check_fits(const vm_request *r, size_t bytes) {
    if (bytes <= PTRDIFF_MAX) return VM_OK;
    return vm_fail(VM_EOVERFLOW,
                   "size: a batch of %zu at %zu x %zu with %u threads takes more bytes than can be addressed", r->batch,
                   r->height, r->width, r->limits.threads);
}

static vm_status build(const vm_model *m, vm_plan *plan) {
    vm_request *r = &plan->ask;
    const vm_graph *g = &m->graph[r->op];
    const size_t factor = vm_arch_factor(&m->arch), latent = m->arch.latent_channels;
    const bool encode = r->op == VM_ENCODE;
    plan->staged = r->host_arrays && !r->backend->device->addressable;
    r->own_output &=
        !plan->staged; /* a staged one has its place in the arena; the host's copy is no part of the plan */
    if (!r->limits.stripe_bytes) r->limits.stripe_bytes = default_stripe_bytes(r, &m->arch);
    plan->in_bytes = pixel_bytes(r, r->in, encode ? m->arch.in_channels : latent, encode ? 1 : factor);
    plan->out_bytes = pixel_bytes(r, r->out, encode ? 2 * latent : m->arch.out_channels, encode ? factor : 1);
    add_values(plan, g);
    vm_status s = VM_OK;
    for (size_t p = 0; p < plan->pieces && !s; p++) s = check_fits(r, plan->piece[p].bytes);
    if (s) return s; /* before a backend is asked about passes of such sizes */
    for (size_t i = 0; i < g->nodes; i++) {
        set_shapes(r, g, &g->node[i], &plan->step[i], &m->arch);
        plan->rows = vm_sum(plan->rows, VM_PRODUCT(plan->step[i].pass.y.h, r->batch));
    }
    if ((s = add_steps(plan, g))) return s;
    add_staging(plan);
    place(plan);
    count_live(m, plan);
    return check_fits(r, vm_sum(plan->reserved, VM_PRODUCT(vm_sum(plan->in_bytes, plan->out_bytes), r->batch)));
}

vm_status vm_plan_new(vm_model *m, const vm_request *ask, vm_plan **out) {
    *out = NULL;
    vm_status s = check_request(m, ask);
    if (s) return s;
    const vm_graph *g = &m->graph[ask->op];
    const size_t pieces = g->values + 3 * g->nodes + 2;
    size_t bytes = 0;
    vm_put_bytes(&bytes, sizeof(vm_plan), VM_ALIGN);
    const size_t step = vm_put_bytes(&bytes, g->nodes * sizeof(vm_step), VM_ALIGN);
    const size_t piece = vm_put_bytes(&bytes, pieces * sizeof(vm_piece), VM_ALIGN);
    const size_t piece_of = vm_put_bytes(&bytes, g->values * sizeof(int), VM_ALIGN);
    char *block;
    if ((s = vm_mem_reserve(m->host, bytes, (void **)&block))) return s;
    vm_plan *plan = (vm_plan *)block;
    *plan = (vm_plan){.ask = *ask,
                      .steps = g->nodes,
                      .step = (vm_step *)(block + step),
                      .piece = (vm_piece *)(block + piece),
                      .piece_of = (int *)(block + piece_of),
                      .pool_bytes = vm_pool_bytes(ask->limits.threads),
                      .plan_bytes = bytes};
    if ((s = build(m, plan)))
        vm_plan_free(m, plan);
    else
        *out = plan;
    return s;
}

void vm_plan_free(vm_model *m, vm_plan *plan) {
    if (plan) vm_mem_unreserve(m->host, plan, plan->plan_bytes);
}
