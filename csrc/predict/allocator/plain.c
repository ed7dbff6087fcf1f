/* A pool for playing many times (plain.h). */
#include "plain.h"

#include <string.h>

vm_status vm_pool_new(vm_pool *p, bool small) {
    *p = (vm_pool){.blocks = TA_BINS, .next_address = TA_FIRST_ADDRESS, .small = small};
    vm_status s = vm_scratch_new(vm_mem_capacity(p->blocks), sizeof *p->block, &p->block);
    for (uint32_t i = 0; !s && i < TA_BINS; i++) p->block[i].less = p->block[i].more = i;
    return s;
}

vm_status vm_pool_copy(const vm_pool *p, vm_pool *copy) {
    *copy = *p;
    vm_status s = vm_scratch_new(vm_mem_capacity(p->blocks), sizeof *p->block, &copy->block);
    if (!s) memcpy(copy->block, p->block, p->blocks * sizeof *p->block);
    return s;
}

void vm_pool_free(vm_pool *p) { vm_scratch_free(p->block); }

/* ---- rings ---- */

static void insert(vm_pool *p, uint32_t i) {
    vm_pool_block *const block = p->block, *const b = &block[i];
    const uint64_t size = b->size, address = b->address;
    const uint32_t bin = (uint32_t)ta_bin(size);
    uint32_t at = block[bin].less, more = bin;
    while (at != bin && (block[at].size > size || (block[at].size == size && block[at].address > address)))
        more = at, at = block[at].less;
    b->free = true;
    b->less = at;
    b->more = more;
    block[more].less = block[at].more = i;
    p->filled[bin / 64] |= (uint64_t)1 << bin % 64;
}

static void take_out(vm_pool *p, uint32_t i) {
    vm_pool_block *const b = &p->block[i];
    const uint32_t less = b->less, more = b->more;
    b->free = false;
    p->block[less].more = more;
    p->block[more].less = less;
    if (less == more) p->filled[less / 64] &= ~((uint64_t)1 << less % 64); /* only the ring itself is left */
}

/* Returns: the smallest free block of `size` or more, of equal ones the lowest; 0: none. */
static uint32_t find(const vm_pool *p, uint64_t size) {
    for (size_t bin = ta_bin_from(p->filled, ta_bin(size)); bin < TA_BINS; bin = ta_bin_from(p->filled, bin + 1))
        for (uint32_t i = p->block[bin].more; i != bin; i = p->block[i].more)
            if (p->block[i].size >= size) return i;
    return 0;
}

uint64_t vm_pool_room(const vm_pool *p) {
    const size_t bin = ta_bin_to(p->filled, TA_BINS - 1);
    return bin < TA_BINS ? p->block[p->block[bin].less].size : 0;
}

/* ---- blocks ---- */

/* Numbers a block; its fields keep the values of the number's last block. */
static vm_status new_block(vm_pool *p, uint32_t *i) {
    *i = p->spare;
    if (*i) {
        p->spare = p->block[*i].more;
        return VM_OK;
    }
    if (p->blocks == UINT32_MAX) return vm_fail(VM_EOVERFLOW, "pool: expected fewer than 2^32 blocks");
    vm_status s = vm_scratch_grow(&p->block, p->blocks, sizeof *p->block);
    if (!s) *i = (uint32_t)p->blocks++;
    return s;
}

static void recycle(vm_pool *p, uint32_t i) {
    p->block[i].more = p->spare;
    p->spare = i;
}

static vm_status new_segment(vm_pool *p, uint64_t size, uint32_t *i) {
    const uint64_t bytes = vm_talloc_segment(size), address = p->next_address;
    if (bytes > TA_LAST_ADDRESS - address)
        return vm_fail(VM_EOVERFLOW, "pool: expected sizes that 2^62 addresses hold");
    vm_status s = new_block(p, i);
    if (s) return s;
    p->next_address = VM_ROUND_UP(address + bytes, TA_LARGE_ROUND);
    p->reserved += bytes;
    p->block[*i] = (vm_pool_block){.address = address, .size = bytes};
    return VM_OK;
}

vm_status vm_pool_take(vm_pool *p, uint64_t size, uint32_t *i) {
    vm_status s = VM_OK;
    *i = find(p, size);
    if (*i)
        take_out(p, *i);
    else
        s = new_segment(p, size, i);
    if (s) return s;
    const uint64_t rest = p->block[*i].size - size;
    if (p->small ? rest < TA_BLOCK : rest <= TA_SMALL) return VM_OK;
    uint32_t r;
    s = new_block(p, &r);
    if (s) return s;
    vm_pool_block *const block = p->block, *const b = &block[*i];
    block[r] = (vm_pool_block){.address = b->address + size, .size = rest, .prev = *i, .next = b->next};
    if (b->next) block[b->next].prev = r;
    b->size = size;
    b->next = r;
    insert(p, r);
    return VM_OK;
}

void vm_pool_give(vm_pool *p, uint32_t i) {
    vm_pool_block *const block = p->block, *const b = &block[i];
    const uint32_t prev = b->prev, next = b->next;
    if (next && block[next].free) {
        take_out(p, next);
        b->size += block[next].size;
        b->next = block[next].next;
        if (b->next) block[b->next].prev = i;
        recycle(p, next);
    }
    if (prev && block[prev].free) {
        take_out(p, prev);
        b->size += block[prev].size;
        b->address = block[prev].address;
        b->prev = block[prev].prev;
        if (b->prev) block[b->prev].next = i;
        recycle(p, prev);
    }
    insert(p, i);
}

vm_status vm_pool_borrow(vm_pool *p, uint64_t size) {
    uint32_t i = 0;
    if (size <= vm_pool_room(p)) return VM_OK;
    vm_status s = new_segment(p, size, &i);
    if (!s) insert(p, i);
    return s;
}

void vm_pool_empty(vm_pool *p) {
    for (size_t bin = ta_bin_from(p->filled, 0); bin < TA_BINS; bin = ta_bin_from(p->filled, bin + 1))
        for (uint32_t i = p->block[bin].more, more; i != bin; i = more) {
            more = p->block[i].more;
            if (p->block[i].prev || p->block[i].next) continue;
            take_out(p, i);
            p->reserved -= p->block[i].size;
            recycle(p, i);
        }
}
