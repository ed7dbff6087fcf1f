/* The smallest plans of tall images, held against the schedules of their chains walked to the last step: no ring lower than
 * the rows that are kept in it, no row written over that is still read, and every step after repeats that were skipped one
 * of the steps that are walked. Exit status 1 on a bad plan. */
#include <stdio.h>

#include "../csrc/vm.h"

static size_t row_bytes(const vm_plan *p, int node) {
    const vm_step *s = &p->step[node];
    return p->piece[s->y].pitch * VM_BLOCK * s->pass.y.w * vm_dtype_bytes(p->request.backend->dtype);
}

/* The first row of what `node` made that the chain still reads; how many rows there are where it reads none. */
static size_t still_read(const vm_plan *p, const vm_chain *c, const vm_stage *stage, int node) {
    size_t row = p->step[node].pass.y.h;
    for (int j = c->first; j <= c->last; j++) {
        const vm_node *n = &p->graph->node[j];
        const vm_stage *s = &stage[j - c->first];
        if (s->active && n->x == node) row = VM_MIN(row, vm_stage_from(s, s->done));
        if (s->active && n->add == node) row = VM_MIN(row, vm_stage_made(s, s->done));
    }
    return row;
}

static bool holds(const vm_plan *p, const vm_chain *c, const vm_stage *stage, bool last_round) {
    for (int i = c->first; i <= c->last; i++) {
        const vm_stage *s = &stage[i - c->first];
        const vm_step *step = &p->step[i];
        if (!s->active || step->y == VM_NONE) continue;
        const size_t made = vm_stage_made(s, s->done + s->now), from = still_read(p, c, stage, i);
        const vm_piece *y = &p->piece[step->y];
        if (y->ring != SIZE_MAX && s->read && made - VM_MIN(from, made) > y->ring) return false;
        for (int node = 0; last_round && s->now && node < c->first; node++) {
            const vm_step *source = &p->step[node];
            const vm_piece *x = source->y == VM_NONE ? NULL : &p->piece[source->y];
            const size_t read = x ? still_read(p, c, stage, node) : 0;
            if (!x || x->heir != step->y || read == source->pass.y.h) continue;
            if (y->offset + made * row_bytes(p, i) > x->offset + read * row_bytes(p, node) &&
                y->offset < x->offset + x->bytes)
                return false;
        }
    }
    return true;
}

static bool same(const vm_stage *a, const vm_stage *b, size_t stages) {
    for (size_t i = 0; i < stages; i++)
        if (a[i].active && (a[i].done != b[i].done || a[i].now != b[i].now)) return false;
    return true;
}

/* Whether the steps that are walked where repeats are skipped are, in this order, among all of them, the last one too. */
static bool skips_repeats(const vm_plan *p, const vm_chain *c, size_t round, size_t *skipped) {
    vm_stage all[VM_CHAIN], some[VM_CHAIN];
    vm_repeats seen = {.steps = 0};
    int target;
    const size_t stages = vm_chain_stages(p, c, all);
    vm_chain_stages(p, c, some);
    vm_chain_round(p, c->first, all, stages, round, &target);
    vm_chain_round(p, c->first, some, stages, round, &target);
    for (; vm_chain_step(some, stages); vm_chain_skip(&seen, some, stages)) {
        bool more = vm_chain_step(all, stages);
        for (; more && !same(all, some, stages); *skipped += 1) more = vm_chain_step(all, stages);
        if (!more) return false;
    }
    return !vm_chain_step(all, stages) && same(all, some, stages);
}

/* Whether all its chains hold at every step. */
static bool walk(const vm_plan *p, size_t *steps, size_t *skipped, size_t *rings, size_t *heirs) {
    for (const vm_chain *c = p->chain; c < p->chain + p->chains; c++) {
        vm_stage stage[VM_CHAIN];
        const size_t stages = vm_chain_stages(p, c, stage);
        int target;
        for (size_t round = 0; c->stepped && vm_chain_round(p, c->first, stage, stages, round, &target); round++) {
            if (!skips_repeats(p, c, round, skipped)) return false;
            for (; vm_chain_step(stage, stages); *steps += 1)
                if (!holds(p, c, stage, target == VM_NONE)) return false;
        }
    }
    for (size_t i = 0; i < p->pieces; i++) {
        *rings += p->piece[i].ring != SIZE_MAX;
        *heirs += p->piece[i].heir != VM_NONE;
    }
    return true;
}

int main(void) {
    static const size_t heights[] = {8 * 128, 8 * 1031, 8 * 5000, 8 * 16387};
    vm_model *m;
    size_t bad = 0, steps = 0, skipped = 0, rings = 0, heirs = 0;
    if (vm_model_new(vm_arch_models()[1], VM_DECODER | VM_ENCODER, vm_backend_at(VM_F32, VM_HIGHEST, 0), &m))
        return puts(vm_error()), 2;
    for (int op = 0; op < VM_OPS; op++)
        for (unsigned threads = 1; threads <= 16; threads *= 4)
            for (size_t i = 0; i < sizeof heights / sizeof *heights; i++) {
                const vm_request r = {.op = (vm_op)op,
                                      .backend = m->backend,
                                      .limits = {threads, 0},
                                      .memory_limit = i % 2 ? 1 : 0,
                                      .height = heights[i],
                                      .width = 16,
                                      .batch = 1,
                                      .in = VM_F32_NCHW,
                                      .out = VM_F32_NCHW};
                vm_plan *p;
                const vm_status s = vm_plan_new(m, &r, &p); /* refused, it is the smallest plan */
                const bool good = (!s || s == VM_ELIMIT) && walk(p, &steps, &skipped, &rings, &heirs);
                if (!good)
                    printf("bad: %s of %zu rows, %u threads\n", op == VM_ENCODE ? "encode" : "decode", heights[i],
                           threads);
                bad += !good;
                vm_plan_free(m, p);
            }
    vm_model_free(m);
    printf("%zu steps, %zu skipped, %zu rings, %zu heirs, %zu bad\n", steps, skipped, rings, heirs, bad);
    return bad || !skipped || !rings || !heirs;
}
