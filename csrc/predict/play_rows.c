/* Finds the bytes that a play would have reserved with other workspaces.
 *
 *   events -> notes: the steps of one pool         a plain allocator's pools do not depend on each other
 *   rows play the notes together -> they split into groups, each with its own copy, when they would make other segments
 *
 * Any other allocator plays the script for each row from the start. */
#include "play_parts.h"
#include "allocator/plain.h"

#include <string.h>

/* `reserved` bytes from a step on. */
typedef struct change {
    size_t step;
    uint64_t reserved;
} change;

/* The reserved bytes of a pool over the steps of a row. Equal rows share one; the first of them owns it. */
typedef struct course {
    change *change;
    size_t changes;
    bool borrowed;
} course;

static vm_status add_change(course *c, size_t step, uint64_t reserved) {
    if (c->changes ? c->change[c->changes - 1].reserved == reserved : !reserved) return VM_OK;
    vm_status s = vm_scratch_grow(&c->change, c->changes, sizeof *c->change);
    if (!s) c->change[c->changes++] = (change){step, reserved};
    return s;
}

/* ---- a plain allocator's pools: a large and a small one for each stream ---- */

typedef enum act { TAKE, GIVE, BORROW, CONVOLVE, EMPTY } act;

/* A step that uses a pool. id: of a storage or a convolution. */
typedef struct note {
    act act;
    uint32_t step, id;
    uint64_t size; /* rounded; of a convolution: the largest workspace that any row takes of the pool */
} note;

typedef struct notes {
    note *note;
    vm_trace_stretch *stretch; /* of notes */
    size_t count, stretches, ids, convs, kinds;
    bool small;
    const uint64_t *workspace; /* [rows][convs], rounded */
    uint64_t *most;            /* [convs], the largest workspace of any row that this pool serves */
    course *course;            /* [rows], out */
} notes;

static vm_status add_note(notes *o, note n) {
    const vm_status s = vm_scratch_grow(&o->note, o->count, sizeof *o->note);
    if (!s) o->note[o->count++] = n;
    return s;
}

/* A call's storage: its number among the notes. */
typedef struct local {
    uint32_t id, stream;
    uint64_t bytes;
} local;

/* Reads a script into notes. */
typedef struct reader {
    const vm_play *p;
    notes *of; /* [pools] */
    size_t pools;
    uint32_t step;       /* steps read so far */
    bool kept[2], takes; /* whether cuBLAS's workspaces are kept; whether a stretch allocates one */
    uint32_t stretches;  /* kinds of stretches read so far */
    local *local;        /* [most ids of a trace] */
} reader;

/* A request: a note of the pool that serves it, with its bytes rounded. */
static vm_status add_request(reader *r, act act, uint32_t id, uint32_t stream, uint64_t bytes) {
    if (!bytes) return VM_OK;
    const uint64_t size = vm_talloc_round(vm_talloc_settings(r->p->talloc), bytes);
    return add_note(&r->of[2 * stream + (size <= TA_SMALL)], (note){act, r->step, id, size});
}

static vm_status read_empty(reader *r) {
    vm_status s = VM_OK;
    for (size_t k = 0; !s && k < r->pools; k++) s = add_note(&r->of[k], (note){EMPTY, r->step, 0, 0});
    return s;
}

/* cuBLAS's workspaces are kept from their first use on, under a number that no storage has. */
static vm_status read_blas(reader *r, bool lt) {
    const vm_blas *const b = &r->p->blas;
    const uint32_t id = (uint32_t)r->of->ids - 1;
    vm_status s;
    if (lt && b->cublaslt_use == VM_CUBLASLT_EACH) return add_request(r, BORROW, 0, 0, b->cublaslt_bytes);
    const bool takes_cublas = !r->kept[CUBLAS], takes_cublaslt = lt && !r->kept[CUBLASLT];
    r->takes |= takes_cublas || takes_cublaslt;
    r->kept[CUBLAS] = true;
    r->kept[CUBLASLT] |= lt;
    if (takes_cublas && (s = add_request(r, TAKE, id, 0, b->cublas_bytes))) return s;
    return takes_cublaslt ? add_request(r, TAKE, id, 0, b->cublaslt_bytes) : VM_OK;
}

