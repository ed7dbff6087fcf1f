/* The caching allocator's decisions, in PyTorch's order. The model and its limits: allocator.h. */
#include <stdio.h>

#include "allocator_parts.h"

typedef struct request {
    uint64_t bytes, size, stream; /* as requested, rounded */
    bool small;
} request;

static uint64_t reserved(const vm_talloc *a) {
    return (uint64_t)a->stats.of[VM_TALLOC_RESERVED_BYTES][VM_TALLOC_ALL].current;
}

/* ---- sizes ---- */

uint64_t vm_talloc_round(const vm_talloc_config *config, uint64_t bytes) {
    if (bytes < TA_BLOCK) return TA_BLOCK;
    const int log2 = 63 - __builtin_clzll(bytes);
    const uint64_t divisions = config->roundup_divisions[VM_MIN(VM_MAX(log2 - 20, 0), VM_TALLOC_INTERVALS - 1)];
    uint64_t step = TA_BLOCK;
    if (divisions > 1 && bytes > TA_BLOCK * divisions) step = ((uint64_t)1 << log2) / divisions;
    return VM_ROUND_UP(bytes, step);
}

static uint64_t native_segment(const request *r) {
    if (r->small) return TA_SMALL_SEGMENT;
    return r->size < TA_LARGE_FROM ? TA_LARGE_SEGMENT : VM_ROUND_UP(r->size, TA_LARGE_ROUND);
}

uint64_t vm_talloc_segment(uint64_t size) {
    return native_segment(&(request){.size = size, .small = size <= TA_SMALL});
}

static uint64_t segment_size(const vm_talloc *a, const request *r) {
    return a->config.driver_pool ? r->size : native_segment(r);
}

bool vm_talloc_is_plain(const vm_talloc *a) {
    const vm_talloc_config *c = &a->config;
    return !c->total_memory && !c->allowed_memory && c->max_split_size == UINT64_MAX && !c->expandable_segments &&
           !c->driver_pool;
}

bool vm_talloc_forgets(const vm_talloc *a) {
    return !a->config.history && !a->config.driver_pool && !a->config.gc_threshold;
}

static bool leaves_a_block(const vm_talloc *a, const request *r, const block *b) {
    const uint64_t rest = b->node.size - r->size;
    if (r->small || a->config.expandable_segments) return rest >= TA_BLOCK;
    return r->size < a->config.max_split_size && rest > TA_SMALL;
}

static bool collects(const vm_talloc *a) { return a->config.allowed_memory && a->config.gc_threshold > 0; }

/* ---- free ---- */

static vm_status unknown(uint64_t address) {
    return vm_fail(VM_EINVAL, VM_EXPECTED("address", "one that malloc gave and that is not freed", "0x%llx"),
                   (unsigned long long)address);
}

static void request_free(vm_talloc *a, block *b) {
    b->state = VM_TALLOC_PENDING;
    ta_pend(a, b);
    ta_count_both(a, VM_TALLOC_ALLOCATION, b->small, -1, -(int64_t)b->node.size);
    ta_count_oversized(a, &a->stats.oversize_allocations, b->node.size, -1);
    ta_record(a, VM_TALLOC_FREE_REQUESTED, b->node.address, b->requested, b->node.stream, b->tag);
}

/* Puts a free block into its pool's tree, merged with its neighbours; the driver's pool keeps none. */
static void cache_free(vm_talloc *a, block *b) {
    int64_t blocks = 0, bytes = 0; /* change of the inactive split blocks, in number and in size */
    block *neighbours[2] = {b->prev, b->next};
    if (b->expandable) ta_vacate(a, b);
    for (int i = 0; i < 2; i++) {
        const uint64_t merged = ta_merge(a, b, neighbours[i]);
        if (merged) blocks--, bytes -= (int64_t)merged;
    }
    ta_cache(a, b);
    if (ta_is_split(b)) blocks++, bytes += (int64_t)b->node.size;
    if (!b->expandable && bytes) ta_count_both(a, VM_TALLOC_INACTIVE_SPLIT, b->small, blocks, bytes);
}

