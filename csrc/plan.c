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
#include <string.h>

#include "vm.h"

static bool overlap(const vm_piece *a, const vm_piece *b) { return a->first <= b->last && b->first <= a->last; }

/* Lowest offset where p meets no placed piece that it overlaps in time. */
static size_t lowest_offset(const vm_plan *plan, const vm_piece *p, const bool *placed) {
    for (size_t offset = 0;;) {
        const vm_piece *hit = NULL;
        for (size_t i = 0; i < plan->pieces && !hit; i++) {
            const vm_piece *q = &plan->piece[i];
            if (placed[i] && overlap(p, q) && offset < q->offset + q->bytes && q->offset < offset + p->bytes) hit = q;
        }
        if (!hit) return offset;
        offset = hit->offset + hit->bytes;
    }
}

/* What is placed earlier: by bytes, or by bytes times steps. Neither is always the better. */
typedef double (*vm_weigh)(const vm_piece *p);
static double by_bytes(const vm_piece *p) { return (double)p->bytes; }
static double by_bytes_and_steps(const vm_piece *p) { return (double)p->bytes * (p->last - p->first + 1); }

/* Fills the offsets; returns the height of the arena. */
static size_t place_by(vm_plan *plan, vm_weigh weigh, bool *placed) {
    size_t height = 0;
    memset(placed, 0, plan->pieces);
    for (size_t n = 0; n < plan->pieces; n++) {
        size_t next = plan->pieces;
        for (size_t i = 0; i < plan->pieces; i++)
            if (!placed[i] && (next == plan->pieces || weigh(&plan->piece[i]) > weigh(&plan->piece[next]))) next = i;
        vm_piece *p = &plan->piece[next];
        p->offset = lowest_offset(plan, p, placed);
        placed[next] = true;
        height = VM_MAX(height, p->offset + p->bytes);
    }
    return height;
}

static vm_status place(vm_model *m, vm_plan *plan) {
    bool *placed;
    vm_status s = vm_mem_alloc(m->mem, VM_SCRATCH, plan->pieces, (void **)&placed);
    if (s) return s;
    const size_t other = place_by(plan, by_bytes_and_steps, placed);
    plan->arena_bytes = place_by(plan, by_bytes, placed);
    if (other < plan->arena_bytes) plan->arena_bytes = place_by(plan, by_bytes_and_steps, placed);
    vm_mem_free(m->mem, VM_SCRATCH, placed, plan->pieces);
    return VM_OK;
}

static int add_piece(vm_plan *plan, vm_category category, size_t bytes, int first, int last) {
    plan->piece[plan->pieces] = (vm_piece){category, first, last, VM_ROUND_UP(bytes, VM_ALIGN), 0};
    return (int)plan->pieces++;
}

static vm_status value_bytes(size_t *out, const vm_value *v, size_t height, size_t width) {
    vm_status s = vm_multiply(out, VM_BLOCKS(v->c) * VM_BLOCK * sizeof(float), height >> v->level, "size");
    return s ? s : vm_multiply(out, *out, width >> v->level, "size");
}

static void set_shapes(vm_plan *plan, const vm_node *n, vm_step *step, const vm_arch *arch, bool scaled) {
    vm_pass *p = &step->pass;
    *p = n->pass;
    p->x.h = plan->height >> n->x_level;
    p->x.w = plan->width >> n->x_level;
    p->y.h = plan->height >> n->y_level;
    p->y.w = plan->width >> n->y_level;
    if (n->x == VM_NONE && plan->op == VM_ENCODE) p->x_format = plan->pixels;
    if (n->y == VM_NONE && plan->op == VM_DECODE) p->y_format = plan->pixels;
    if (n->x == VM_NONE && plan->op == VM_DECODE && scaled) {
        p->affine = true;
        p->in_scale = 1 / arch->scaling_factor;
        p->in_shift = arch->shift_factor;
    }
}