static vm_status read_step(reader *r, const vm_called *c, const vm_trace_step *step) {
    local *const one = &r->local[step->id];
    vm_status s = VM_OK;
    switch (step->op) {
    case VM_TRACE_TAKE:
        one->stream = step->stream;
        one->bytes = step->bytes;
        return add_request(r, TAKE, one->id, one->stream, one->bytes);
    case VM_TRACE_GIVE: return add_request(r, GIVE, one->id, one->stream, one->bytes);
    case VM_TRACE_CONV:
        for (int k = 0; !s && k < 2; k++) {
            const uint32_t conv = c->conv[step->id];
            if (r->of[k].most[conv]) s = add_note(&r->of[k], (note){CONVOLVE, r->step, conv, r->of[k].most[conv]});
        }
        return s;
    case VM_TRACE_EMPTY: return read_empty(r);
    default: return read_blas(r, step->op == VM_TRACE_CUBLASLT);
    }
}

/* Ends stretch x of a call, which begins at note `from`. */
static vm_status add_stretch(notes *o, uint32_t kind, size_t from, bool takes) {
    if (takes || from == o->count) return VM_OK;
    const vm_status s = vm_scratch_grow(&o->stretch, o->stretches, sizeof *o->stretch);
    if (!s) o->stretch[o->stretches++] = (vm_trace_stretch){from, o->count, kind};
    return s;
}

static vm_status read_call(reader *r, const vm_event *e, const vm_called *c) {
    const vm_trace *const t = c->trace;
    size_t from[2 * VM_TRACE_STREAMS] = {0}, next = 0;
    vm_status s = VM_OK;
    for (uint32_t i = 0; i < t->ids; i++) r->local[i].id = r->p->script->storages + i;
    for (uint32_t i = 0; i < c->lefts; i++) r->local[c->left[i]].id = e->first + i;
    for (size_t i = 0; !s && i < t->steps; i++, r->step++) {
        const vm_trace_stretch *const x = next < t->stretches ? &t->stretch[next] : NULL;
        if (x && i == x->from) r->takes = false;
        for (size_t k = 0; x && i == x->from && k < r->pools; k++) from[k] = r->of[k].count;
        s = read_step(r, c, &t->step[i]);
        if (s || !x || i + 1 < x->until) continue;
        for (size_t k = 0; !s && k < r->pools; k++)
            s = add_stretch(&r->of[k], r->stretches + x->kind, from[k], r->takes);
        next++;
    }
    r->stretches += t->kinds;
    return s;
}

static vm_status read_going(reader *r, const vm_event *e, size_t i) {
    const uint32_t id = r->p->script->going[e->gone + i];
    const vm_storage *const one = &r->p->script->storage[id];
    const vm_status s = add_request(r, GIVE, id, one->stream, one->bytes);
    r->step++;
    return s;
}

static vm_status read_event(reader *r, size_t number) {
    const vm_event *const e = &r->p->script->event[number];
    vm_status s;
    if (e->kind == VM_EVENT_CALL) return read_call(r, e, vm_play_called(r->p, number));
    if (e->kind == VM_EVENT_EMPTY) {
        if ((s = read_empty(r))) return s;
        r->step++;
    }
    for (uint32_t i = 0; i < e->count; i++) {
        if ((s = add_request(r, TAKE, e->first + i, 0, r->p->script->storage[e->first + i].bytes))) return s;
        r->step++;
        if (e->kind == VM_EVENT_REPLACE && (s = read_going(r, e, i))) return s;
    }
    for (size_t i = 0; e->kind == VM_EVENT_GIVE && i < e->goes; i++)
        if ((s = read_going(r, e, i))) return s;
    return VM_OK;
}