static void complete_free(vm_talloc *a, block *b) {
    node *newer = b->node.child[0], *older = b->node.child[1];
    *(newer ? &newer->child[1] : &a->pending) = older;
    if (older) older->child[0] = newer;
    a->pendings--;
    ta_record(a, VM_TALLOC_FREE_COMPLETED, b->node.address, b->requested, b->node.stream, b->tag);
    ta_table_remove(a, b);
    ta_count_both(a, VM_TALLOC_ACTIVE, b->small, -1, -(int64_t)b->node.size);
    ta_count(a, VM_TALLOC_REQUESTED_BYTES, b->small, -(int64_t)b->requested);
    b->state = VM_TALLOC_FREE_BLOCK;
    b->tag = 0;
    if (a->config.driver_pool)
        ta_segment_drop(a, b);
    else
        cache_free(a, b);
}

vm_status vm_talloc_free_request(vm_talloc *a, uint64_t address) {
    if (!address) return VM_OK;
    vm_status s = ta_make_room(a);
    if (s) return s;
    block *b = ta_find(a, address);
    if (!b || b->state != VM_TALLOC_LIVE) return unknown(address);
    request_free(a, b);
    return VM_OK;
}

vm_status vm_talloc_free(vm_talloc *a, uint64_t address) {
    if (!address) return VM_OK;
    vm_status s = ta_make_room(a);
    if (s) return s;
    block *b = ta_find(a, address);
    if (!b) return unknown(address);
    if (b->state == VM_TALLOC_LIVE) request_free(a, b);
    complete_free(a, b);
    return VM_OK;
}

/* Returns: the size of the driver's pool if `more` bytes are used in addition. */
static uint64_t pool_size(const vm_talloc *a, uint64_t more) {
    return VM_ROUND_UP((uint64_t)a->stats.of[VM_TALLOC_ACTIVE_BYTES][VM_TALLOC_ALL].current + more, TA_LARGE_ROUND);
}

/* Completes pending frees, then frees every whole cached segment. */
static void release_whole_segments(vm_talloc *a) {
    a->stats.num_sync_all_streams++; /* synchronising ends every use on another stream */
    while (a->pending) complete_free(a, ta_block(a->pending));
    if (a->config.driver_pool)
        ta_count(a, VM_TALLOC_RESERVED_BYTES, false, (int64_t)pool_size(a, 0) - (int64_t)reserved(a));
    for (int small = 0; small < 2; small++) {
        tree *t = &a->pools[small].cached;
        for (node *n = ta_next(t, NULL, TA_PAGES), *next; n; n = next) {
            const node here = *n; /* unmapping leaves less of b, which sorts before this place in the tree */
            block *b = ta_block(n);
            if (b->expandable)
                ta_unmap(a, b);
            else
                ta_release(a, b);
            next = ta_next(t, &here, TA_PAGES);
        }
    }
}

/* ---- the stages of a malloc ---- */

/* Returns: the best fit among cached blocks, removed from its tree. */
static block *take_cached(vm_talloc *a, const request *r) {
    pool *p = &a->pools[r->small];
    if (collects(a)) p->searches++;
    node *n = ta_at_least(&p->cached, &(node){.stream = r->stream, .size = r->size});
    if (!n) return NULL;
    if (ta_block(n)->expandable) {
        /* A growable block counts at the size that it can reach. */
        for (node *next; (next = ta_after(&p->cached, n)); n = next) {
            const block *here = ta_block(n), *there = ta_block(next);
            const uint64_t grows = here->next && !here->next->mapped ? here->next->node.size : 0;
            const uint64_t there_grows = there->next && !there->next->mapped ? there->next->node.size : 0;
            if (there->node.size + there_grows >= here->node.size + grows) break;
        }
    }
    const uint64_t limit = a->config.max_split_size;
    if (r->size < limit && n->size >= limit) return NULL;
    if (r->size >= limit && n->size >= r->size + a->config.max_non_split_rounding) return NULL;
    ta_remove(&p->cached, n);
    return ta_block(n);
}

