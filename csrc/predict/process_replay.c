/* Plays a process's script on another device (process.h), event by event, so that decisions that depend on the free
 * memory are made there. The new process numbers its storages anew; `map` maps old numbers to new ones. */
#include "process_play.h"

enum { PAGE = 2 << 20 };

/* ---- a replay ---- */

/* Names and convolutions keep their numbers. */
static vm_status begin(vm_process *p, const vm_process *from) {
    uint32_t number;
    vm_status s = VM_OK;
    if (p->script->steps || p->events) return vm_fail(VM_EINVAL, VM_EXPECTED("replay", "a new process", ""));
    for (size_t i = 0; !s && i < from->script->names.count; i++)
        s = vm_names_add(&p->script->names, vm_names_get(&from->script->names, i), &number);
    for (size_t i = 0; !s && i < from->script->convs; i++) {
        s = vm_process_question(p, &from->script->conv[i], &number);
        if (!s && i < from->convs)
            p->workspaces[i] = (workspaces){from->workspaces[i].first, from->workspaces[i].next, UINT64_MAX};
    }
    return s;
}

static vm_status take(vm_process *p, const vm_process *from, const event *e, uint32_t *map) {
    const vm_trace_step *const step = from->script->step + e->from;
    const size_t count = e->until - e->from;
    size_t taken = 0;
    uint64_t *bytes, *address = NULL;
    vm_status s = vm_scratch_new(count, sizeof *bytes, &bytes);
    if (!s) s = vm_scratch_new(count, sizeof *address, &address);
    for (size_t i = 0; !s && i < count; i++) {
        if (step[i].op != VM_TRACE_TAKE) continue;
        map[step[i].id] = p->script->ids + (uint32_t)taken;
        bytes[taken++] = step[i].bytes;
    }
    if (!s && taken) s = vm_process_take(p, e->stamp, step[0].name, bytes, taken, address);
    for (size_t i = 0; !s && i < count; i++)
        if (step[i].op == VM_TRACE_TAKE) p->storage[map[step[i].id]].rounded = from->storage[step[i].id].rounded;
    vm_scratch_free(address);
    vm_scratch_free(bytes);
    return s;
}

/* Repeats a call's steps. */
static vm_status call(vm_process *p, const vm_process *from, const event *e, uint32_t *map) {
    const size_t start = p->script->steps;
    const uint32_t first = p->script->ids;
    vm_status s = VM_OK;
    for (size_t i = e->from; !s && i < e->until; i++) {
        vm_trace_step x = from->script->step[i];
        if (x.op == VM_TRACE_TAKE) map[x.id] = p->script->ids;
        if (x.op == VM_TRACE_GIVE) x.id = map[x.id];
        s = vm_process_push(p, x);
    }
    if (!s) s = vm_process_note_stretches(p, from->script, e->from, e->until, start);
    return s ? s : vm_process_run(p, start, first, NULL, NULL, NULL);
}

/* Maps each storage that the old call left to the one that the new call left in its place. left: one flag per storage
 * of the old call, true if the call left it. */
static vm_status map_left(const vm_process *p, uint32_t first, const bool *left, uint32_t old, uint32_t end,
                          uint32_t *map) {
    uint32_t id = first;
    for (; old < end; old++) {
        if (!*left++) continue;
        while (id < p->script->ids && !p->storage[id].address) id++;
        if (id == p->script->ids) return vm_fail(VM_EINVAL, VM_EXPECTED("replay", "a call that leaves as much", ""));
        map[old] = id++;
    }
    return VM_OK;
}

/* Walks the call again with the memory that is free now. */
static vm_status call_again(vm_process *p, const vm_process *from, const event *e, uint32_t *map) {
    const vm_trace_step *const step = from->script->step;
    const uint64_t total = vm_talloc_settings(p->talloc)->total_memory,
                   used = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
    const size_t start = p->script->steps;
    const uint32_t first = p->script->ids;
    uint32_t old = UINT32_MAX, end = 0, *conv = NULL;
    bool *left = NULL;
    vm_trace_vae vae = *e->again;
    vm_trace *t;
    vae.gpu.free_bytes = total > used ? total - used : 0;
    vm_status s = vm_trace_vae_build(&vae, &t);
    if (s) return s;
    for (size_t i = e->from; i < e->until; i++)
        if (step[i].op == VM_TRACE_TAKE) old = VM_MIN(old, step[i].id), end = step[i].id + 1;
    s = vm_scratch_new(t->convs, sizeof *conv, &conv);
    if (!s && old < end) s = vm_scratch_new(end - old, sizeof *left, &left);
    for (size_t i = e->from; !s && i < e->until; i++)
        if (step[i].op == VM_TRACE_TAKE || step[i].op == VM_TRACE_GIVE)
            left[step[i].id - old] = step[i].op == VM_TRACE_TAKE && step[i].bytes;
    if (!s) s = vm_process_append(p, t, conv);
    if (!s && p->convs != from->script->convs)
        s = vm_fail(VM_EINVAL, VM_EXPECTED("replay", "a call with the same convolutions", ""));
    if (!s) s = vm_process_run(p, start, first, &vae, NULL, NULL);
    if (!s && left) s = map_left(p, first, left, old, end, map);
    vm_scratch_free(left);
    vm_scratch_free(conv);
    vm_trace_free(t);
    return s;
}