/* Rows that have been equal so far. */
typedef struct group {
    vm_pool pool;
    uint32_t *held;         /* [ids], the block of each storage; 0: none */
    uint64_t *version;      /* [kinds] of stretches: the pool's version when one was played without a change */
    uint64_t begun;         /* the pool's version when the stretch began */
    size_t stretch, others; /* stretches and other notes played */
    course course;
    size_t *row; /* [rows], borrowed */
    size_t rows;
} group;

static void forget_group(group *g) {
    vm_pool_free(&g->pool);
    vm_scratch_free(g->held);
    vm_scratch_free(g->version);
    vm_scratch_free(g->course.change);
}

/* Between stretches, equal numbers mean equal blocks. */
static uint64_t version_of(const group *g) { return g->pool.next_address + g->others; }

static vm_status copy_group(const notes *o, const group *g, group *copy) {
    *copy = *g;
    copy->held = NULL;
    copy->version = NULL;
    copy->course.change = NULL;
    const size_t changes = vm_mem_capacity(g->course.changes);
    vm_status s;
    if ((s = vm_pool_copy(&g->pool, &copy->pool))) return s;
    if ((s = vm_scratch_new(o->ids, sizeof *g->held, &copy->held))) return s;
    if ((s = vm_scratch_new(changes, sizeof *g->course.change, &copy->course.change))) return s;
    if ((s = vm_scratch_new(o->kinds, sizeof *g->version, &copy->version))) return s;
    memcpy(copy->held, g->held, o->ids * sizeof *g->held);
    if (o->kinds) memcpy(copy->version, g->version, o->kinds * sizeof *g->version);
    if (g->course.changes) memcpy(copy->course.change, g->course.change, g->course.changes * sizeof *g->course.change);
    return VM_OK;
}

/* Returns: the segment that a row's workspace makes if a pool has `room`; 0 if it makes none. */
static uint64_t makes(const notes *o, uint64_t room, size_t row, uint32_t conv) {
    const uint64_t size = o->workspace[row * o->convs + conv];
    return size <= room || (size <= TA_SMALL) != o->small ? 0 : vm_talloc_segment(size);
}

static vm_status play(const notes *o, group *g, size_t at);

/* Plays the rows from number `from` on as a group of their own. */
static vm_status play_others(const notes *o, const group *g, size_t from, size_t at) {
    group others;
    vm_status s;
    if ((s = copy_group(o, g, &others))) goto done;
    others.row += from;
    others.rows -= from;
    s = play(o, &others, at);
done:
    forget_group(&others);
    return s;
}

/* A convolution's workspace: rows that would make another segment than the first row leave the group, and play on. */
static vm_status convolve(const notes *o, group *g, size_t at) {
    const uint32_t conv = o->note[at].id;
    const uint64_t room = vm_pool_room(&g->pool);
    if (o->note[at].size <= room) return VM_OK;
    const uint64_t made = makes(o, room, g->row[0], conv);
    size_t equal = 1;
    for (size_t i = 1; i < g->rows; i++) {
        const size_t row = g->row[i];
        if (makes(o, room, row, conv) != made) continue;
        g->row[i] = g->row[equal];
        g->row[equal++] = row;
    }
    vm_status s = VM_OK;
    if (equal < g->rows) {
        s = play_others(o, g, equal, at);
        g->rows = equal;
    }
    return s || !made ? s : vm_pool_borrow(&g->pool, o->workspace[g->row[0] * o->convs + conv]);
}

