/* Plays a process's script (process.h).
 *
 *   script   [ take | take | take conv give ... | give | take conv give ... ]     storages are numbered throughout
 *                          ^ a call               ^ a call with the peak: its height is its end
 *   storage  number -> address
 *
 * The steps before a step tell who is live then. cuBLAS's kept workspaces are no storages: they exist from the step of
 * their first use on. */
#include <string.h>

#include "process_play.h"

vm_status vm_process_new(vm_talloc *talloc, const vm_process_blas *blas, vm_process **out) {
    vm_process *p;
    *out = NULL;
    vm_status s = vm_scratch_new(1, sizeof *p, &p);
    if (!s && (s = vm_trace_new(&p->script))) vm_scratch_free(p);
    if (s) return s;
    p->talloc = talloc;
    p->blas = *blas;
    p->kept[CUBLAS].step = p->kept[CUBLASLT].step = NEVER;
    p->times = 1;
    *out = p;
    return VM_OK;
}

void vm_process_free(vm_process *p) {
    if (!p) return;
    vm_scratch_free(p->storage);
    vm_scratch_free(p->workspaces);
    for (size_t i = 0; i < p->events; i++) vm_scratch_free(p->event[i].again);
    vm_scratch_free(p->event);
    vm_scratch_free(p->reading);
    vm_scratch_free(p->reading_peak);
    vm_trace_free(p->script);
    vm_scratch_free(p);
}

const vm_trace *vm_process_script(const vm_process *p) { return p->script; }
const vm_talloc_oom *vm_process_last_oom(const vm_process *p) { return p->full ? &p->oom : NULL; }
size_t vm_process_refused(const vm_process *p) { return p->refused; }

/* ---- the script ---- */

vm_status vm_process_push(vm_process *p, vm_trace_step step) {
    vm_trace *t = p->script;
    if (t->steps == UINT32_MAX) return vm_fail(VM_EOVERFLOW, "process: expected fewer than 2^32 steps");
    if (step.op == VM_TRACE_TAKE) {
        vm_status s = vm_scratch_grow(&p->storage, t->ids, sizeof *p->storage);
        if (s) return s;
        p->storage[t->ids] = (storage){.bytes = step.bytes, .name = step.name, .stream = step.stream};
        step.id = t->ids++;
    }
    vm_status s = vm_scratch_grow(&t->step, t->steps, sizeof *t->step);
    if (!s) t->step[t->steps++] = step;
    return s;
}

vm_status vm_process_note_stretches(vm_process *p, const vm_trace *t, size_t from, size_t until, size_t to) {
    vm_trace *const script = p->script;
    const uint32_t kinds = script->kinds;
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < t->stretches; i++) {
        vm_trace_stretch x = t->stretch[i];
        if (x.from < from || x.until > until) continue;
        s = vm_scratch_grow(&script->stretch, script->stretches, sizeof x);
        if (s) return s;
        x = (vm_trace_stretch){x.from - from + to, x.until - from + to, x.kind + kinds};
        script->stretch[script->stretches++] = x;
        script->kinds = VM_MAX(script->kinds, x.kind + 1);
    }
    return s;
}

/* Makes room for an event, for add_event. */
static vm_status expect_event(vm_process *p) { return vm_scratch_grow(&p->event, p->events, sizeof *p->event); }

static void add_event(vm_process *p, event e) {
    e.until = p->script->steps;
    p->event[p->events++] = e;
}

/* Removes the steps from number `from` on, which were not played or were undone. */
static void forget(vm_process *p, size_t from) {
    for (size_t i = from; i < p->script->steps; i++)
        if (i != p->kept[CUBLAS].step && i != p->kept[CUBLASLT].step) p->script->step[i].op = VM_TRACE_NOTHING;
}

/* Finds the storage at an address: most are among the last ones, or follow the one found last. */
static bool find(vm_process *p, uint64_t address, uint32_t *id) {
    uint32_t up = p->found, down = p->script->ids;
    while (address && down--) {
        up += up + 1 < p->script->ids;
        if (p->storage[up].address != address && p->storage[down].address != address) continue;
        *id = p->found = p->storage[up].address == address ? up : down;
        return true;
    }
    return false;
}

uint64_t vm_process_bytes_at(vm_process *p, uint64_t address) {
    uint32_t id;
    return find(p, address, &id) ? p->storage[id].bytes : 0;
}

static run run_of(vm_process *p) {
    return (run){.talloc = p->talloc,
                 .blas = &p->blas,
                 .storage = p->storage,
                 .kept = {p->kept[CUBLAS], p->kept[CUBLASLT]},
                 .highest = NEVER};
}