/* Pieces of the values: from the first node that touches one to the last. */
static vm_status add_values(vm_plan *plan, const vm_graph *g, int *piece_of) {
    for (size_t v = 0; v < g->values; v++) {
        int first = VM_NONE, last = VM_NONE;
        for (size_t i = 0; i < g->nodes; i++) {
            const vm_node *n = &g->node[i];
            if (n->x != (int)v && n->y != (int)v && n->add != (int)v) continue;
            if (first == VM_NONE) first = (int)i;
            last = (int)i;
        }
        size_t bytes;
        vm_status s = value_bytes(&bytes, &g->value[v], plan->height, plan->width);
        if (s) return s;
        piece_of[v] = add_piece(plan, VM_ACTIVATIONS, bytes, first, last);
    }
    return VM_OK;
}

static int last_reader_of_stats(const vm_graph *g, size_t node) {
    for (size_t i = g->nodes; i-- > 0;)
        if (g->node[i].x_stats == (int)node) return (int)i;
    return (int)node;
}

static void add_steps(vm_plan *plan, const vm_graph *g, const int *piece_of) {
    for (size_t i = 0; i < g->nodes; i++) {
        const vm_node *n = &g->node[i];
        vm_step *s = &plan->step[i];
        s->x = n->x == VM_NONE ? VM_NONE : piece_of[n->x];
        s->y = n->y == VM_NONE ? VM_NONE : piece_of[n->y];
        s->add = n->add == VM_NONE ? VM_NONE : piece_of[n->add];
        s->y_stats = s->x_stats = VM_NONE;
        const size_t parts = n->pass.stats ? plan->backend->parts(&s->pass) : 0;
        if (parts)
            s->y_stats = add_piece(plan, VM_SCRATCH, parts * vm_stats_floats(s->pass.y.c) * sizeof(float), (int)i,
                                   last_reader_of_stats(g, i));
        if (n->x_stats != VM_NONE) {
            s->x_stats = plan->step[n->x_stats].y_stats;
            s->parts = plan->backend->parts(&plan->step[n->x_stats].pass);
        }
        s->scratch = add_piece(plan, VM_SCRATCH, plan->backend->scratch(&s->pass, plan->threads), (int)i, (int)i);
    }
}

static size_t sum(const size_t bytes[VM_CATEGORIES]) {
    size_t total = 0;
    for (int c = 0; c < VM_CATEGORIES; c++) total += bytes[c];
    return total;
}

static void count_live(const vm_model *m, vm_plan *plan) {
    const size_t output = plan->own_output ? plan->out_bytes * plan->batch : 0;
    const size_t weights = vm_mem_usage(m->mem).live[VM_WEIGHTS];
    for (size_t i = 0; i < plan->steps; i++) {
        size_t *live = plan->step[i].live;
        live[VM_WEIGHTS] = weights;
        live[VM_OUTPUT] = output;
        live[VM_SCRATCH] = plan->plan_bytes + plan->pool_bytes;
        for (size_t p = 0; p < plan->pieces; p++)
            if (plan->piece[p].first <= (int)i && (int)i <= plan->piece[p].last)
                live[plan->piece[p].category] += plan->piece[p].bytes;
        if (sum(live) <= sum(plan->peak)) continue;
        memcpy(plan->peak, live, sizeof plan->peak);
        plan->peak_step = i;
    }
    plan->reserved = weights + output + plan->plan_bytes + plan->pool_bytes + plan->arena_bytes;
}

/* Bytes of one batch item of the user's pixels: images at full size, latents (or moments) at the lowest level. */
static vm_status pixel_bytes(size_t *out, const vm_plan *plan, size_t channels, bool latent, size_t factor) {
    const size_t item = !latent && plan->pixels == VM_U8_NHWC ? 1 : sizeof(float);
    const size_t h = latent ? plan->height / factor : plan->height, w = latent ? plan->width / factor : plan->width;
    vm_status s = vm_multiply(out, channels * item, h, "size");
    if (!s) s = vm_multiply(out, *out, w, "size");
    size_t whole;
    return s ? s : vm_multiply(&whole, *out, plan->batch, "size");
}

