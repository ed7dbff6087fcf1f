/* Finds the bytes that a process would have reserved with other workspaces: plays its script again for rows of them.
 *
 *   script -> notes: the steps of one pool         a plain allocator's pools do not depend on each other
 *   rows play the notes together -> they split into groups, each with its own copy, when they would make other segments
 *
 * Any other allocator plays the script for each row from the start. */
#include "process_play.h"
#include "torch_pool.h"

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

typedef struct score {
    note *note;
    vm_trace_stretch *stretch; /* of notes */
    size_t notes, stretches, ids, convs, kinds;
    bool small;
    const uint64_t *workspace; /* [rows][convs], rounded */
    uint64_t *most;            /* [convs], the largest workspace of any row that this pool serves */
    course *course;            /* [rows], out */
} score;

static vm_status add_note(score *o, note n) {
    vm_status s = vm_scratch_grow(&o->note, o->notes, sizeof *o->note);
    if (!s) o->note[o->notes++] = n;
    return s;
}

/* A request: a note of the pool that serves it, with its bytes rounded. */
static vm_status add_request(score *o, const vm_process *p, uint32_t stream, note n) {
    if (!n.size) return VM_OK;
    n.size = vm_talloc_round(vm_talloc_settings(p->talloc), n.size);
    return add_note(&o[2 * stream + (n.size <= TA_SMALL)], n);
}

/* Ends stretch x of the script, which begins at note `from`. takes: whether it allocates a cuBLAS workspace. */
static vm_status add_stretch(score *o, const vm_trace_stretch *x, size_t from, bool takes) {
    if (takes || from == o->notes) return VM_OK;
    vm_status s = vm_scratch_grow(&o->stretch, o->stretches, sizeof *o->stretch);
    if (!s) o->stretch[o->stretches++] = (vm_trace_stretch){from, o->notes, x->kind};
    return s;
}

/* Reads step i. kept: cuBLAS's workspaces so far; each is kept from its first use on, under a number that no storage
 * has. *takes: whether the step allocates one of them. */
static vm_status read_step(score *o, size_t pools, const vm_process *p, uint32_t i, bool kept[2], bool *takes) {
    const vm_trace_step *const step = &p->script->step[i];
    const bool lt = step->op == VM_TRACE_CUBLASLT;
    const note first = {TAKE, i, p->script->ids, p->blas.cublas_bytes};
    vm_status s = VM_OK;
    switch (step->op) {
    case VM_TRACE_TAKE: return add_request(o, p, step->stream, (note){TAKE, i, step->id, step->bytes});
    case VM_TRACE_GIVE:
        return add_request(o, p, p->storage[step->id].stream, (note){GIVE, i, step->id, p->storage[step->id].bytes});
    case VM_TRACE_CONV:
        for (int k = 0; !s && k < 2; k++)
            if (o[k].most[step->id]) s = add_note(&o[k], (note){CONVOLVE, i, step->id, o[k].most[step->id]});
        return s;
    case VM_TRACE_EMPTY:
        for (size_t k = 0; !s && k < pools; k++) s = add_note(&o[k], (note){EMPTY, i, 0, 0});
        return s;
    case VM_TRACE_CUBLASLT:
    case VM_TRACE_CUBLAS:
        if (lt && p->blas.cublaslt_use == VM_CUBLASLT_EACH)
            return add_request(o, p, 0, (note){BORROW, i, 0, p->blas.cublaslt_bytes});
        *takes |= !kept[CUBLAS] || (lt && !kept[CUBLASLT]);
        if (!kept[CUBLAS]) s = add_request(o, p, 0, first);
        if (!s && lt && !kept[CUBLASLT]) s = add_request(o, p, 0, (note){TAKE, i, first.id, p->blas.cublaslt_bytes});
        kept[CUBLAS] = true;
        kept[CUBLASLT] |= lt;
        return s;
    default: return VM_OK;
    }
}

