/* Walks a plan on a backend: allocates the pieces that begin with a step, runs its pass, frees the pieces that end with
 * it. Independent of the backend.
 *
 * With run->check two tests surround every step. Before it, memory that the plan does not let it read is filled with
 * NaN; after it, memory that the plan does not let it write must be unchanged. Under AddressSanitizer the arena outside
 * the step's pieces is poisoned in every run. */
#include <stdint.h>
#include <string.h>

#include "../vm.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

typedef struct walk {
    vm_model *m;
    vm_plan *plan;
    vm_run *run;
    char *arena;
    const vm_backend *backend;
    const vm_device *device;
    vm_exec exec;
} walk;

static vm_status check(const walk *w, vm_status s) { return vm_device_fail(w->device, s, NULL); }

static void *address(const walk *w, int piece) {
    return piece == VM_NONE ? NULL : w->arena + w->plan->piece[piece].offset;
}

/* Returns: the rows of a node's tensor. They keep the width of their piece, which may be wider. */
static vm_view view(const walk *w, int node) {
    const vm_dtype dtype = w->backend->dtype;
    if (node == VM_NONE || w->plan->step[node].y == VM_NONE) return (vm_view){.dtype = dtype, .ring = SIZE_MAX};
    const vm_step *s = &w->plan->step[node];
    const vm_piece *p = &w->plan->piece[s->y];
    const size_t row = s->pass.y.f * s->pass.y.w * VM_BLOCK, block = w->device->channels_last ? VM_BLOCK : row;
    char *data = (char *)address(w, s->y) + s->y_block * block * vm_dtype_bytes(dtype);
    return (vm_view){data, dtype, block, p->pitch * row, p->ring};
}

/* Returns: the layout of the user's pixels for the first pass; NULL: packed. */
static const vm_numbers *numbers(const walk *w) {
    const vm_numbers *in = &w->run->in;
    return w->device->addressable || (in->row && !w->plan->staged) ? in : NULL;
}

static const char *user_in(const walk *w, size_t item) {
    const ptrdiff_t each = numbers(w) ? w->run->in.item : (ptrdiff_t)w->plan->in_bytes;
    return (const char *)w->run->in.data + (ptrdiff_t)item * each;
}

static char *user_out(const walk *w, size_t item) { return (char *)w->run->out + item * w->plan->out_bytes; }

static const void *weights_of(const walk *w, int tensor) {
    return tensor == VM_NONE ? NULL : (const char *)w->m->weights + w->m->tensor[tensor].offset;
}

static vm_operands operands(const walk *w, int node, const vm_chain *chain, size_t item) {
    const vm_plan *plan = w->plan;
    const vm_node *n = &plan->graph->node[node];
    const vm_step *s = &plan->step[node], *x = n->x == VM_NONE ? NULL : &plan->step[n->x];
    const bool staged = plan->staged;
    return (vm_operands){
        .x = view(w, n->x),
        .y = view(w, node),
        .add = view(w, n->add),
        .x_pixels = x        ? NULL
                    : staged ? address(w, plan->in)
                             : user_in(w, item),
        .numbers = numbers(w),
        .y_pixels = node + 1 < (int)plan->steps ? NULL
                    : staged                    ? address(w, plan->out)
                                                : user_out(w, item),
        .weight = weights_of(w, n->weight),
        .bias = weights_of(w, n->bias),
        .gamma = weights_of(w, n->gamma),
        .beta = weights_of(w, n->beta),
        .x_stats = n->pass.norm == VM_NORM_GROUP ? address(w, x->y_stats) : NULL,
        .y_stats = address(w, s->y_stats),
        .x_parts = n->pass.norm == VM_NORM_GROUP ? x->parts : 0,
        .prepared = address(w, s->prepared),
        .manner = vm_chain_manner(plan, chain, node),
        .scratch = address(w, chain->scratch),
        .scratch_each = plan->piece[chain->scratch].bytes / plan->request.limits.threads,
        .workspace = address(w, chain->workspace),
        .overflow = &w->run->overflow,
    };
}

