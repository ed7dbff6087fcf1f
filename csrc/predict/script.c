/* Writes scripts (script.h). */
#include <string.h>

#include "script.h"

vm_status vm_script_new(vm_script **out) {
    const vm_status s = vm_scratch_new(1, sizeof **out, out);
    if (!s) (*out)->times = 1;
    return s;
}

void vm_called_free(vm_called *c) {
    vm_trace_free(c->trace);
    vm_scratch_free(c->name);
    vm_scratch_free(c->conv);
    vm_scratch_free(c->left);
    *c = (vm_called){0};
}

void vm_script_free(vm_script *s) {
    if (!s) return;
    for (size_t i = 0; i < s->called; i++) vm_called_free(&s->call[i]);
    vm_scratch_free(s->call);
    vm_scratch_free(s->event);
    vm_scratch_free(s->storage);
    vm_scratch_free(s->going);
    vm_scratch_free(s->conv);
    vm_scratch_free(s->phase);
    vm_names_free(&s->names);
    vm_scratch_free(s);
}

/* ---- events ---- */

/* Makes room for an event, for add. */
static vm_status expect(vm_script *s) { return vm_scratch_grow(&s->event, s->events, sizeof *s->event); }

static void add(vm_script *s, vm_event e) { s->event[s->events++] = e; }

/* Makes room for `more` items in a growing array. */
static vm_status widen(void *array, size_t count, size_t more, size_t item_bytes) {
    const size_t room = vm_mem_capacity(count + more);
    return room > vm_mem_capacity(count) ? vm_scratch_widen(array, count, room, item_bytes) : VM_OK;
}

static vm_status expect_storages(vm_script *s, size_t count) {
    if (count >= UINT32_MAX - s->storages) return vm_fail(VM_EOVERFLOW, "script: expected fewer than 2^32 storages");
    return widen(&s->storage, s->storages, count, sizeof *s->storage);
}

static void add_storage(vm_script *s, uint64_t bytes, uint32_t name, uint32_t stream) {
    s->storage[s->storages++] = (vm_storage){bytes, name, stream, true};
}

static vm_status expect_there(const vm_script *s, const uint32_t *id, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (id[i] >= s->storages || !s->storage[id[i]].is_there)
            return vm_fail(VM_EINVAL, VM_EXPECTED("storage", "one that is there", "number %u"), id[i]);
    return VM_OK;
}

static void let_go(vm_script *s, uint32_t id) {
    s->storage[id].is_there = false;
    s->going[s->goings++] = id;
}

/* Undoes what an event that was not added did. */
static void take_back(vm_script *s, const vm_event *e) {
    for (; s->goings > e->gone; s->goings--) s->storage[s->going[s->goings - 1]].is_there = true;
    s->storages = e->first;
}

vm_status vm_script_take(vm_script *s, const char *stamp, const char *name, const uint64_t *bytes, size_t count,
                         uint32_t *first) {
    uint32_t shown, own;
    vm_status status;
    if ((status = expect(s))) return status;
    if ((status = vm_names_add(&s->names, stamp, &shown))) return status;
    if ((status = vm_names_add(&s->names, name, &own))) return status;
    if ((status = expect_storages(s, count))) return status;
    *first = s->storages;
    add(s, (vm_event){.kind = VM_EVENT_TAKE, .first = s->storages, .count = (uint32_t)count, .stamp = shown});
    for (size_t i = 0; i < count; i++) add_storage(s, bytes[i], own, 0);
    return VM_OK;
}

vm_status vm_script_replace(vm_script *s, const char *stamp, uint32_t *id, const uint64_t *bytes, size_t count) {
    vm_event e = {.kind = VM_EVENT_REPLACE, .first = s->storages, .gone = s->goings};
    vm_status status;
    if ((status = expect(s))) return status;
    if ((status = vm_names_add(&s->names, stamp, &e.stamp))) return status;
    if ((status = expect_storages(s, count))) return status;
    if ((status = widen(&s->going, s->goings, count, sizeof *s->going))) return status;
    for (size_t i = 0; !status && i < count; i++) {
        const uint32_t old = id[i];
        status = expect_there(s, &old, 1);
        if (status || !bytes[i]) continue;
        id[i] = s->storages;
        add_storage(s, bytes[i], s->storage[old].name, 0);
        let_go(s, old);
    }
    e.count = s->storages - e.first;
    e.goes = s->goings - e.gone;
    if (!status) {
        add(s, e);
        return VM_OK;
    }
    for (size_t i = 0; i < count; i++)
        if (id[i] >= e.first && id[i] < s->storages) id[i] = s->going[e.gone + id[i] - e.first];
    take_back(s, &e);
    return status;
}

