/* A process's script, played (process.h).
 *
 *   script   [ take | take | take conv give ... | give | take conv give ... ]     storages are numbered throughout
 *                          ^ a call               ^ one in which the peak lies: its height is its end
 *   storage  number -> where it lies
 *
 * Who is live at a step is read off the steps before it. The workspaces that cuBLAS keeps are no storages: they are
 * there from the step that first uses them on. */
#include <string.h>

#include "process.h"

typedef struct storage {
    uint64_t address; /* 0: not there */
    uint64_t bytes;
    uint32_t name;
} storage;

/* A workspace of cuBLAS's that is kept. */
typedef struct kept {
    uint64_t address;
    size_t step;     /* that first uses it */
    uint32_t before; /* as many storages were numbered before that call */
    uint32_t name;
} kept;

/* What a convolution met in a pool: what was cached, and the segment that its workspace made. */
typedef struct met {
    uint64_t room, made;
} met;

/* From a step on so much was reserved. */
typedef struct change {
    size_t step;
    uint64_t reserved;
} change;

/* A row that was played in a pool: what its convolutions met there, and what was reserved. */
typedef struct played {
    met *met; /* [calls], or NULL where the allocator is not plain */
    change *change;
    size_t calls, changes;
    const struct played *like; /* itself, or a row before it that went alike */
} played;

enum { CUBLAS, CUBLASLT };
static const size_t NEVER = SIZE_MAX;

struct vm_process {
    vm_talloc *talloc;
    vm_process_blas blas;
    vm_trace *script;
    storage *storage;      /* [script->ids] */
    uint64_t *most;        /* by convolution: what ran where the workspace could not be had, else UINT64_MAX */
    size_t mosts, refused; /* how many there are, and how many of these could not be had */
    kept kept[2];
    uint32_t found;     /* the storage that was looked for last */
    size_t reset;       /* steps before the peak was reset */
    uint64_t peak;      /* bytes at the most since, */
    size_t call, end;   /* behind so many steps, of which those from `call` on are a call's, up to its height */
    uint64_t workspace; /* of the convolution that is the last of them */
    played small;       /* a row in the small pool, which nearly all others go like, */
    size_t until;       /* of so many steps */
    bool full;          /* the last call failed because the simulated device was full, */
    vm_talloc_oom oom;  /* and these are its figures */
};

static void release(void *array, size_t items, size_t item) {
    vm_mem_free(vm_mem_common, VM_SCRATCH, array, items * item);
}

static vm_status take(size_t items, size_t item, void *out) {
    return vm_mem_alloc(vm_mem_common, VM_SCRATCH, (items + 1) * item, out);
}

static vm_status grow(void *array, size_t count, size_t item) {
    return vm_mem_grow(vm_mem_common, VM_SCRATCH, array, count, item);
}

static void forget_row(played *row) {
    release(row->met, row->calls + 1, sizeof *row->met);
    release(row->change, vm_mem_capacity(row->changes), sizeof *row->change);
    *row = (played){0};
}

vm_status vm_process_new(vm_talloc *talloc, const vm_process_blas *blas, vm_process **out) {
    vm_process *p;
    *out = NULL;
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, sizeof *p, (void **)&p);
    if (s) return s;
    if ((s = vm_trace_new(&p->script))) {
        release(p, 1, sizeof *p);
        return s;
    }
    p->talloc = talloc;
    p->blas = *blas;
    p->kept[CUBLAS].step = p->kept[CUBLASLT].step = NEVER;
    *out = p;
    return VM_OK;
}

void vm_process_free(vm_process *p) {
    if (!p) return;
    release(p->storage, vm_mem_capacity(p->script->ids), sizeof *p->storage);
    release(p->most, vm_mem_capacity(p->mosts), sizeof *p->most);
    forget_row(&p->small);
    vm_trace_free(p->script);
    release(p, 1, sizeof *p);
}

const vm_trace *vm_process_script(const vm_process *p) { return p->script; }
const vm_talloc_oom *vm_process_last_oom(const vm_process *p) { return p->full ? &p->oom : NULL; }
size_t vm_process_refused(const vm_process *p) { return p->refused; }

/* ---- the script ---- */