/* Ends every call: notes whether it failed because the device was full. */
static vm_status done(vm_process *p, vm_status s) {
    const vm_talloc_oom *oom = s == VM_ENOMEM ? vm_talloc_last_oom(p->talloc) : NULL;
    p->full = oom != NULL;
    if (oom) p->oom = *oom;
    return s;
}

static uint64_t most_allocated(const vm_process *p) {
    return (uint64_t)vm_talloc_get_stats(p->talloc)->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL].peak;
}

/* Notes a new peak among the steps played. call: its first step, or NEVER outside calls. */
static void note_peak(vm_process *p, const run *r, size_t call) {
    if (r->highest == NEVER || most_allocated(p) <= p->peak_bytes) return;
    const vm_trace_step *step = &p->script->step[r->highest];
    p->peak_bytes = most_allocated(p);
    p->peak.end = r->highest + 1;
    p->peak.call = VM_MIN(call, p->peak.end);
    p->peak.workspace = step->op == VM_TRACE_CONV ? r->workspace[step->id] : 0;
}

static uint64_t peak_reserved(const vm_process *p) {
    return (uint64_t)vm_talloc_get_stats(p->talloc)->of[VM_TALLOC_RESERVED_BYTES][VM_TALLOC_ALL].peak;
}

uint64_t vm_process_most_reserved(const vm_process *p) { return VM_MAX(p->most_reserved, peak_reserved(p)); }

vm_status vm_process_reset_peak(vm_process *p) {
    vm_status s = expect_event(p);
    if (s) return done(p, s);
    p->most_reserved = vm_process_most_reserved(p);
    vm_talloc_reset_peak(p->talloc);
    p->peak_bytes = most_allocated(p);
    p->allocated = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
    p->reserved = vm_play_now(p->talloc, VM_TALLOC_RESERVED_BYTES);
    p->reset = p->script->steps;
    p->peak = (peak){p->reset, p->reset, 0};
    add_event(p, (event){.kind = EVENT_RESET, .from = p->reset});
    return done(p, VM_OK);
}

static void add_times(uint64_t *count, uint64_t by, uint64_t times) {
    const uint64_t room = UINT64_MAX - *count;
    *count = times && by > room / times ? UINT64_MAX : *count + by * times;
}

void vm_process_count(vm_process *p, const vm_work *work, uint64_t outside) {
    add_times(&p->work.flops, work->flops, p->times);
    add_times(&p->work.attended, work->attended, p->times);
    add_times(&p->work.moved, work->moved, p->times);
    add_times(&p->work.sent, work->sent, p->times);
    add_times(&p->work.host_flops, work->host_flops, p->times);
    p->outside = VM_MAX(p->outside, outside);
}

void vm_process_times(vm_process *p, uint64_t times) { p->times = times; }

vm_status vm_process_end(vm_process *p, uint32_t name) {
    vm_status s = expect_event(p);
    if (!s) s = vm_scratch_grow(&p->reading, p->readings, sizeof *p->reading);
    if (!s) s = vm_scratch_grow(&p->reading_peak, p->readings, sizeof *p->reading_peak);
    if (s) return done(p, s);
    const size_t steps = p->script->steps;
    add_event(p, (event){.kind = EVENT_READ, .from = steps, .reading = p->readings});
    p->reading_peak[p->readings] = p->peak;
    p->reading[p->readings++] = (vm_reading){{p->reset, steps}, p->allocated, p->reserved, most_allocated(p),
                                             peak_reserved(p),  p->outside,   name,        p->work};
    p->work = (vm_work){0};
    p->outside = 0;
    return done(p, VM_OK);
}

vm_status vm_process_read(vm_process *p, const char *name) {
    uint32_t number;
    const vm_status s = vm_names_add(&p->script->names, name, &number);
    return s ? done(p, s) : vm_process_end(p, number);
}

const vm_reading *vm_process_readings(const vm_process *p, size_t *count) {
    *count = p->readings;
    return p->reading;
}

/* ---- allocating and freeing ---- */

vm_status vm_process_give(vm_process *p, uint32_t id) {
    const size_t from = p->script->steps;
    vm_status s = expect_event(p);
    if (!s) s = vm_process_push(p, (vm_trace_step){.op = VM_TRACE_GIVE, .id = id});
    if (!s) s = vm_talloc_free(p->talloc, p->storage[id].address);
    if (s) {
        forget(p, from);
        return s;
    }
    p->storage[id].address = 0;
    add_event(p, (event){.kind = EVENT_GIVE, .from = from});
    return VM_OK;
}

