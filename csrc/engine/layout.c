/* Places every byte of a run before it starts.
 *
 * The passes are cut into chains (choose.c). A tensor that a later chain reads is stored whole; one that stays within
 * its chain is a ring of rows. Tensors, sums, prepared weights and scratch are pieces: some bytes, from one chain to
 * another. Pieces of overlapping chains must not share bytes, with one exception: a chain's output may lie over an
 * input that it reads for the last time, row by row, `shift` ahead of the rows still to be read.
 *
 *   offset
 *     ^   h h h   h h     q k v
 *     |  x x x x x x x | up up up up        a column is a chain; the arena is as high as the
 *     0  ------------------------> chain    highest column */
#include <string.h>

#include "plan.h"

/* ---- placing ---- */

static bool overlap(const vm_piece *a, const vm_piece *b) { return a->first <= b->last && b->first <= a->last; }

/* Returns: the lowest offset from `offset` on at which p does not meet q, or only as an heir its source, behind the
 * rows still to be read. With `down`, offsets count from the arena's top, and the two swap roles: the source must not
 * begin too far up. */
static size_t clear_of(const vm_plan *plan, const vm_piece *p, const vm_piece *q, bool down, size_t offset) {
    const size_t after = vm_sum(q->offset, q->bytes);
    if (offset >= after || q->offset >= vm_sum(offset, p->bytes)) return offset;
    const bool heir = q->heir == (int)(p - plan->piece), source = p->heir == (int)(q - plan->piece);
    if (!heir && !source) return after;
    const vm_piece *of = heir ? q : p, *to = heir ? p : q;
    const ptrdiff_t shift = of->shift + (down ? (ptrdiff_t)to->bytes - (ptrdiff_t)of->bytes : 0);
    if (heir != down) return (ptrdiff_t)offset <= (ptrdiff_t)q->offset + shift ? offset : after;
    const ptrdiff_t from = (ptrdiff_t)q->offset - shift;
    if ((ptrdiff_t)offset >= from) return offset;
    return VM_MIN(after, vm_round_up((size_t)from, plan->request.backend->device->align));
}

/* Returns: the lowest offset at which piece `nth` in the order meets no earlier piece that it must not. */
static size_t lowest_offset(const vm_plan *plan, size_t nth, bool down) {
    const vm_piece *piece = plan->piece, *p = &piece[piece[nth].nth];
    size_t offset = 0, before;
    do {
        before = offset;
        for (size_t i = 0; i < nth; i++) {
            const vm_piece *q = &piece[piece[i].nth];
            if (overlap(p, q)) offset = clear_of(plan, p, q, down, offset);
        }
    } while (offset != before);
    return offset;
}

/* An order in which pieces are placed, heaviest first. No order is always best, so each is tried. */
typedef double (*vm_weigh)(const vm_piece *p);
static double by_bytes(const vm_piece *p) { return (double)p->bytes; }
static double by_bytes_and_chains(const vm_piece *p) { return (double)p->bytes * (p->last - p->first + 1); }
static double by_end(const vm_piece *p) { return (double)p->last * 0x1p60 + (double)p->bytes; }
static double by_start(const vm_piece *p) { return (double)p->bytes - (double)p->first * 0x1p60; }

static void sort(vm_plan *plan, vm_weigh weigh) {
    vm_piece *piece = plan->piece;
    for (size_t i = 0; i < plan->pieces; i++) {
        const double weight = weigh(&piece[i]);
        size_t at = i; /* later ones first among equals: heirs before sources */
        for (; at > 0 && weigh(&piece[piece[at - 1].nth]) <= weight; at--) piece[at].nth = piece[at - 1].nth;
        piece[at].nth = (int)i;
    }
}

/* Fills the offsets of sorted pieces, from the bottom of the arena or down from its top. Returns: its height. */
static size_t place_sorted(vm_plan *plan, bool down) {
    size_t height = 0;
    for (size_t i = 0; i < plan->pieces; i++) {
        vm_piece *p = &plan->piece[plan->piece[i].nth];
        p->offset = lowest_offset(plan, i, down);
        height = VM_MAX(height, vm_sum(p->offset, p->bytes));
    }
    for (vm_piece *p = plan->piece; down && p < plan->piece + plan->pieces; p++)
        p->offset = height - p->offset - p->bytes;
    return height;
}