/* Returns: whether a chain may write to a piece. */
static bool written(const walk *w, const vm_chain *c, int piece) {
    bool is = piece == c->scratch || piece == c->workspace;
    for (int i = c->first; i <= c->last; i++) {
        const vm_step *s = &w->plan->step[i];
        is |= piece == s->y || piece == s->y_stats || piece == s->prepared;
    }
    return is;
}

/* Returns: whether a chain may read or write a piece. */
static bool touched(const walk *w, const vm_chain *c, int piece) {
    bool is = written(w, c, piece);
    for (int i = c->first; i <= c->last; i++) {
        const vm_node *n = &w->plan->graph->node[i];
        if (n->x != VM_NONE) is |= piece == w->plan->step[n->x].y || piece == w->plan->step[n->x].y_stats;
        if (n->add != VM_NONE) is |= piece == w->plan->step[n->add].y;
    }
    return is;
}

static uint64_t fnv(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return hash;
}

/* Hashes (FNV-1a) the bytes of the arena that chain c must not write; `poison` first fills those that it must not read
 * (no live piece there) with NaN. */
static uint64_t outside(const walk *w, int c, bool poison) {
    const vm_plan *plan = w->plan;
    uint64_t hash = 14695981039346656037u;
    for (size_t at = 0; at < plan->arena_bytes; at += VM_ALIGN) { /* pieces begin and end at multiples of VM_ALIGN */
        bool live = false, writes = false;
        for (size_t p = 0; p < plan->pieces; p++) {
            const vm_piece *q = &plan->piece[p];
            if (q->first > c || c > q->last || at < q->offset || at >= q->offset + q->bytes) continue;
            live |= q->first < c;
            writes |= written(w, &plan->chain[c], (int)p);
        }
        if (poison && !live) memset(w->arena + at, 0xff, VM_ALIGN);
        if (!writes) hash = fnv(hash, w->arena + at, VM_ALIGN);
    }
    return hash;
}

static void guard(const walk *w, const vm_chain *c) {
    if (!w->device->addressable) return;
    ASAN_POISON_MEMORY_REGION(w->arena, w->m->arena_bytes);
    for (size_t p = 0; p < w->plan->pieces; p++)
        if (touched(w, c, (int)p))
            ASAN_UNPOISON_MEMORY_REGION(w->arena + w->plan->piece[p].offset, w->plan->piece[p].bytes);
}

static void unguard(const walk *w) {
    if (w->device->addressable) ASAN_UNPOISON_MEMORY_REGION(w->arena, w->m->arena_bytes);
}

/* Makes the host wait now and then while it enqueues. */
static vm_status keep_pace(const walk *w, size_t step, size_t rows) {
    return check(w, w->device->step_enqueued(w->backend, step, rows, w->run->wait ? &w->exec : NULL));
}

/* Enqueues a round step by step, on a device whose tiles are not tasks. */
static vm_status enqueue_round(const walk *w, vm_stage *stage, const vm_tasks *tasks, size_t stages) {
    vm_status s;
    while (vm_chain_step(stage, stages)) {
        size_t rows = 0;
        for (size_t i = 0; i < stages; i++) {
            const vm_stage *at = &stage[i];
            rows += vm_stage_made(at, at->done + at->now) - vm_stage_made(at, at->done);
            if (at->now && (s = check(w, tasks[i].rows(&tasks[i], at->done, at->now)))) return s;
        }
        if ((s = w->exec.each(w->exec.pool, 0, rows, NULL, NULL))) return s;
        if ((s = keep_pace(w, SIZE_MAX, 0))) return s;
    }
    return VM_OK;
}