vm_status vm_process_release(vm_process *p, uint64_t address) {
    uint32_t id;
    if (find(p, address, &id)) return done(p, vm_process_give(p, id));
    return done(p, vm_fail(VM_EINVAL, VM_EXPECTED("address", "one of the process's storages", "%#llx"),
                           (unsigned long long)address));
}

vm_status vm_process_empty_cache(vm_process *p) {
    const size_t from = p->script->steps;
    vm_status s = expect_event(p);
    if (!s) s = vm_process_push(p, (vm_trace_step){.op = VM_TRACE_EMPTY});
    if (!s) add_event(p, (event){.kind = EVENT_EMPTY, .from = from});
    return done(p, s ? s : vm_talloc_empty_cache(p->talloc));
}

vm_status vm_process_take(vm_process *p, uint32_t stamp, uint32_t name, const uint64_t *bytes, size_t count,
                          uint64_t *address) {
    const size_t from = p->script->steps;
    const uint32_t first = p->script->ids;
    size_t at = from;
    vm_status s = expect_event(p);
    for (size_t i = 0; !s && i < count; i++)
        s = vm_process_push(p, (vm_trace_step){.op = VM_TRACE_TAKE, .name = name, .bytes = bytes[i]});
    run r = run_of(p);
    r.stamp = &stamp;
    if (!s) s = vm_scratch_new(count, sizeof *r.allocated, &r.allocated);
    uint64_t before = vm_play_now(p->talloc, VM_TALLOC_ALLOCATED_BYTES);
    if (!s) s = vm_play(&r, p->script, &at, p->script->steps);
    for (size_t i = 0; i < at - from; before = r.allocated[i++])
        p->storage[first + i].rounded = (uint32_t)VM_MIN(r.allocated[i] - before - bytes[i], UINT32_MAX);
    vm_scratch_free(r.allocated);
    note_peak(p, &r, NEVER);
    if (s) forget(p, at);
    if (at > from) add_event(p, (event){.kind = EVENT_TAKE, .stamp = stamp, .from = from});
    if (s) {
        done(p, s);
        for (uint32_t id = first + (uint32_t)(at - from); id-- > first;) vm_process_give(p, id);
        return s;
    }
    for (size_t i = 0; i < count; i++) address[i] = p->storage[first + i].address;
    return done(p, s);
}

vm_status vm_process_hold(vm_process *p, const char *stamp, const char *name, const uint64_t *bytes, size_t count,
                          uint64_t *address) {
    uint32_t shown, own;
    vm_status s = vm_names_add(&p->script->names, stamp, &shown);
    if (!s) s = vm_names_add(&p->script->names, name, &own);
    return s ? done(p, s) : vm_process_take(p, shown, own, bytes, count, address);
}

vm_status vm_process_copy(vm_process *p, const char *stamp, uint64_t *address, const uint64_t *bytes, size_t count,
                          size_t *copied) {
    uint32_t shown, old;
    vm_status s = vm_names_add(&p->script->names, stamp, &shown);
    for (*copied = 0; !s && *copied < count; *copied += !s) {
        uint64_t *const one = &address[*copied];
        if (!find(p, *one, &old))
            return done(p, vm_fail(VM_EINVAL, VM_EXPECTED("copy", "storages of the process", "")));
        if (!bytes[*copied]) continue;
        s = vm_process_take(p, shown, p->storage[old].name, &bytes[*copied], 1, one);
        if (s) break;
        p->storage[p->script->ids - 1].rounded = 0; /* the load's rounding counts */
        s = vm_process_give(p, old);
    }
    return done(p, s);
}

/* ---- calls ---- */

vm_status vm_process_question(vm_process *p, const vm_conv *conv, uint32_t *number) {
    vm_status s = vm_trace_question(p->script, conv, number);
    while (!s && p->convs < p->script->convs)
        if (!(s = vm_scratch_grow(&p->workspaces, p->convs, sizeof *p->workspaces)))
            p->workspaces[p->convs++] = (workspaces){.most = UINT64_MAX};
    return s;
}