/* Plays the notes from `at` on. */
static vm_status play(const notes *o, group *g, size_t at) {
    vm_status s = VM_OK;
    while (at < o->count) {
        const vm_trace_stretch *x = g->stretch < o->stretches ? &o->stretch[g->stretch] : NULL;
        if (x && at == x->from) {
            g->begun = version_of(g);
            if (g->version[x->kind] == g->begun) {
                at = x->until;
                g->stretch++;
                continue;
            }
        }
        const note n = o->note[at];
        switch (n.act) {
        case TAKE: s = vm_pool_take(&g->pool, n.size, &g->held[n.id]); break;
        case GIVE:
            if (g->held[n.id]) vm_pool_give(&g->pool, g->held[n.id]); /* a recorded trace may give twice */
            g->held[n.id] = 0;
            break;
        case BORROW: s = vm_pool_borrow(&g->pool, n.size); break;
        case CONVOLVE: s = convolve(o, g, at); break;
        case EMPTY: vm_pool_empty(&g->pool); break;
        }
        if (s) return s;
        if ((s = add_change(&g->course, n.step, g->pool.reserved))) return s;
        g->others += !x || at < x->from;
        if (++at != (x ? x->until : 0)) continue;
        if (version_of(g) == g->begun) g->version[x->kind] = g->begun;
        g->stretch++;
    }
    for (size_t i = 0; i < g->rows; i++) {
        o->course[g->row[i]] = g->course;
        o->course[g->row[i]].borrowed = i > 0;
    }
    g->course.change = NULL;
    return VM_OK;
}

static vm_status play_pool(const notes *o, size_t rows) {
    group all = {.rows = rows};
    size_t *row = NULL;
    vm_status s;
    if ((s = vm_pool_new(&all.pool, o->small))) goto done;
    if ((s = vm_scratch_new(o->ids, sizeof *all.held, &all.held))) goto done;
    if ((s = vm_scratch_new(o->kinds, sizeof *all.version, &all.version))) goto done;
    if ((s = vm_scratch_new(rows, sizeof *row, &row))) goto done;
    for (size_t i = 0; i < rows; i++) row[i] = i;
    all.row = row;
    if (rows) s = play(o, &all, 0);
done:
    forget_group(&all);
    vm_scratch_free(row);
    return s;
}

/* Steps of the script before each of its events. */
typedef struct outline {
    size_t *before;    /* [events + 1] */
    size_t ids, pools; /* most storages of a trace; pools that are used */
    uint32_t kinds;    /* of stretches */
} outline;

static vm_status draw_outline(const vm_play *p, size_t until, outline *o) {
    const vm_script *const script = p->script;
    *o = (outline){.pools = 2};
    const vm_status s = vm_scratch_new(until + 1, sizeof *o->before, &o->before);
    if (s) return s;
    for (size_t i = 0; i < until; i++) {
        const vm_event *const e = &script->event[i];
        const vm_trace *const t = e->kind == VM_EVENT_CALL ? vm_play_called(p, i)->trace : NULL;
        size_t steps = e->count + e->goes + (e->kind == VM_EVENT_EMPTY);
        for (size_t k = 0; t && k < t->steps; k++) o->pools = VM_MAX(o->pools, 2 + 2 * (size_t)t->step[k].stream);
        if (t) steps = t->steps, o->ids = VM_MAX(o->ids, t->ids), o->kinds += t->kinds;
        o->before[i + 1] = o->before[i] + steps;
    }
    if (o->before[until] > UINT32_MAX) return vm_fail(VM_EOVERFLOW, "rows: expected fewer than 2^32 steps");
    return VM_OK;
}

static vm_status read_script(const vm_play *p, size_t until, const outline *of, notes *o) {
    reader r = {.p = p, .of = o, .pools = of->pools, .kept = {false, p->blas.cublaslt_use != VM_CUBLASLT_KEPT}};
    vm_status s = vm_scratch_new(of->ids, sizeof *r.local, &r.local);
    for (size_t i = 0; !s && i < until; i++)
        if (p->script->event[i].kind != VM_EVENT_NOTHING) s = read_event(&r, i);
    vm_scratch_free(r.local);
    return s;
}

