/* One pool of a plain allocator (vm_talloc_is_plain), for playing the same steps many times. It decides as
 * allocator.c does for one stream and an unlimited device, without history and statistics. It can be copied.
 *
 *   block   0 .. TA_BINS-1: rings of free blocks by size and address, one for each bin; then blocks of memory */
#ifndef VM_PLAIN_H
#define VM_PLAIN_H

#include "allocator_parts.h"

typedef struct vm_pool_block {
    uint64_t address, size;
    uint32_t prev, next; /* neighbours in memory; 0: none */
    uint32_t less, more; /* neighbours in the ring */
    bool free;
} vm_pool_block;

typedef struct vm_pool {
    vm_pool_block *block; /* [blocks], owned */
    size_t blocks;
    uint64_t reserved, next_address;
    uint64_t filled[TA_BINS / 64]; /* one bit for each non-empty ring */
    uint32_t spare;                /* a list linked by `more`, ended by 0 */
    bool small;
} vm_pool;

/* After a failure only vm_pool_free may follow. Sizes are rounded as by vm_talloc_round. */
vm_status vm_pool_new(vm_pool *p, bool small);
vm_status vm_pool_copy(const vm_pool *p, vm_pool *copy);
void vm_pool_free(vm_pool *p); /* accepts zeros */
vm_status vm_pool_take(vm_pool *p, uint64_t size, uint32_t *block);
void vm_pool_give(vm_pool *p, uint32_t block);
/* Allocates and frees: leaves only a new segment, if no block has room. */
vm_status vm_pool_borrow(vm_pool *p, uint64_t size);
void vm_pool_empty(vm_pool *p);
/* Returns: the largest free block's size, 0 if there is none. */
uint64_t vm_pool_room(const vm_pool *p);

#endif
