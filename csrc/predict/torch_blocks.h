/* What the allocator is made of: blocks in ordered trees. Private to csrc/predict/torch_*.c.
 *
 *   segment  [ block | block | block ]    prev, next: neighbours in memory
 *                 |               |
 *           address table     pool tree    handed out: found by address; cached: by stream, size, address
 *
 * An expandable segment is a reserved stretch of addresses. What lies between its blocks in use is a gap, free and in
 * part unmapped; gaps are in a tree by address. */
#ifndef VM_TORCH_BLOCKS_H
#define VM_TORCH_BLOCKS_H

#include "torch_alloc.h"

#define TA_MIB ((uint64_t)1 << 20)
#define TA_BLOCK ((uint64_t)512) /* sizes and addresses are multiples of it */
#define TA_SMALL TA_MIB          /* largest request of the small pool; smallest remainder of a split in the large */
#define TA_SMALL_SEGMENT (2 * TA_MIB)
#define TA_LARGE_FROM (10 * TA_MIB) /* below it, large requests share segments of TA_LARGE_SEGMENT */
#define TA_LARGE_SEGMENT (20 * TA_MIB)
#define TA_LARGE_ROUND (2 * TA_MIB)
#define TA_FIRST_ADDRESS ((uint64_t)0x7f0000000000)
#define TA_LAST_ADDRESS ((uint64_t)1 << 62) /* next_address never passes it */
#define TA_RESERVATION ((uint64_t)1 << 40)  /* of an expandable segment when the device has no end */

/* ---- trees: elements in the order of stream, size (in trees by size) and address ----
 *
 * Sizes are binned, four bins an octave, and each bin is a treap threaded through its elements: a search descends a
 * tree of a few elements, however many there are. The priority is drawn once, when the element is made. Elements have a
 * weight, so that those that weigh enough are found without a look at the others. */

enum { TA_BINS = 256 };

/* The bin of a size: larger sizes never have smaller bins. The two bits below the highest one split each octave in
 * four. */
static inline size_t ta_bin(uint64_t size) {
    const uint64_t units = size / TA_BLOCK;
    if (units < 4) return (size_t)units;
    const int log2 = 63 - __builtin_clzll(units);
    return (size_t)(4 * (log2 - 1)) + (units >> (log2 - 2) & 3);
}

/* The first filled bin from `bin` on, or the last up to it; TA_BINS for none. filled: a bit for each bin. */
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
    uint64_t weight, heaviest; /* its own, set before ta_insert; the largest of it and of all below it */
    uint32_t priority;
} node;

typedef struct tree {
    node *root[TA_BINS];
    uint64_t filled[TA_BINS / 64]; /* one bit for each bin that is not empty */
    size_t count;
    bool by_size;
} tree;

void ta_insert(tree *t, node *n);
void ta_remove(tree *t, node *n);
/* Of key's stream: the first element not before, first after, last before key; NULL for none. key may be in no tree. */
node *ta_at_least(const tree *t, const node *key);
node *ta_after(const tree *t, const node *key);
node *ta_before(const tree *t, const node *key);
/* As ta_at_least, among the elements that weigh so much. */
node *ta_weighing(const tree *t, const node *key, uint64_t weight);
/* Over all streams, among the elements that weigh so much: the first (key NULL) or the first after key. */
node *ta_next(const tree *t, const node *key, uint64_t weight);

typedef struct segment {
    node node; /* by address; size: of the reservation when expandable */
    struct block *first;
} segment;

typedef struct block {
    node node;
    struct block *prev, *next;
    segment *segment;
    uint64_t requested, age_base; /* age_base: the pool's count of searches when it was cached */
    uint32_t tag;
    uint8_t state; /* vm_talloc_state */
    bool small, mapped, expandable;
} block;

/* address and size: of the stretch; weight: its size where some of it is unmapped, so that it can grow, else 0. */
typedef struct gap {
    node node;
    struct block **first; /* where the block before it, or the segment, names its first block */
} gap;

/* What empty_cache would return of a cached block, the weight in its tree. */
enum { TA_NOTHING, TA_PAGES, TA_WHOLE_SEGMENT };

typedef struct pool {
    tree cached, gaps;
    size_t unmapped;   /* blocks */
    uint64_t searches; /* counted only when garbage is collected */
} pool;