/* Runs row by row. Each pass is prepared in its first round. */
static vm_status run_stepped(walk *w, const vm_chain *c, size_t item) {
    vm_stage stage[VM_CHAIN];
    vm_tasks tasks[VM_CHAIN];
    vm_operands at[VM_CHAIN];
    bool ready[VM_CHAIN] = {false};
    int target;
    vm_status s = VM_OK;
    const size_t stages = vm_chain_stages(w->plan, c, stage);
    for (size_t round = 0; !s && vm_chain_round(w->plan, c->first, stage, stages, round, &target); round++) {
        for (size_t i = 0; i < stages && !s; i++) {
            if (!stage[i].active || ready[i]) continue;
            const vm_pass *pass = &w->plan->step[c->first + (int)i].pass;
            at[i] = operands(w, c->first + (int)i, c, item);
            s = check(w, w->backend->prepare(w->backend, pass, &at[i], &w->exec, &tasks[i]));
            ready[i] = true;
        }
        if (s) break;
        const size_t last = target == VM_NONE ? stages - 1 : (size_t)target;
        s = tasks[last].fn ? vm_flow_run(w->plan, c, stage, tasks, stages, &w->exec)
                           : enqueue_round(w, stage, tasks, stages);
    }
    return s;
}

/* Divides a chain's time among its passes by their share of the work. */
static void share_seconds(const walk *w, const vm_chain *c, double seconds) {
    double flops = 0;
    for (int i = c->first; i <= c->last; i++) flops += w->plan->step[i].flops;
    for (int i = c->first; i <= c->last; i++) w->plan->step[i].seconds += seconds * w->plan->step[i].flops / flops;
}

/* Runs the chain, or only counts it if it is enqueued already. */
static vm_status run_passes(walk *w, int i, size_t item) {
    const vm_chain *c = &w->plan->chain[i];
    const vm_pass *first = &w->plan->step[c->first].pass;
    const uint64_t before = w->run->check ? outside(w, i, true) : 0;
    const vm_operands at = operands(w, c->first, c, item);
    guard(w, c);
    const double start = vm_now();
    vm_status status =
        c->stepped ? run_stepped(w, c, item) : check(w, w->backend->run(w->backend, first, &at, &w->exec));
    share_seconds(w, c, vm_now() - start);
    unguard(w);
    if (status) return status;
    if (w->run->check && outside(w, i, false) != before)
        return vm_fail(VM_EINVAL, "check: %s wrote outside its plan", w->plan->graph->node[c->first].name);
    return keep_pace(w, (size_t)i, c->stepped ? 0 : first->y.h);
}

static vm_status run_chain(walk *w, int c, size_t item, bool enqueued) {
    vm_plan *plan = w->plan;
    vm_mem *mem = w->m->mem;
    for (vm_piece *p = plan->piece; p < plan->piece + plan->pieces; p++)
        if (p->first == c) vm_mem_use(mem, p->category, p->bytes - p->shared);
    const vm_usage usage = vm_mem_usage(mem);
    memcpy(plan->chain[c].measured, usage.live, sizeof usage.live);
    vm_status status = enqueued ? VM_OK : run_passes(w, c, item);
    for (vm_piece *p = plan->piece; p < plan->piece + plan->pieces; p++) {
        const bool gone = p->last == c || (status && p->first <= c && c < p->last);
        if (gone) vm_mem_unuse(mem, p->category, p->bytes - (p->first == c ? p->shared : 0));
    }
    for (vm_piece *p = plan->piece; p < plan->piece + plan->pieces; p++) /* its source has gone */
        if (p->first == c && p->last != c && !status) vm_mem_use(mem, p->category, p->shared);
    return status;
}

