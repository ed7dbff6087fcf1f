/* Trees, the address table and the storage of the simulated allocator. */
#include <string.h>

#include "allocator_parts.h"

/* ---- trees ---- */

static bool before(const node *a, const node *b) {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->rank != b->rank) return a->rank < b->rank;
    return a->address < b->address;
}

static void hang(node **at, node *n, node *parent) {
    *at = n;
    if (n) n->parent = parent;
}

static void weigh(node *n) {
    for (; n; n = n->parent) {
        n->heaviest = n->weight;
        for (int i = 0; i < 2; i++)
            if (n->child[i]) n->heaviest = VM_MAX(n->heaviest, n->child[i]->heaviest);
    }
}

void ta_insert(tree *t, node *n) {
    n->rank = t->by_size ? n->size : 0;
    const size_t bin = ta_bin(n->rank);
    node **at = &t->root[bin], *parent = NULL;
    while (*at && (*at)->priority >= n->priority) {
        parent = *at;
        at = &parent->child[before(parent, n)];
    }
    /* n takes this place in the treap. The old subtree is split: elements before n become its left child, the others
     * its right one. */
    node *rest = *at, **low = &n->child[0], **high = &n->child[1], *low_parent = n, *high_parent = n;
    hang(at, n, parent);
    while (rest) {
        if (before(rest, n)) {
            hang(low, rest, low_parent);
            low_parent = rest;
            low = &rest->child[1];
            rest = *low;
        } else {
            hang(high, rest, high_parent);
            high_parent = rest;
            high = &rest->child[0];
            rest = *high;
        }
    }
    *low = *high = NULL;
    weigh(low_parent);
    weigh(high_parent);
    t->filled[bin / 64] |= (uint64_t)1 << bin % 64;
    t->count++;
}

void ta_remove(tree *t, node *n) {
    const size_t bin = ta_bin(n->rank);
    node *parent = n->parent, *low = n->child[0], *high = n->child[1];
    node **at = parent ? &parent->child[parent->child[1] == n] : &t->root[bin];
    while (low && high) {
        const bool up = low->priority > high->priority; /* low takes this place, high moves to its right */
        node *risen = up ? low : high;
        hang(at, risen, parent);
        parent = risen;
        at = &risen->child[up];
        *(up ? &low : &high) = *at;
    }
    hang(at, low ? low : high, parent);
    weigh(parent);
    if (!t->root[bin]) t->filled[bin / 64] &= ~((uint64_t)1 << bin % 64);
    t->count--;
}

/* Within a bin, over all streams, among elements of at least `weight`. Returns: the first that is not before key or,
 * with `after`, the first after it. */
static node *first(node *n, const node *key, bool after, uint64_t weight) {
    while (n && n->heaviest >= weight) {
        if (after ? before(key, n) : !before(n, key)) {
            node *found = first(n->child[0], key, after, weight);
            if (found || n->weight >= weight) return found ? found : n;
        }
        n = n->child[1];
    }
    return NULL;
}

/* Within a bin, over all streams. Returns: the last element before key. */
static node *last_before(node *n, const node *key) {
    node *found = NULL;
    while (n) {
        const bool low = before(n, key);
        if (low) found = n;
        n = n->child[low];
    }
    return found;
}

/* In any other bin all elements lie on one side of key, so the search ends at the first or last one. */
static node *search_up(const tree *t, const node *key, bool after, uint64_t weight) {
    const node k = {.stream = key->stream, .rank = t->by_size ? key->size : 0, .address = key->address};
    for (size_t bin = ta_bin_from(t->filled, ta_bin(k.rank)); bin < TA_BINS; bin = ta_bin_from(t->filled, bin + 1)) {
        node *found = first(t->root[bin], &k, after, weight);
        if (found && found->stream == k.stream) return found;
    }
    return NULL;
}

node *ta_at_least(const tree *t, const node *key) { return search_up(t, key, false, 0); }
node *ta_after(const tree *t, const node *key) { return search_up(t, key, true, 0); }
node *ta_weighing(const tree *t, const node *key, uint64_t weight) { return search_up(t, key, false, weight); }

node *ta_before(const tree *t, const node *key) {
    const node k = {.stream = key->stream, .rank = t->by_size ? key->size : 0, .address = key->address};
    for (size_t bin = ta_bin_to(t->filled, ta_bin(k.rank)); bin < TA_BINS; bin = ta_bin_to(t->filled, bin - 1)) {
        node *found = last_before(t->root[bin], &k);
        if (found && found->stream == k.stream) return found;
        if (!bin) break;
    }
    return NULL;
}

node *ta_next(const tree *t, const node *key, uint64_t weight) {
    node *next = key ? search_up(t, key, true, weight) : NULL;
    if (next || (key && key->stream == UINT64_MAX)) return next;
    const node k = {.stream = key ? key->stream + 1 : 0};
    for (size_t bin = ta_bin_from(t->filled, 0); bin < TA_BINS; bin = ta_bin_from(t->filled, bin + 1)) {
        node *found = first(t->root[bin], &k, false, weight);
        if (found && (!next || before(found, next))) next = found;
    }
    return next;
}

/* ---- the table of allocated blocks ---- */

