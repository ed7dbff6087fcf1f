/* Plays a script's events (play.h). */
#include <string.h>

#include "play_parts.h"

vm_status vm_play_new(const vm_script *script, vm_talloc *talloc, const vm_blas *blas, uint64_t memory, vm_play **out) {
    vm_play *p;
    *out = NULL;
    const vm_status s = vm_scratch_new(1, sizeof *p, &p);
    if (s) return s;
    p->script = script;
    p->talloc = talloc;
    p->blas = *blas;
    p->memory = memory;
    p->kept[CUBLAS].first.event = p->kept[CUBLASLT].first.event = NEVER;
    *out = p;
    return VM_OK;
}

static void free_heights(vm_heights *h) {
    vm_scratch_free(h->allocated);
    vm_scratch_free(h->reserved);
    *h = (vm_heights){0};
}

void vm_play_free(vm_play *p) {
    if (!p) return;
    for (size_t i = 0; i < p->walks; i++) vm_called_free(&p->walked[i].called);
    vm_scratch_free(p->walked);
    vm_scratch_free(p->reached);
    vm_scratch_free(p->stored);
    vm_scratch_free(p->address);
    vm_scratch_free(p->workspaces);
    vm_scratch_free(p->reading);
    vm_scratch_free(p->reading_peak);
    free_heights(&p->heights);
    vm_talloc_delete(p->owned);
    vm_scratch_free(p);
}

const vm_script *vm_play_script(const vm_play *p) { return p->script; }
const vm_talloc *vm_play_device(const vm_play *p) { return p->talloc; }
const vm_talloc_oom *vm_play_oom(const vm_play *p) { return p->full ? &p->oom : NULL; }
size_t vm_play_refused(const vm_play *p) { return p->refused; }
bool vm_play_walked(const vm_play *p) { return p->walks; }
bool vm_play_has(const vm_play *p, uint32_t storage) { return storage < p->storages && p->stored[storage].address; }
const vm_heights *vm_play_heights(const vm_play *p) { return &p->heights; }

void vm_play_note_heights(vm_play *p, bool notes) {
    p->notes_heights = notes;
    free_heights(&p->heights);
}

const vm_reading *vm_play_readings(const vm_play *p, size_t *count) {
    *count = p->readings;
    return p->reading;
}

static uint64_t peak_of(const vm_play *p, vm_talloc_kind kind) {
    return (uint64_t)vm_talloc_get_stats(p->talloc)->of[kind][VM_TALLOC_ALL].peak;
}

uint64_t vm_play_most_reserved(const vm_play *p) {
    return VM_MAX(p->most_reserved, peak_of(p, VM_TALLOC_RESERVED_BYTES));
}

const vm_called *vm_play_called(const vm_play *p, size_t event) {
    for (size_t i = 0; i < p->walks; i++)
        if (p->walked[i].event == event) return &p->walked[i].called;
    return &p->script->call[p->script->event[event].of];
}

/* ---- room for what the script says ---- */

static vm_status widen(void *array, size_t *count, size_t items, size_t item_bytes) {
    const size_t room = vm_mem_capacity(items);
    if (room > vm_mem_capacity(*count)) {
        const vm_status s = vm_scratch_widen(array, *count, room, item_bytes);
        if (s) return s;
    }
    *count = VM_MAX(*count, items);
    return VM_OK;
}

static vm_status make_room(vm_play *p) {
    const size_t known = p->convs;
    vm_status s;
    if ((s = widen(&p->stored, &p->storages, p->script->storages, sizeof *p->stored))) return s;
    if ((s = widen(&p->workspaces, &p->convs, p->script->convs, sizeof *p->workspaces))) return s;
    for (size_t i = known; i < p->convs; i++) p->workspaces[i] = (workspaces){.most = UINT64_MAX};
    return VM_OK;
}

vm_status vm_play_answer(vm_play *p, const uint64_t *workspace, const uint64_t *next) {
    const vm_status s = make_room(p);
    for (size_t i = 0; !s && i < p->convs; i++) p->workspaces[i].first = workspace[i], p->workspaces[i].next = next[i];
    return s;
}

vm_status vm_play_answer_call(vm_play *p, const vm_called *c, const uint64_t *workspace, const uint64_t *next) {
    const vm_status s = make_room(p);
    for (size_t i = 0; !s && i < c->trace->convs; i++)
        p->workspaces[c->conv[i]].first = workspace[i], p->workspaces[c->conv[i]].next = next[i];
    return s;
}

