/* Passes that run together, row of tiles by row of tiles, so that tensors between them need not exist whole.
 *
 *   x --conv1--> h --conv2--> y        each step: every pass with its input ready and a reader waiting for its rows
 *
 *   step   1    2    3    4    5
 *   conv1  0    1    2    3    4       rows of tiles; conv2's row k reads h up to row k + 1
 *   conv2            0    1    2
 *
 * A norm on load first needs the sums of its whole input. If that input is streamed, the chain runs in rounds: first up
 * to that tensor, only measuring its rows; then again from the beginning, with the sums known. */
#include <math.h>
#include <string.h>

#include "../vm.h"

size_t vm_stage_made(const vm_stage *s, size_t k) { return VM_MIN(k * s->cut.out_rows, s->y_rows); }

size_t vm_stage_from(const vm_stage *s, size_t k) {
    if (k >= s->cut.rows) return s->x_rows;
    const size_t at = k * s->cut.in_step;
    return VM_MIN(at > s->cut.pad ? at - s->cut.pad : 0, s->x_rows);
}

/* Returns: the end of the rows of x that row k of tiles reads. */
static size_t reads_to(const vm_stage *s, size_t k) {
    k = VM_MIN(k, s->cut.rows - 1);
    const size_t end = k * s->cut.in_step + s->cut.in_rows;
    return VM_MIN(end > s->cut.pad ? end - s->cut.pad : 0, s->x_rows);
}

size_t vm_chain_stages(const vm_plan *plan, const vm_chain *chain, vm_stage *stage) {
    const vm_backend *b = plan->request.backend;
    const size_t threads = plan->request.limits.threads;
    const int first = chain->first, last = chain->last;
    for (int i = first; i <= last; i++) {
        const vm_node *n = &plan->graph->node[i];
        const vm_pass *p = &plan->step[i].pass;
        vm_stage *s = &stage[i - first];
        *s = (vm_stage){.cut = b->cut(b, p, chain->tight),
                        .x_rows = p->x.h,
                        .y_rows = p->y.h,
                        .x = n->x >= first ? n->x - first : VM_NONE,
                        .add = n->add >= first ? n->add - first : VM_NONE};
        s->ahead = threads > s->cut.columns ? 2 : 1; /* 2: threads stay busy while the input is made */
        s->least = chain->steps ? (s->cut.rows + chain->steps - 1) / chain->steps : 1;
        s->most = VM_MAX(threads > 1 ? 4 * ((threads + s->cut.columns - 1) / s->cut.columns) : 1, s->least);
    }
    return (size_t)(last - first + 1);
}

/* Returns: a stage's rows of tiles next to `tall` rows of a tensor of `all`. */
static size_t rows_of_tiles(const vm_stage *s, size_t tall, size_t all) {
    const uint64_t made = (uint64_t)all * s->cut.out_rows; /* attention has one row of tiles, the whole image's */
    return VM_MAX((size_t)(((uint64_t)tall * s->y_rows + made - 1) / made), 1);
}

static double flops_of(const vm_plan *plan, int node) { return vm_pass_flops(&plan->step[node].pass); }

/* Sets how many rows of tiles each active stage makes per step: few, so that rings are low, but by its share of the
 * work each stage has tasks for its share of the threads. All advance equally, by a multiple of `tall` rows of the
 * tallest tensor, which are next to the coarsest row of tiles. */
static void set_steps(const vm_plan *plan, int first, vm_stage *stage, size_t stages) {
    size_t all = 0, tall = 0, times = 1;
    double work = 0;
    for (size_t i = 0; i < stages; i++) {
        if (!stage[i].active) continue;
        all = VM_MAX(all, stage[i].y_rows);
        work += flops_of(plan, first + (int)i);
    }
    for (size_t i = 0; i < stages; i++)
        if (stage[i].active) tall = VM_MAX(tall, stage[i].cut.out_rows * (all / stage[i].y_rows));
    for (size_t i = 0; i < stages; i++) {
        const double share = flops_of(plan, first + (int)i) / work * plan->request.limits.threads;
        const size_t tasks = stage[i].cut.columns * rows_of_tiles(&stage[i], tall, all);
        if (stage[i].active) times = VM_MAX(times, (size_t)ceil(share / (double)tasks - 1e-9));
    }
    for (size_t i = 0; i < stages; i++) {
        vm_stage *s = &stage[i];
        s->each = VM_MAX(times > 1 ? VM_MIN(rows_of_tiles(s, times * tall, all), s->most) : 1, s->least);
    }
}