vm_status vm_process_append(vm_process *p, const vm_trace *t, uint32_t *conv) {
    const uint32_t first = p->script->ids;
    const size_t start = p->script->steps;
    uint32_t *name;
    vm_status s = vm_scratch_new(t->names.count, sizeof *name, &name);
    if (s) return s;
    for (size_t i = 0; !s && i < t->names.count; i++)
        s = vm_names_add(&p->script->names, vm_names_get(&t->names, i), &name[i]);
    for (size_t i = 0; !s && i < t->convs; i++) s = vm_process_question(p, &t->conv[i], &conv[i]);
    for (size_t i = 0; !s && i < t->steps; i++) {
        vm_trace_step step = t->step[i];
        step.id = step.op == VM_TRACE_CONV ? conv[step.id] : first + step.id;
        step.name = name[step.name];
        s = vm_process_push(p, step);
    }
    vm_scratch_free(name);
    return s ? s : vm_process_note_stretches(p, t, 0, t->steps, start);
}

/* Frees what a failed call allocated, and notes which workspaces cuBLAS keeps since. */
static vm_status play_call(vm_process *p, run *r, size_t from, uint32_t first) {
    uint32_t names[2];
    size_t at = from;
    vm_status s = vm_names_add(&p->script->names, "cublas [workspace]", &names[CUBLAS]);
    if (!s) s = vm_names_add(&p->script->names, "cublaslt [workspace]", &names[CUBLASLT]);
    if (!s) s = vm_play(r, p->script, &at, p->script->steps);
    if (done(p, s))
        for (uint32_t id = first; id < p->script->ids; id++)
            if (p->storage[id].address && !vm_talloc_free(p->talloc, p->storage[id].address))
                p->storage[id].address = 0;
    for (int k = 0; k < 2; k++) {
        if (r->kept[k].step != p->kept[k].step) r->kept[k].before = first, r->kept[k].name = names[k];
        p->kept[k] = r->kept[k];
    }
    if (!s) note_peak(p, r, from);
    return s;
}

vm_status vm_process_run(vm_process *p, size_t from, uint32_t first, const vm_trace_vae *again, uint64_t *allocated,
                         uint64_t *reserved) {
    uint64_t *workspace = NULL, *next = NULL;
    vm_trace_vae *copy = NULL;
    vm_status s = expect_event(p);
    if (!s && again) s = vm_trace_vae_copy(again, &copy);
    if (!s) s = vm_scratch_new(p->convs, sizeof *workspace, &workspace);
    if (!s) s = vm_scratch_new(p->convs, sizeof *next, &next);
    for (size_t i = 0; !s && i < p->convs; i++) {
        workspace[i] = VM_MIN(p->workspaces[i].first, p->workspaces[i].most);
        next[i] = p->first_only ? p->workspaces[i].first : p->workspaces[i].next;
    }
    run r = run_of(p);
    r.workspace = workspace;
    r.next = next;
    r.allocated = allocated;
    r.reserved = reserved;
    const bool ready = !s;
    s = s ? done(p, s) : play_call(p, &r, from, first);
    for (size_t i = 0; !s && i < p->convs; i++) {
        workspaces *one = &p->workspaces[i];
        if (workspace[i] >= VM_MIN(one->first, one->most)) continue;
        p->refused += one->most == UINT64_MAX;
        one->most = workspace[i];
    }
    if (s) forget(p, from);
    if (s) vm_scratch_free(copy);
    if (ready) add_event(p, (event){.kind = EVENT_CALL, .from = from, .again = s ? NULL : copy});
    vm_scratch_free(next);
    vm_scratch_free(workspace);
    return s;
}

vm_status vm_process_call(vm_process *p, const vm_trace *t, const uint64_t *workspace, const uint64_t *next,
                          uint64_t *address, uint64_t *allocated, uint64_t *reserved) {
    const size_t from = p->script->steps;
    const uint32_t first = p->script->ids;
    uint32_t *conv;
    memset(address, 0, t->ids * sizeof *address);
    vm_status s = vm_scratch_new(t->convs, sizeof *conv, &conv);
    if (s) return done(p, s);
    s = vm_process_append(p, t, conv);
    for (size_t i = 0; !s && i < t->convs; i++)
        p->workspaces[conv[i]].first = workspace[i], p->workspaces[conv[i]].next = next[i];
    vm_scratch_free(conv);
    if (s) {
        forget(p, from);
        return done(p, s);
    }
    s = vm_process_run(p, from, first, t->again, allocated, reserved);
    for (uint32_t i = 0; i < t->ids; i++) address[i] = p->storage[first + i].address;
    return s;
}

/* ---- what happened ---- */

/* row: by name, its place in the list + 1, or 0. */
static void add(vm_process_list *list, uint32_t *row, uint32_t name, uint64_t bytes) {
    if (!row[name]) {
        list->item[list->count++] = (vm_process_named){.name = name};
        row[name] = (uint32_t)list->count;
    }
    list->item[row[name] - 1].bytes += bytes;
}