static vm_status push(vm_process *p, vm_trace_step step) {
    vm_trace *t = p->script;
    if (t->steps == UINT32_MAX) return vm_fail(VM_EOVERFLOW, "process: want fewer than 2^32 steps");
    if (step.op == VM_TRACE_TAKE) {
        vm_status s = grow(&p->storage, t->ids, sizeof *p->storage);
        if (s) return s;
        p->storage[t->ids] = (storage){0, step.bytes, step.name};
        step.id = t->ids++;
    }
    vm_status s = grow(&t->step, t->steps, sizeof *t->step);
    if (!s) t->step[t->steps++] = step;
    return s;
}

/* Takes back the steps from so many on, which were not played or were undone. */
static void forget(vm_process *p, size_t from) {
    for (size_t i = from; i < p->script->steps; i++)
        if (i != p->kept[CUBLAS].step && i != p->kept[CUBLASLT].step) p->script->step[i].op = VM_TRACE_NOTHING;
}

/* The number of the storage at an address. Those that are looked for one after the other were often taken so. */
static bool find(vm_process *p, uint64_t address, uint32_t *id) {
    *id = p->found + 1;
    if (!address) return false;
    if (*id >= p->script->ids || p->storage[*id].address != address) {
        *id = p->script->ids;
        while (*id && p->storage[*id - 1].address != address) --*id;
        if (!*id) return false;
        --*id;
    }
    p->found = *id;
    return true;
}

uint64_t vm_process_bytes_at(vm_process *p, uint64_t address) {
    uint32_t id;
    return find(p, address, &id) ? p->storage[id].bytes : 0;
}

/* ---- playing it ---- */

typedef enum pool { BOTH_POOLS, LARGE_POOL, SMALL_POOL } pool;

/* Where steps are played, and what with. */
typedef struct run {
    vm_talloc *talloc;
    const vm_process_blas *blas;
    storage *storage;
    uint64_t *workspace, *next; /* [convs]; next: or NULL */
    kept kept[2];
    const uint32_t *stamp;          /* the name in the allocator's history, else the step's */
    uint64_t *allocated, *reserved; /* of each step that was played, or NULL */
    pool pool;                      /* all else is passed over */
    met *met;                       /* where the next convolution's goes, of a pool of a plain allocator, or NULL */
    size_t highest;                 /* the step with the greatest height */
} run;

static uint64_t now(const vm_talloc *a, vm_talloc_kind kind) {
    return (uint64_t)vm_talloc_get_stats(a)->of[kind][VM_TALLOC_ALL].current;
}

static bool is_played(const run *r, uint64_t bytes) {
    return r->pool == BOTH_POOLS || vm_talloc_is_small(r->talloc, bytes) == (r->pool == SMALL_POOL);
}

/* *address is 0 where it is passed over. */
static vm_status allocate(run *r, uint64_t bytes, uint64_t *address) {
    *address = 0;
    return is_played(r, bytes) ? vm_talloc_malloc(r->talloc, bytes, 0, address) : VM_OK;
}

/* A workspace that is given back at once; *height: allocated bytes while it was there. */
static vm_status borrow(run *r, uint64_t bytes, uint64_t *height) {
    uint64_t address;
    vm_status s = allocate(r, bytes, &address);
    if (s || !address) return s;
    *height = now(r->talloc, VM_TALLOC_ALLOCATED_BYTES);
    return vm_talloc_free(r->talloc, address);
}

static vm_status keep(run *r, uint64_t bytes, uint64_t *address) {
    return *address ? VM_OK : allocate(r, bytes, address);
}

static uint64_t makes(const run *r, uint64_t room, uint64_t workspace) {
    return is_played(r, workspace) ? vm_talloc_makes(r->talloc, room, workspace) : 0;
}

/* A convolution's workspace: of the first plan, else of the next (try_configs in Conv_v8.cpp). */
static vm_status convolve(run *r, uint32_t id, uint64_t *height) {
    if (r->met) {
        const uint64_t room = vm_talloc_cached(r->talloc, r->pool == SMALL_POOL);
        r->met->room = room;
        r->met->made = makes(r, room, r->workspace[id]);
        if (!r->met++->made) return VM_OK; /* for it would leave no trace */
    }
    vm_status s = borrow(r, r->workspace[id], height);
    if (s != VM_ENOMEM || !vm_talloc_last_oom(r->talloc) || !r->next || r->next[id] >= r->workspace[id]) return s;
    r->workspace[id] = r->next[id];
    return borrow(r, r->workspace[id], height);
}