vm_status vm_script_give(vm_script *s, const uint32_t *id, size_t count) {
    const vm_event e = {.kind = VM_EVENT_GIVE, .first = s->storages, .gone = s->goings, .goes = count};
    vm_status status;
    if ((status = expect(s))) return status;
    if ((status = widen(&s->going, s->goings, count, sizeof *s->going))) return status;
    for (size_t i = 0; i < count; i++) {
        if ((status = expect_there(s, &id[i], 1))) { /* it may be listed twice */
            take_back(s, &e);
            return status;
        }
        let_go(s, id[i]);
    }
    add(s, e);
    return VM_OK;
}

static vm_status add_plain(vm_script *s, vm_event_kind kind) {
    const vm_status status = expect(s);
    if (!status) add(s, (vm_event){.kind = kind, .first = s->storages});
    return status;
}

vm_status vm_script_empty_cache(vm_script *s) { return add_plain(s, VM_EVENT_EMPTY); }
vm_status vm_script_reset_peak(vm_script *s) { return add_plain(s, VM_EVENT_RESET); }

/* ---- calls ---- */

static vm_status find_conv(const vm_script *s, const vm_conv *conv, uint32_t *number) {
    size_t i = s->convs;
    while (i && !vm_conv_same(&s->conv[i - 1], conv)) i--;
    if (!i) return vm_fail(VM_EINVAL, VM_EXPECTED("call", "a trace with the script's convolutions", ""));
    *number = (uint32_t)i - 1;
    return VM_OK;
}

/* Lists the storages that a trace leaves. */
static vm_status list_left(vm_called *c) {
    const vm_trace *const t = c->trace;
    bool *there;
    vm_status status = vm_scratch_new(t->ids, sizeof *there, &there);
    if (status) return status;
    for (size_t i = 0; i < t->steps; i++) {
        const vm_trace_step *const step = &t->step[i];
        if (step->op == VM_TRACE_TAKE || step->op == VM_TRACE_GIVE)
            there[step->id] = step->op == VM_TRACE_TAKE && step->bytes;
    }
    for (uint32_t i = 0; i < t->ids; i++) c->lefts += there[i];
    status = vm_scratch_new(c->lefts, sizeof *c->left, &c->left);
    for (uint32_t i = 0, at = 0; !status && i < t->ids; i++)
        if (there[i]) c->left[at++] = i;
    vm_scratch_free(there);
    return status;
}

static vm_status new_called(vm_trace *t, vm_called *c) {
    *c = (vm_called){.trace = vm_trace_share(t)};
    vm_status status;
    if ((status = vm_scratch_new(t->names.count, sizeof *c->name, &c->name))) return status;
    if ((status = vm_scratch_new(t->convs, sizeof *c->conv, &c->conv))) return status;
    return list_left(c);
}

vm_status vm_script_find(const vm_script *s, vm_trace *t, vm_called *out) {
    vm_status status = new_called(t, out);
    for (size_t i = 0; !status && i < t->names.count; i++)
        if (!vm_names_find(&s->names, vm_names_get(&t->names, i), &out->name[i]))
            status = vm_fail(VM_EINVAL, VM_EXPECTED("call", "a trace with the script's names", ""));
    for (size_t i = 0; !status && i < t->convs; i++) status = find_conv(s, &t->conv[i], &out->conv[i]);
    if (status) vm_called_free(out);
    return status;
}

static vm_status add_conv(vm_script *s, const vm_conv *conv, uint32_t *number) {
    for (size_t i = s->convs; i--;)
        if (vm_conv_same(&s->conv[i], conv)) {
            *number = (uint32_t)i;
            return VM_OK;
        }
    const vm_status status = vm_scratch_grow(&s->conv, s->convs, sizeof *s->conv);
    if (!status) *number = (uint32_t)s->convs, s->conv[s->convs++] = *conv;
    return status;
}