/* Rounds a row's workspaces, and notes the largest ones by pool. */
static vm_status round_rows(const vm_play *p, uint64_t *workspace, size_t rows, notes *o) {
    const size_t convs = p->script->convs;
    for (size_t i = 0; i < rows * convs; i++) {
        if (!workspace[i]) continue;
        if (workspace[i] > VM_TALLOC_LARGEST) return vm_fail(VM_EOVERFLOW, "rows: expected workspaces of at most 2^60");
        workspace[i] = vm_talloc_round(vm_talloc_settings(p->talloc), workspace[i]);
        uint64_t *const m = &o[workspace[i] <= TA_SMALL].most[i % convs];
        *m = VM_MAX(*m, workspace[i]);
    }
    return VM_OK;
}

static vm_status play_pools(const vm_play *p, size_t until, const outline *of, uint64_t *workspace, size_t rows,
                            course *course) {
    const size_t convs = p->script->convs;
    notes o[2 * VM_TRACE_STREAMS];
    uint64_t *most;
    vm_status s = vm_scratch_new(convs, of->pools * sizeof *most, &most);
    if (s) return s;
    for (size_t k = 0; k < of->pools; k++)
        o[k] = (notes){.ids = (size_t)p->script->storages + of->ids + 1,
                       .kinds = of->kinds,
                       .convs = convs,
                       .small = k % 2,
                       .workspace = workspace,
                       .most = most + k * convs,
                       .course = course + k * rows};
    if ((s = round_rows(p, workspace, rows, o))) goto done;
    s = read_script(p, until, of, o);
    for (size_t k = 0; k < of->pools; k++) {
        if (!s) s = play_pool(&o[k], rows); /* each pool's notes are freed before the next pool is played */
        vm_scratch_free(o[k].note);
        vm_scratch_free(o[k].stretch);
    }
done:
    vm_scratch_free(most);
    return s;
}

/* ---- any allocator ---- */

/* Plays a call of a row. step: its first one. */
static vm_status play_call(run *r, const vm_event *e, stored *stored, size_t step, course *c) {
    uint64_t height;
    vm_status s;
    for (size_t i = 0; i < r->of->trace->steps; i++) {
        if ((s = vm_play_step(r, &r->of->trace->step[i], &height))) return s;
        if ((s = add_change(c, step + i, vm_play_now(r->talloc, VM_TALLOC_RESERVED_BYTES)))) return s;
    }
    for (size_t i = 0; i < r->of->lefts; i++) {
        stored[e->first + i].address = r->address[r->of->left[i]];
        r->address[r->of->left[i]] = 0;
    }
    return VM_OK;
}

/* Plays a step outside of calls: a storage comes or goes. */
static vm_status play_one(run *r, bool comes, uint64_t bytes, uint64_t *address, size_t step, course *c) {
    vm_status s = VM_OK;
    if (comes) s = vm_talloc_malloc(r->talloc, bytes, 0, address);
    if (!comes && *address) s = vm_talloc_free(r->talloc, *address);
    return s ? s : add_change(c, step, vm_play_now(r->talloc, VM_TALLOC_RESERVED_BYTES));
}

static vm_status play_event(const vm_play *p, run *r, size_t number, stored *stored, size_t step, course *c) {
    const vm_script *const script = p->script;
    const vm_event *const e = &script->event[number];
    vm_status s;
    if (e->kind == VM_EVENT_CALL) {
        r->of = vm_play_called(p, number);
        return play_call(r, e, stored, step, c);
    }
    if (e->kind == VM_EVENT_EMPTY && (s = vm_talloc_empty_cache(r->talloc))) return s;
    if ((s = add_change(c, step, vm_play_now(r->talloc, VM_TALLOC_RESERVED_BYTES)))) return s;
    for (size_t i = 0; i < VM_MAX(e->count, e->goes); i++) {
        const uint32_t id = e->first + (uint32_t)i;
        if (i < e->count && (s = play_one(r, true, script->storage[id].bytes, &stored[id].address, step++, c)))
            return s;
        if (i < e->goes && (s = play_one(r, false, 0, &stored[script->going[e->gone + i]].address, step++, c)))
            return s;
    }
    return VM_OK;
}