static void place(vm_plan *plan) {
    static const vm_weigh orders[] = {by_bytes, by_bytes_and_chains, by_end, by_start};
    enum { WAYS = 2 * sizeof orders / sizeof *orders };
    size_t best = WAYS;
    for (size_t way = 0; way < WAYS; way++) {
        if (way % 2 == 0) sort(plan, orders[way / 2]);
        const size_t height = place_sorted(plan, way % 2);
        if (best < WAYS && height >= plan->arena_bytes) continue;
        best = way;
        plan->arena_bytes = height;
    }
    sort(plan, orders[best / 2]);
    plan->arena_bytes = vm_held(plan->request.backend, place_sorted(plan, best % 2));
}

/* ---- pieces ---- */

static int add_piece(vm_plan *plan, vm_category category, size_t bytes, int first, int last) {
    plan->piece[plan->pieces] = (vm_piece){.category = category,
                                           .first = first,
                                           .last = last,
                                           .bytes = vm_round_up(bytes, plan->request.backend->device->align),
                                           .ring = SIZE_MAX,
                                           .heir = VM_NONE};
    return (int)plan->pieces++;
}

static int chain_of(const vm_plan *plan, int node) {
    int c = 0;
    while (plan->chain[c].last < node) c++;
    return c;
}

/* Returns: bytes of a row of `blocks` blocks of channels, as wide as a node's tensor. */
static size_t row_bytes(const vm_plan *plan, size_t blocks, int node) {
    const vm_shape *y = &plan->step[node].pass.y;
    return VM_PRODUCT(blocks, VM_BLOCK, y->f, y->w, vm_dtype_bytes(plan->request.backend->dtype));
}

size_t vm_plan_row_bytes(const vm_plan *plan, int node) {
    return row_bytes(plan, VM_BLOCKS(plan->step[node].pass.y.c), node);
}

size_t vm_plan_pitch_bytes(const vm_plan *plan, int node) {
    return row_bytes(plan, plan->piece[plan->step[node].y].pitch, node);
}

/* Returns: the node whose memory this one's tensor may take, pixel by pixel, in any order of the rows; VM_NONE. */
static int place_of(const vm_plan *plan, int node) {
    const vm_node *n = &plan->graph->node[node];
    const vm_pass *p = &plan->step[node].pass;
    const int over = n->add != VM_NONE ? n->add : n->x;
    const bool local = n->add != VM_NONE || p->kind == VM_PASS_ATTENTION ||
                       (p->ksize == 1 && p->slices == 1 && p->stride == 1 && !p->up);
    if (over == VM_NONE || !local || plan->step[over].streamed || plan->step[over].last != node) return VM_NONE;
    const size_t blocks = VM_BLOCKS(p->y.c);
    if (blocks > VM_BLOCKS(plan->step[over].pass.y.c)) return VM_NONE;
    /* A sum stored within wider rows keeps all of their bytes. In a wide layout other tensors use them. Otherwise the
     * sum gets a narrower piece of its own, the heir of the wide one, if it may. */
    const bool narrower = n->add != VM_NONE && blocks < plan->piece[plan->step[over].y].pitch;
    return narrower && !plan->wide && !plan->ample ? VM_NONE : over;
}

/* Returns: a piece of tensors as high and wide as the pass's, or VM_NONE. Its rows have `blocks` adjacent free blocks
 * from *at on, throughout chain c. */
static int free_blocks(const vm_plan *plan, int c, const vm_pass *pass, size_t blocks, size_t *at) {
    for (int p = 0; p < (int)plan->pieces; p++) {
        const vm_piece *q = &plan->piece[p];
        if (!q->pitch || q->ring != SIZE_MAX || q->first >= c || q->last < c) continue;
        for (*at = 0; *at + blocks <= q->pitch;) {
            size_t next = *at;
            bool same = false;
            for (int i = 0; i < plan->chain[c].first; i++) {
                const vm_step *s = &plan->step[i];
                if (s->y != p || plan->chain[c].first > s->last) continue;
                const size_t end = s->y_block + VM_BLOCKS(s->pass.y.c);
                same = s->pass.y.h == pass->y.h && s->pass.y.w == pass->y.w && s->pass.y.f == pass->y.f;
                if (s->y_block < *at + blocks && *at < end) next = VM_MAX(next, end);
            }
            if (!same) break;
            if (next == *at) return p;
            *at = next;
        }
    }
    return VM_NONE;
}

/* Returns: byte of `piece` from which on row `row` of node `from`'s tensor lies in it; `bytes` of the piece if neither
 * lies there. */
