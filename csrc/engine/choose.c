/* Chooses which tensors are stored and which streamed: where the list of passes is cut into chains.
 *
 * Every stretch of passes that can be a chain has two numbers: bytes needed, if its outputs may lie over inputs that it
 * reads for the last time; and work, rounds counted. Both are known for two manners; the tight one needs less memory
 * and more time (vm_manner). Given a bound on bytes, dynamic programming over the list finds the cuts with the least
 * work. Laying a plan out tells its true size; the bound is lowered until the plan keeps within the limit. */
#include <string.h>

#include "plan.h"

/* Indexed by manner: 0 loose, 1 tight. */
typedef struct stretch {
    double work[2];                 /* negative: no such chain */
    size_t bytes[2], steps, stored; /* stored: the bytes of all tensors that exist while it runs */
    enum { UNKNOWN, EXAMINED, MEASURED } known;
} stretch;

typedef struct choice {
    vm_plan *plan;
    stretch *at;
    bool free;     /* only chains that cost no extra work */
    bool longer;   /* of cuts with equal work, prefer longer chains */
    double *work;  /* of the best cuts up to a node */
    vm_chain *cut; /* the last chain of each of these */
    size_t *ring;  /* for vm_plan_lay_out */
} choice;

/* Returns: bytes of the tensors that exist after node `at` and are read later, for the last time by node `dead_by`. */
static size_t stored_after(const vm_plan *plan, int at, int dead_by) {
    size_t bytes = 0;
    for (int i = 0; i <= at; i++) {
        const int last = plan->step[i].last;
        if (last > at && last <= dead_by)
            bytes = vm_sum(bytes, VM_PRODUCT(vm_plan_row_bytes(plan, i), plan->step[i].pass.y.h));
    }
    return bytes;
}

/* Returns: the most steps of a chain if memory must not cost time; 0: any number. Weights that do not stay in a cache
 * between steps are read again in each step, next to enough work to hide that. Both constants were measured
 * (docs/SPEED.md). Pairs of bfloat16 that a direct product uses as stored are not counted. */
static size_t most_steps(const vm_plan *plan, int first, int last) {
    enum { CACHE = 21 << 18 /* 5.25 MiB */, WORTH = 1600 /* FLOPs for each byte that is read again */ };
    const vm_backend *b = plan->request.backend;
    size_t weights = 0;
    double flops = 0;
    for (int i = first; i <= last; i++) {
        const vm_pass *p = &plan->step[i].pass;
        weights = vm_sum(weights, b->needs(b, p, &plan->request.limits, (vm_manner){.at_once = 1}).prepared);
        flops += vm_pass_flops(p);
    }
    return first == last || weights <= CACHE ? 0 : VM_MAX((size_t)(flops / ((double)weights * WORTH)), 1);
}

/* Returns: what a chain of these passes would cost and store. free: reject chains that cost extra work. */
static stretch examine(const vm_plan *plan, int first, int last, bool free) {
    const int end = (int)plan->steps;
    stretch s = {.work = {-1, -1}, .known = EXAMINED};
    double once = 0;
    if (!vm_chain_can(plan, first, last)) return s;
    for (int i = first; i <= last; i++) once += vm_pass_flops(&plan->step[i].pass);
    const double work = vm_chain_work(plan, &(vm_chain){.first = first, .last = last});
    if (free && work > once) return s;
    const size_t dying = stored_after(plan, first - 1, last), kept = stored_after(plan, first - 1, end) - dying;
    size_t born = 0;
    for (int i = first; i <= last; i++)
        if (plan->step[i].last > last)
            born = vm_sum(born, VM_PRODUCT(vm_plan_row_bytes(plan, i), plan->step[i].pass.y.h));
    s.stored = vm_sum(kept, VM_MAX(dying, born));
    s.work[0] = work;
    return s;
}

