/* The tools of the allocator's decisions: statistics, the history, blocks and segments. */
#include "allocator_parts.h"

/* ---- statistics ---- */

const char *const vm_talloc_kind_name[VM_TALLOC_KINDS] = {
    "allocation",      "segment",        "active",       "inactive_split",
    "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
    "requested_bytes"};
const char *const vm_talloc_pool_name[VM_TALLOC_POOLS] = {"all", "small_pool", "large_pool"};

const vm_talloc_stats *vm_talloc_get_stats(const vm_talloc *a) { return &a->stats; }

static void count_again(vm_talloc_stat *s, const vm_talloc_stat *before, const vm_talloc_stat *after) {
    s->allocated += after->allocated - before->allocated;
    s->freed += after->freed - before->freed;
}

void vm_talloc_count_again(vm_talloc *a, const vm_talloc_stats *before, const vm_talloc_stats *after) {
    for (int k = 0; k < VM_TALLOC_KINDS; k++)
        for (int p = 0; p < VM_TALLOC_POOLS; p++) count_again(&a->stats.of[k][p], &before->of[k][p], &after->of[k][p]);
    count_again(&a->stats.oversize_allocations, &before->oversize_allocations, &after->oversize_allocations);
}

void vm_talloc_reset_peak(vm_talloc *a) {
    for (int k = 0; k < VM_TALLOC_KINDS; k++)
        for (int p = 0; p < VM_TALLOC_POOLS; p++) a->stats.of[k][p].peak = a->stats.of[k][p].current;
    a->stats.oversize_allocations.peak = a->stats.oversize_allocations.current;
    a->stats.oversize_segments.peak = a->stats.oversize_segments.current;
}

void ta_record(vm_talloc *a, vm_talloc_action action, uint64_t address, uint64_t size, uint64_t stream, uint32_t tag) {
    if (!a->config.history) return;
    a->history[a->history_used++] =
        (vm_talloc_event){.address = address, .size = size, .stream = stream, .tag = tag, .action = action};
}

/* ---- blocks and segments ---- */

bool ta_whole_pages(const block *b, uint64_t *from, uint64_t *to) {
    const uint64_t page = ta_page(b->small), base = b->segment->node.address;
    const uint64_t start = b->node.address, end = start + b->node.size;
    *from = base + VM_ROUND_UP(start - base, page);
    *to = base + (end - base) / page * page;
    return *from < *to;
}

void ta_cache(vm_talloc *a, block *b) {
    uint64_t from, to;
    b->age_base = ta_pool(a, b)->searches;
    b->node.weight = b->expandable    ? (ta_whole_pages(b, &from, &to) ? TA_PAGES : TA_NOTHING)
                     : ta_is_split(b) ? TA_NOTHING
                                      : TA_WHOLE_SEGMENT;
    ta_insert(&ta_pool(a, b)->cached, &b->node);
}

void ta_pend(vm_talloc *a, block *b) {
    b->node.child[0] = NULL;
    b->node.child[1] = a->pending;
    if (a->pending) a->pending->child[0] = &b->node;
    a->pending = &b->node;
    a->pendings++;
}

block *ta_split(vm_talloc *a, block *b, uint64_t size) {
    block *rest = ta_element(a);
    rest->node.stream = b->node.stream;
    rest->node.address = b->node.address + size;
    rest->node.size = b->node.size - size;
    rest->segment = b->segment;
    rest->small = b->small;
    rest->mapped = b->mapped;
    rest->expandable = b->expandable;
    rest->prev = b;
    rest->next = b->next;
    if (rest->next) rest->next->prev = rest;
    b->next = rest;
    b->node.size = size;
    return rest;
}

uint64_t ta_merge(vm_talloc *a, block *b, block *neighbour) {
    if (!neighbour || neighbour->state != VM_TALLOC_FREE_BLOCK || neighbour->mapped != b->mapped) return 0;
    pool *p = ta_pool(a, b);
    const uint64_t size = neighbour->node.size;
    if (neighbour->mapped)
        ta_remove(&p->cached, &neighbour->node);
    else
        p->unmapped--;
    if (b->prev == neighbour) {
        b->node.address = neighbour->node.address;
        b->prev = neighbour->prev;
        if (b->prev)
            b->prev->next = b;
        else
            b->segment->first = b;
    } else {
        b->next = neighbour->next;
        if (b->next) b->next->prev = b;
    }
    b->node.size += size;
    ta_recycle(a, neighbour);
    return size;
}

static bool addresses_free(const vm_talloc *a, uint64_t address, uint64_t size) {
    const node key = {.address = address};
    const node *above = ta_at_least(&a->segments, &key), *below = ta_before(&a->segments, &key);
    return size <= TA_LAST_ADDRESS - address && (!above || above->address - address >= size) &&
           (!below || address - below->address >= below->size);
}

block *ta_segment_new(vm_talloc *a, uint64_t size, uint64_t stream, bool small) {
    const uint64_t address = a->placed && addresses_free(a, a->placed, size) ? a->placed : a->next_address;
    if (size > TA_LAST_ADDRESS - address) return NULL;
    a->placed = 0;
    a->next_address = VM_MAX(a->next_address, VM_ROUND_UP(address + size, TA_LARGE_ROUND));
    segment *s = ta_element(a);
    block *b = s->first = ta_element(a);
    s->node.address = b->node.address = address;
    s->node.size = b->node.size = size;
    b->node.stream = stream;
    b->segment = s;
    b->small = small;
    b->mapped = true;
    ta_insert(&a->segments, &s->node);
    return b;
}

void ta_segment_drop(vm_talloc *a, block *only) {
    ta_remove(&a->segments, &only->segment->node);
    ta_recycle(a, only->segment);
    ta_recycle(a, only);
}

void ta_segment_copy(vm_talloc *copy, const segment *of) {
    segment *const s = ta_element(copy);
    s->node.address = of->node.address;
    s->node.size = of->node.size;
    ta_insert(&copy->segments, &s->node);
    block **next = &s->first, *prev = NULL;
    for (const block *b = of->first; b; b = b->next) {
        block *const c = *next = ta_element(copy);
        const uint32_t priority = c->node.priority;
        *c = *b;
        c->node.priority = priority;
        c->prev = prev;
        c->next = NULL;
        c->segment = s;
        if (b->state == VM_TALLOC_LIVE)
            ta_table_add(copy, c);
        else
            ta_insert(&ta_pool(copy, c)->cached, &c->node);
        prev = c;
        next = &c->next;
    }
}

void ta_release(vm_talloc *a, block *b) {
    a->stats.num_device_free++;
    ta_record(a, VM_TALLOC_SEGMENT_FREE, b->node.address, b->node.size, b->node.stream, a->tag);
    ta_count_both(a, VM_TALLOC_SEGMENT, b->small, -1, -(int64_t)b->node.size);
    ta_count_oversized(a, &a->stats.oversize_segments, b->node.size, -1);
    ta_remove(&ta_pool(a, b)->cached, &b->node);
    ta_segment_drop(a, b);
}
