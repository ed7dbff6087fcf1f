/* Lists the storages that are live at a place of a play (play.h).
 *
 *   events before the place -> who is live there        a call in progress: its steps before the place, too
 *
 * cuBLAS's kept workspaces are no storages: they exist from the step of their first use on. */
#include "play_parts.h"

typedef struct lister {
    const vm_play *p;
    vm_live_list *out;
    uint32_t *row; /* [names], a name's place in the list + 1, or 0 */
    bool *live;    /* [storages] */
} lister;

static void add(lister *l, uint32_t name, uint64_t bytes) {
    if (!l->row[name]) {
        l->out->item[l->out->count++] = (vm_live){.name = name};
        l->row[name] = (uint32_t)l->out->count;
    }
    l->out->item[l->row[name] - 1].bytes += bytes;
}

static void add_kept(lister *l, int k) {
    const vm_script *const s = l->p->script;
    add(l, k == CUBLAS ? s->cublas : s->cublaslt, k == CUBLAS ? l->p->blas.cublas_bytes : l->p->blas.cublaslt_bytes);
}

/* Marks the first `comes` storages that an event takes as live, and the first `goes` that it frees as not live. */
static void mark_event(lister *l, const vm_event *e, size_t comes, size_t goes) {
    for (size_t i = 0; i < comes; i++) l->live[e->first + i] = true;
    for (size_t i = 0; i < goes; i++) l->live[l->p->script->going[e->gone + i]] = false;
}

/* Marks what the events before a place leave. */
static void mark(lister *l, place at) {
    const vm_script *const s = l->p->script;
    for (size_t i = 0; i < at.event; i++)
        if (s->event[i].kind != VM_EVENT_NOTHING) mark_event(l, &s->event[i], s->event[i].count, s->event[i].goes);
    if (!at.steps || s->event[at.event].kind == VM_EVENT_CALL) return;
    const vm_event *const e = &s->event[at.event];
    mark_event(l, e, at.steps, e->goes ? at.steps - 1 : 0); /* the last storage has not replaced another one yet */
}

/* Adds a call's own storages after `steps` of its steps. there: [ids], zeros on entry. workspace: of the last step, if
 * that step is a convolution. */
static void add_call(lister *l, place at, uint64_t workspace, bool *there) {
    const vm_play *const p = l->p;
    const vm_called *const c = vm_play_called(p, at.event);
    const vm_trace_step *const step = c->trace->step, *const last = &step[at.steps - 1];
    for (size_t i = 0; i < at.steps; i++)
        if (step[i].op == VM_TRACE_TAKE || step[i].op == VM_TRACE_GIVE) there[step[i].id] = step[i].op == VM_TRACE_TAKE;
    for (size_t i = 0; i < at.steps; i++) {
        if (step[i].op == VM_TRACE_TAKE && there[step[i].id]) add(l, c->name[step[i].name], step[i].bytes);
        for (int k = 0; k < 2; k++)
            if (p->kept[k].first.event == at.event && p->kept[k].first.steps == i) add_kept(l, k);
    }
    if (last->op == VM_TRACE_CONV) add(l, c->name[last->name], workspace);
    if (last->op == VM_TRACE_CUBLASLT && p->blas.cublaslt_use == VM_CUBLASLT_EACH)
        add(l, c->name[last->name], p->blas.cublaslt_bytes);
}

/* Lists the live storages outside of calls. */
static void add_outside(lister *l, place at) {
    const vm_script *const s = l->p->script;
    const kept *const used = l->p->kept;
    for (uint32_t id = 0; id <= s->storages; id++) {
        for (int k = 0; k < 2; k++)
            if (used[k].first.event < at.event && s->event[used[k].first.event].first == id) add_kept(l, k);
        if (id < s->storages && l->live[id] && s->storage[id].bytes) add(l, s->storage[id].name, s->storage[id].bytes);
    }
}

typedef struct rounding {
    uint32_t *held;    /* [names], counts of live storages */
    uint64_t *rounded; /* [names] */
} rounding;

static void round_event(const vm_play *p, const vm_event *e, rounding *r) {
    const vm_storage *const storage = p->script->storage;
    for (uint32_t id = e->first; id < e->first + e->count; id++) {
        const uint32_t name = storage[id].name;
        if (storage[id].bytes && !r->held[name]++) r->rounded[name] = 0;
        r->rounded[name] += p->stored[id].rounded;
    }
    for (size_t i = 0; i < e->goes; i++) {
        const vm_storage *const one = &storage[p->script->going[e->gone + i]];
        if (one->bytes && r->held[one->name]) r->held[one->name]--;
    }
}

/* Lists the bytes added by rounding, by name. */
static void list_rounded(const vm_play *p, size_t until, rounding *r, vm_live_list *out) {
    for (size_t i = 0; i < until; i++)
        if (p->script->event[i].kind != VM_EVENT_NOTHING) round_event(p, &p->script->event[i], r);
    for (size_t i = 0; i < out->count; i++) out->item[i].rounded = r->rounded[out->item[i].name];
}

/* until: events that count for the rounding */
static vm_status list_at(const vm_play *p, const peak *at, size_t until, vm_live_list *out) {
    const size_t names = p->script->names.count;
    const bool in_call = at->at.steps && p->script->event[at->at.event].kind == VM_EVENT_CALL;
    const size_t ids = in_call ? vm_play_called(p, at->at.event)->trace->ids : 0;
    lister l = {.p = p, .out = out};
    bool *there = NULL;
    rounding r = {0};
    *out = (vm_live_list){0};
    vm_status s;
    if ((s = vm_scratch_new(names, sizeof *out->item, &out->item))) goto done;
    if ((s = vm_scratch_new(p->script->storages, sizeof *l.live, &l.live))) goto done;
    if ((s = vm_scratch_new(names, sizeof *l.row, &l.row))) goto done;
    if ((s = vm_scratch_new(ids, sizeof *there, &there))) goto done;
    if ((s = vm_scratch_new(names, sizeof *r.held, &r.held))) goto done;
    if ((s = vm_scratch_new(names, sizeof *r.rounded, &r.rounded))) goto done;
    mark(&l, at->at);
    add_outside(&l, at->at);
    if (in_call) add_call(&l, at->at, at->workspace, there);
    list_rounded(p, until, &r, out);
done:
    if (s) {
        vm_scratch_free(out->item);
        *out = (vm_live_list){0};
    }
    vm_scratch_free(r.rounded);
    vm_scratch_free(r.held);
    vm_scratch_free(there);
    vm_scratch_free(l.row);
    vm_scratch_free(l.live);
    return s;
}

vm_status vm_play_peak(const vm_play *p, size_t reading, vm_live_list *out, uint32_t *step) {
    const bool is_read = reading < p->readings;
    const peak *const at = is_read ? &p->reading_peak[reading] : &p->peak;
    const place where = at->at;
    *step = VM_NO_NAME;
    if (where.steps && p->script->event[where.event].kind == VM_EVENT_CALL) {
        const vm_called *const c = vm_play_called(p, where.event);
        *step = c->name[c->trace->step[where.steps - 1].name];
    }
    return list_at(p, at, is_read ? p->reading[reading].span.until : p->event, out);
}

vm_status vm_play_baseline(const vm_play *p, vm_live_list *out) {
    return list_at(p, &(peak){{p->reset, 0}, 0}, p->reset, out);
}