/* Frees whole cached segments of the large pool older than the average, until enough is free. */
static void collect_garbage(vm_talloc *a) {
    const uint64_t threshold = (uint64_t)(a->config.gc_threshold * (double)a->config.allowed_memory);
    if (reserved(a) <= threshold) return;
    const uint64_t target = reserved(a) - threshold;
    pool *p = &a->pools[0];
    uint64_t reclaimed = 0, total_age = 0;
    int64_t candidates = 0;
    for (node *n = ta_next(&p->cached, NULL, 0); n; n = ta_next(&p->cached, n, 0)) {
        if (ta_is_split(ta_block(n))) continue;
        total_age += p->searches - ta_block(n)->age_base;
        candidates++;
    }
    for (bool freed = true; reclaimed < target && freed && candidates;) {
        const double old = (double)total_age / (double)candidates;
        freed = false;
        for (node *n = ta_next(&p->cached, NULL, 0), *next; n; n = next) {
            next = ta_next(&p->cached, n, 0);
            block *b = ta_block(n);
            const uint64_t age = p->searches - b->age_base;
            if (ta_is_split(b) || b->expandable || (double)age < old) continue;
            freed = true;
            reclaimed += n->size;
            total_age -= age;
            candidates--;
            ta_release(a, b);
        }
    }
}

/* PyTorch never splits an oversized block; a restored segment may hold a part of one. */
static bool is_whole(const block *b) { return !b->expandable && !ta_is_split(b); }

/* With max_split_size: frees the smallest oversized block that suffices, otherwise the largest ones until they do. */
static bool release_oversized(vm_talloc *a, const request *r) {
    const uint64_t limit = a->config.max_split_size;
    if (limit == UINT64_MAX) return false;
    tree *t = &a->pools[r->small].cached;
    const node key = {.stream = r->stream, .size = VM_MAX(r->size, limit)};
    node *n = ta_at_least(t, &key);
    if (n && is_whole(ta_block(n))) {
        ta_release(a, ta_block(n));
        return true;
    }
    uint64_t released = 0;
    for (n = ta_before(t, &key); n && released < key.size && n->size >= limit;) {
        node *smaller = ta_before(t, n);
        if (is_whole(ta_block(n))) {
            released += n->size;
            ta_release(a, ta_block(n));
        }
        n = smaller;
    }
    return released >= key.size;
}

/* Returns: memory of the driver's pool, which grows if necessary; NULL if it cannot. */
static block *take_of_pool(vm_talloc *a, const request *r) {
    const uint64_t size = pool_size(a, r->size), held = reserved(a);
    const uint64_t requested = (uint64_t)a->stats.of[VM_TALLOC_REQUESTED_BYTES][VM_TALLOC_ALL].current;
    if (a->config.allowed_memory && requested + r->bytes > a->config.allowed_memory) return NULL;
    if (size > held && !ta_fits(a, size)) return NULL;
    block *b = ta_segment_new(a, r->size, r->stream, false);
    if (b && size > held) ta_count(a, VM_TALLOC_RESERVED_BYTES, false, (int64_t)(size - held));
    return b;
}

/* Returns: memory from the device; NULL if it is full. */
static block *take_new(vm_talloc *a, const request *r) {
    const uint64_t size = segment_size(a, r), held = reserved(a);
    if (a->config.allowed_memory && held + size > a->config.allowed_memory) return NULL;
    if (a->config.expandable_segments) return ta_expand(a, r->size, r->stream, r->small);
    if (!ta_fits(a, held + size)) return NULL;
    block *b = ta_segment_new(a, size, r->stream, r->small);
    if (!b) return NULL;
    ta_count_both(a, VM_TALLOC_SEGMENT, r->small, 1, (int64_t)size);
    ta_count_oversized(a, &a->stats.oversize_segments, size, 1);
    a->stats.num_device_alloc++;
    ta_record(a, VM_TALLOC_SEGMENT_ALLOC, b->node.address, size, r->stream, a->tag);
    return b;
}