static vm_status check_size(const vm_model *m, vm_op op, size_t height, size_t width, size_t batch) {
    const size_t factor = vm_arch_factor(&m->arch);
    if (!(m->parts & 1u << op))
        return vm_fail(VM_EINVAL, "%s: this VAE was loaded without its %s", op == VM_ENCODE ? "encode" : "decode",
                       op == VM_ENCODE ? "encoder" : "decoder");
    if (!batch) return vm_fail(VM_EINVAL, "batch: want 1 or more, got 0");
    if (!height || height % factor)
        return vm_fail(VM_EINVAL, "height: want a positive multiple of %zu, got %zu", factor, height);
    if (!width || width % factor)
        return vm_fail(VM_EINVAL, "width: want a positive multiple of %zu, got %zu", factor, width);
    return VM_OK;
}

static vm_status build(vm_model *m, vm_plan *plan, bool scaled, int *piece_of) {
    const vm_graph *g = &m->graph[plan->op];
    const size_t factor = vm_arch_factor(&m->arch), latent = m->arch.latent_channels;
    const bool encode = plan->op == VM_ENCODE;
    vm_status s = pixel_bytes(&plan->in_bytes, plan, encode ? m->arch.in_channels : latent, !encode, factor);
    if (!s) s = pixel_bytes(&plan->out_bytes, plan, encode ? 2 * latent : m->arch.out_channels, encode, factor);
    if (!s) s = add_values(plan, g, piece_of); /* from here on every size fits, so the kernels' sums do too */
    if (s) return s;
    for (size_t i = 0; i < g->nodes; i++) {
        set_shapes(plan, &g->node[i], &plan->step[i], &m->arch, scaled);
        plan->rows += plan->step[i].pass.y.h * plan->batch;
    }
    add_steps(plan, g, piece_of);
    if ((s = place(m, plan))) return s;
    count_live(m, plan);
    return VM_OK;
}

vm_status vm_plan_new(vm_model *m, vm_op op, const vm_backend *backend, unsigned threads, size_t height, size_t width,
                      size_t batch, vm_format pixels, bool own_output, bool scaled, vm_plan **out) {
    *out = NULL;
    vm_status s = check_size(m, op, height, width, batch);
    if (s) return s;
    if (scaled && !m->arch.scaling_known)
        return vm_fail(VM_EINVAL,
                       "scaled: the weights do not tell the scaling factor (sd15 and sdxl have the same "
                       "tensors); load with model= or config=");
    const vm_graph *g = &m->graph[op];
    const size_t most = g->values + 2 * g->nodes;
    const size_t bytes = VM_ROUND_UP(sizeof(vm_plan) + g->nodes * sizeof(vm_step) + most * sizeof(vm_piece), VM_ALIGN);
    vm_plan *plan;
    int *piece_of;
    if ((s = vm_mem_alloc(m->mem, VM_SCRATCH, bytes, (void **)&plan))) return s;
    *plan = (vm_plan){.op = op,
                      .backend = backend,
                      .threads = threads,
                      .height = height,
                      .width = width,
                      .batch = batch,
                      .pixels = pixels,
                      .own_output = own_output,
                      .steps = g->nodes,
                      .pool_bytes = vm_pool_bytes(threads),
                      .plan_bytes = bytes};
    plan->step = (vm_step *)(plan + 1);
    plan->piece = (vm_piece *)(plan->step + g->nodes);
    if (!(s = vm_mem_alloc(m->mem, VM_SCRATCH, g->values * sizeof *piece_of, (void **)&piece_of))) {
        s = build(m, plan, scaled, piece_of);
        vm_mem_free(m->mem, VM_SCRATCH, piece_of, g->values * sizeof *piece_of);
    }
    if (s)
        vm_plan_free(m, plan);
    else
        *out = plan;
    return s;
}

void vm_plan_free(vm_model *m, vm_plan *plan) {
    if (plan) vm_mem_free(m->mem, VM_SCRATCH, plan, plan->plan_bytes);
}