bool vm_chain_round(const vm_plan *plan, int first, vm_stage *stage, size_t stages, size_t round, int *target) {
    bool measured[VM_CHAIN] = {false};
    size_t found = 0;
    *target = VM_NONE;
    for (size_t i = 0; i < stages; i++)
        if (stage[i].x != VM_NONE && plan->graph->node[first + (int)i].pass.norm == VM_NORM_GROUP)
            measured[stage[i].x] = true;
    for (size_t i = 0; i < stages && *target == VM_NONE; i++)
        if (measured[i] && found++ == round) *target = (int)i;
    if (*target == VM_NONE && round > found) return false;
    for (size_t i = 0; i < stages; i++) {
        stage[i].done = stage[i].now = 0;
        stage[i].read = false;
        stage[i].active = *target == VM_NONE || (int)i == *target;
    }
    for (size_t i = stages; i-- > 0;) { /* and the stages that feed the target */
        const int sources[] = {stage[i].x, stage[i].add};
        for (size_t k = 0; stage[i].active && k < 2; k++)
            if (sources[k] != VM_NONE) stage[sources[k]].active = stage[sources[k]].read = true;
    }
    set_steps(plan, first, stage, stages);
    return true;
}

/* Fills the rows of each stage's output that readers wait for. Outputs without a reader in the chain advance together,
 * so that they may lie over their input. */
static void find_wanted(const vm_stage *stage, size_t stages, size_t *wanted) {
    size_t lowest = SIZE_MAX, reach = 0;
    memset(wanted, 0, stages * sizeof *wanted);
    for (size_t i = 0; i < stages; i++) {
        const vm_stage *s = &stage[i];
        if (!s->active || s->done == s->cut.rows) continue;
        const size_t next = s->done + s->ahead * s->each - 1;
        if (s->x != VM_NONE) wanted[s->x] = VM_MAX(wanted[s->x], reads_to(s, next));
        if (s->add != VM_NONE) wanted[s->add] = VM_MAX(wanted[s->add], vm_stage_made(s, next + 1));
        if (s->read) continue;
        lowest = VM_MIN(lowest, vm_stage_made(s, s->done));
        reach = VM_MAX(reach, s->each * s->cut.out_rows);
    }
    for (size_t i = 0; i < stages; i++)
        if (!stage[i].read) wanted[i] = lowest + reach;
}

bool vm_stage_ready(const vm_stage *stage, const vm_stage *s, size_t k) {
    const vm_stage *x = s->x == VM_NONE ? NULL : &stage[s->x], *add = s->add == VM_NONE ? NULL : &stage[s->add];
    return (!x || vm_stage_made(x, x->done) >= reads_to(s, k)) &&
           (!add || vm_stage_made(add, add->done) >= vm_stage_made(s, k + 1));
}

bool vm_chain_step(vm_stage *stage, size_t stages) {
    size_t wanted[VM_CHAIN];
    bool more = false;
    for (size_t i = 0; i < stages; i++) stage[i].done += stage[i].now, stage[i].now = 0;
    find_wanted(stage, stages, wanted);
    for (size_t i = 0; i < stages; i++) {
        vm_stage *s = &stage[i];
        if (!s->active) continue;
        while (s->now < s->each && s->done + s->now < s->cut.rows && vm_stage_made(s, s->done + s->now) < wanted[i] &&
               vm_stage_ready(stage, s, s->done + s->now))
            s->now++;
        more |= s->now > 0;
    }
    return more;
}

static size_t reached(const vm_stage *s) { return s->done + s->now; }