vm_status vm_play_elsewhere(const vm_play *like, vm_talloc *talloc, uint64_t memory, bool first_only, vm_play **out) {
    vm_talloc *own = NULL;
    vm_status s;
    *out = NULL;
    if (!talloc) {
        vm_talloc_config c = *vm_talloc_settings(like->talloc);
        c.total_memory = memory;
        c.reservation = 0;
        c.history = false;
        if ((s = vm_talloc_new(&c, &own))) return s;
    }
    if ((s = vm_play_new(like->script, talloc ? talloc : own, &like->blas, memory, out))) {
        vm_talloc_delete(own);
        return s;
    }
    (*out)->owned = own;
    (*out)->first_only = first_only;
    s = make_room(*out);
    for (size_t i = 0; !s && i < like->convs; i++)
        (*out)->workspaces[i] = (workspaces){like->workspaces[i].first, like->workspaces[i].next, UINT64_MAX};
    if (!s) return VM_OK;
    vm_play_free(*out);
    *out = NULL;
    return s;
}

/* Copies an array that grows. */
static vm_status copy_array(void *copy, const void *of, size_t count, size_t item_bytes) {
    const vm_status s = vm_scratch_new(vm_mem_capacity(count), item_bytes, copy);
    if (!s && count) memcpy(*(void **)copy, of, count * item_bytes);
    return s;
}

vm_status vm_play_branch(const vm_play *p, uint64_t memory, vm_play **out) {
    vm_talloc *talloc;
    vm_play *c;
    *out = NULL;
    vm_status s = vm_talloc_copy(p->talloc, memory, &talloc);
    if (s) return s;
    if ((s = vm_play_new(p->script, talloc, &p->blas, memory, &c))) {
        vm_talloc_delete(talloc);
        return s;
    }
    *c = *p;
    c->talloc = c->owned = talloc;
    c->memory = memory;
    c->address = NULL, c->ids = 0; /* no call is in progress */
    c->heights = (vm_heights){0};
    c->notes_heights = false;
    c->reached = NULL, c->stored = NULL, c->workspaces = NULL, c->reading = NULL, c->reading_peak = NULL;
    if ((s = copy_array(&c->reached, p->reached, p->event, sizeof *p->reached))) goto done;
    if ((s = copy_array(&c->stored, p->stored, p->storages, sizeof *p->stored))) goto done;
    if ((s = copy_array(&c->workspaces, p->workspaces, p->convs, sizeof *p->workspaces))) goto done;
    if ((s = copy_array(&c->reading, p->reading, p->readings, sizeof *p->reading))) goto done;
    s = copy_array(&c->reading_peak, p->reading_peak, p->readings, sizeof *p->reading_peak);
done:
    if (s)
        vm_play_free(c);
    else
        *out = c;
    return s;
}

/* ---- events ---- */

/* Notes a new peak among the steps played. steps: up to the highest one. */
static void note_peak(vm_play *p, place at, uint64_t workspace) {
    const uint64_t most = peak_of(p, VM_TALLOC_ALLOCATED_BYTES);
    if (!at.steps || most <= p->peak_bytes) return;
    p->peak_bytes = most;
    p->peak = (peak){at, workspace};
}

static vm_status give(vm_play *p, uint32_t id) {
    stored *const one = &p->stored[id];
    if (!one->address) return VM_OK; /* a storage of 0 bytes */
    const vm_status s = vm_talloc_free(p->talloc, one->address);
    if (!s) one->address = 0;
    return s;
}

/* Takes an event's storages. Each may replace another storage, which keeps the count of rounded bytes. */
static vm_status take(vm_play *p, const vm_event *e, size_t *taken) {
    uint64_t before = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
    place highest = {p->event, 0};
    vm_status s = VM_OK;
    vm_talloc_tag(p->talloc, e->stamp);
    for (*taken = 0; !s && *taken < e->count; ++*taken) {
        const uint64_t bytes = p->script->storage[e->first + *taken].bytes;
        stored *const one = &p->stored[e->first + *taken];
        if ((s = vm_talloc_malloc(p->talloc, bytes, 0, &one->address))) break;
        const uint64_t now = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
        if (!e->goes) one->rounded = (uint32_t)VM_MIN(now - before - bytes, UINT32_MAX);
        if (bytes) highest.steps = *taken + 1;
        if (e->goes) {
            note_peak(p, highest, 0);
            s = give(p, p->script->going[e->gone + *taken]);
        }
        before = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
    }
    note_peak(p, highest, 0);
    return s;
}