static vm_status take_step(run *r, const vm_trace_step *step, uint64_t *height) {
    vm_talloc *const a = r->talloc;
    const bool stored = step->op == VM_TRACE_TAKE || step->op == VM_TRACE_GIVE;
    uint64_t *const address = stored ? &r->storage[step->id].address : NULL;
    vm_status s;
    vm_talloc_tag(a, r->stamp ? *r->stamp : step->name);
    switch (step->op) {
    case VM_TRACE_TAKE:
        return allocate(r, step->bytes, address);
    case VM_TRACE_GIVE:
        s = *address ? vm_talloc_free(a, *address) : VM_OK; /* 0: a storage of 0 bytes */
        if (!s) *address = 0;
        return s;
    case VM_TRACE_CONV:
        return convolve(r, step->id, height);
    case VM_TRACE_EMPTY:
        return vm_talloc_empty_cache(a);
    case VM_TRACE_CUBLASLT:
        if (r->blas->cublaslt_use == VM_CUBLASLT_EACH) return borrow(r, r->blas->cublaslt_bytes, height);
        s = keep(r, r->blas->cublas_bytes, &r->kept[CUBLAS].address); /* cuBLASLt's handle is cuBLAS's */
        if (s || r->blas->cublaslt_use == VM_CUBLASLT_SHARED) return s;
        return keep(r, r->blas->cublaslt_bytes, &r->kept[CUBLASLT].address);
    case VM_TRACE_CUBLAS:
        return keep(r, r->blas->cublas_bytes, &r->kept[CUBLAS].address);
    default:
        return VM_OK;
    }
}

/* Plays the script's steps from *at until `until`; *at: the first that was not played. */
static vm_status play(run *r, const vm_trace *script, size_t *at, size_t until) {
    const size_t from = *at;
    uint64_t most = 0;
    vm_status s = VM_OK;
    for (; *at < until; ++*at) {
        uint64_t height = 0;
        if ((s = take_step(r, &script->step[*at], &height))) break;
        for (int k = 0; k < 2; k++)
            if (r->kept[k].address && r->kept[k].step == NEVER) r->kept[k].step = *at;
        height = VM_MAX(height, now(r->talloc, VM_TALLOC_ALLOCATED_BYTES));
        if (height > most) most = height, r->highest = *at;
        if (r->allocated) r->allocated[*at - from] = height;
        if (r->reserved) r->reserved[*at - from] = now(r->talloc, VM_TALLOC_RESERVED_BYTES);
    }
    return s;
}

static run run_of(vm_process *p) {
    return (run){.talloc = p->talloc,
                 .blas = &p->blas,
                 .storage = p->storage,
                 .kept = {p->kept[CUBLAS], p->kept[CUBLASLT]},
                 .highest = NEVER};
}

/* The end of every call: whether it failed because the device was full. */
static vm_status done(vm_process *p, vm_status s) {
    const vm_talloc_oom *oom = s == VM_ENOMEM ? vm_talloc_last_oom(p->talloc) : NULL;
    p->full = oom != NULL;
    if (oom) p->oom = *oom;
    return s;
}

static uint64_t most_allocated(const vm_process *p) {
    return (uint64_t)vm_talloc_get_stats(p->talloc)->of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL].peak;
}

/* Whether what was played made a new peak. call: its first step, or NEVER where it is no call. */
static void note_peak(vm_process *p, const run *r, size_t call) {
    if (r->highest == NEVER || most_allocated(p) <= p->peak) return;
    const vm_trace_step *step = &p->script->step[r->highest];
    p->peak = most_allocated(p);
    p->end = r->highest + 1;
    p->call = VM_MIN(call, p->end);
    p->workspace = step->op == VM_TRACE_CONV ? r->workspace[step->id] : 0;
}

void vm_process_reset_peak(vm_process *p) {
    vm_talloc_reset_peak(p->talloc);
    p->peak = most_allocated(p);
    p->reset = p->call = p->end = p->script->steps;
}

/* ---- taking and giving ---- */

