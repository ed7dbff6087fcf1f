/* The allocator's parts: blocks in ordered trees. Private to csrc/predict/allocator.
 *
 *   segment  [ block | block | block ]    prev, next: neighbours in memory
 *                 |               |
 *           address table     pool tree    allocated: found by address; cached: by stream, size, address
 *
 * An expandable segment is a reserved range of addresses. Between its blocks in use are gaps, free and partly unmapped;
 * a tree holds them by address. */
#ifndef VM_ALLOCATOR_PARTS_H
#define VM_ALLOCATOR_PARTS_H

#include "allocator.h"

/* c10/cuda/CUDACachingAllocator.cpp in PyTorch has the names on the right. */
#define TA_MIB ((uint64_t)1 << 20)
#define TA_BLOCK ((uint64_t)512)       /* kMinBlockSize: sizes and addresses are multiples of it */
#define TA_SMALL TA_MIB                /* kSmallSize: largest request of the small pool; least split in the large one */
#define TA_SMALL_SEGMENT (2 * TA_MIB)  /* kSmallBuffer */
#define TA_LARGE_FROM (10 * TA_MIB)    /* kMinLargeAlloc: below it, large requests share a TA_LARGE_SEGMENT */
#define TA_LARGE_SEGMENT (20 * TA_MIB) /* kLargeBuffer */
#define TA_LARGE_ROUND (2 * TA_MIB)    /* kRoundLarge */
#define TA_FIRST_ADDRESS ((uint64_t)0x7f0000000000)
#define TA_LAST_ADDRESS ((uint64_t)1 << 62) /* next_address never passes it */
#define TA_RESERVATION ((uint64_t)1 << 40)  /* of an expandable segment on an unlimited device */

/* ---- trees: elements ordered by stream, size (in trees by size) and address ----
 *
 * Sizes are binned, four bins an octave. Each bin is a treap threaded through its elements, so a search descends a
 * small tree. An element's priority is drawn once, when it is made. Elements have weights: a search for heavy elements
 * skips subtrees of lighter ones. */

enum { TA_BINS = 256 };

/* Returns: the bin of a size; larger sizes never have smaller bins. The two bits below the highest one split each
 * octave into four bins. */
static inline size_t ta_bin(uint64_t size) {
    const uint64_t units = size / TA_BLOCK;
    if (units < 4) return (size_t)units;
    const int log2 = 63 - __builtin_clzll(units);
    return (size_t)(4 * (log2 - 1)) + (units >> (log2 - 2) & 3);
}

/* Returns: the first filled bin from `bin` on, or the last up to it; TA_BINS: none. filled: a bit for each bin. */
static inline size_t ta_bin_from(const uint64_t *filled, size_t bin) {
    for (size_t word = bin / 64, skip = bin % 64; word < TA_BINS / 64; word++, skip = 0) {
        const uint64_t bits = filled[word] >> skip << skip;
        if (bits) return 64 * word + (size_t)__builtin_ctzll(bits);
    }
    return TA_BINS;
}

static inline size_t ta_bin_to(const uint64_t *filled, size_t bin) {
    for (size_t word = bin / 64 + 1, skip = 63 - bin % 64; word-- > 0; skip = 0) {
        const uint64_t bits = filled[word] << skip >> skip;
        if (bits) return 64 * word + 63 - (size_t)__builtin_clzll(bits);
    }
    return TA_BINS;
}

typedef struct node {
    struct node *child[2], *parent;
    uint64_t stream, size, address;
    uint64_t rank;             /* size in a tree by size, else 0 */
    uint64_t weight, heaviest; /* weight: set before ta_insert; heaviest: the largest weight in its subtree */
    uint32_t priority;
} node;

typedef struct tree {
    node *root[TA_BINS];
    uint64_t filled[TA_BINS / 64]; /* one bit for each non-empty bin */
    size_t count;
    bool by_size;
} tree;

void ta_insert(tree *t, node *n);
void ta_remove(tree *t, node *n);
/* Within key's stream: the first element not before, first after, last before key; NULL: none. */
node *ta_at_least(const tree *t, const node *key);
node *ta_after(const tree *t, const node *key);
node *ta_before(const tree *t, const node *key);
/* As ta_at_least, among elements of at least `weight`. */
node *ta_weighing(const tree *t, const node *key, uint64_t weight);
/* Over all streams, among elements of at least `weight`: the first (key NULL) or the first after key. */
node *ta_next(const tree *t, const node *key, uint64_t weight);

typedef struct segment {
    node node; /* by address; size: of the reservation if expandable */
    struct block *first;
} segment;

typedef struct block {
    node node;
    struct block *prev, *next;
    segment *segment;
    uint64_t requested, age_base; /* age_base: the pool's count of searches when the block was cached */
    uint32_t tag;
    uint8_t state; /* vm_talloc_state */
    bool small, mapped, expandable;
} block;

/* node.address, node.size: of the range. node.weight: its size if it is partly unmapped, otherwise 0. */
typedef struct gap {
    node node;
    struct block **first; /* first block of the preceding block or segment */
} gap;

/* What empty_cache would free of a cached block: its weight in the tree. */
enum { TA_NOTHING, TA_PAGES, TA_WHOLE_SEGMENT };