/* Hashes the plan's addresses and manners. */
static uint64_t hash_of(const vm_plan *plan) {
    uint64_t hash = 14695981039346656037u;
    for (const vm_chain *c = plan->chain; c < plan->chain + plan->chains; c++)
        hash = fnv(hash, (size_t[]){(size_t)c->last, c->stepped, c->tight}, 3 * sizeof(size_t));
    for (const vm_piece *p = plan->piece; p < plan->piece + plan->pieces; p++)
        hash = fnv(hash, (size_t[]){p->offset, p->bytes, p->pitch, p->ring}, 4 * sizeof(size_t));
    for (const vm_step *s = plan->step; s < plan->step + plan->steps; s++)
        hash = fnv(hash, (size_t[]){(size_t)s->y, s->y_block}, 2 * sizeof(size_t));
    return hash;
}

/* Hashes everything that an item's enqueued passes depend on, except the backend itself. */
static uint64_t key_of(const walk *w, size_t item) {
    const vm_request *r = &w->plan->request;
    const struct {
        const void *model, *weights, *arena, *in, *out;
        size_t op, many, staged, frames, height, width, in_row, in_channel, in_format, out_format, scaled, unclamped;
        uint64_t plan;
        double scale;
    } all = {.model = w->m,
             .weights = w->m->weights,
             .arena = w->arena,
             .in = w->plan->staged ? NULL : user_in(w, item),
             .out = w->plan->staged ? NULL : user_out(w, item),
             .op = r->op,
             .many = r->batch > 1, /* changes the place of staging */
             .staged = w->plan->staged,
             .frames = r->frames,
             .height = r->height,
             .width = r->width,
             .in_row = (size_t)w->run->in.row,
             .in_channel = (size_t)w->run->in.channel,
             .in_format = r->in,
             .out_format = r->out,
             .scaled = r->scaled,
             .unclamped = r->unclamped,
             .plan = hash_of(w->plan),
             .scale = (double)r->scale};
    return fnv(14695981039346656037u, &all, sizeof all);
}

static vm_status fetch(walk *w, size_t item) {
    return check(w, w->device->fetch(w->backend, user_out(w, item), address(w, w->plan->out), w->plan->out_bytes));
}

/* The copies of staged arrays run in parallel with the passes: an item is sent during the previous item's passes, and
 * fetched before the next one's last pass would overwrite it. Passes that are enqueued whole leave no room for that. */
static vm_status run_item(walk *w, size_t item) {
    const vm_plan *plan = w->plan;
    const bool staged = plan->staged, replay = w->run->replay;
    bool enqueued = false;
    vm_status s;
    if (staged && replay && item && (s = fetch(w, item - 1))) return s;
    if (staged && (s = check(w, w->device->send(w->backend, address(w, plan->in), user_in(w, item), plan->in_bytes))))
        return s;
    const uint64_t key = replay ? key_of(w, item) : 0; /* 0: pass by pass */
    if ((s = check(w, w->device->begin(w->backend, key, &enqueued)))) return s;
    for (size_t i = 0; i < plan->chains; i++) {
        if (staged && !replay && item && i + 1 == plan->chains && (s = fetch(w, item - 1))) break;
        if ((s = run_chain(w, (int)i, item, enqueued))) break;
    }
    const vm_status ended = w->device->end(w->backend, key, s);
    return s ? s : check(w, ended);
}

static vm_status run_items(walk *w) {
    vm_plan *plan = w->plan;
    vm_run *run = w->run;
    vm_status s = check(w, w->device->start(w->backend, run->stream));
    if (s) return s;
    for (size_t item = 0; item < plan->request.batch && !s; item++) s = run_item(w, item);
    if (!s && plan->staged) s = fetch(w, plan->request.batch - 1);
    /* enqueued work must not outlive its memory: a failed run waits too */
    const vm_status finished = w->device->finish(w->backend, s ? NULL : &w->exec, s || run->wait, &run->overflow);
    for (size_t i = 0; i < plan->chains && !s && run->wait && !run->replay; i++) {
        const vm_chain *c = &plan->chain[i];
        double seconds = 0;
        for (int n = c->first; n <= c->last; n++) seconds += plan->step[n].seconds, plan->step[n].seconds = 0;
        w->device->seconds(w->backend, i, &seconds);
        share_seconds(w, c, seconds);
    }
    return s ? s : check(w, finished);
}