static vm_status give(vm_process *p, uint32_t id) {
    const size_t from = p->script->steps;
    vm_status s = push(p, (vm_trace_step){.op = VM_TRACE_GIVE, .id = id});
    if (!s) s = vm_talloc_free(p->talloc, p->storage[id].address);
    if (s)
        forget(p, from);
    else
        p->storage[id].address = 0;
    return s;
}

vm_status vm_process_release(vm_process *p, uint64_t address) {
    uint32_t id;
    if (find(p, address, &id)) return done(p, give(p, id));
    vm_status s = vm_talloc_free(p->talloc, address);
    if (!s)
        s = vm_fail(VM_EINVAL, "address: want one of the process's storages, got %#llx", (unsigned long long)address);
    return done(p, s);
}

vm_status vm_process_empty_cache(vm_process *p) {
    vm_status s = push(p, (vm_trace_step){.op = VM_TRACE_EMPTY});
    return done(p, s ? s : vm_talloc_empty_cache(p->talloc));
}

/* Takes `count` storages, all or none. */
static vm_status take_all(vm_process *p, uint32_t stamp, uint32_t name, const uint64_t *bytes, size_t count,
                          uint64_t *address) {
    const size_t from = p->script->steps;
    const uint32_t first = p->script->ids;
    size_t at = from;
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < count; i++)
        s = push(p, (vm_trace_step){.op = VM_TRACE_TAKE, .name = name, .bytes = bytes[i]});
    run r = run_of(p);
    r.stamp = &stamp;
    if (!s) s = play(&r, p->script, &at, p->script->steps);
    note_peak(p, &r, NEVER);
    if (s) {
        done(p, s);
        forget(p, at);
        for (uint32_t id = first + (uint32_t)(at - from); id-- > first;) give(p, id);
        return s;
    }
    for (size_t i = 0; i < count; i++) address[i] = p->storage[first + i].address;
    return done(p, s);
}

static vm_status hold_all(vm_process *p, const char *stamp, const char *name, const uint64_t *bytes, size_t count,
                          uint64_t *address) {
    uint32_t shown, own;
    vm_status s = vm_names_add(&p->script->names, stamp, &shown);
    if (!s) s = vm_names_add(&p->script->names, name, &own);
    return s ? done(p, s) : take_all(p, shown, own, bytes, count, address);
}

vm_status vm_process_hold(vm_process *p, const char *name, const uint64_t *bytes, size_t count, uint64_t *address) {
    return hold_all(p, name, name, bytes, count, address);
}

vm_status vm_process_place(vm_process *p, const char *stamp, const char *name, const vm_trace *t, uint64_t *address) {
    uint64_t *bytes;
    vm_status s = take(t->ids, sizeof *bytes, &bytes);
    if (s) return done(p, s);
    for (size_t i = 0; i < t->steps; i++)
        if (t->step[i].op == VM_TRACE_TAKE) bytes[t->step[i].id] = t->step[i].bytes;
    s = hold_all(p, stamp, name, bytes, t->ids, address);
    release(bytes, (size_t)t->ids + 1, sizeof *bytes);
    return s;
}

vm_status vm_process_copy(vm_process *p, const char *stamp, uint64_t *address, const uint64_t *bytes, size_t count,
                          size_t *copied) {
    uint32_t shown, old;
    vm_status s = vm_names_add(&p->script->names, stamp, &shown);
    for (*copied = 0; !s && *copied < count; *copied += !s) {
        uint64_t *const one = &address[*copied];
        if (!find(p, *one, &old)) return done(p, vm_fail(VM_EINVAL, "copy: want storages of the process"));
        if (!bytes[*copied]) continue;
        s = take_all(p, shown, p->storage[old].name, &bytes[*copied], 1, one);
        if (!s) s = give(p, old);
    }
    return done(p, s);
}

/* ---- calls ---- */

