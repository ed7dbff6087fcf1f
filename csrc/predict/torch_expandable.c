/* Expandable segments: addresses reserved once per (stream, pool), pages of 2 MiB (small pool) or 20 MiB (large) mapped
 * as the segment grows and unmapped, whole pages at a time, when the cache is emptied.
 *
 *   reservation  [ live | free | live | free |        unmapped        ]     config.reservation
 *                |<------ mapped, counted as reserved ----->|
 *
 * The driver's part of the model: a page can be mapped as long as total_memory is not exceeded. */
#include "torch_blocks.h"

static uint64_t page_size(const block *b) { return b->small ? TA_SMALL_SEGMENT : TA_LARGE_SEGMENT; }

static uint64_t reservation(const vm_talloc *a, bool small) {
    return VM_ROUND_UP(a->config.reservation, small ? TA_SMALL_SEGMENT : TA_LARGE_SEGMENT);
}

/* Maps the pages that the first `size` bytes of b need, merges the result with its neighbours and caches it. */
static bool map(vm_talloc *a, block *b, uint64_t size) {
    const uint64_t mapped = VM_ROUND_UP(size, page_size(b)), address = b->node.address;
    const uint64_t held = (uint64_t)a->stats.of[VM_TALLOC_RESERVED_BYTES][VM_TALLOC_ALL].current;
    if (a->config.total_memory && held + mapped > a->config.total_memory) return false;
    pool *p = ta_pool(a, b);
    ta_remove(&p->unmapped, &b->node);
    if (mapped < b->node.size) {
        block *rest = ta_split(a, b, mapped);
        ta_insert(&p->unmapped, &rest->node);
    }
    b->mapped = true;
    ta_merge(a, b, b->prev);
    ta_merge(a, b, b->next);
    ta_cache(a, b);
    ta_count(a, VM_TALLOC_RESERVED_BYTES, b->small, (int64_t)mapped);
    a->stats.num_device_alloc++;
    ta_record(a, VM_TALLOC_SEGMENT_MAP, address, mapped, b->node.stream, a->tag);
    return true;
}

static bool can_serve(const block *b) { return b && b->state == VM_TALLOC_FREE_BLOCK; }

/* The lowest stretch of free and unmapped blocks that can become a block of `size`. */
static block *find_stretch(vm_talloc *a, uint64_t size, uint64_t stream, bool small) {
    pool *p = &a->pools[small];
    for (node *n = ta_at_least(&p->unmapped, &(node){.stream = stream}); n; n = ta_after(&p->unmapped, n)) {
        block *start = ta_block(n);
        if (can_serve(start->prev)) start = start->prev;
        uint64_t bytes = 0;
        for (const block *b = start; bytes < size && can_serve(b); b = b->next) bytes += b->node.size;
        if (bytes >= size) return start;
    }
    if (size > reservation(a, small)) return NULL;
    block *all = ta_segment_new(a, reservation(a, small), stream, small);
    if (!all) return NULL;
    all->mapped = false;
    all->expandable = true;
    ta_insert(&p->unmapped, &all->node);
    return all;
}

block *ta_expand(vm_talloc *a, uint64_t size, uint64_t stream, bool small) {
    block *b = find_stretch(a, size, stream, small);
    if (!b || (!b->mapped && !map(a, b, VM_MIN(b->node.size, size)))) return NULL;
    while (b->node.size < size) {
        /* b is free and what follows unmapped: mapping that swallows b. */
        block *next = b->next;
        if (!map(a, next, VM_MIN(next->node.size, size - b->node.size))) return NULL;
        b = next;
    }
    ta_remove(&ta_pool(a, b)->cached, &b->node);
    return b;
}

void ta_unmap(vm_talloc *a, block *b) {
    const uint64_t page = page_size(b), base = b->segment->node.address;
    const uint64_t start = b->node.address, end = start + b->node.size;
    const uint64_t from = base + VM_ROUND_UP(start - base, page), to = base + (end - base) / page * page;
    if (from >= to) return;
    pool *p = ta_pool(a, b);
    const bool small = b->small;
    const uint64_t stream = b->node.stream;
    ta_remove(&p->cached, &b->node);
    if (start < from) {
        block *front = b;
        b = ta_split(a, front, from - start);
        front->requested = 0;
        ta_cache(a, front);
    }
    if (to < end) ta_cache(a, ta_split(a, b, to - from));
    b->mapped = false;
    ta_merge(a, b, b->prev);
    ta_merge(a, b, b->next);
    ta_insert(&p->unmapped, &b->node);
    ta_count(a, VM_TALLOC_RESERVED_BYTES, small, -(int64_t)(to - from));
    a->stats.num_device_free++;
    ta_record(a, VM_TALLOC_SEGMENT_UNMAP, from, to - from, stream, a->tag);
    if (!ta_is_split(b)) {
        ta_remove(&p->unmapped, &b->node);
        ta_segment_drop(a, b);
    }
}