static vm_status add_called(vm_script *s, vm_trace *t) {
    vm_called c;
    vm_status status;
    if ((status = vm_scratch_grow(&s->call, s->called, sizeof *s->call))) return status;
    if ((status = new_called(t, &c))) goto done;
    for (size_t i = 0; i < t->names.count; i++)
        if ((status = vm_names_add(&s->names, vm_names_get(&t->names, i), &c.name[i]))) goto done;
    for (size_t i = 0; i < t->convs; i++)
        if ((status = add_conv(s, &t->conv[i], &c.conv[i]))) goto done;
    if ((status = vm_names_add(&s->names, "cublas [workspace]", &s->cublas))) goto done;
    status = vm_names_add(&s->names, "cublaslt [workspace]", &s->cublaslt);
done:
    if (status)
        vm_called_free(&c);
    else
        s->call[s->called++] = c;
    return status;
}

vm_status vm_script_call(vm_script *s, vm_trace *t, const vm_event **event) {
    size_t of = s->called;
    while (of && s->call[of - 1].trace != t) of--;
    vm_status status;
    if ((status = expect(s))) return status;
    if (!of && (status = add_called(s, t))) return status;
    const vm_called *const c = &s->call[of ? of - 1 : s->called - 1];
    if ((status = expect_storages(s, c->lefts))) return status;
    add(s, (vm_event){
               .kind = VM_EVENT_CALL, .first = s->storages, .count = (uint32_t)c->lefts, .of = (size_t)(c - s->call)});
    for (size_t i = 0, at = 0; i < t->steps && at < c->lefts; i++) {
        const vm_trace_step *const step = &t->step[i];
        if (step->op != VM_TRACE_TAKE || step->id != c->left[at]) continue;
        add_storage(s, step->bytes, c->name[step->name], step->stream);
        at++;
    }
    *event = &s->event[s->events - 1];
    return VM_OK;
}

/* ---- phases ---- */

vm_status vm_script_read(vm_script *s, const char *name) {
    uint32_t number;
    vm_status status;
    if ((status = expect(s))) return status;
    if ((status = vm_names_add(&s->names, name, &number))) return status;
    if ((status = vm_scratch_grow(&s->phase, s->phases, sizeof *s->phase))) return status;
    add(s, (vm_event){.kind = VM_EVENT_READ, .first = s->storages, .of = s->phases});
    s->phase[s->phases++] = (vm_phase){number, s->outside, s->work};
    s->work = (vm_work){0};
    s->outside = 0;
    return VM_OK;
}

static void add_times(uint64_t *count, uint64_t by, uint64_t times) {
    const uint64_t room = UINT64_MAX - *count;
    *count = times && by > room / times ? UINT64_MAX : *count + by * times;
}

void vm_script_count(vm_script *s, const vm_work *work, uint64_t outside) {
    add_times(&s->work.flops, work->flops, s->times);
    add_times(&s->work.attended, work->attended, s->times);
    add_times(&s->work.moved, work->moved, s->times);
    add_times(&s->work.sent, work->sent, s->times);
    add_times(&s->work.host_flops, work->host_flops, s->times);
    s->outside = VM_MAX(s->outside, outside);
}

void vm_script_times(vm_script *s, uint64_t times) { s->times = times; }

/* ---- failures ---- */

void vm_script_failed(vm_script *s, size_t taken) {
    vm_event *const e = &s->event[s->events - 1];
    if (e->kind == VM_EVENT_READ) {
        const vm_phase *const p = &s->phase[--s->phases];
        s->work = p->work;
        s->outside = p->outside;
    }
    for (size_t i = taken; i < e->goes; i++) s->storage[s->going[e->gone + i]].is_there = true;
    for (size_t i = taken; i < e->count; i++) s->storage[e->first + i].is_there = false;
    if (e->kind == VM_EVENT_REPLACE) e->goes = taken;
    if (e->kind == VM_EVENT_TAKE || e->kind == VM_EVENT_REPLACE)
        e->count = (uint32_t)taken;
    else
        e->kind = VM_EVENT_NOTHING;
}
