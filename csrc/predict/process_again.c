/* What a process would have reserved with other workspaces: its script, played again for rows of them on fresh
 * allocators, in each pool by itself. Rows that would make the same segments go alike and are played once. */
#include "process_play.h"

void vm_process_forget_row(played *row) {
    vm_scratch_free(row->met);
    vm_scratch_free(row->change);
    *row = (played){0};
}

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
        if (stored ? !vm_play_has(r, o->p->storage[step[i].id].bytes) : step[i].op == VM_TRACE_NOTHING) continue;
        if (!(s = vm_scratch_grow(&o->step, o->steps, sizeof *o->step))) o->step[o->steps++] = (uint32_t)i;
        if (s || step[i].op != VM_TRACE_CONV) continue;
        if (!(s = vm_scratch_grow(&o->asked, o->calls, sizeof *o->asked))) o->asked[o->calls++] = step[i].id;
    }
    return s;
}

/* Whether a row of workspaces makes the segments that were made before, so that all goes as it went then. */
static bool makes_the_same(const score *o, const run *r, const met *before) {
    size_t i = 0;
    while (i < o->calls && vm_play_makes(r, before[i].room, r->workspace[o->asked[i]]) == before[i].made) i++;
    return i == o->calls;
}

static vm_status play_row(const score *o, run r, played *row) {
    uint64_t reserved = 0, height;
    vm_status s = r.pool == BOTH_POOLS ? VM_OK : vm_scratch_new(o->calls, sizeof *row->met, &row->met);
    vm_talloc *a = NULL;
    if (!s) s = vm_talloc_new(vm_talloc_settings(r.talloc), &a);
    r.talloc = a;
    r.met = row->met;
    row->like = row;
    for (size_t i = 0; !s && i < o->steps; i++) {
        s = vm_play_step(&r, &o->p->script->step[o->step[i]], &height);
        if (s || vm_play_now(a, VM_TALLOC_RESERVED_BYTES) == reserved) continue;
        reserved = vm_play_now(a, VM_TALLOC_RESERVED_BYTES);
        if (!(s = vm_scratch_grow(&row->change, row->changes, sizeof *row->change)))
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
    if (!s) s = vm_scratch_new(p->script->ids, sizeof *r.storage, &r.storage);
    for (size_t i = 0; !s && i < rows; i++) {
        r.workspace = workspace + i * p->script->convs;
        if (first && !first->like) s = play_row(&o, r, first);
        if (!s && first && makes_the_same(&o, &r, first->met)) row[i].like = first;
        for (size_t like = 0; !s && like < i && !row[i].like; like++)
            if (row[like].met && makes_the_same(&o, &r, row[like].met)) row[i].like = &row[like];
        if (!s && !row[i].like) s = play_row(&o, r, &row[i]);
    }
    vm_scratch_free(r.storage);
    vm_scratch_free(o.asked);
    vm_scratch_free(o.step);
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
    vm_status s = vm_scratch_new(2 * rows, sizeof **row, row);
    if (!s) row[1] = row[0] + rows;
    if (!s) s = play_rows(p, plain ? LARGE_POOL : BOTH_POOLS, until, workspace, rows, NULL, row[0]);
    if (until != p->until) vm_process_forget_row(&p->small);
    p->until = until;
    if (!s && plain) s = play_rows(p, SMALL_POOL, until, workspace, rows, &p->small, row[1]);
    if (s) vm_process_forget_row(&p->small);
    for (size_t i = 0; !s && i < rows; i++)
        for (size_t j = 0; j < spans; j++)
            most[i * spans + j] =
                most_of((const played *[]){row[0][i].like, plain ? row[1][i].like : &none}, &span[j], above);
    for (size_t i = 0; row[0] && i < 2 * rows; i++) vm_process_forget_row(&row[0][i]);
    vm_scratch_free(row[0]);
    return s;
}