static vm_status give_all(vm_play *p, const vm_event *e) {
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < e->goes; i++) s = give(p, p->script->going[e->gone + i]);
    return s;
}

/* Walks a call with the memory that is free now. */
static vm_status walk(vm_play *p, const vm_event *e) {
    const uint64_t used = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
    vm_trace_vae vae = *p->script->call[e->of].trace->walk;
    vm_trace *t;
    vae.gpu.free_bytes = p->memory > used ? p->memory - used : 0;
    vm_status s;
    if ((s = vm_scratch_grow(&p->walked, p->walks, sizeof *p->walked))) return s;
    if ((s = vm_trace_vae_build(&vae, &t))) return s;
    walked *const w = &p->walked[p->walks];
    *w = (walked){.event = p->event};
    s = vm_script_find(p->script, t, &w->called);
    vm_trace_free(t); /* the walked call shares it */
    if (s) return s;
    p->walks++;
    return w->called.lefts == e->count ? VM_OK
                                       : vm_fail(VM_EINVAL, VM_EXPECTED("call", "a walk that leaves as much", ""));
}

/* Makes arrays for the heights of a call's steps, if they are wanted. */
static vm_status begin_heights(vm_play *p, const vm_called *c) {
    free_heights(&p->heights);
    if (!p->notes_heights) return VM_OK;
    vm_status s;
    if ((s = vm_scratch_new(c->trace->steps, sizeof *p->heights.allocated, &p->heights.allocated))) return s;
    if ((s = vm_scratch_new(c->trace->steps, sizeof *p->heights.reserved, &p->heights.reserved))) return s;
    p->heights.of = c;
    return VM_OK;
}

/* workspace, next: [convs], of the convolutions now. */
static vm_status list_workspaces(const vm_play *p, uint64_t **workspace, uint64_t **next) {
    vm_status s;
    if ((s = vm_scratch_new(p->convs, sizeof **workspace, workspace))) return s;
    if ((s = vm_scratch_new(p->convs, sizeof **next, next))) return s;
    for (size_t i = 0; i < p->convs; i++) {
        (*workspace)[i] = VM_MIN(p->workspaces[i].first, p->workspaces[i].most);
        (*next)[i] = p->first_only ? p->workspaces[i].first : p->workspaces[i].next;
    }
    return VM_OK;
}

/* Keeps next plans that ran. */
static void note_refused(vm_play *p, const uint64_t *workspace) {
    for (size_t i = 0; i < p->convs; i++) {
        workspaces *const one = &p->workspaces[i];
        if (workspace[i] >= VM_MIN(one->first, one->most)) continue;
        p->refused += one->most == UINT64_MAX;
        one->most = workspace[i];
    }
}

/* Plays a call's steps. Frees what a failed call allocated. */
static vm_status play_call(vm_play *p, const vm_event *e, const vm_called *c, run *r) {
    const vm_status s = vm_play_steps(r);
    if (s && vm_talloc_last_oom(p->talloc)) p->full = true, p->oom = *vm_talloc_last_oom(p->talloc);
    for (uint32_t id = 0; s && id < c->trace->ids; id++)
        if (p->address[id] && !vm_talloc_free(p->talloc, p->address[id])) p->address[id] = 0;
    for (size_t i = 0; !s && i < c->lefts; i++) {
        p->stored[e->first + i].address = p->address[c->left[i]];
        p->address[c->left[i]] = 0;
    }
    for (int k = 0; k < 2; k++)
        if (r->kept_at[k] != NEVER) p->kept[k].first = (place){p->event, r->kept_at[k]};
    if (s || r->highest == NEVER) return s;
    const vm_trace_step *const step = &c->trace->step[r->highest];
    note_peak(p, (place){p->event, r->highest + 1}, step->op == VM_TRACE_CONV ? r->workspace[c->conv[step->id]] : 0);
    return VM_OK;
}