static size_t byte_of_row(const vm_plan *plan, int piece, int from, size_t row) {
    const vm_piece *p = &plan->piece[piece];
    if (from == VM_NONE || plan->step[from].y != piece || row >= plan->step[from].pass.y.h) return p->bytes;
    return row * row_bytes(plan, p->pitch, from);
}

size_t vm_plan_read_from(const vm_plan *plan, const vm_chain *chain, const vm_stage *stage, size_t stages, int piece) {
    size_t read = plan->piece[piece].bytes;
    for (size_t i = 0; i < stages; i++) {
        const vm_stage *s = &stage[i];
        const vm_node *n = &plan->graph->node[chain->first + (int)i];
        read = VM_MIN(read, byte_of_row(plan, piece, n->x, vm_stage_from(s, s->done)));
        read = VM_MIN(read, byte_of_row(plan, piece, n->add, vm_stage_made(s, s->done)));
    }
    return read;
}

/* Returns: how far after the beginning of `piece` its heir may begin without overwriting a row still to be read. */
static ptrdiff_t shift_of(const vm_plan *plan, const vm_chain *c, int piece, const int *output, size_t outputs) {
    vm_stage stage[VM_CHAIN];
    const size_t stages = vm_chain_stages(plan, c, stage);
    ptrdiff_t shift = PTRDIFF_MAX;
    int target;
    for (size_t round = 0; vm_chain_round(plan, c->first, stage, stages, round, &target); round++)
        for (vm_repeats seen = {.steps = 0}; target == VM_NONE && vm_chain_step(stage, stages);
             vm_chain_skip(&seen, stage, stages)) {
            const size_t read = vm_plan_read_from(plan, c, stage, stages, piece);
            size_t written = 0;
            for (size_t o = 0; o < outputs; o++) {
                const vm_stage *s = &stage[output[o] - c->first];
                const size_t row = vm_plan_pitch_bytes(plan, output[o]);
                if (s->now) written = VM_MAX(written, vm_stage_made(s, s->done + s->now) * row);
            }
            if (written) shift = VM_MIN(shift, (ptrdiff_t)read - (ptrdiff_t)written);
        }
    return shift;
}

void vm_plan_ring_rows(const vm_plan *plan, const vm_chain *chain, size_t *rows, size_t most_steps) {
    vm_stage stage[VM_CHAIN];
    const int first = chain->first;
    const size_t stages = vm_chain_stages(plan, chain, stage);
    size_t from[VM_CHAIN]; /* the first row of each tensor that is still read */
    int target;
    memset(rows, 0, stages * sizeof *rows);
    memset(from, 0xff, sizeof from);
    for (size_t round = 0; vm_chain_round(plan, first, stage, stages, round, &target); round++) {
        const size_t active = target == VM_NONE ? stages : (size_t)target + 1; /* at most */
        for (vm_repeats seen = {.steps = 0}; seen.steps < most_steps && vm_chain_step(stage, active);
             vm_chain_skip(&seen, stage, active))
            for (size_t i = active; i-- > 0;) { /* readers first */
                const vm_stage *s = &stage[i];
                const size_t before = vm_stage_made(s, s->done), made = vm_stage_made(s, s->done + s->now);
                const size_t kept = s->read ? from[i] : before; /* otherwise only measured */
                if (made > kept) rows[i] = VM_MAX(rows[i], made - kept);
                from[i] = SIZE_MAX;
                if (!s->active) continue;
                if (s->x != VM_NONE) from[s->x] = VM_MIN(from[s->x], vm_stage_from(s, s->done));
                if (s->add != VM_NONE) from[s->add] = VM_MIN(from[s->add], before);
            }
    }
    for (size_t i = 0; i < stages; i++) rows[i] = VM_MIN(vm_round_up(rows[i], stage[i].cut.together), stage[i].y_rows);
}

/* Places a chain's stored outputs: in the memory of a tensor that they add to or pass by, or in their own pieces, rows
 * side by side. */