static vm_status read_scores(const vm_process *p, size_t until, score *o, size_t pools) {
    const vm_trace *const script = p->script;
    size_t from[2 * VM_TRACE_STREAMS] = {0}, next = 0;
    bool takes = false, kept[2] = {false, p->blas.cublaslt_use != VM_CUBLASLT_KEPT};
    vm_status s = VM_OK;
    for (uint32_t i = 0; !s && i < until; i++) {
        const vm_trace_stretch *const x = next < script->stretches ? &script->stretch[next] : NULL;
        if (x && i == x->from) takes = false;
        for (size_t k = 0; x && i == x->from && k < pools; k++) from[k] = o[k].notes;
        s = read_step(o, pools, p, i, kept, &takes);
        if (s || !x || i + 1 < x->until) continue;
        for (size_t k = 0; !s && k < pools; k++) s = add_stretch(&o[k], x, from[k], takes);
        next++;
    }
    return s;
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

static vm_status copy_group(const score *o, const group *g, group *copy) {
    *copy = *g;
    copy->held = NULL;
    copy->version = NULL;
    copy->course.change = NULL;
    vm_status s = vm_pool_copy(&g->pool, &copy->pool);
    if (!s) s = vm_scratch_new(o->ids, sizeof *g->held, &copy->held);
    if (!s) s = vm_scratch_new(vm_mem_capacity(g->course.changes), sizeof *g->course.change, &copy->course.change);
    if (!s) s = vm_scratch_new(o->kinds, sizeof *g->version, &copy->version);
    if (s) return s;
    memcpy(copy->held, g->held, o->ids * sizeof *g->held);
    if (o->kinds) memcpy(copy->version, g->version, o->kinds * sizeof *g->version);
    if (g->course.changes) memcpy(copy->course.change, g->course.change, g->course.changes * sizeof *g->course.change);
    return VM_OK;
}

/* Returns: the segment that a row's workspace makes if a pool has `room`; 0 if it makes none. */
static uint64_t makes(const score *o, uint64_t room, size_t row, uint32_t conv) {
    const uint64_t size = o->workspace[row * o->convs + conv];
    return size <= room || (size <= TA_SMALL) != o->small ? 0 : vm_talloc_segment(size);
}

static vm_status play(const score *o, group *g, size_t at);

/* A convolution's workspace: rows that would make another segment than the first row leave the group, and play on. */
static vm_status convolve(const score *o, group *g, size_t at) {
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
        group others;
        s = copy_group(o, g, &others);
        others.row += equal;
        others.rows -= equal;
        if (!s) s = play(o, &others, at);
        forget_group(&others);
        g->rows = equal;
    }
    return s || !made ? s : vm_pool_borrow(&g->pool, o->workspace[g->row[0] * o->convs + conv]);
}

/* Plays the notes from `at` on. */
static vm_status play(const score *o, group *g, size_t at) {
    vm_status s = VM_OK;
    while (!s && at < o->notes) {
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
        if (!s) s = add_change(&g->course, n.step, g->pool.reserved);
        g->others += !x || at < x->from;
        if (++at != (x ? x->until : 0)) continue;
        if (version_of(g) == g->begun) g->version[x->kind] = g->begun;
        g->stretch++;
    }
    if (s) return s;
    for (size_t i = 0; i < g->rows; i++) {
        o->course[g->row[i]] = g->course;
        o->course[g->row[i]].borrowed = i > 0;
    }
    g->course.change = NULL;
    return VM_OK;
}

static vm_status play_pool(const score *o, size_t rows) {
    group all = {.rows = rows};
    size_t *row = NULL;
    vm_status s = vm_pool_new(&all.pool, o->small);
    if (!s) s = vm_scratch_new(o->ids, sizeof *all.held, &all.held);
    if (!s) s = vm_scratch_new(o->kinds, sizeof *all.version, &all.version);
    if (!s) s = vm_scratch_new(rows, sizeof *row, &row);
    for (size_t i = 0; !s && i < rows; i++) row[i] = i;
    all.row = row;
    if (!s && rows) s = play(o, &all, 0);
    forget_group(&all);
    vm_scratch_free(row);
    return s;
}