static size_t slot_of(const vm_talloc *a, uint64_t address) {
    return (size_t)((address / TA_BLOCK * 0x9E3779B97F4A7C15u) >> 32) & (a->table_size - 1);
}

block *ta_find(const vm_talloc *a, uint64_t address) {
    if (!a->table_size) return NULL;
    for (size_t i = slot_of(a, address); a->table[i]; i = (i + 1) & (a->table_size - 1))
        if (a->table[i]->node.address == address) return a->table[i];
    return NULL;
}

void ta_table_add(vm_talloc *a, block *b) {
    size_t i = slot_of(a, b->node.address);
    while (a->table[i]) i = (i + 1) & (a->table_size - 1);
    a->table[i] = b;
    a->table_used++;
}

void ta_table_remove(vm_talloc *a, block *b) {
    const size_t mask = a->table_size - 1;
    size_t hole = slot_of(a, b->node.address);
    while (a->table[hole] != b) hole = (hole + 1) & mask;
    /* Closes the gap: the following entries move up, unless that would put them before the slot of their address. */
    for (size_t i = (hole + 1) & mask; a->table[i]; i = (i + 1) & mask) {
        if (((i - slot_of(a, a->table[i]->node.address)) & mask) < ((i - hole) & mask)) continue;
        a->table[hole] = a->table[i];
        hole = i;
    }
    a->table[hole] = NULL;
    a->table_used--;
}

static vm_status grow_table(vm_talloc *a) {
    const size_t old_size = a->table_size, size = VM_MAX(2 * old_size, 1024);
    block **old = a->table, **table;
    vm_status s = vm_scratch_new(size, sizeof *table, &table);
    if (s) return s;
    a->table = table;
    a->table_size = size;
    a->table_used = 0;
    for (size_t i = 0; i < old_size; i++)
        if (old[i]) ta_table_add(a, old[i]);
    vm_scratch_free(old);
    return VM_OK;
}

/* ---- storage ---- */

enum { SLAB = 511 };

typedef struct slab {
    struct slab *next;
    block element[SLAB]; /* a segment or a gap uses a block's memory */
} slab;

_Static_assert(sizeof(segment) <= sizeof(block) && sizeof(gap) <= sizeof(block), "elements are as large as blocks");

static vm_status grow_spares(vm_talloc *a) {
    slab *fresh;
    vm_status s = vm_scratch_new(1, sizeof *fresh, &fresh);
    if (s) return s;
    fresh->next = a->slabs;
    a->slabs = fresh;
    for (size_t i = 0; i < SLAB; i++) ta_recycle(a, &fresh->element[i]);
    return VM_OK;
}

static vm_status grow_history(vm_talloc *a, size_t events) {
    const size_t size = VM_MAX(2 * a->history_size, a->history_used + events);
    vm_status s = vm_scratch_widen(&a->history, a->history_used, size, sizeof *a->history);
    if (!s) a->history_size = size;
    return s;
}

vm_status ta_reserve(vm_talloc *a, size_t elements, size_t live) {
    vm_status s = VM_OK;
    while (!s && a->spares < elements) s = grow_spares(a);
    while (!s && 2 * live > a->table_size) s = grow_table(a);
    return s;
}

vm_status ta_make_room(vm_talloc *a) {
    /* At worst an operation completes every pending free (each may open a gap), frees every cached block (an unmapped
     * one may leave a rest on both sides), maps every range again, makes a segment and splits a block. */
    size_t elements = 8, events = 8;
    if (a->config.expandable_segments || a->config.history) {
        const size_t cached = a->pools[0].cached.count + a->pools[1].cached.count;
        events += 3 * (cached + a->pools[0].unmapped + a->pools[1].unmapped + a->pendings);
        if (a->config.expandable_segments) elements = events;
    }
    a->out_of_memory = false;
    const vm_status s = ta_reserve(a, elements, a->table_used + 1);
    if (s) return s;
    return a->config.history && a->history_size - a->history_used < events ? grow_history(a, events) : VM_OK;
}

void *ta_element(vm_talloc *a) {
    block *b = ta_block(a->spare);
    a->spare = b->node.child[0];
    a->spares--;
    uint64_t mixed =
        ++a->drawn * 0x9E3779B97F4A7C15u; /* the last step of splitmix64: any well-mixed sequence will do */
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    /* Trees set the other fields. */
    b->node.stream = b->node.size = b->node.address = b->node.weight = 0;
    b->node.priority = (uint32_t)(mixed >> 32);
    memset(&b->prev, 0, sizeof *b - offsetof(block, prev));
    return b;
}

void ta_recycle(vm_talloc *a, void *element) {
    node *n = element;
    n->child[0] = a->spare;
    a->spare = n;
    a->spares++;
}

void ta_storage_free(vm_talloc *a) {
    while (a->slabs) {
        slab *next = a->slabs->next;
        vm_scratch_free(a->slabs);
        a->slabs = next;
    }
    vm_scratch_free(a->table);
    vm_scratch_free(a->history);
}

bool ta_fits(vm_talloc *a, uint64_t bytes) {
    if (!a->config.total_memory || bytes <= a->config.total_memory) return true;
    if (!a->stats.least_refused || bytes < a->stats.least_refused) a->stats.least_refused = bytes;
    return false;
}
