/* Walks a plan on a backend: takes the pieces that begin with a step, runs its pass, gives back the
 * pieces that end with it. Knows nothing of any backend.
 *
 * With run->check every step is surrounded by two tests: what the plan does not let it read is
 * filled with NaN before, and what the plan does not let it write must not have changed after.
 * Under AddressSanitizer the arena outside the step's pieces is poisoned in every run. */
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "vm.h"

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

static vm_status said(const walk *w, vm_status s) { return vm_said(w->device, s); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *address(const walk *w, int piece) {
    return piece == VM_NONE ? NULL : w->arena + w->plan->piece[piece].offset;
}

/* Rows keep the width of the value, which may be wider than the tensor in it now. */
static vm_view view(const walk *w, int piece, int value, const vm_shape *shape) {
    if (piece == VM_NONE) return (vm_view){NULL, 0, 0};
    const vm_value *v = &w->m->graph[w->plan->ask.op].value[value];
    const size_t block = shape->w * VM_BLOCK;
    return (vm_view){address(w, piece), block, VM_BLOCKS(v->c) * block};
}

static const char *user_in(const walk *w, size_t item) { return (const char *)w->run->in + item * w->plan->in_bytes; }
static char *user_out(const walk *w, size_t item) { return (char *)w->run->out + item * w->plan->out_bytes; }

static const float *weights_of(const walk *w, int tensor) {
    return tensor == VM_NONE ? NULL : (const float *)((const char *)w->m->weights + w->m->tensor[tensor].offset);
}

static vm_operands operands(const walk *w, size_t i, size_t item) {
    const vm_plan *plan = w->plan;
    const vm_node *n = &w->m->graph[plan->ask.op].node[i];
    const vm_step *s = &plan->step[i];
    const bool staged = plan->staged;
    return (vm_operands){
        .x = view(w, s->x, n->x, &s->pass.x),
        .y = view(w, s->y, n->y, &s->pass.y),
        .add = view(w, s->add, n->add, &s->pass.y),
        .x_pixels = n->x != VM_NONE ? NULL
                    : staged        ? address(w, plan->in)
                                    : user_in(w, item),
        .y_pixels = n->y != VM_NONE ? NULL
                    : staged        ? address(w, plan->out)
                                    : user_out(w, item),
        .weight = weights_of(w, n->weight),
        .bias = weights_of(w, n->bias),
        .gamma = weights_of(w, n->gamma),
        .beta = weights_of(w, n->beta),
        .x_stats = address(w, s->x_stats),
        .y_stats = address(w, s->y_stats),
        .x_parts = s->parts,
        .scratch = address(w, s->scratch),
        .workspace = address(w, s->workspace),
    };
}

static bool touched(const vm_step *s, int piece) {
    return piece == s->x || piece == s->y || piece == s->add || piece == s->x_stats || piece == s->y_stats ||
           piece == s->scratch || piece == s->workspace;
}

static bool written(const vm_step *s, int piece) {
    return piece == s->y || piece == s->y_stats || piece == s->scratch || piece == s->workspace;
}

static uint64_t fnv(uint64_t hash, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    return hash;
}

/* FNV-1a over the bytes of the arena that step i must not write; `poison` first fills those that it
 * must not read (no piece alive there) with NaN. */
static uint64_t outside(const walk *w, size_t i, bool poison) {
    const vm_plan *plan = w->plan;
    uint64_t hash = 14695981039346656037u;
    for (size_t at = 0; at < plan->arena_bytes; at += VM_ALIGN) { /* pieces begin and end at multiples of VM_ALIGN */
        bool live = false, writes = false;
        for (size_t p = 0; p < plan->pieces; p++) {
            const vm_piece *q = &plan->piece[p];
            if (q->first > (int)i || (int)i > q->last || at < q->offset || at >= q->offset + q->bytes) continue;
            live |= q->first < (int)i;
            writes |= written(&plan->step[i], (int)p);
        }
        if (poison && !live) memset(w->arena + at, 0xff, VM_ALIGN);
        if (!writes) hash = fnv(hash, w->arena + at, VM_ALIGN);
    }
    return hash;
}

static void guard(const walk *w, const vm_step *s) {
    if (!w->device->addressable) return;
    ASAN_POISON_MEMORY_REGION(w->arena, w->m->arena_bytes);
    for (size_t p = 0; p < w->plan->pieces; p++)
        if (touched(s, (int)p))
            ASAN_UNPOISON_MEMORY_REGION(w->arena + w->plan->piece[p].offset, w->plan->piece[p].bytes);
}

static void unguard(const walk *w) {
    if (w->device->addressable) ASAN_UNPOISON_MEMORY_REGION(w->arena, w->m->arena_bytes);
}

/* Runs the pass, or where it has been enqueued already only accounts for it. */
static vm_status run_pass(walk *w, size_t i, size_t item) {
    vm_step *s = &w->plan->step[i];
    const uint64_t before = w->run->check ? outside(w, i, true) : 0;
    const vm_operands at = operands(w, i, item);
    guard(w, s);
    const double start = now();
    vm_status status = said(w, w->backend->run(w->backend, &s->pass, &at, &w->exec));
    s->seconds += now() - start;
    unguard(w);
    if (!status && w->run->check && outside(w, i, false) != before)
        status = vm_fail(VM_EINVAL, "check: pass %zu (%s) wrote outside its plan", i,
                         w->m->graph[w->plan->ask.op].node[i].name);
    if (!status && !w->run->replay)
        status = said(w, w->device->step_enqueued(w->backend, i, s->pass.y.h, w->run->wait ? &w->exec : NULL));
    return status;
}

static vm_status run_step(walk *w, size_t i, size_t item, bool enqueued) {
    vm_plan *plan = w->plan;
    vm_step *s = &plan->step[i];
    for (size_t p = 0; p < plan->pieces; p++)
        if (plan->piece[p].first == (int)i) vm_mem_use(w->m->mem, plan->piece[p].category, plan->piece[p].bytes);
    const vm_usage usage = vm_mem_usage(w->m->mem);
    memcpy(s->measured, usage.live, sizeof s->measured);
    vm_status status = enqueued ? VM_OK : run_pass(w, i, item);
    for (size_t p = 0; p < plan->pieces; p++)
        if (plan->piece[p].last == (int)i || (status && plan->piece[p].first <= (int)i && (int)i < plan->piece[p].last))
            vm_mem_unuse(w->m->mem, plan->piece[p].category, plan->piece[p].bytes);
    return status;
}

/* All that the enqueued passes of an item depend on beside the backend itself. */
static uint64_t key_of(const walk *w, size_t item) {
    const vm_request *r = &w->plan->ask;
    const struct {
        const void *model, *weights, *arena, *in, *out;
        size_t op, many, staged, height, width, in_format, out_format, scaled, stripe_bytes;
        double scale;
    } all = {.model = w->m,
             .weights = w->m->weights,
             .arena = w->arena,
             .in = w->plan->staged ? NULL : user_in(w, item),
             .out = w->plan->staged ? NULL : user_out(w, item),
             .op = r->op,
             .many = r->batch > 1, /* staging lies elsewhere then */
             .staged = w->plan->staged,
             .height = r->height,
             .width = r->width,
             .in_format = r->in,
             .out_format = r->out,
             .scaled = r->scaled,
             .stripe_bytes = r->limits.stripe_bytes,
             .scale = (double)r->scale};
    return fnv(14695981039346656037u, &all, sizeof all);
}

static vm_status fetch(walk *w, size_t item) {
    return said(w, w->device->fetch(w->backend, user_out(w, item), address(w, w->plan->out), w->plan->out_bytes));
}

/* The copies of staged arrays run beside the passes: an item is sent while the one before it is computed, and fetched
 * before the next one's last pass would write over it. Passes that are enqueued whole leave no place for that. */
static vm_status run_item(walk *w, size_t item) {
    const vm_plan *plan = w->plan;
    const bool staged = plan->staged, replay = w->run->replay;
    bool enqueued = false;
    vm_status s = VM_OK;
    if (staged && replay && item) s = fetch(w, item - 1);
    if (!s && staged) s = said(w, w->device->send(w->backend, address(w, plan->in), user_in(w, item), plan->in_bytes));
    const uint64_t key = replay ? key_of(w, item) : 0; /* 0: pass by pass */
    if (!s) s = said(w, w->device->begin(w->backend, key, &enqueued));
    if (s) return s;
    for (size_t i = 0; i < plan->steps && !s; i++) {
        if (staged && !replay && item && i + 1 == plan->steps) s = fetch(w, item - 1);
        if (!s) s = run_step(w, i, item, enqueued);
    }
    const vm_status ended = w->device->end(w->backend, key, s);
    return s ? s : said(w, ended);
}

static vm_status run_items(walk *w) {
    vm_plan *plan = w->plan;
    vm_run *run = w->run;
    vm_status s = said(w, w->device->start(w->backend, run->stream));
    if (s) return s;
    for (size_t item = 0; item < plan->ask.batch && !s; item++) s = run_item(w, item);
    if (!s && plan->staged) s = fetch(w, plan->ask.batch - 1);
    /* what was enqueued must not outlive the memory that it works on: a run that failed waits too */
    const vm_status finished = w->device->finish(w->backend, s ? NULL : &w->exec, s || run->wait, &run->overflow);
    for (size_t i = 0; i < plan->steps && !s && run->wait && !run->replay; i++)
        w->device->seconds(w->backend, i, &plan->step[i].seconds);
    return s ? s : said(w, finished);
}

static vm_status reserve_arena(vm_model *m, const vm_plan *plan) {
    if (m->arena_bytes >= plan->arena_bytes) return VM_OK;
    vm_model_trim(m);
    vm_status s = vm_mem_reserve(m->mem, plan->arena_bytes, &m->arena);
    if (!s) m->arena_bytes = plan->arena_bytes;
    return s;
}

/* The output's bytes, charged to it while the run lasts; taken first where the caller has not given them. */
static vm_status open_output(const vm_model *m, const vm_plan *plan, vm_run *run) {
    vm_status s = VM_OK;
    run->out_bytes = plan->out_bytes * plan->ask.batch;
    if (!run->out) {
        run->out_mem = plan->staged ? m->host : m->mem;
        s = vm_mem_reserve(run->out_mem, run->out_bytes, &run->out);
    }
    if (!s && plan->ask.own_output) vm_mem_use(m->mem, VM_OUTPUT, run->out_bytes);
    return s;
}

/* The caller's from now on, or given back. */
static void close_output(const vm_model *m, const vm_plan *plan, vm_run *run, vm_status s) {
    if (run->out && plan->ask.own_output) vm_mem_unuse(m->mem, VM_OUTPUT, run->out_bytes);
    if (s && run->out_mem) {
        vm_mem_unreserve(run->out_mem, run->out, run->out_bytes);
        run->out = run->out_mem = NULL;
    }
}

static vm_status run_with_output(vm_model *m, vm_plan *plan, vm_run *run) {
    const vm_backend *b = plan->ask.backend;
    vm_pool *pool;
    vm_status s = reserve_arena(m, plan);
    if (!s) s = vm_mem_alloc(m->host, VM_SCRATCH, plan->pool_bytes, (void **)&pool);
    if (s) return s;
    if (!(s = vm_pool_open(pool, plan->ask.limits.threads, plan->rows, run->poll, run->poll_context))) {
        s = run_items(&(walk){m, plan, run, m->arena, b, b->device, {plan->ask.limits, pool, vm_pool_each}});
        vm_pool_close(pool);
    }
    vm_mem_free(m->host, VM_SCRATCH, pool, plan->pool_bytes);
    return s;
}

vm_status vm_plan_run(vm_model *m, vm_plan *plan, vm_run *run) {
    const vm_backend *b = plan->ask.backend;
    vm_status s = vm_weights_check(m);
    if (!s && run->check && !b->device->addressable) s = vm_fail(VM_EINVAL, "check: want a CPU, got %s", b->name);
    if (s) return s;
    vm_mem_reset_peak(m->mem);
    vm_mem_use(m->host, VM_SCRATCH, plan->plan_bytes);
    if (!(s = open_output(m, plan, run))) s = run_with_output(m, plan, run);
    vm_usage usage = vm_mem_usage(m->mem);
    memcpy(run->peak, usage.peak, sizeof run->peak);
    run->reserved = usage.live[VM_WEIGHTS] + m->arena_bytes + plan->own_bytes + usage.live[VM_OUTPUT];
    close_output(m, plan, run, s);
    vm_mem_unuse(m->host, VM_SCRATCH, plan->plan_bytes);
    if (s) vm_model_trim(m);
    return s;
}