/* Finds the bytes that the chain would need in each manner. This takes far longer than to examine it. */
static void measure(const vm_plan *plan, int first, int last, bool free, stretch *s) {
    enum { LEAST = 48, EACH = 4 /* steps until rings are nearly at full height; laying out tells the exact size */ };
    const size_t steps = VM_MAX((size_t)LEAST, EACH * (size_t)(last - first + 1));
    const vm_backend *b = plan->request.backend;
    size_t ring[VM_CHAIN];
    bool lower = false; /* whether the tight manner has lower rows of tiles */
    if (free) s->steps = most_steps(plan, first, last);
    for (int i = first; i <= last; i++) {
        const vm_pass *p = &plan->step[i].pass;
        lower |= b->cut(b, p, true).out_rows < b->cut(b, p, false).out_rows;
    }
    for (int tight = 0; tight < (free ? 1 : 2); tight++) {
        const vm_chain c = {.first = first, .last = last, .tight = tight, .steps = s->steps};
        size_t bytes = s->stored, scratch = 0;
        if (first != last && (!tight || lower)) vm_plan_ring_rows(plan, &c, ring, steps);
        for (int i = first; i <= last; i++) {
            const vm_pass *p = &plan->step[i].pass;
            if (plan->step[i].last <= last && i + 1 < (int)plan->steps)
                bytes = vm_sum(bytes, VM_PRODUCT(vm_plan_row_bytes(plan, i), ring[i - first]));
            const vm_needs n = b->needs(b, p, &plan->request.limits, vm_chain_manner(plan, &c, i));
            bytes = vm_sum(bytes, vm_sum(n.prepared, VM_PRODUCT(n.parts, vm_stats_floats(p->y.c), sizeof(float))));
            scratch = VM_MAX(scratch, n.scratch);
        }
        s->bytes[tight] = vm_sum(bytes, scratch);
    }
    if (!free && s->bytes[1] < s->bytes[0])
        s->work[1] = vm_chain_work(plan, &(vm_chain){.first = first, .last = last, .tight = true});
    s->known = MEASURED;
}

/* Finds the cuts with the least work among chains of at most `bound` bytes; *most: bytes of the largest chain. */
static bool cut(choice *c, size_t bound, size_t *most) {
    const int n = (int)c->plan->steps;
    for (int last = 0; last < n; last++) {
        double best = c->work[last] = -1;
        for (int first = last; first >= 0 && last - first < VM_CHAIN; first--) {
            stretch *s = &c->at[first * n + last];
            if (!s->known) *s = examine(c->plan, first, last, c->free);
            const double before = first ? c->work[first - 1] : 0;
            for (int tight = 0; tight < 2 && before >= 0; tight++) { /* the tight manner never costs less */
                const double work = s->work[tight] + before;
                if (s->work[tight] < 0 || s->stored > bound || (best >= 0 && (c->longer ? work > best : work >= best)))
                    break;
                if (s->known != MEASURED) measure(c->plan, first, last, c->free, s);
                if (s->bytes[tight] > bound) continue;
                c->work[last] = best = work;
                c->cut[last] = (vm_chain){.first = first, .last = last, .tight = tight, .steps = s->steps};
                break;
            }
        }
    }
    if (c->work[n - 1] < 0) return false;
    size_t chains = 0;
    *most = 0;
    for (int last = n - 1; last >= 0; last = c->cut[last].first - 1) chains++;
    c->plan->chains = chains;
    for (int last = n - 1; last >= 0; last = c->cut[last].first - 1) {
        const vm_chain *chain = &c->cut[last];
        *most = VM_MAX(*most, c->at[chain->first * n + last].bytes[chain->tight]);
        c->plan->chain[--chains] = *chain;
    }
    return true;
}

static size_t taken(const vm_plan *plan) {
    size_t peak = 0;
    for (int i = 0; i < VM_CATEGORIES; i++) peak = vm_sum(peak, plan->peak[i]);
    return VM_MAX(peak, plan->reserved);
}

static bool within(const vm_plan *plan) {
    return !plan->request.memory_limit || taken(plan) <= plan->request.memory_limit;
}

/* Reports that the plan, which is the smallest, is too large. */
static vm_status refuse(vm_plan *plan) {
    const size_t limit = plan->request.memory_limit, smallest = taken(plan);
    plan->reserved = smallest;
    return vm_fail(VM_ELIMIT,
                   VM_EXPECTED("memory_limit", "at least %zu bytes (%.1f MiB) for this size", "%zu (%.1f MiB)"),
                   smallest, (double)smallest / 1048576, limit, (double)limit / 1048576);
}

/* Returns: whether a pass takes longer in steps than whole. */
static bool steps_cost(const vm_plan *plan) {
    const vm_backend *b = plan->request.backend;
    bool cost = false;
    for (size_t i = 0; i < plan->steps; i++) cost |= b->cut(b, &plan->step[i].pass, false).cost > 1;
    return cost;
}