/* Lists the tensors that are live at a peak: those outside of its call first. */
static void list_live(const vm_process *p, const peak *at, bool *live, uint32_t *row, vm_process_list *out) {
    const vm_trace_step *const step = p->script->step;
    const size_t call = at->call, end = at->end;
    const uint64_t kept_bytes[2] = {p->blas.cublas_bytes, p->blas.cublaslt_bytes};
    uint32_t before = 0; /* of the call */
    for (size_t i = 0; i < end; i++) {
        if (step[i].op == VM_TRACE_TAKE || step[i].op == VM_TRACE_GIVE) live[step[i].id] = step[i].op == VM_TRACE_TAKE;
        if (i < call && step[i].op == VM_TRACE_TAKE) before = step[i].id + 1;
    }
    for (uint32_t id = 0; id <= p->script->ids; id++) {
        for (int k = 0; k < 2; k++)
            if (p->kept[k].step < call && p->kept[k].before == id) add(out, row, p->kept[k].name, kept_bytes[k]);
        if (id >= before || !live[id] || !p->storage[id].bytes) continue;
        add(out, row, p->storage[id].name, p->storage[id].bytes);
    }
    for (size_t i = call; i < end; i++) {
        if (step[i].op == VM_TRACE_TAKE && live[step[i].id]) add(out, row, step[i].name, step[i].bytes);
        for (int k = 0; k < 2; k++)
            if (p->kept[k].step == i) add(out, row, p->kept[k].name, kept_bytes[k]);
    }
    if (call == end) return;
    if (step[end - 1].op == VM_TRACE_CONV) add(out, row, step[end - 1].name, at->workspace);
    if (step[end - 1].op == VM_TRACE_CUBLASLT && p->blas.cublaslt_use == VM_CUBLASLT_EACH)
        add(out, row, step[end - 1].name, kept_bytes[CUBLASLT]);
}

/* Lists the bytes added by rounding, by name. held: [names], counts of live storages, zeros on entry */
static void list_rounded(const vm_process *p, size_t until, uint32_t *held, uint64_t *rounded, vm_process_list *out) {
    for (size_t i = 0; i < until; i++) {
        const vm_trace_step *const step = &p->script->step[i];
        if (step->op != VM_TRACE_TAKE && step->op != VM_TRACE_GIVE) continue;
        const storage *one = &p->storage[step->id];
        if (step->op == VM_TRACE_GIVE && one->bytes && held[one->name]) held[one->name]--;
        if (step->op == VM_TRACE_GIVE || !one->bytes) continue;
        if (!held[one->name]++) rounded[one->name] = 0;
        rounded[one->name] += one->rounded;
    }
    for (size_t i = 0; i < out->count; i++) out->item[i].rounded = rounded[out->item[i].name];
}

/* until: steps that count for the rounding */
static vm_status list_at(const vm_process *p, const peak *at, size_t until, vm_process_list *out) {
    const size_t names = p->script->names.count;
    bool *live = NULL;
    uint32_t *row = NULL, *held = NULL;
    uint64_t *rounded = NULL;
    *out = (vm_process_list){0};
    vm_status s = vm_scratch_new(names, sizeof *out->item, &out->item);
    if (!s) s = vm_scratch_new(p->script->ids, sizeof *live, &live);
    if (!s) s = vm_scratch_new(names, sizeof *row, &row);
    if (!s) s = vm_scratch_new(names, sizeof *held, &held);
    if (!s) s = vm_scratch_new(names, sizeof *rounded, &rounded);
    if (!s) list_live(p, at, live, row, out);
    if (!s) list_rounded(p, until, held, rounded, out);
    if (s) vm_scratch_free(out->item);
    vm_scratch_free(rounded);
    vm_scratch_free(held);
    vm_scratch_free(row);
    vm_scratch_free(live);
    return s;
}

vm_status vm_process_peak(const vm_process *p, size_t reading, vm_process_list *out, const vm_trace_step **step) {
    const bool is_read = reading < p->readings;
    const peak *at = is_read ? &p->reading_peak[reading] : &p->peak;
    *step = at->call < at->end ? &p->script->step[at->end - 1] : NULL;
    return list_at(p, at, is_read ? p->reading[reading].span.until : p->script->steps, out);
}

vm_status vm_process_baseline(const vm_process *p, vm_process_list *out) {
    return list_at(p, &(peak){p->reset, p->reset, 0}, p->reset, out);
}
