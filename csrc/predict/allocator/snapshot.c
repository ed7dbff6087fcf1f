/* Snapshots of the allocator, decisions imposed on it, and many steps in one call. */
#include "allocator_parts.h"

/* ---- snapshots ---- */

const char *const vm_talloc_action_name[VM_TALLOC_ACTIONS] = {
    "alloc",        "free_requested", "free_completed", "segment_alloc",
    "segment_free", "segment_map",    "segment_unmap",  "oom"};

const vm_talloc_event *vm_talloc_events(const vm_talloc *a, size_t *count) {
    *count = a->history_used;
    return a->history;
}

size_t vm_talloc_blocks(const vm_talloc *a, vm_talloc_block *out) {
    size_t n = 0;
    for (const node *s = ta_next(&a->segments, NULL, 0); s; s = ta_next(&a->segments, s, 0))
        for (const block *b = ((const segment *)s)->first; b; b = b->next) {
            if (b->mapped && out)
                out[n] = (vm_talloc_block){.address = b->node.address,
                                           .size = b->node.size,
                                           .requested = b->requested,
                                           .stream = b->node.stream,
                                           .tag = b->tag,
                                           .state = (vm_talloc_state)b->state,
                                           .small = b->small,
                                           .expandable = b->expandable,
                                           .first = !b->prev || !b->prev->mapped};
            n += b->mapped;
        }
    return n;
}

/* ---- imposed decisions ---- */

vm_status vm_talloc_place(vm_talloc *a, uint64_t address) {
    if (address % TA_BLOCK || address >= TA_LAST_ADDRESS)
        return vm_fail(VM_EINVAL, VM_EXPECTED("address", "a multiple of 512 below 2^62", "0x%llx"),
                       (unsigned long long)address);
    a->placed = address;
    return VM_OK;
}

static bool is_whole(const segment *s) {
    const block *b = s->first;
    return !b->expandable && b->state == VM_TALLOC_FREE_BLOCK && !ta_is_split(b);
}

bool vm_talloc_has_whole_segment(const vm_talloc *a) {
    return ta_next(&a->pools[0].cached, NULL, TA_WHOLE_SEGMENT) || ta_next(&a->pools[1].cached, NULL, TA_WHOLE_SEGMENT);
}

vm_status vm_talloc_release(vm_talloc *a, uint64_t address) {
    vm_status s = ta_make_room(a);
    if (s) return s;
    const node *n = ta_at_least(&a->segments, &(node){.address = address});
    if (!n || n->address != address || !is_whole((const segment *)n))
        return vm_fail(VM_EINVAL, VM_EXPECTED("address", "the start of a whole cached segment", "0x%llx"),
                       (unsigned long long)address);
    ta_release(a, ((const segment *)n)->first);
    return VM_OK;
}

static vm_status check_segment(const vm_talloc_block *s, const vm_talloc_block *block, size_t blocks) {
    if (s->address % TA_BLOCK || s->size % TA_BLOCK || !s->size || s->size > VM_TALLOC_LARGEST)
        return vm_fail(VM_EINVAL, VM_EXPECTED("segment", "address and size as multiples of 512", "0x%llx and %llu"),
                       (unsigned long long)s->address, (unsigned long long)s->size);
    uint64_t end = s->address;
    for (size_t i = 0; i < blocks; i++) {
        const vm_talloc_block *b = &block[i];
        if (b->address % TA_BLOCK || b->size % TA_BLOCK || !b->size || b->requested > b->size || b->address < end ||
            b->address - s->address > s->size || b->size > s->size - (b->address - s->address) ||
            (b->state != VM_TALLOC_LIVE && b->state != VM_TALLOC_PENDING))
            return vm_fail(VM_EINVAL, "block: 0x%llx of %llu bytes has no place in the segment at 0x%llx of %llu bytes",
                           (unsigned long long)b->address, (unsigned long long)b->size, (unsigned long long)s->address,
                           (unsigned long long)s->size);
        end = b->address + b->size;
    }
    return VM_OK;
}