static uint64_t hand_out(vm_talloc *a, const request *r, block *b) {
    const int64_t split =
        ta_is_split(b) ? (int64_t)b->node.size : 0; /* bytes that were an inactive part of a segment */
    int64_t left = 0;                               /* bytes that are one now */
    if (leaves_a_block(a, r, b)) {
        block *rest = ta_split(a, b, r->size);
        left = (int64_t)rest->node.size;
        ta_cache(a, rest);
    }
    b->state = VM_TALLOC_LIVE;
    if (b->expandable)
        ta_occupy(a, b);
    else if (left != split)
        ta_count_both(a, VM_TALLOC_INACTIVE_SPLIT, r->small, (left > 0) - (split > 0), left - split);
    b->requested = r->bytes;
    b->tag = a->tag;
    ta_table_add(a, b);
    ta_record(a, VM_TALLOC_ALLOC, b->node.address, r->bytes, r->stream, a->tag);
    ta_count_both(a, VM_TALLOC_ALLOCATION, r->small, 1, (int64_t)b->node.size);
    ta_count_both(a, VM_TALLOC_ACTIVE, r->small, 1, (int64_t)b->node.size);
    ta_count(a, VM_TALLOC_REQUESTED_BYTES, r->small, (int64_t)r->bytes);
    ta_count_oversized(a, &a->stats.oversize_allocations, b->node.size, 1);
    return b->node.address;
}

/* Formats sizes as PyTorch does. */
static const char *format_size(uint64_t bytes, char text[32]) {
    if (bytes < 1024)
        snprintf(text, 32, "%llu bytes", (unsigned long long)bytes);
    else if (bytes < TA_MIB)
        snprintf(text, 32, "%.2f KiB", (double)bytes / 1024);
    else if (bytes < 1024 * TA_MIB)
        snprintf(text, 32, "%.2f MiB", (double)bytes / (double)TA_MIB);
    else
        snprintf(text, 32, "%.2f GiB", (double)bytes / (double)(1024 * TA_MIB));
    return text;
}

static vm_status out_of_memory(vm_talloc *a, const request *r) {
    vm_talloc_oom *o = &a->oom;
    if (!a->config.total_memory && !a->config.allowed_memory) /* addresses ended, not a device */
        return vm_fail(VM_EOVERFLOW, VM_EXPECTED("bytes", "at most 2^60 in all", "more"));
    *o = (vm_talloc_oom){.requested = r->bytes,
                         .wanted = segment_size(a, r),
                         .total = a->config.total_memory,
                         .allowed = a->config.allowed_memory,
                         .allocated = (uint64_t)a->stats.of[VM_TALLOC_ALLOCATED_BYTES][VM_TALLOC_ALL].current,
                         .reserved = reserved(a),
                         .tag = a->tag};
    o->free = o->total > o->reserved ? o->total - o->reserved : 0;
    a->out_of_memory = true;
    a->stats.num_ooms++;
    ta_record(a, VM_TALLOC_OOM, o->free, r->size, r->stream, a->tag);
    char t[5][32], allowed[64] = "";
    if (o->allowed) snprintf(allowed, sizeof allowed, ", %s allowed", format_size(o->allowed, t[4]));
    return vm_fail(
        VM_ENOMEM,
        "simulated device: no %s to allocate; capacity %s%s, %s free, %s allocated, %s reserved but unallocated",
        format_size(o->wanted, t[0]), o->total ? format_size(o->total, t[1]) : "not set", allowed,
        format_size(o->free, t[2]), format_size(o->allocated, t[3]),
        format_size(o->reserved - o->allocated, (char[32]){0}));
}

vm_status vm_talloc_malloc(vm_talloc *a, uint64_t bytes, uint64_t stream, uint64_t *address) {
    *address = 0;
    a->out_of_memory = false;
    if (!bytes) return VM_OK;
    if (bytes > VM_TALLOC_LARGEST)
        return vm_fail(VM_EOVERFLOW, VM_EXPECTED("bytes", "at most 2^60", "%llu"), (unsigned long long)bytes);
    vm_status s = ta_make_room(a);
    if (s) return s;
    const uint64_t size = vm_talloc_round(&a->config, bytes);
    const bool pooled = a->config.driver_pool;
    const request r = {.bytes = bytes, .size = size, .stream = stream, .small = !pooled && size <= TA_SMALL};
    block *b = pooled ? take_of_pool(a, &r) : take_cached(a, &r);
    if (!b && pooled) return out_of_memory(a, &r);
    if (!b) {
        if (collects(a)) collect_garbage(a);
        b = take_new(a, &r);
        if (!b && release_oversized(a, &r)) b = take_new(a, &r);
        if (!b) {
            release_whole_segments(a);
            a->stats.num_alloc_retries++;
            b = take_new(a, &r);
        }
        if (!b) return out_of_memory(a, &r);
    }
    *address = hand_out(a, &r, b);
    return VM_OK;
}