/* A trace's steps behind the script's, and the numbers that its convolutions have there. */
static vm_status append(vm_process *p, const vm_trace *t, uint32_t *conv) {
    const uint32_t first = p->script->ids;
    uint32_t *name;
    vm_status s = take(t->names.count, sizeof *name, &name);
    if (s) return s;
    for (size_t i = 0; !s && i < t->names.count; i++)
        s = vm_names_add(&p->script->names, vm_names_get(&t->names, i), &name[i]);
    for (size_t i = 0; !s && i < t->convs; i++) {
        s = vm_trace_question(p->script, &t->conv[i], &conv[i]);
        while (!s && p->mosts < p->script->convs)
            if (!(s = grow(&p->most, p->mosts, sizeof *p->most))) p->most[p->mosts++] = UINT64_MAX;
    }
    for (size_t i = 0; !s && i < t->steps; i++) {
        vm_trace_step step = t->step[i];
        step.name = name[step.name];
        step.id = step.op == VM_TRACE_CONV ? conv[step.id] : first + step.id;
        s = push(p, step);
    }
    release(name, t->names.count + 1, sizeof *name);
    return s;
}

/* With the trace's steps from `from` on. */
static vm_status play_call(vm_process *p, run *r, const vm_trace *t, size_t from, uint32_t first, uint64_t *address) {
    uint32_t names[2];
    size_t at = from;
    vm_status s = vm_names_add(&p->script->names, "cublas [workspace]", &names[CUBLAS]);
    if (!s) s = vm_names_add(&p->script->names, "cublaslt [workspace]", &names[CUBLASLT]);
    if (!s) s = play(r, p->script, &at, p->script->steps);
    if (done(p, s))
        for (uint32_t id = first; id < p->script->ids; id++)
            if (p->storage[id].address && !vm_talloc_free(p->talloc, p->storage[id].address))
                p->storage[id].address = 0;
    for (int k = 0; k < 2; k++) {
        if (r->kept[k].step != p->kept[k].step) r->kept[k].before = first, r->kept[k].name = names[k];
        p->kept[k] = r->kept[k];
    }
    if (!s && t->steps) note_peak(p, r, from);
    for (uint32_t i = 0; i < t->ids; i++) address[i] = p->storage[first + i].address;
    return s;
}

vm_status vm_process_call(vm_process *p, const vm_trace *t, const uint64_t *workspace, const uint64_t *next,
                          uint64_t *address, uint64_t *allocated, uint64_t *reserved) {
    const size_t from = p->script->steps, room = p->script->convs + t->convs;
    const uint32_t first = p->script->ids;
    uint32_t *conv;
    uint64_t *plans;
    memset(address, 0, t->ids * sizeof *address);
    vm_status s = take(t->convs, sizeof *conv, &conv);
    if (s) return done(p, s);
    if (done(p, take(2 * room, sizeof *plans, &plans))) {
        s = VM_ENOMEM;
    } else {
        s = append(p, t, conv);
        run r = run_of(p);
        r.workspace = plans;
        r.next = plans + room;
        r.allocated = allocated;
        r.reserved = reserved;
        for (size_t i = 0; !s && i < t->convs; i++) {
            r.workspace[conv[i]] = VM_MIN(workspace[i], p->most[conv[i]]);
            r.next[conv[i]] = next[i];
        }
        s = s ? done(p, s) : play_call(p, &r, t, from, first, address);
        for (size_t i = 0; !s && i < t->convs; i++) {
            uint64_t *most = &p->most[conv[i]];
            if (r.workspace[conv[i]] >= VM_MIN(workspace[i], *most)) continue;
            p->refused += *most == UINT64_MAX;
            *most = r.workspace[conv[i]];
        }
        if (s) forget(p, from);
        release(plans, 2 * room + 1, sizeof *plans);
    }
    release(conv, t->convs + 1, sizeof *conv);
    return s;
}

/* ---- the same with other workspaces ---- */

/* What is played in a pool. */
typedef struct score {
    const vm_process *p;
    uint32_t *step, *asked; /* what does something there, and which convolutions are among it */
    size_t steps, calls;
} score;

static vm_status read_score(const run *r, size_t until, score *o) {
    const vm_trace_step *const step = o->p->script->step;
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < until; i++) {
        const bool stored = step[i].op == VM_TRACE_TAKE || step[i].op == VM_TRACE_GIVE;
        if (stored ? !is_played(r, o->p->storage[step[i].id].bytes) : step[i].op == VM_TRACE_NOTHING) continue;
        if (!(s = grow(&o->step, o->steps, sizeof *o->step))) o->step[o->steps++] = (uint32_t)i;
        if (s || step[i].op != VM_TRACE_CONV) continue;
        if (!(s = grow(&o->asked, o->calls, sizeof *o->asked))) o->asked[o->calls++] = step[i].id;
    }
    return s;
}