static vm_status call(vm_play *p, const vm_event *e) {
    run r = {.talloc = p->talloc,
             .blas = &p->blas,
             .cublas = {&p->kept[CUBLAS].address, &p->kept[CUBLASLT].address},
             .kept_at = {NEVER, NEVER},
             .highest = NEVER};
    vm_status s = p->script->call[e->of].trace->walk ? walk(p, e) : VM_OK;
    if (s) return s;
    r.of = vm_play_called(p, p->event);
    if ((s = widen(&p->address, &p->ids, r.of->trace->ids, sizeof *p->address))) goto done;
    if ((s = begin_heights(p, r.of))) goto done;
    if ((s = list_workspaces(p, &r.workspace, &r.next))) goto done;
    r.address = p->address;
    r.allocated = p->heights.allocated;
    r.reserved = p->heights.reserved;
    if ((s = play_call(p, e, r.of, &r))) goto done;
    note_refused(p, r.workspace);
done:
    if (s) free_heights(&p->heights);
    vm_scratch_free(r.next);
    vm_scratch_free(r.workspace);
    return s;
}

static vm_status reset_peak(vm_play *p) {
    p->most_reserved = vm_play_most_reserved(p);
    vm_talloc_reset_peak(p->talloc);
    p->peak_bytes = peak_of(p, VM_TALLOC_ALLOCATED_BYTES);
    p->allocated = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
    p->reserved = vm_play_now(p->talloc, VM_TALLOC_RESERVED_BYTES);
    p->reset = p->event;
    p->peak = (peak){{p->event, 0}, 0};
    return VM_OK;
}

static vm_status read_counters(vm_play *p) {
    vm_status s;
    if ((s = vm_scratch_grow(&p->reading, p->readings, sizeof *p->reading))) return s;
    if ((s = vm_scratch_grow(&p->reading_peak, p->readings, sizeof *p->reading_peak))) return s;
    p->reading_peak[p->readings] = p->peak;
    p->reading[p->readings++] = (vm_reading){{p->reset, p->event},
                                             p->allocated,
                                             p->reserved,
                                             peak_of(p, VM_TALLOC_ALLOCATED_BYTES),
                                             peak_of(p, VM_TALLOC_RESERVED_BYTES)};
    return VM_OK;
}

static vm_status play_event(vm_play *p, const vm_event *e, size_t *taken) {
    switch (e->kind) {
    case VM_EVENT_TAKE:
    case VM_EVENT_REPLACE: return take(p, e, taken);
    case VM_EVENT_GIVE: return give_all(p, e);
    case VM_EVENT_CALL: return call(p, e);
    case VM_EVENT_EMPTY: return vm_talloc_empty_cache(p->talloc);
    case VM_EVENT_RESET: return reset_peak(p);
    case VM_EVENT_READ: return read_counters(p);
    default: return VM_OK;
    }
}

/* Plays the events before number `until` that were not played yet. */
static vm_status play_until(vm_play *p, size_t until, size_t *taken) {
    vm_status s = make_room(p);
    *taken = 0;
    p->full = false;
    for (; !s && p->event < until; p->event++) {
        if ((s = vm_scratch_grow(&p->reached, p->event, sizeof *p->reached))) break;
        s = play_event(p, &p->script->event[p->event], taken);
        const vm_talloc_oom *const oom = s == VM_ENOMEM && !p->full ? vm_talloc_last_oom(p->talloc) : NULL;
        if (oom) p->full = true, p->oom = *oom;
        p->reached[p->event] = vm_play_most_reserved(p);
    }
    return s;
}

vm_status vm_play_run(vm_play *p, size_t *taken) { return play_until(p, p->script->events, taken); }

vm_status vm_play_up_to(vm_play *p, const vm_play *like, uint64_t bytes) {
    size_t until = p->event, taken;
    while (until < like->event && like->reached[until] <= bytes) until++;
    return play_until(p, until, &taken);
}

vm_status vm_play_follow(vm_play *p, vm_script *script) {
    size_t taken;
    const vm_status s = vm_play_run(p, &taken);
    if (!s || !script->events) return s;
    const vm_event failed = script->event[script->events - 1];
    vm_script_failed(script, taken);
    const bool full = p->full;
    for (uint32_t id = failed.first + (uint32_t)taken; failed.kind == VM_EVENT_TAKE && id-- > failed.first;)
        if (!vm_script_give(script, &id, 1)) vm_play_run(p, &taken);
    p->full = full;
    return s;
}