struct vm_talloc {
    vm_talloc_config config; /* as it was given, with every 0 replaced by the value that it stands for */
    vm_talloc_stats stats;
    pool pools[2]; /* large, small */
    tree segments;
    node *pending; /* last requested first */
    size_t pendings;
    uint64_t next_address, placed;
    vm_talloc_oom oom;
    bool out_of_memory;
    uint32_t tag;
    /* Storage: slabs of elements, the table of blocks handed out, the history. */
    struct slab *slabs;
    node *spare;
    size_t spares;
    uint64_t drawn; /* elements, ever */
    block **table;  /* by address, open addressing; table_size is a power of two, at most half full */
    size_t table_size, table_used;
    vm_talloc_event *history;
    size_t history_size, history_used;
};

/* Makes sure that the coming operation finds every element that it may need, so that it cannot fail half-way. */
vm_status ta_make_room(vm_talloc *a);
/* A spare element, of zeros but for its priority and what trees set. ta_make_room has made sure that there is one. */
void *ta_element(vm_talloc *a);
void ta_recycle(vm_talloc *a, void *element);
void ta_storage_free(vm_talloc *a);

block *ta_find(const vm_talloc *a, uint64_t address);
void ta_table_add(vm_talloc *a, block *b);
void ta_table_remove(vm_talloc *a, block *b);

/* ---- torch_segments.c ---- */

static inline pool *ta_pool(vm_talloc *a, const block *b) { return &a->pools[b->small]; }
static inline block *ta_block(node *n) { return (block *)n; }
static inline bool ta_is_split(const block *b) { return b->prev || b->next; }
/* Bytes of an expandable segment's pages. */
static inline uint64_t ta_page(bool small) { return small ? TA_SMALL_SEGMENT : TA_LARGE_SEGMENT; }
/* Whether whole pages lie in b, a block of an expandable segment, and which. */
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

/* kind: one that counts blocks or segments; their bytes are counted with them. */
static inline void ta_count_both(vm_talloc *a, vm_talloc_kind kind, bool small, int64_t count, int64_t bytes) {
    ta_count(a, kind, small, count);
    ta_count(a, kind - VM_TALLOC_ALLOCATION + VM_TALLOC_ALLOCATED_BYTES, small, bytes);
}

static inline void ta_count_oversized(const vm_talloc *a, vm_talloc_stat *stat, uint64_t size, int64_t amount) {
    if (size >= a->config.max_split_size) ta_count_one(stat, amount);
}

void ta_record(vm_talloc *a, vm_talloc_action action, uint64_t address, uint64_t size, uint64_t stream, uint32_t tag);
void ta_cache(vm_talloc *a, block *b); /* into its pool's tree */
void ta_pend(vm_talloc *a, block *b);  /* into the list of pending ones, linked by the trees' pointers */
/* Leaves b `size` bytes; a new block behind it, like b but in no tree, has the others. */
block *ta_split(vm_talloc *a, block *b, uint64_t size);
/* Takes b's free neighbour into b; the bytes gained, 0 when it must stay apart. */
uint64_t ta_merge(vm_talloc *a, block *b, block *neighbour);
/* A new segment of one block that is in no tree yet; NULL when there are no such addresses. */
block *ta_segment_new(vm_talloc *a, uint64_t size, uint64_t stream, bool small);
void ta_segment_drop(vm_talloc *a, block *only);
void ta_release(vm_talloc *a, block *whole); /* a cached segment, back to the device */

/* ---- torch_expandable.c ---- */

/* Whether the device has so many bytes in all; remembers the fewest that it did not have. */
bool ta_fits(vm_talloc *a, uint64_t bytes);
/* A free block of at least size, out of the tree, made by mapping; NULL when the device is full. */
block *ta_expand(vm_talloc *a, uint64_t size, uint64_t stream, bool small);
/* Unmaps the whole pages in b, and drops the reservation when nothing of it is mapped. */
void ta_unmap(vm_talloc *a, block *b);
/* Keeps the gaps: b is in use from now on; b is free from now on, and not yet merged with its neighbours. */
void ta_occupy(vm_talloc *a, block *b);
void ta_vacate(vm_talloc *a, block *b);

#endif