/* Whether a row of workspaces makes the segments that were made before, so that all goes as it went then. */
static bool makes_the_same(const score *o, const run *r, const met *before) {
    size_t i = 0;
    while (i < o->calls && makes(r, before[i].room, r->workspace[o->asked[i]]) == before[i].made) i++;
    return i == o->calls;
}

static vm_status play_row(const score *o, run r, played *row) {
    uint64_t reserved = 0, height;
    vm_status s = r.pool == BOTH_POOLS ? VM_OK : take(o->calls, sizeof *row->met, &row->met);
    vm_talloc *a = NULL;
    if (!s) s = vm_talloc_new(vm_talloc_settings(r.talloc), &a);
    r.talloc = a;
    r.met = row->met;
    row->like = row;
    row->calls = o->calls;
    for (size_t i = 0; !s && i < o->steps; i++) {
        s = take_step(&r, &o->p->script->step[o->step[i]], &height);
        if (s || now(a, VM_TALLOC_RESERVED_BYTES) == reserved) continue;
        reserved = now(a, VM_TALLOC_RESERVED_BYTES);
        if (!(s = grow(&row->change, row->changes, sizeof *row->change)))
            row->change[row->changes++] = (change){o->step[i], reserved};
    }
    vm_talloc_delete(a);
    return s;
}

/* Each row in a pool. first: one that rows are compared with before the others, played where it was not yet; or NULL.
 * Every storage that is given back was taken before, so that none is of an earlier row. */
static vm_status play_rows(const vm_process *p, pool pool, size_t until, uint64_t *workspace, size_t rows,
                           played *first, played *row) {
    run r = {.talloc = p->talloc, .blas = &p->blas, .pool = pool};
    score o = {.p = p};
    vm_status s = read_score(&r, until, &o);
    if (!s) s = take(p->script->ids, sizeof *r.storage, &r.storage);
    for (size_t i = 0; !s && i < rows; i++) {
        r.workspace = workspace + i * p->script->convs;
        if (first && !first->like) s = play_row(&o, r, first);
        if (!s && first && makes_the_same(&o, &r, first->met)) row[i].like = first;
        for (size_t like = 0; !s && like < i && !row[i].like; like++)
            if (row[like].met && makes_the_same(&o, &r, row[like].met)) row[i].like = &row[like];
        if (!s && !row[i].like) s = play_row(&o, r, &row[i]);
    }
    release(r.storage, (size_t)p->script->ids + 1, sizeof *r.storage);
    release(o.asked, vm_mem_capacity(o.calls), sizeof *o.asked);
    release(o.step, vm_mem_capacity(o.steps), sizeof *o.step);
    return s;
}

/* The most that was reserved in a span by the pools together; with `above` beyond what was before it. */
static uint64_t most_of(const played *const row[2], const vm_process_span *span, bool above) {
    size_t at[2] = {0, 0};
    uint64_t held[2] = {0, 0}, before = 0, most = 0;
    for (;;) {
        const change *next = NULL;
        int pool = 0;
        for (int i = 0; i < 2; i++)
            if (at[i] < row[i]->changes && (!next || row[i]->change[at[i]].step < next->step))
                next = &row[i]->change[at[i]], pool = i;
        if (!next || next->step >= span->until) return above ? most - before : most;
        held[pool] = next->reserved;
        at[pool]++;
        most = VM_MAX(most, held[0] + held[1]);
        if (next->step < span->since) before = most = held[0] + held[1];
    }
}