vm_status vm_talloc_empty_cache(vm_talloc *a) {
    vm_status s = ta_make_room(a);
    if (s == VM_OK) release_whole_segments(a);
    return s;
}

/* ---- the object ---- */

vm_status vm_talloc_new(const vm_talloc_config *config, vm_talloc **out) {
    *out = NULL;
    vm_talloc_config c = *config;
    const uint64_t largest = VM_MAX(c.total_memory, VM_MAX(c.allowed_memory, c.reservation));
    if (largest > VM_TALLOC_LARGEST)
        return vm_fail(VM_EINVAL, VM_EXPECTED("total_memory", "at most 2^60", "%llu"), (unsigned long long)largest);
    if (c.max_split_size && c.max_split_size < TA_LARGE_SEGMENT)
        return vm_fail(VM_EINVAL, VM_EXPECTED("max_split_size", "at least 20 MiB", "%llu bytes"),
                       (unsigned long long)c.max_split_size);
    if (c.max_non_split_rounding && c.max_non_split_rounding < TA_LARGE_SEGMENT)
        return vm_fail(VM_EINVAL, VM_EXPECTED("max_non_split_rounding", "at least 20 MiB", "%llu bytes"),
                       (unsigned long long)c.max_non_split_rounding);
    if (!(c.gc_threshold >= 0 && c.gc_threshold < 1))
        return vm_fail(VM_EINVAL, VM_EXPECTED("garbage_collection_threshold", "between 0 and 1", "%g"), c.gc_threshold);
    for (int i = 0; i < VM_TALLOC_INTERVALS; i++)
        if (c.roundup_divisions[i] & (c.roundup_divisions[i] - 1))
            return vm_fail(VM_EINVAL, VM_EXPECTED("roundup_power2_divisions", "0 or a power of two", "%u"),
                           c.roundup_divisions[i]);
    if (!c.max_split_size) c.max_split_size = UINT64_MAX;
    if (!c.reservation) c.reservation = c.total_memory ? c.total_memory + c.total_memory / 8 : TA_RESERVATION;
    if (!c.max_non_split_rounding) c.max_non_split_rounding = TA_LARGE_SEGMENT;
    vm_talloc *a;
    vm_status s = vm_scratch_new(1, sizeof *a, &a);
    if (s) return s;
    a->config = c;
    a->next_address = TA_FIRST_ADDRESS;
    a->pools[0].cached.by_size = a->pools[1].cached.by_size = true;
    *out = a;
    return VM_OK;
}

void vm_talloc_delete(vm_talloc *a) {
    if (!a) return;
    ta_storage_free(a);
    vm_scratch_free(a);
}

vm_status vm_talloc_copy(const vm_talloc *a, uint64_t total_memory, vm_talloc **out) {
    const size_t blocks = a->table_used + a->pools[0].cached.count + a->pools[1].cached.count;
    vm_talloc_config c = a->config;
    c.total_memory = total_memory;
    c.reservation = 0;
    vm_status s;
    if ((s = vm_talloc_new(&c, out))) return s;
    if ((s = ta_reserve(*out, a->segments.count + blocks, a->table_used))) {
        vm_talloc_delete(*out);
        *out = NULL;
        return s;
    }
    for (const node *n = ta_next(&a->segments, NULL, 0); n; n = ta_next(&a->segments, n, 0))
        ta_segment_copy(*out, (const segment *)n);
    (*out)->stats = a->stats;
    (*out)->next_address = a->next_address;
    (*out)->placed = a->placed;
    (*out)->tag = a->tag;
    return VM_OK;
}

const vm_talloc_config *vm_talloc_settings(const vm_talloc *a) { return &a->config; }
const vm_talloc_oom *vm_talloc_last_oom(const vm_talloc *a) { return a->out_of_memory ? &a->oom : NULL; }
void vm_talloc_tag(vm_talloc *a, uint32_t tag) { a->tag = tag; }