static void add_outputs(vm_plan *plan, int c) {
    const vm_chain *chain = &plan->chain[c];
    int output[VM_CHAIN];
    size_t outputs = 0, pitch = 0;
    for (int i = chain->first; i <= chain->last; i++) {
        vm_step *s = &plan->step[i];
        if (s->last <= chain->last || vm_plan_ends_with(plan, i)) continue;
        s->y_block = pitch;
        pitch += VM_BLOCKS(s->pass.y.c);
        output[outputs++] = i;
    }
    if (!outputs) return;
    vm_step *s = &plan->step[output[0]];
    int last = c;
    for (size_t o = 0; o < outputs; o++) last = VM_MAX(last, chain_of(plan, plan->step[output[o]].last));
    const int over = outputs == 1 && chain->first == chain->last ? place_of(plan, output[0]) : VM_NONE;
    if (over != VM_NONE && plan->piece[plan->step[over].y].last == c) {
        s->y = plan->step[over].y;
        s->y_block = plan->step[over].y_block;
        plan->piece[s->y].last = last;
        return;
    }
    size_t at;
    const int host = plan->wide && outputs == 1 ? free_blocks(plan, c, &s->pass, pitch, &at) : VM_NONE;
    if (host != VM_NONE) {
        s->y = host;
        s->y_block = at;
        plan->piece[host].last = VM_MAX(plan->piece[host].last, last);
        return;
    }
    const size_t row = row_bytes(plan, pitch, output[0]);
    const int piece = add_piece(plan, VM_ACTIVATIONS, VM_PRODUCT(row, s->pass.y.h), c, last);
    plan->piece[piece].pitch = pitch;
    for (size_t o = 0; o < outputs; o++) plan->step[output[o]].y = piece;
    if (plan->ample || s->pass.kind == VM_PASS_ATTENTION) return;
    for (int p = 0; p < piece; p++) {
        vm_piece *dying = &plan->piece[p];
        if (dying->last != c || dying->first == c || !dying->pitch) continue;
        dying->heir = piece;
        dying->shift = shift_of(plan, chain, p, output, outputs);
    }
}

static vm_status add_chain(vm_plan *plan, int c, const size_t *ring) {
    const vm_backend *b = plan->request.backend;
    const vm_limits *limits = &plan->request.limits;
    vm_chain *chain = &plan->chain[c];
    size_t scratch = 0, workspace = 0;
    add_outputs(plan, c);
    for (int i = chain->first; i <= chain->last; i++) {
        const vm_node *n = &plan->graph->node[i];
        vm_step *s = &plan->step[i];
        if (s->streamed) {
            const size_t rows = ring[i];
            s->y = add_piece(plan, VM_ACTIVATIONS, VM_PRODUCT(rows, vm_plan_row_bytes(plan, i)), c, c);
            plan->piece[s->y].pitch = VM_BLOCKS(s->pass.y.c);
            plan->piece[s->y].ring = rows < s->pass.y.h ? rows : SIZE_MAX;
        }
        int last = i; /* the last norm that needs its sums */
        for (int j = i + 1; j < (int)plan->steps; j++)
            if (plan->graph->node[j].x == i && plan->graph->node[j].pass.norm == VM_NORM_GROUP) last = j;
        const vm_manner manner = vm_chain_manner(plan, chain, i);
        const vm_needs needs = b->needs(b, &s->pass, limits, manner);
        s->parts = needs.parts;
        if (s->parts)
            s->y_stats = add_piece(plan, VM_SCRATCH, VM_PRODUCT(s->parts, vm_stats_floats(s->pass.y.c), sizeof(float)),
                                   c, chain_of(plan, last));
        if (needs.prepared) s->prepared = add_piece(plan, VM_SCRATCH, needs.prepared, c, c);
        scratch = VM_MAX(scratch, needs.scratch);
        size_t bytes = 0;
        const vm_status status = vm_device_fail(b->device, b->workspace(b, &s->pass, limits, manner, &bytes), n->name);
        if (status) return status;
        workspace = VM_MAX(workspace, bytes);
    }
    chain->workspace = workspace ? add_piece(plan, VM_WORKSPACE, workspace, c, c) : VM_NONE;
    chain->scratch = add_piece(plan, VM_SCRATCH, scratch, c, c);
    return VM_OK;
}

/* The user's arrays while they pass through the arena. In a batch they stay all the time, so that one item's copies run
 * during another item's passes. */
static void add_staging(vm_plan *plan) {
    const int last = (int)plan->chains - 1, whole = plan->request.batch > 1;
    plan->in = plan->out = VM_NONE;
    if (!plan->staged) return;
    plan->in = add_piece(plan, VM_ACTIVATIONS, plan->in_bytes, 0, whole ? last : 0);
    plan->out = add_piece(plan, VM_OUTPUT, plan->out_bytes, whole ? 0 : last, last);
}

/* ---- counting ---- */

static size_t sum(const size_t bytes[VM_CATEGORIES]) {
    size_t total = 0;
    for (int c = 0; c < VM_CATEGORIES; c++) total = vm_sum(total, bytes[c]);
    return total;
}