typedef struct pool {
    tree cached, gaps;
    size_t unmapped;   /* blocks */
    uint64_t searches; /* counted only if garbage collection is on */
} pool;

struct vm_talloc {
    vm_talloc_config config; /* as given, with every 0 replaced by its default */
    vm_talloc_stats stats;
    pool pools[2]; /* large, small */
    tree segments;
    node *pending; /* last requested first */
    size_t pendings;
    uint64_t next_address, placed;
    vm_talloc_oom oom;
    bool out_of_memory;
    uint32_t tag;
    /* Storage: slabs of elements, the table of allocated blocks, the history. */
    struct slab *slabs;
    node *spare;
    size_t spares;
    uint64_t drawn; /* elements made in total */
    block **table;  /* by address, open addressing; table_size is a power of two, at most half full */
    size_t table_size, table_used;
    vm_talloc_event *history;
    size_t history_size, history_used;
};

/* Reserves elements, and room for `live` blocks in the table. */
vm_status ta_reserve(vm_talloc *a, size_t elements, size_t live);
/* Reserves every element that the next operation may need, so that it cannot fail half-way. */
vm_status ta_make_room(vm_talloc *a);
/* Returns: a spare element, zeroed except its priority and the trees' fields. Requires ta_make_room. */
void *ta_element(vm_talloc *a);
void ta_recycle(vm_talloc *a, void *element);
void ta_storage_free(vm_talloc *a);
/* Returns: whether the device can hold `bytes` in total; remembers the fewest that it could not. */
bool ta_fits(vm_talloc *a, uint64_t bytes);

block *ta_find(const vm_talloc *a, uint64_t address);
void ta_table_add(vm_talloc *a, block *b);
void ta_table_remove(vm_talloc *a, block *b);

/* ---- bookkeeping.c ---- */

static inline pool *ta_pool(vm_talloc *a, const block *b) { return &a->pools[b->small]; }
static inline block *ta_block(node *n) { return (block *)n; }
static inline bool ta_is_split(const block *b) { return b->prev || b->next; }
/* Returns: bytes of an expandable segment's page. */
static inline uint64_t ta_page(bool small) { return small ? TA_SMALL_SEGMENT : TA_LARGE_SEGMENT; }
/* Returns: whether b, a block of an expandable segment, contains whole pages, and which. */
bool ta_whole_pages(const block *b, uint64_t *from, uint64_t *to);

static inline void ta_count_one(vm_talloc_stat *s, int64_t amount) {
    s->current += amount;
    if (amount >= 0) {
        s->allocated += (uint64_t)amount;
        if (s->current > s->peak) s->peak = s->current;
    } else {
        s->freed += (uint64_t)-amount;
    }
}

static inline void ta_count(vm_talloc *a, vm_talloc_kind kind, bool small, int64_t amount) {
    ta_count_one(&a->stats.of[kind][VM_TALLOC_ALL], amount);
    ta_count_one(&a->stats.of[kind][small ? VM_TALLOC_SMALL : VM_TALLOC_LARGE], amount);
}

/* kind: a kind that counts blocks or segments; also counts their bytes. */
static inline void ta_count_both(vm_talloc *a, vm_talloc_kind kind, bool small, int64_t count, int64_t bytes) {
    ta_count(a, kind, small, count);
    ta_count(a, kind - VM_TALLOC_ALLOCATION + VM_TALLOC_ALLOCATED_BYTES, small, bytes);
}

static inline void ta_count_oversized(const vm_talloc *a, vm_talloc_stat *stat, uint64_t size, int64_t amount) {
    if (size >= a->config.max_split_size) ta_count_one(stat, amount);
}

void ta_record(vm_talloc *a, vm_talloc_action action, uint64_t address, uint64_t size, uint64_t stream, uint32_t tag);
void ta_cache(vm_talloc *a, block *b); /* into its pool's tree */
void ta_pend(vm_talloc *a, block *b);  /* into the list of pending blocks, linked by the trees' pointers */
/* Cuts b to `size` bytes. Returns: a new block with the rest, like b but in no tree. */
block *ta_split(vm_talloc *a, block *b, uint64_t size);
/* Merges b's free neighbour into b. Returns: the bytes gained, 0 if they must stay separate. */
uint64_t ta_merge(vm_talloc *a, block *b, block *neighbour);
/* Returns: a new segment's only block, in no tree yet; NULL if the addresses are exhausted. */
block *ta_segment_new(vm_talloc *a, uint64_t size, uint64_t stream, bool small);
void ta_segment_drop(vm_talloc *a, block *only);
/* Copies the blocks of another allocator's segment. Requires ta_reserve. */
void ta_segment_copy(vm_talloc *copy, const segment *of);
void ta_release(vm_talloc *a, block *whole); /* frees a cached segment */

/* ---- expandable.c ---- */

/* Maps memory. Returns: a free block of at least `size`, in no tree; NULL if the device is full. */
block *ta_expand(vm_talloc *a, uint64_t size, uint64_t stream, bool small);
/* Unmaps the whole pages in b, and drops the reservation once nothing of it is mapped. */
void ta_unmap(vm_talloc *a, block *b);
/* Update the gaps. ta_occupy: b is in use from now on; ta_vacate: b is free, and not yet merged with its neighbours. */
void ta_occupy(vm_talloc *a, block *b);
void ta_vacate(vm_talloc *a, block *b);

#endif
