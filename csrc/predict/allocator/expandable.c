/* Expandable segments: addresses are reserved once per (stream, pool). Pages of 2 MiB (small pool) or 20 MiB (large)
 * are mapped as the segment grows; emptying the cache unmaps whole pages.
 *
 *   reservation  [ live | free | live | free |        unmapped        ]     config.reservation
 *                |<------ mapped, counted as reserved ----->|
 *
 * The driver model: a page can be mapped while total_memory is not exceeded. */
#include "allocator_parts.h"

/* ---- gaps ---- */

static bool can_serve(const block *b) { return b && b->state == VM_TALLOC_FREE_BLOCK; }

/* Returns: the gap that contains the free block b. */
static gap *gap_of(vm_talloc *a, const block *b) {
    return (gap *)ta_before(&ta_pool(a, b)->gaps, &(node){.stream = b->node.stream, .address = b->node.address + 1});
}

/* Mapped neighbours are always merged: if any block of a gap is unmapped, one of the first two is. */
static bool can_grow(const gap *g) {
    const block *b = *g->first;
    return !b->mapped || (b->next && !b->next->mapped);
}

static void put_gap(pool *p, gap *g, uint64_t from, uint64_t to, bool grows) {
    g->node.address = from;
    g->node.size = to - from;
    g->node.weight = grows ? to - from : 0;
    ta_insert(&p->gaps, &g->node);
}

static void weigh_gap(vm_talloc *a, const block *b) {
    gap *g = gap_of(a, b);
    ta_remove(&ta_pool(a, b)->gaps, &g->node);
    put_gap(ta_pool(a, b), g, g->node.address, g->node.address + g->node.size, can_grow(g));
}

static gap *new_gap(vm_talloc *a, uint64_t stream, block **first) {
    gap *g = ta_element(a);
    g->node.stream = stream;
    g->first = first;
    return g;
}

void ta_occupy(vm_talloc *a, block *b) {
    pool *p = ta_pool(a, b);
    gap *g = gap_of(a, b);
    const uint64_t from = b->node.address, to = from + b->node.size, end = g->node.address + g->node.size;
    ta_remove(&p->gaps, &g->node);
    if (g->node.address < from)
        put_gap(p, g, g->node.address, from, can_grow(g));
    else
        ta_recycle(a, g);
    if (to == end) return;
    g = new_gap(a, b->node.stream, &b->next);
    put_gap(p, g, to, end, can_grow(g));
}

void ta_vacate(vm_talloc *a, block *b) {
    pool *p = ta_pool(a, b);
    gap *left = can_serve(b->prev) ? gap_of(a, b->prev) : NULL;
    gap *right = can_serve(b->next) ? gap_of(a, b->next) : NULL;
    uint64_t from = b->node.address, to = from + b->node.size;
    bool grows = false;
    if (right) {
        to += right->node.size;
        grows = right->node.weight;
        ta_remove(&p->gaps, &right->node);
        ta_recycle(a, right);
    }
    if (left) {
        from -= left->node.size;
        grows = grows || left->node.weight;
        ta_remove(&p->gaps, &left->node);
    } else {
        left = new_gap(a, b->node.stream, b->prev ? &b->prev->next : &b->segment->first);
    }
    put_gap(p, left, from, to, grows);
}

/* ---- pages ---- */

static uint64_t reservation(const vm_talloc *a, bool small) {
    return VM_ROUND_UP(a->config.reservation, ta_page(small));
}

/* Maps the pages that the first `size` bytes of b need, merges the result with its neighbours and caches it. */
static bool map(vm_talloc *a, block *b, uint64_t size) {
    const uint64_t mapped = VM_ROUND_UP(size, ta_page(b->small)), address = b->node.address;
    const uint64_t held = (uint64_t)a->stats.of[VM_TALLOC_RESERVED_BYTES][VM_TALLOC_ALL].current;
    if (!ta_fits(a, held + mapped)) return false;
    pool *p = ta_pool(a, b);
    if (mapped < b->node.size)
        ta_split(a, b, mapped);
    else
        p->unmapped--;
    b->mapped = true;
    ta_merge(a, b, b->prev);
    ta_merge(a, b, b->next);
    ta_cache(a, b);
    weigh_gap(a, b);
    ta_count(a, VM_TALLOC_RESERVED_BYTES, b->small, (int64_t)mapped);
    a->stats.num_device_alloc++;
    ta_record(a, VM_TALLOC_SEGMENT_MAP, address, mapped, b->node.stream, a->tag);
    return true;
}

/* Returns: the first block of the lowest gap that can become a block of `size`. */
static block *find_stretch(vm_talloc *a, uint64_t size, uint64_t stream, bool small) {
    pool *p = &a->pools[small];
    const node *n = ta_weighing(&p->gaps, &(node){.stream = stream}, size);
    if (n) return *((const gap *)n)->first;
    if (size > reservation(a, small)) return NULL;
    block *all = ta_segment_new(a, reservation(a, small), stream, small);
    if (!all) return NULL;
    all->mapped = false;
    all->expandable = true;
    p->unmapped++;
    put_gap(p, new_gap(a, stream, &all->segment->first), all->node.address, all->node.address + all->node.size, true);
    return all;
}

block *ta_expand(vm_talloc *a, uint64_t size, uint64_t stream, bool small) {
    block *b = find_stretch(a, size, stream, small);
    if (!b || (!b->mapped && !map(a, b, VM_MIN(b->node.size, size)))) return NULL;
    while (b->node.size < size) {
        /* b is free and the next block unmapped: mapping that absorbs b. */
        block *next = b->next;
        if (!map(a, next, VM_MIN(next->node.size, size - b->node.size))) return NULL;
        b = next;
    }
    ta_remove(&ta_pool(a, b)->cached, &b->node);
    return b;
}

void ta_unmap(vm_talloc *a, block *b) {
    const uint64_t start = b->node.address, end = start + b->node.size;
    uint64_t from, to;
    if (!ta_whole_pages(b, &from, &to)) return;
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
    p->unmapped++;
    weigh_gap(a, b);
    ta_count(a, VM_TALLOC_RESERVED_BYTES, small, -(int64_t)(to - from));
    a->stats.num_device_free++;
    ta_record(a, VM_TALLOC_SEGMENT_UNMAP, from, to - from, stream, a->tag);
    if (!ta_is_split(b)) {
        gap *g = gap_of(a, b);
        p->unmapped--;
        ta_remove(&p->gaps, &g->node);
        ta_recycle(a, g);
        ta_segment_drop(a, b);
    }
}