/* Counts bytes of an heir that lie over its source: they count once the source is gone. */
static void count_shared(vm_plan *plan) {
    for (size_t i = 0; i < plan->pieces; i++) {
        const vm_piece *s = &plan->piece[i];
        if (s->heir == VM_NONE) continue;
        vm_piece *o = &plan->piece[s->heir];
        const size_t from = VM_MAX(s->offset, o->offset), to = VM_MIN(s->offset + s->bytes, o->offset + o->bytes);
        if (to <= from) continue;
        o->shared += to - from;
        plan->chain[o->first].stepped = true;
    }
}

static size_t output_bytes(const vm_plan *plan) {
    return plan->request.own_output ? VM_PRODUCT(plan->out_bytes, plan->request.batch) : 0;
}

size_t vm_plan_bytes_outside_arena(const vm_model *m, const vm_plan *plan) {
    const vm_backend *b = plan->request.backend;
    const size_t weights = vm_held(b, vm_mem_usage(m->mem).live[VM_WEIGHTS]), output = vm_held(b, output_bytes(plan));
    return vm_sum(weights, vm_sum(output, plan->own_bytes));
}

static void count_live(const vm_model *m, vm_plan *plan) {
    const size_t output = output_bytes(plan), weights = vm_mem_usage(m->mem).live[VM_WEIGHTS];
    memset(plan->peak, 0, sizeof plan->peak);
    for (size_t i = 0; i < plan->chains; i++) {
        size_t *live = plan->chain[i].live;
        memset(live, 0, sizeof plan->chain[i].live);
        live[VM_WEIGHTS] = weights;
        live[VM_OUTPUT] = output;
        live[VM_SCRATCH] = plan->own_bytes;
        for (size_t p = 0; p < plan->pieces; p++) {
            const vm_piece *q = &plan->piece[p];
            size_t *bytes = &live[q->category];
            if (q->first <= (int)i && (int)i <= q->last)
                *bytes = vm_sum(*bytes, q->bytes - (q->first == (int)i ? q->shared : 0));
        }
        if (sum(live) > sum(plan->peak)) memcpy(plan->peak, live, sizeof plan->peak);
    }
    plan->reserved = vm_sum(vm_plan_bytes_outside_arena(m, plan), plan->arena_bytes);
}

static vm_status lay_out(const vm_model *m, vm_plan *plan, const size_t *ring) {
    double once = 0, all = 0;
    plan->pieces = plan->rows = 0;
    for (vm_chain *c = plan->chain; c < plan->chain + plan->chains; c++) c->stepped = c->first != c->last;
    for (int i = 0; i < (int)plan->steps; i++) {
        vm_step *s = &plan->step[i];
        const vm_chain *c = &plan->chain[chain_of(plan, i)];
        s->streamed = s->last <= c->last && !vm_plan_ends_with(plan, i);
        s->y = s->y_stats = s->prepared = VM_NONE;
        s->y_block = 0;
        s->flops = vm_chain_flops(plan, c->first, c->last, i);
        once += vm_pass_flops(&s->pass);
        plan->rows = vm_sum(plan->rows, VM_PRODUCT(s->pass.y.h, plan->request.batch,
                                                   (size_t)(s->flops / vm_pass_flops(&s->pass) + 0.5)));
    }
    for (size_t c = 0; c < plan->chains; c++) {
        vm_status s = add_chain(plan, (int)c, ring);
        if (s) return s;
    }
    add_staging(plan);
    place(plan);
    count_shared(plan);
    count_live(m, plan);
    for (size_t c = 0; c < plan->chains; c++) all += vm_chain_work(plan, &plan->chain[c]);
    plan->work = all / once;
    return VM_OK;
}

vm_status vm_plan_lay_out(const vm_model *m, vm_plan *plan, size_t *ring) {
    for (const vm_chain *c = plan->chain; c < plan->chain + plan->chains; c++)
        if (c->first != c->last) vm_plan_ring_rows(plan, c, &ring[c->first], SIZE_MAX);
    plan->wide = false;
    vm_status s = lay_out(m, plan, ring);
    const size_t narrow = plan->arena_bytes;
    if (s || plan->ample) return s;
    plan->wide = true;
    if ((s = lay_out(m, plan, ring)) || plan->arena_bytes <= narrow) return s;
    plan->wide = false;
    return lay_out(m, plan, ring);
}