/* Returns: whether each stage is where it was at the mark, only further down, each as far as its neighbours. */
static bool moved_equally(const vm_stage *mark, const vm_stage *stage, size_t stages) {
    size_t stored = 0; /* rows by which outputs without a reader in the chain moved */
    for (size_t i = 0; i < stages; i++) {
        const vm_stage *s = &stage[i];
        if (!s->active) continue;
        const size_t by = reached(s) - reached(&mark[i]), made = by * s->cut.out_rows;
        if (!by || mark[i].done * s->cut.in_step < s->cut.pad) return false; /* the image's top: no rows above it */
        if (s->x != VM_NONE &&
            by * s->cut.in_step != (reached(&stage[s->x]) - reached(&mark[s->x])) * stage[s->x].cut.out_rows)
            return false;
        if (s->add != VM_NONE &&
            made != (reached(&stage[s->add]) - reached(&mark[s->add])) * stage[s->add].cut.out_rows)
            return false;
        if (s->read) continue;
        if (stored && made != stored) return false;
        stored = made;
    }
    return true;
}

void vm_chain_skip(vm_repeats *seen, vm_stage *stage, size_t stages) {
    if (seen->steps && moved_equally(seen->mark, stage, stages)) {
        size_t times = SIZE_MAX; /* leaves each stage one repeat before it sees the image's end */
        for (size_t i = 0; i < stages; i++) {
            const vm_stage *s = &stage[i];
            const size_t by = reached(s) - reached(&seen->mark[i]);
            const size_t kept = reached(s) + by + (s->ahead + 1) * s->each + s->cut.in_rows / s->cut.in_step + 1;
            if (s->active) times = VM_MIN(times, s->cut.rows > kept ? (s->cut.rows - kept) / by : 0);
        }
        for (size_t i = 0; i < stages; i++)
            if (stage[i].active) stage[i].done += times * (reached(&stage[i]) - reached(&seen->mark[i]));
    }
    if (!(seen->steps & (seen->steps - 1)))
        memcpy(seen->mark, stage, stages * sizeof *stage); /* at 0, 1, 2, 4, 8 ... */
    seen->steps++;
}

vm_manner vm_chain_manner(const vm_plan *plan, const vm_chain *chain, int node) {
    vm_stage stage;
    vm_chain_stages(plan, &(vm_chain){.first = node, .last = node, .tight = chain->tight, .steps = chain->steps},
                    &stage);
    const bool alone = chain->first == chain->last;
    const size_t at_once = alone ? stage.cut.rows : VM_MIN(stage.most, stage.cut.rows);
    return (vm_manner){.at_once = at_once, .stepped = !alone || !plan->ample, .tight = chain->tight};
}

bool vm_chain_can(const vm_plan *plan, int first, int last) {
    const vm_node *node = plan->graph->node;
    if (first == last) return true;
    if (last - first >= VM_CHAIN) return false;
    int stored = VM_NONE; /* the level of tensors that are read later */
    for (int i = first; i <= last; i++) {
        bool inside = false, later = plan->step[i].last > last;
        if (node[i].pass.kind == VM_PASS_ATTENTION) return false; /* every row reads all of its input */
        for (int j = i + 1; j <= last; j++) inside |= node[j].x == i || node[j].add == i;
        if (later && (inside || (stored != VM_NONE && stored != node[i].y_level))) return false;
        if (later) stored = node[i].y_level;
    }
    return true;
}

/* Returns: FLOPs of all rounds, of one node or all. priced: weighted by the price of each pass's steps. */
static double sum_flops(const vm_plan *plan, const vm_chain *chain, int node, bool priced) {
    vm_stage stage[VM_CHAIN];
    int target;
    double flops = 0, more = 0; /* beyond the first pass's price: passes of equal price then cost exactly their FLOPs */
    const size_t stages = vm_chain_stages(plan, chain, stage);
    for (size_t round = 0; vm_chain_round(plan, chain->first, stage, stages, round, &target); round++)
        for (size_t i = 0; i < stages; i++) {
            if (!stage[i].active || (node != VM_NONE && node != chain->first + (int)i)) continue;
            const double once = vm_pass_flops(&plan->step[chain->first + (int)i].pass);
            flops += once;
            more += once * (stage[i].cut.cost - stage[0].cut.cost);
        }
    return priced ? flops * stage[0].cut.cost + more : flops;
}

double vm_chain_flops(const vm_plan *plan, int first, int last, int node) {
    if (first == last) return vm_pass_flops(&plan->step[first].pass);
    return sum_flops(plan, &(vm_chain){.first = first, .last = last}, node, false);
}

double vm_chain_work(const vm_plan *plan, const vm_chain *chain) {
    return sum_flops(plan, chain, VM_NONE, chain->first != chain->last || chain->stepped || chain->tight);
}