static vm_status play_pools(const vm_process *p, size_t until, uint64_t *workspace, size_t rows, size_t pools,
                            course *course) {
    const size_t convs = p->script->convs;
    score o[2 * VM_TRACE_STREAMS];
    uint64_t *most;
    vm_status s = vm_scratch_new(convs, pools * sizeof *most, &most);
    if (s) return s;
    for (size_t k = 0; k < pools; k++)
        o[k] = (score){.ids = p->script->ids + (size_t)1,
                       .kinds = p->script->kinds,
                       .convs = convs,
                       .small = k % 2,
                       .workspace = workspace,
                       .most = most + k * convs,
                       .course = course + k * rows};
    for (size_t i = 0; !s && i < rows * convs; i++) {
        if (!workspace[i]) continue;
        if (workspace[i] > VM_TALLOC_LARGEST) s = vm_fail(VM_EOVERFLOW, "again: expected workspaces of at most 2^60");
        workspace[i] = vm_talloc_round(vm_talloc_settings(p->talloc), workspace[i]);
        uint64_t *const m = &o[workspace[i] <= TA_SMALL].most[i % convs];
        *m = VM_MAX(*m, workspace[i]);
    }
    if (!s) s = read_scores(p, until, o, pools);
    for (size_t k = 0; k < pools; k++) {
        if (!s) s = play_pool(&o[k], rows);
        vm_scratch_free(o[k].note);
        vm_scratch_free(o[k].stretch);
    }
    vm_scratch_free(most);
    return s;
}

/* ---- any allocator ---- */

static vm_status play_row(const vm_process *p, size_t until, uint64_t *workspace, course *c) {
    run r = {.blas = &p->blas, .workspace = workspace};
    uint64_t height;
    vm_status s = vm_talloc_new(vm_talloc_settings(p->talloc), &r.talloc);
    if (!s) s = vm_scratch_new(p->script->ids, sizeof *r.storage, &r.storage);
    for (size_t i = 0; !s && i < until; i++) {
        s = vm_play_step(&r, &p->script->step[i], &height);
        if (!s) s = add_change(c, i, vm_play_now(r.talloc, VM_TALLOC_RESERVED_BYTES));
    }
    vm_scratch_free(r.storage);
    vm_talloc_delete(r.talloc);
    return s;
}

/* Returns: the most bytes reserved in a span by all pools; with `above` beyond those before it. The courses of a row's
 * pools are `rows` apart. */
static uint64_t most_of(const course *pool, size_t rows, size_t pools, const vm_process_span *span, bool above) {
    size_t at[2 * VM_TRACE_STREAMS] = {0};
    uint64_t held[2 * VM_TRACE_STREAMS] = {0}, sum = 0, before = 0, most = 0;
    for (;;) {
        const change *next = NULL;
        size_t of = 0;
        for (size_t i = 0; i < pools; i++) {
            const course *const c = &pool[i * rows];
            if (at[i] < c->changes && (!next || c->change[at[i]].step < next->step)) next = &c->change[at[i]], of = i;
        }
        if (!next || next->step >= span->until) return above ? most - before : most;
        sum += next->reserved - held[of];
        held[of] = next->reserved;
        at[of]++;
        most = VM_MAX(most, sum);
        if (next->step < span->since) before = most = sum;
    }
}

vm_status vm_process_again(const vm_process *p, const vm_process_span *span, size_t spans, bool above,
                           uint64_t *workspace, size_t rows, uint64_t *most) {
    course *course;
    size_t until = 0, pools = 2;
    for (size_t i = 0; i < spans; i++) {
        if (span[i].since > span[i].until || span[i].until > p->script->steps)
            return vm_fail(VM_EINVAL, VM_EXPECTED("again", "spans of %zu steps", "one from %zu until %zu"),
                           p->script->steps, span[i].since, span[i].until);
        until = VM_MAX(until, span[i].until);
    }
    for (size_t i = 0; i < until; i++) pools = VM_MAX(pools, 2 + 2 * (size_t)p->script->step[i].stream);
    vm_status s = vm_scratch_new(rows, pools * sizeof *course, &course);
    if (!s && vm_talloc_is_plain(p->talloc)) {
        s = play_pools(p, until, workspace, rows, pools, course);
    } else {
        for (size_t i = 0; !s && i < rows; i++) s = play_row(p, until, workspace + i * p->script->convs, &course[i]);
    }
    for (size_t i = 0; !s && i < rows; i++)
        for (size_t j = 0; j < spans; j++) most[i * spans + j] = most_of(course + i, rows, pools, &span[j], above);
    for (size_t i = 0; course && i < pools * rows; i++)
        if (!course[i].borrowed) vm_scratch_free(course[i].change);
    vm_scratch_free(course);
    return s;
}