/* Keeps an earlier run's arena if it is large enough and, with everything else, within the limit. */
static vm_status reserve_arena(vm_model *m, const vm_plan *plan) {
    const size_t limit = plan->request.memory_limit, rest = plan->reserved - plan->arena_bytes;
    if (m->arena_bytes >= plan->arena_bytes && (!limit || m->arena_bytes <= limit - rest)) return VM_OK;
    vm_model_trim_arena(m);
    vm_status s = vm_mem_reserve(m->mem, plan->arena_bytes, &m->arena);
    if (!s) m->arena_bytes = plan->arena_bytes;
    return s;
}

/* Charges the output's bytes while the run lasts; allocates them first unless the caller gave them. */
static vm_status open_output(const vm_model *m, const vm_plan *plan, vm_run *run) {
    vm_status s = VM_OK;
    run->out_bytes = plan->out_bytes * plan->request.batch;
    if (!run->out) {
        run->out_mem = plan->staged ? m->host : m->mem;
        s = vm_mem_reserve(run->out_mem, run->out_bytes, &run->out);
    }
    if (!s && plan->request.own_output) vm_mem_use(m->mem, VM_OUTPUT, run->out_bytes);
    return s;
}

/* Transfers the output to the caller, or frees it. */
static void close_output(const vm_model *m, const vm_plan *plan, vm_run *run, vm_status s) {
    if (run->out && plan->request.own_output) vm_mem_unuse(m->mem, VM_OUTPUT, run->out_bytes);
    if (s && run->out_mem) {
        vm_mem_unreserve(run->out_mem, run->out, run->out_bytes);
        run->out = run->out_mem = NULL;
    }
}

static vm_status run_with_output(vm_model *m, vm_plan *plan, vm_run *run) {
    const vm_backend *b = plan->request.backend;
    vm_pool *pool;
    vm_status s;
    if ((s = reserve_arena(m, plan))) return s;
    if ((s = vm_mem_alloc(m->host, VM_SCRATCH, plan->pool_bytes, (void **)&pool))) return s;
    if (!(s = vm_pool_open(pool, plan->request.limits.threads, plan->rows, run->poll, run->poll_context))) {
        s = run_items(&(walk){m, plan, run, m->arena, b, b->device, {plan->request.limits, pool, vm_pool_each}});
        vm_pool_close(pool);
    }
    vm_mem_free(m->host, VM_SCRATCH, pool, plan->pool_bytes);
    return s;
}

vm_status vm_plan_run(vm_model *m, vm_plan *plan, vm_run *run) {
    const vm_backend *b = plan->request.backend;
    vm_status s;
    if ((s = vm_weights_check(m))) return s;
    if (run->check && !b->device->addressable) return vm_fail(VM_EINVAL, VM_EXPECTED("check", "a CPU", "%s"), b->name);
    run->overflow = false;
    for (size_t i = 0; i < plan->steps; i++) plan->step[i].seconds = 0;
    vm_mem_reset_peak(m->mem);
    vm_mem_use(m->host, VM_SCRATCH, plan->plan_bytes);
    if (!(s = open_output(m, plan, run))) s = run_with_output(m, plan, run);
    vm_usage usage = vm_mem_usage(m->mem);
    memcpy(run->peak, usage.peak, sizeof run->peak);
    run->reserved =
        vm_held(b, usage.live[VM_WEIGHTS]) + m->arena_bytes + plan->own_bytes + vm_held(b, usage.live[VM_OUTPUT]);
    close_output(m, plan, run, s);
    vm_mem_unuse(m->host, VM_SCRATCH, plan->plan_bytes);
    if (s) vm_model_trim_arena(m);
    return s;
}