vm_status vm_process_again(vm_process *p, const vm_process_span *span, size_t spans, bool above, uint64_t *workspace,
                           size_t rows, uint64_t *most) {
    const bool plain = vm_talloc_is_plain(p->talloc);
    const played none = {0};
    played *row[2] = {NULL, NULL};
    size_t until = 0;
    for (size_t i = 0; i < spans; i++) {
        if (span[i].since > span[i].until || span[i].until > p->script->steps)
            return vm_fail(VM_EINVAL, "again: want spans of %zu steps, got one from %zu until %zu", p->script->steps,
                           span[i].since, span[i].until);
        until = VM_MAX(until, span[i].until);
    }
    vm_status s = take(2 * rows, sizeof **row, row);
    if (!s) row[1] = row[0] + rows;
    if (!s) s = play_rows(p, plain ? LARGE_POOL : BOTH_POOLS, until, workspace, rows, NULL, row[0]);
    if (until != p->until) forget_row(&p->small);
    p->until = until;
    if (!s && plain) s = play_rows(p, SMALL_POOL, until, workspace, rows, &p->small, row[1]);
    if (s) forget_row(&p->small);
    for (size_t i = 0; !s && i < rows; i++)
        for (size_t j = 0; j < spans; j++)
            most[i * spans + j] =
                most_of((const played *[]){row[0][i].like, plain ? row[1][i].like : &none}, &span[j], above);
    for (size_t i = 0; row[0] && i < 2 * rows; i++) forget_row(&row[0][i]);
    release(row[0], 2 * rows + 1, sizeof **row);
    return s;
}

/* ---- what happened ---- */

void vm_process_list_free(vm_process_list *list) {
    release(list->item, list->room, sizeof *list->item);
    *list = (vm_process_list){0};
}

/* row: by name, its place in the list + 1, or 0. */
static void add(vm_process_list *list, uint32_t *row, uint32_t name, uint64_t bytes) {
    if (!row[name]) {
        list->item[list->count++] = (vm_process_named){.name = name};
        row[name] = (uint32_t)list->count;
    }
    list->item[row[name] - 1].bytes += bytes;
}

/* What is live behind `end` steps: outside of the call whose step is the `call`-th, then in it. */
static void list_live(const vm_process *p, size_t call, size_t end, bool *live, uint32_t *row, vm_process_list *out) {
    const vm_trace_step *const step = p->script->step;
    const uint64_t kept_bytes[2] = {p->blas.cublas_bytes, p->blas.cublaslt_bytes};
    uint32_t before = 0; /* the call */
    for (size_t i = 0; i < end; i++) {
        if (step[i].op == VM_TRACE_TAKE || step[i].op == VM_TRACE_GIVE) live[step[i].id] = step[i].op == VM_TRACE_TAKE;
        if (i < call && step[i].op == VM_TRACE_TAKE) before = step[i].id + 1;
    }
    for (uint32_t id = 0; id <= p->script->ids; id++) {
        for (int k = 0; k < 2; k++)
            if (p->kept[k].step < call && p->kept[k].before == id) add(out, row, p->kept[k].name, kept_bytes[k]);
        if (id < before && live[id] && p->storage[id].bytes) add(out, row, p->storage[id].name, p->storage[id].bytes);
    }
    for (size_t i = call; i < end; i++) {
        if (step[i].op == VM_TRACE_TAKE && live[step[i].id]) add(out, row, step[i].name, step[i].bytes);
        for (int k = 0; k < 2; k++)
            if (p->kept[k].step == i) add(out, row, p->kept[k].name, kept_bytes[k]);
    }
    if (call == end) return;
    if (step[end - 1].op == VM_TRACE_CONV) add(out, row, step[end - 1].name, p->workspace);
    if (step[end - 1].op == VM_TRACE_CUBLASLT && p->blas.cublaslt_use == VM_CUBLASLT_EACH)
        add(out, row, step[end - 1].name, kept_bytes[CUBLASLT]);
}

static vm_status list_at(const vm_process *p, size_t call, size_t end, vm_process_list *out) {
    const size_t names = p->script->names.count;
    bool *live = NULL;
    uint32_t *row = NULL;
    *out = (vm_process_list){.room = names + 1};
    vm_status s = take(names, sizeof *out->item, &out->item);
    if (!s) s = take(p->script->ids, sizeof *live, &live);
    if (!s) s = take(names, sizeof *row, &row);
    if (!s) list_live(p, call, end, live, row, out);
    if (s) vm_process_list_free(out);
    release(live, (size_t)p->script->ids + 1, sizeof *live);
    release(row, names + 1, sizeof *row);
    return s;
}

vm_status vm_process_peak(const vm_process *p, vm_process_list *out, const vm_trace_step **step) {
    *step = p->call < p->end ? &p->script->step[p->end - 1] : NULL;
    return list_at(p, p->call, p->end, out);
}

vm_status vm_process_baseline(const vm_process *p, vm_process_list *out) { return list_at(p, p->reset, p->reset, out); }
