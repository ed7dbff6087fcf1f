/* Plays a call's steps on an allocator (play_parts.h). */
#include "play_parts.h"

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
    uint64_t *address;
    vm_status s;
    if (r->of->trace->names.count) vm_talloc_tag(a, r->of->name[step->name]);
    switch (step->op) {
    case VM_TRACE_TAKE: return vm_talloc_malloc(a, step->bytes, step->stream, &r->address[step->id]);
    case VM_TRACE_GIVE:
        address = &r->address[step->id];
        s = *address ? vm_talloc_free(a, *address) : VM_OK; /* 0: a storage of 0 bytes, or given before */
        if (!s) *address = 0;
        return s;
    case VM_TRACE_CONV: return convolve(r, r->of->conv[step->id], height);
    case VM_TRACE_EMPTY: return vm_talloc_empty_cache(a);
    case VM_TRACE_CUBLASLT:
        if (r->blas->cublaslt_use == VM_CUBLASLT_EACH) return borrow(r, r->blas->cublaslt_bytes, height);
        s = keep(r, r->blas->cublas_bytes, r->cublas[CUBLAS]); /* cuBLASLt uses cuBLAS's handle */
        if (s || r->blas->cublaslt_use == VM_CUBLASLT_SHARED) return s;
        return keep(r, r->blas->cublaslt_bytes, r->cublas[CUBLASLT]);
    case VM_TRACE_CUBLAS: return keep(r, r->blas->cublas_bytes, r->cublas[CUBLAS]);
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
    const size_t kept = (*r->cublas[CUBLAS] != 0) + (*r->cublas[CUBLASLT] != 0);
    return 1 + others + kept + (size_t)(s->num_device_alloc + s->num_device_free + s->num_ooms);
}

/* Skips a stretch that runs like the one in m. */
static void pass_over(run *r, const vm_trace_stretch *x, const memory *m) {
    const size_t bytes = (x->until - x->from) * sizeof *r->allocated;
    if (r->allocated) memcpy(r->allocated + x->from, r->allocated + m->from, bytes);
    if (r->reserved) memcpy(r->reserved + x->from, r->reserved + m->from, bytes);
    vm_talloc_count_again(r->talloc, &m->before, &m->after);
}

static vm_status play_one(run *r, size_t at, uint64_t *most) {
    uint64_t height = 0;
    const bool had[2] = {*r->cublas[CUBLAS], *r->cublas[CUBLASLT]};
    vm_status s = vm_play_step(r, &r->of->trace->step[at], &height);
    for (int k = 0; k < 2; k++) /* cuBLAS's may exist though cuBLASLt's was refused */
        if (*r->cublas[k] && !had[k]) r->kept_at[k] = at;
    if (s) return s;
    height = VM_MAX(height, vm_play_now(r->talloc, VM_TALLOC_ALLOCATED_BYTES));
    if (height > *most) *most = height, r->highest = at;
    if (r->allocated) r->allocated[at] = height;
    if (r->reserved) r->reserved[at] = vm_play_now(r->talloc, VM_TALLOC_RESERVED_BYTES);
    return VM_OK;
}

vm_status vm_play_steps(run *r) {
    const vm_trace *const t = r->of->trace;
    const size_t stretches = vm_talloc_forgets(r->talloc) ? t->stretches : 0;
    size_t at = 0, next = 0, others = 0, version = 0;
    uint64_t most = 0;
    memory *known = NULL;
    vm_status s = VM_OK;
    if (stretches) s = vm_scratch_new(t->kinds, sizeof *known, &known);
    while (!s && at < t->steps) {
        const vm_trace_stretch *x = next < stretches ? &t->stretch[next] : NULL;
        memory *m = x ? &known[x->kind] : NULL;
        if (x && at == x->from) {
            version = version_of(r, others);
            if (m->version == version) {
                pass_over(r, x, m);
                at = x->until;
                next++;
                continue;
            }
            m->before = *vm_talloc_get_stats(r->talloc);
        }
        if ((s = play_one(r, at, &most))) break;
        others += !x || at < x->from;
        if (++at != (x ? x->until : 0)) continue;
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