/* Work and memory outside PyTorch are the same on every device. */
static vm_status read(vm_process *p, const vm_reading *was) {
    p->work = was->work;
    p->outside = was->outside;
    return vm_process_end(p, was->name);
}

static vm_status do_again(vm_process *p, const vm_process *from, const event *e, uint32_t *map) {
    switch (e->kind) {
    case EVENT_TAKE: return take(p, from, e, map);
    case EVENT_GIVE: return vm_process_give(p, map[from->script->step[e->from].id]);
    case EVENT_EMPTY: return vm_process_empty_cache(p);
    case EVENT_CALL: return e->again ? call_again(p, from, e, map) : call(p, from, e, map);
    case EVENT_RESET: return vm_process_reset_peak(p);
    default: return read(p, &from->reading[e->reading]);
    }
}

vm_status vm_process_replay(vm_process *p, const vm_process *from, bool first_only) {
    uint32_t *map = NULL;
    vm_status s = begin(p, from);
    if (!s) s = vm_scratch_new(from->script->ids, sizeof *map, &map);
    p->first_only = first_only;
    for (size_t i = 0; !s && i < from->events; i++) s = do_again(p, from, &from->event[i], map);
    vm_scratch_free(map);
    return s;
}

/* ---- the least device ---- */

/* The outcome of a replay, the same on every device from `most` on and below `refused`. */
typedef struct tried {
    uint64_t most, refused;
    bool full;
    uint64_t with_outside; /* peak of PyTorch's memory plus the memory outside it; 0 if none is outside */
} tried;

typedef struct search {
    const vm_process *p;
    bool first_only, same; /* same: a device that is no larger than needed changes nothing */
    tried *tried;
    size_t count;
} search;

/* Returns: a played process's outcome on its device. a: its allocator. */
static tried outcome(const vm_process *p, const vm_talloc *a) {
    size_t count;
    const vm_reading *reading = vm_process_readings(p, &count);
    tried t = {.most = vm_process_most_reserved(p),
               .refused = vm_talloc_get_stats(a)->least_refused,
               .full = vm_process_last_oom(p)};
    for (size_t i = 0; i < count; i++)
        if (reading[i].outside) t.with_outside = VM_MAX(t.with_outside, reading[i].peak_reserved + reading[i].outside);
    return t;
}

static vm_status try(search *s, uint64_t capacity, tried *out) {
    vm_talloc_config c = *vm_talloc_settings(s->p->talloc);
    vm_talloc *a;
    vm_process *p = NULL;
    c.total_memory = capacity;
    c.reservation = 0;
    c.history = false;
    vm_status status = vm_talloc_new(&c, &a);
    if (!status) status = vm_process_new(a, &s->p->blas, &p);
    if (!status) status = vm_process_replay(p, s->p, s->first_only);
    if (!status || (p && vm_process_last_oom(p))) {
        *out = outcome(p, a);
        status = VM_OK;
    }
    vm_process_free(p);
    vm_talloc_delete(a);
    return status;
}

static vm_status fits(search *s, uint64_t capacity, bool *out) {
    const tried *found = NULL;
    for (size_t i = 0; i < s->count && s->same && !found; i++) {
        const tried *t = &s->tried[i];
        if (t->most <= capacity && (!t->refused || capacity < t->refused)) found = t;
    }
    if (!found) {
        vm_status status = vm_scratch_grow(&s->tried, s->count, sizeof *s->tried);
        if (!status) status = try(s, VM_MAX(capacity, PAGE), &s->tried[s->count]);
        if (status) return status;
        found = &s->tried[s->count++];
    }
    *out = !found->full && found->with_outside <= capacity;
    return VM_OK;
}

vm_status vm_process_least(const vm_process *p, bool first_only, uint64_t low, uint64_t high, uint64_t *least) {
    search s = {.p = p, .first_only = first_only, .same = vm_talloc_is_plain(p->talloc)};
    uint64_t little = low < high ? low / PAGE : 0, enough = high / PAGE; /* in pages */
    bool is = false;
    for (size_t i = 0; i < p->events; i++) s.same &= !p->event[i].again;
    vm_status status = vm_scratch_grow(&s.tried, 0, sizeof *s.tried);
    if (!status) s.tried[s.count++] = outcome(p, p->talloc); /* the device with enough room */
    if (!status) status = fits(&s, enough * PAGE, &is);
    while (!status && !is) { /* `high` may be too little: with more room A1111 splits its attention less */
        little = enough;
        enough = VM_MAX(2 * enough, 1);
        if (enough > VM_TALLOC_LARGEST / PAGE) status = vm_fail(VM_EOVERFLOW, "least: no device is large enough");
        if (!status) status = fits(&s, enough * PAGE, &is);
    }
    while (!status && enough - little > 1) {
        const uint64_t middle = (little + enough) / 2;
        status = fits(&s, middle * PAGE, &is);
        if (is)
            enough = middle;
        else
            little = middle;
    }
    *least = enough * PAGE;
    vm_scratch_free(s.tried);
    return status;
}
