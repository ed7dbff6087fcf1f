/* Plays steps of a process's script on an allocator. */
#include "process_play.h"

#include <string.h>

uint64_t vm_play_now(const vm_talloc *a, vm_talloc_kind kind) {
    return (uint64_t)vm_talloc_get_stats(a)->of[kind][VM_TALLOC_ALL].current;
}

/* Allocates and frees a workspace; *height: allocated bytes in between. */
static vm_status borrow(run *r, uint64_t bytes, uint64_t *height) {
    uint64_t address;
    vm_status s = vm_talloc_malloc(r->talloc, bytes, 0, &address);
    if (s || !address) return s;
    *height = vm_play_now(r->talloc, VM_TALLOC_ALLOCATED_BYTES);
    return vm_talloc_free(r->talloc, address);
}

static vm_status keep(run *r, uint64_t bytes, uint64_t *address) {
    return *address ? VM_OK : vm_talloc_malloc(r->talloc, bytes, 0, address);
}

/* A convolution's workspace: of the first plan, otherwise of the next (try_configs in Conv_v8.cpp). */
static vm_status convolve(run *r, uint32_t id, uint64_t *height) {
    vm_status s = borrow(r, r->workspace[id], height);
    if (s != VM_ENOMEM || !vm_talloc_last_oom(r->talloc) || !r->next || r->next[id] >= r->workspace[id]) return s;
    r->workspace[id] = r->next[id];
    return borrow(r, r->workspace[id], height);
}

vm_status vm_play_step(run *r, const vm_trace_step *step, uint64_t *height) {
    vm_talloc *const a = r->talloc;
    const bool stored = step->op == VM_TRACE_TAKE || step->op == VM_TRACE_GIVE;
    uint64_t *const address = stored ? &r->storage[step->id].address : NULL;
    vm_status s;
    vm_talloc_tag(a, r->stamp ? *r->stamp : step->name);
    switch (step->op) {
    case VM_TRACE_TAKE: return vm_talloc_malloc(a, step->bytes, step->stream, address);
    case VM_TRACE_GIVE:
        s = *address ? vm_talloc_free(a, *address) : VM_OK; /* 0: a storage of 0 bytes */
        if (!s) *address = 0;
        return s;
    case VM_TRACE_CONV: return convolve(r, step->id, height);
    case VM_TRACE_EMPTY: return vm_talloc_empty_cache(a);
    case VM_TRACE_CUBLASLT:
        if (r->blas->cublaslt_use == VM_CUBLASLT_EACH) return borrow(r, r->blas->cublaslt_bytes, height);
        s = keep(r, r->blas->cublas_bytes, &r->kept[CUBLAS].address); /* cuBLASLt uses cuBLAS's handle */
        if (s || r->blas->cublaslt_use == VM_CUBLASLT_SHARED) return s;
        return keep(r, r->blas->cublaslt_bytes, &r->kept[CUBLASLT].address);
    case VM_TRACE_CUBLAS: return keep(r, r->blas->cublas_bytes, &r->kept[CUBLAS].address);
    default: return VM_OK;
    }
}

/* A kind of stretch: its last one, and the counters around it, if it changed nothing else. */
typedef struct memory {
    size_t version, from; /* version: the allocator's at that time; 0: never */
    vm_talloc_stats before, after;
} memory;

/* Between stretches, equal numbers mean equal blocks. others: steps played outside of stretches. */
static size_t version_of(const run *r, size_t others) {
    const vm_talloc_stats *s = vm_talloc_get_stats(r->talloc);
    const size_t kept = (r->kept[CUBLAS].address != 0) + (r->kept[CUBLASLT].address != 0);
    return 1 + others + kept + (size_t)(s->num_device_alloc + s->num_device_free + s->num_ooms);
}

/* Skips a stretch that runs like the one in m. start: the first step of r's heights. */
static void pass_over(run *r, const vm_trace_stretch *x, const memory *m, size_t start) {
    const size_t to = x->from - start, from = m->from - start, bytes = (x->until - x->from) * sizeof *r->allocated;
    if (r->allocated) memcpy(r->allocated + to, r->allocated + from, bytes);
    if (r->reserved) memcpy(r->reserved + to, r->reserved + from, bytes);
    vm_talloc_count_again(r->talloc, &m->before, &m->after);
}

static vm_status play_one(run *r, const vm_trace *script, size_t at, size_t start, uint64_t *most) {
    uint64_t height = 0;
    vm_status s = vm_play_step(r, &script->step[at], &height);
    for (int k = 0; k < 2; k++) /* cuBLAS's may exist though cuBLASLt's was refused */
        if (r->kept[k].address && r->kept[k].step == NEVER) r->kept[k].step = at;
    if (s) return s;
    height = VM_MAX(height, vm_play_now(r->talloc, VM_TALLOC_ALLOCATED_BYTES));
    if (height > *most) *most = height, r->highest = at;
    if (r->allocated) r->allocated[at - start] = height;
    if (r->reserved) r->reserved[at - start] = vm_play_now(r->talloc, VM_TALLOC_RESERVED_BYTES);
    return VM_OK;
}

vm_status vm_play(run *r, const vm_trace *script, size_t *at, size_t until) {
    const size_t start = *at;
    size_t next = script->stretches, others = 0, version = 0;
    uint64_t most = 0;
    memory *known = NULL;
    vm_status s = VM_OK;
    while (next && script->stretch[next - 1].from >= start) next--;
    if (!vm_talloc_forgets(r->talloc)) next = script->stretches;
    /* A call's first stretch is of its first kind. */
    const uint32_t first = next < script->stretches ? script->stretch[next].kind : script->kinds;
    if (first < script->kinds) s = vm_scratch_new(script->kinds - first, sizeof *known, &known);
    while (!s && *at < until) {
        const vm_trace_stretch *x = next < script->stretches ? &script->stretch[next] : NULL;
        memory *m = x ? &known[x->kind - first] : NULL;
        if (x && *at == x->from) {
            version = version_of(r, others);
            if (m->version == version) {
                pass_over(r, x, m, start);
                *at = x->until;
                next++;
                continue;
            }
            m->before = *vm_talloc_get_stats(r->talloc);
        }
        if ((s = play_one(r, script, *at, start, &most))) break;
        others += !x || *at < x->from;
        if (++*at != (x ? x->until : 0)) continue;
        if (version_of(r, others) == version) {
            m->version = version;
            m->from = x->from;
            m->after = *vm_talloc_get_stats(r->talloc);
        }
        next++;
    }
    vm_scratch_free(known);
    return s;
}