/* Returns: a hash of a plan's cuts and manners. */
static uint64_t ends(const vm_plan *plan) {
    uint64_t number = 0;
    for (const vm_chain *chain = plan->chain; chain < plan->chain + plan->chains; chain++)
        number = (number ^ ((uint64_t)chain->last << 1 | chain->tight)) * 1099511628211u + 1;
    return number;
}

/* Cuts within a bound, preferring longer or shorter chains of equal work. Returns: ends(). */
static uint64_t cut_again(choice *c, size_t bound, bool longer) {
    size_t most;
    c->longer = longer;
    cut(c, bound, &most);
    c->longer = false;
    return ends(c->plan);
}

/* The fewest bytes without extra work: every cut found costs each pass once. Among cuts of equal work, neither long nor
 * short chains always pack smaller, so try both. */
static vm_status without_limit(const vm_model *m, choice *c) {
    size_t bound = SIZE_MAX, most;
    c->plan->ample = steps_cost(c->plan);
    while (cut(c, bound, &most)) bound = most - 1;
    bound++;
    const uint64_t longer = cut_again(c, bound, true);
    const bool same = cut_again(c, bound, false) == longer;
    vm_status s = vm_plan_lay_out(m, c->plan, c->ring);
    const size_t shorter = taken(c->plan);
    if (s || same) return s;
    cut_again(c, bound, true);
    s = vm_plan_lay_out(m, c->plan, c->ring);
    if (s || taken(c->plan) < shorter) return s;
    cut_again(c, bound, false);
    return vm_plan_lay_out(m, c->plan, c->ring);
}

/* The cuts with the least work whose plan keeps within the limit; if there are none, those with the smallest plan.
 * Among cuts of equal work, neither long nor short chains always pack smaller, so try both. The bounds tried do not
 * depend on the limit: the smallest plan is the same for each limit, and is itself a sufficient limit. */
static vm_status within_limit(const vm_model *m, choice *c) {
    vm_plan *plan = c->plan;
    size_t bound = SIZE_MAX, smallest = SIZE_MAX, best = SIZE_MAX, most = 0;
    uint64_t laid_out = 0;
    bool longer = false;
    plan->ample = false;
    while (cut(c, bound, &most)) {
        const uint64_t number = ends(plan);
        vm_status s = number == laid_out ? VM_OK : vm_plan_lay_out(m, plan, c->ring);
        laid_out = number;
        if (s || within(plan)) return s;
        if (taken(plan) < smallest) {
            smallest = taken(plan);
            best = bound;
            longer = c->longer;
        }
        if (c->longer) bound = most - VM_MAX(most / 32, 1);
        c->longer = !c->longer;
    }
    c->longer = longer;
    cut(c, best, &most);
    vm_status s = vm_plan_lay_out(m, plan, c->ring);
    return s ? s : refuse(plan);
}

/* A tenth of T, the largest tensor of 128 channels: with it the peak stays within 3.2 T. */
static size_t most_stripe_bytes(const vm_model *m, const vm_request *r) {
    enum { LEAST = 1 << 20 };
    const size_t c = VM_BLOCKS(m->arch.block_out_channels[0]) * VM_BLOCK;
    return VM_MAX(VM_PRODUCT(c, r->height, r->width, vm_dtype_bytes(r->backend->dtype)) / 10, LEAST);
}

vm_status vm_plan_choose(const vm_model *m, vm_plan *plan) {
    const size_t n = plan->steps;
    size_t bytes = 0;
    plan->request.limits.stripe_bytes = most_stripe_bytes(m, &plan->request);
    const size_t at = vm_put_bytes(&bytes, n * n * sizeof(stretch), VM_ALIGN);
    const size_t work = vm_put_bytes(&bytes, n * sizeof(double), VM_ALIGN);
    const size_t cuts = vm_put_bytes(&bytes, n * sizeof(vm_chain), VM_ALIGN);
    const size_t ring = vm_put_bytes(&bytes, n * sizeof(size_t), VM_ALIGN);
    char *block;
    vm_status s = vm_mem_reserve(m->host, bytes, (void **)&block);
    if (s) return s;
    choice c = {.plan = plan,
                .at = (stretch *)(block + at),
                .work = (double *)(block + work),
                .cut = (vm_chain *)(block + cuts),
                .ring = (size_t *)(block + ring)};
    c.free = true;
    memset(block, 0, bytes);
    if ((s = without_limit(m, &c))) goto done;
    if (!within(plan)) {
        c.free = false;
        memset(block, 0, bytes);
        s = within_limit(m, &c);
    }
done:
    vm_mem_unreserve(m->host, block, bytes);
    return s;
}