static vm_status play_row(const vm_play *p, size_t until, const outline *of, uint64_t *workspace, course *c) {
    uint64_t kept[2] = {0};
    run r = {.blas = &p->blas, .workspace = workspace, .cublas = {&kept[CUBLAS], &kept[CUBLASLT]}};
    stored *stored = NULL;
    vm_status s;
    if ((s = vm_talloc_new(vm_talloc_settings(p->talloc), &r.talloc))) goto done;
    if ((s = vm_scratch_new(p->script->storages, sizeof *stored, &stored))) goto done;
    if ((s = vm_scratch_new(of->ids, sizeof *r.address, &r.address))) goto done;
    for (size_t i = 0; i < until; i++) {
        if (p->script->event[i].kind == VM_EVENT_NOTHING) continue;
        if ((s = play_event(p, &r, i, stored, of->before[i], c))) goto done;
    }
done:
    vm_scratch_free(r.address);
    vm_scratch_free(stored);
    vm_talloc_delete(r.talloc);
    return s;
}

/* Steps [since, until). */
typedef struct range {
    size_t since, until;
} range;

/* Returns: the most bytes reserved in a range by all pools; with `above` beyond those before it. The courses of a row's
 * pools are `rows` apart. */
static uint64_t most_of(const course *pool, size_t rows, size_t pools, range range, bool above) {
    size_t at[2 * VM_TRACE_STREAMS] = {0};
    uint64_t held[2 * VM_TRACE_STREAMS] = {0}, sum = 0, before = 0, most = 0;
    for (;;) {
        const change *next = NULL;
        size_t of = 0;
        for (size_t i = 0; i < pools; i++) {
            const course *const c = &pool[i * rows];
            if (at[i] < c->changes && (!next || c->change[at[i]].step < next->step)) next = &c->change[at[i]], of = i;
        }
        if (!next || next->step >= range.until) return above ? most - before : most;
        sum += next->reserved - held[of];
        held[of] = next->reserved;
        at[of]++;
        most = VM_MAX(most, sum);
        if (next->step < range.since) before = most = sum;
    }
}

vm_status vm_play_rows(const vm_play *p, const vm_span *span, size_t spans, bool above, uint64_t *workspace,
                       size_t rows, uint64_t *most) {
    course *course = NULL;
    size_t until = 0;
    outline of;
    for (size_t i = 0; i < spans; i++) {
        if (span[i].since > span[i].until || span[i].until > p->event)
            return vm_fail(VM_EINVAL, VM_EXPECTED("rows", "spans of %zu events", "one from %zu until %zu"), p->event,
                           span[i].since, span[i].until);
        until = VM_MAX(until, span[i].until);
    }
    vm_status s;
    if ((s = draw_outline(p, until, &of))) goto done;
    if ((s = vm_scratch_new(rows, of.pools * sizeof *course, &course))) goto done;
    if (vm_talloc_is_plain(p->talloc)) {
        if ((s = play_pools(p, until, &of, workspace, rows, course))) goto done;
    } else {
        for (size_t i = 0; i < rows; i++)
            if ((s = play_row(p, until, &of, workspace + i * p->script->convs, &course[i]))) goto done;
    }
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < spans; j++) {
            const range steps = {of.before[span[j].since], of.before[span[j].until]};
            most[i * spans + j] = most_of(course + i, rows, of.pools, steps, above);
        }
done:
    for (size_t i = 0; course && i < of.pools * rows; i++)
        if (!course[i].borrowed) vm_scratch_free(course[i].change);
    vm_scratch_free(course);
    vm_scratch_free(of.before);
    return s;
}
