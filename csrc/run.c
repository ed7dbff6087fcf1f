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
    const vm_run *run;
    char *arena;
    vm_exec exec;
} walk;

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
    const vm_value *v = &w->m->graph[w->plan->op].value[value];
    const size_t block = shape->w * VM_BLOCK;
    return (vm_view){address(w, piece), block, VM_BLOCKS(v->c) * block};
}

static vm_operands operands(const walk *w, size_t i, size_t item) {
    const vm_plan *plan = w->plan;
    const vm_node *n = &w->m->graph[plan->op].node[i];
    const vm_step *s = &plan->step[i];
    const vm_tensor *t = w->m->tensor;
    const float *weights = w->m->weights;
    return (vm_operands){
        .x = view(w, s->x, n->x, &s->pass.x),
        .y = view(w, s->y, n->y, &s->pass.y),
        .add = view(w, s->add, n->add, &s->pass.y),
        .x_pixels = n->x == VM_NONE ? (const char *)w->run->in + item * plan->in_bytes : NULL,
        .y_pixels = n->y == VM_NONE ? (char *)w->run->out + item * plan->out_bytes : NULL,
        .weight = n->weight == VM_NONE ? NULL : weights + t[n->weight].offset,
        .bias = n->bias == VM_NONE ? NULL : weights + t[n->bias].offset,
        .gamma = n->gamma == VM_NONE ? NULL : weights + t[n->gamma].offset,
        .beta = n->beta == VM_NONE ? NULL : weights + t[n->beta].offset,
        .x_stats = address(w, s->x_stats),
        .y_stats = address(w, s->y_stats),
        .x_parts = s->parts,
        .scratch = address(w, s->scratch),
    };
}

static bool touched(const vm_step *s, int piece) {
    return piece == s->x || piece == s->y || piece == s->add || piece == s->x_stats || piece == s->y_stats ||
           piece == s->scratch;
}

static bool written(const vm_step *s, int piece) { return piece == s->y || piece == s->y_stats || piece == s->scratch; }

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
        for (size_t b = 0; !writes && b < VM_ALIGN; b++)
            hash = (hash ^ (unsigned char)w->arena[at + b]) * 1099511628211u;
    }
    return hash;
}

static void guard(const walk *w, const vm_step *s) {
    ASAN_POISON_MEMORY_REGION(w->arena, w->m->arena_bytes);
    for (size_t p = 0; p < w->plan->pieces; p++)
        if (touched(s, (int)p))
            ASAN_UNPOISON_MEMORY_REGION(w->arena + w->plan->piece[p].offset, w->plan->piece[p].bytes);
}

static void unguard(const walk *w) { ASAN_UNPOISON_MEMORY_REGION(w->arena, w->m->arena_bytes); }

static vm_status run_step(walk *w, size_t i, size_t item) {
    vm_plan *plan = w->plan;
    vm_step *s = &plan->step[i];
    for (size_t p = 0; p < plan->pieces; p++)
        if (plan->piece[p].first == (int)i) vm_mem_use(w->m->mem, plan->piece[p].category, plan->piece[p].bytes);
    const vm_usage usage = vm_mem_usage(w->m->mem);
    memcpy(s->measured, usage.live, sizeof s->measured);

    const uint64_t before = w->run->check ? outside(w, i, true) : 0;
    const vm_operands at = operands(w, i, item);
    guard(w, s);
    const double start = now();
    vm_status status = plan->backend->run(&s->pass, &at, &w->exec);
    s->seconds += now() - start;
    unguard(w);
    if (!status && w->run->check && outside(w, i, false) != before)
        status =
            vm_fail(VM_EINVAL, "check: pass %zu (%s) wrote outside its plan", i, w->m->graph[plan->op].node[i].name);

    for (size_t p = 0; p < plan->pieces; p++)
        if (plan->piece[p].last == (int)i || (status && plan->piece[p].first <= (int)i && (int)i < plan->piece[p].last))
            vm_mem_unuse(w->m->mem, plan->piece[p].category, plan->piece[p].bytes);
    return status;
}

static vm_status check_weights(const vm_model *m) {
    for (size_t i = 0; i < m->tensors; i++)
        if (!m->tensor[i].set) return vm_fail(VM_EINVAL, "weights: %s was never set", m->tensor[i].name);
    return VM_OK;
}

static vm_status reserve_arena(vm_model *m, const vm_plan *plan) {
    if (m->arena_bytes >= plan->arena_bytes) return VM_OK;
    vm_model_trim(m);
    vm_status s = vm_mem_reserve(m->mem, plan->arena_bytes, &m->arena);
    if (!s) m->arena_bytes = plan->arena_bytes;
    return s;
}

void vm_model_trim(vm_model *m) {
    vm_mem_unreserve(m->mem, m->arena, m->arena_bytes);
    m->arena = NULL;
    m->arena_bytes = 0;
}

vm_status vm_plan_run(vm_model *m, vm_plan *plan, const vm_run *run) {
    vm_pool *pool = NULL;
    vm_status s = check_weights(m);
    if (!s) s = reserve_arena(m, plan);
    if (!s) s = vm_mem_alloc(m->mem, VM_SCRATCH, plan->pool_bytes, (void **)&pool);
    if (!s) s = vm_pool_open(pool, plan->threads, plan->rows, run->poll, run->poll_context);
    if (!s) {
        walk w = {m, plan, run, m->arena, {plan->threads, pool, vm_pool_each}};
        for (size_t item = 0; item < plan->batch && !s; item++)
            for (size_t i = 0; i < plan->steps && !s; i++) s = run_step(&w, i, item);
        vm_pool_close(pool);
    }
    vm_mem_free(m->mem, VM_SCRATCH, pool, plan->pool_bytes);
    if (s) vm_model_trim(m);
    return s;
}