/* Cuts `size` bytes off the front of the free block *rest, which is in no tree; *rest: the remainder, or NULL. */
static block *cut(vm_talloc *a, block **rest, uint64_t size) {
    block *front = *rest;
    *rest = front->node.size == size ? NULL : ta_split(a, front, size);
    return front;
}

static void restore_block(vm_talloc *a, block *b, const vm_talloc_block *as) {
    if (!as) {
        ta_cache(a, b);
        if (!ta_is_split(b)) return;
        ta_count_both(a, VM_TALLOC_INACTIVE_SPLIT, b->small, 1, (int64_t)b->node.size);
        return;
    }
    b->state = (uint8_t)as->state;
    b->requested = as->requested;
    b->tag = as->tag;
    ta_table_add(a, b);
    ta_count_both(a, VM_TALLOC_ACTIVE, b->small, 1, (int64_t)b->node.size);
    ta_count(a, VM_TALLOC_REQUESTED_BYTES, b->small, (int64_t)b->requested);
    if (as->state == VM_TALLOC_PENDING) {
        ta_pend(a, b);
        return;
    }
    ta_count_both(a, VM_TALLOC_ALLOCATION, b->small, 1, (int64_t)b->node.size);
    ta_count_oversized(a, &a->stats.oversize_allocations, b->node.size, 1);
}

vm_status vm_talloc_restore(vm_talloc *a, const vm_talloc_block *s, const vm_talloc_block *live, size_t blocks) {
    if (a->config.driver_pool)
        return vm_fail(VM_EINVAL, VM_EXPECTED("segment", "the native backend, the driver's pool has none", ""));
    vm_status status;
    if ((status = check_segment(s, live, blocks))) return status;
    if ((status = ta_make_room(a))) return status;
    if ((status = vm_talloc_place(a, s->address))) return status;
    block *rest = ta_segment_new(a, s->size, s->stream, s->small);
    a->placed = 0;
    if (!rest || rest->node.address != s->address) {
        if (rest) ta_segment_drop(a, rest);
        return vm_fail(VM_EINVAL, "segment: 0x%llx of %llu bytes lies on another one", (unsigned long long)s->address,
                       (unsigned long long)s->size);
    }
    ta_count_both(a, VM_TALLOC_SEGMENT, s->small, 1, (int64_t)s->size);
    ta_count_oversized(a, &a->stats.oversize_segments, s->size, 1);
    for (size_t i = 0; i < blocks; i++) {
        /* An earlier step reserved this block and its gap: failing leaves the tail free and cached. */
        if (live[i].address > rest->node.address)
            restore_block(a, cut(a, &rest, live[i].address - rest->node.address), NULL);
        restore_block(a, cut(a, &rest, live[i].size), &live[i]);
        if (!rest) break;
        status = ta_make_room(a);
        if (status) break;
    }
    if (rest) restore_block(a, rest, NULL);
    return status;
}

/* ---- many steps ---- */

/* step: a copy: another thread may write to the caller's array. */
static vm_status take(vm_talloc *a, vm_talloc_step step, uint64_t *address, size_t ids) {
    if (step.op <= VM_TALLOC_FREE && step.id >= ids)
        return vm_fail(VM_EINVAL, VM_EXPECTED("step", "an id below %zu", "%u"), ids, step.id);
    switch (step.op) {
    case VM_TALLOC_MALLOC: return vm_talloc_malloc(a, step.bytes, step.stream, &address[step.id]);
    case VM_TALLOC_FREE: return vm_talloc_free(a, address[step.id]);
    case VM_TALLOC_EMPTY_CACHE: return vm_talloc_empty_cache(a);
    case VM_TALLOC_RESET_PEAK: vm_talloc_reset_peak(a); return VM_OK;
    default: return vm_fail(VM_EINVAL, VM_EXPECTED("step", "an op from 0 to 3", "%u"), step.op);
    }
}

vm_status vm_talloc_run(vm_talloc *a, const vm_talloc_step *step, size_t steps, uint64_t *address, size_t ids,
                        size_t *done) {
    vm_status s = VM_OK;
    size_t i = 0;
    while (i < steps && !(s = take(a, step[i], address, ids))) i++;
    *done = i;
    return s;
}
