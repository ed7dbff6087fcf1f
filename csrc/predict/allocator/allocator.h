/* PyTorch's CUDA allocators, without the memory: addresses and sizes only.
 *
 * The native allocator caches (c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.5 to 2.9, backend "native"):
 *
 *   request -> rounded to 512 B, or to a fraction of a power of two (roundup_divisions)
 *           -> small pool up to 1 MiB, large pool above; a block belongs to the stream that first took it
 *           -> best fit among the cached blocks: smallest, then lowest address
 *           -> otherwise a new segment: 2 MiB (small), 20 MiB (below 10 MiB), or the next multiple of 2 MiB
 *           -> split if 512 B (small pool, expandable) or more than 1 MiB (large pool) would remain
 *   free    -> merged with free neighbours, cached
 *   no room -> collect by age, free oversized blocks, free every whole cached segment, then out of memory
 *
 * The driver is a model: cudaMalloc returns ascending addresses, 2 MiB aligned, and never the same range twice
 * (vm_talloc_place overrides it). A device allocates until total_memory is reached, in any order.
 *
 * Not modelled: private pools of CUDA graphs; when the events of record_stream complete (the caller says it:
 * vm_talloc_free_request, later vm_talloc_free); the CUDA context's own memory (subtract it from total_memory).
 *
 * driver_pool selects the backend "cudaMallocAsync" (c10/cuda/CUDAMallocAsyncAllocator.cpp). PyTorch then caches
 * nothing; each request goes to the driver's memory pool. The pool's attributes are its statistics: used is allocated,
 * reserved is reserved. PyTorch sets the largest release threshold, so the pool shrinks only when the cache is emptied
 * (trimmed to 0). The driver's documentation says that it remaps free pages if none fits; real pools still waste some
 * memory. This pool wastes nothing: reserved is the most in use since the last trim, in pages of 2 MiB, a lower bound.
 * Rounding sizes to 512 B is an assumption. */
#ifndef VM_ALLOCATOR_H
#define VM_ALLOCATOR_H

#include "../../vm.h"

enum { VM_TALLOC_INTERVALS = 16 };
#define VM_TALLOC_LARGEST ((uint64_t)1 << 60) /* PyTorch refuses larger requests */

typedef struct vm_talloc_config {
    uint64_t total_memory;           /* bytes of the device; 0: unlimited */
    uint64_t allowed_memory;         /* of them, the part that set_per_process_memory_fraction allows; 0: not set */
    uint64_t max_split_size;         /* bytes; larger blocks are kept whole; 0: no limit */
    uint64_t max_non_split_rounding; /* bytes by which an unsplit block may exceed its request; 0: 20 MiB */
    uint64_t reservation;            /* addresses of an expandable segment; 0: 1 1/8 of total_memory, or 1 TiB */
    uint32_t roundup_divisions[VM_TALLOC_INTERVALS]; /* from 2^(20+i) on; smaller requests use [0]; 0: round to 512 B */
    double gc_threshold; /* share of allowed_memory above which old cached segments are freed; 0: off */
    bool expandable_segments;
    bool driver_pool; /* the cudaMallocAsync backend, which uses only total_memory and allowed_memory */
    bool history;     /* keep every event for vm_talloc_events */
} vm_talloc_config;

typedef struct vm_talloc vm_talloc;

vm_status vm_talloc_new(const vm_talloc_config *config, vm_talloc **out);
void vm_talloc_delete(vm_talloc *a); /* accepts NULL */
/* Copies a plain allocator (vm_talloc_is_plain) without pending frees to a device of `total_memory` bytes, at least as
 * many as it has reserved. The copy goes on as the original would, until the device is full. */
vm_status vm_talloc_copy(const vm_talloc *a, uint64_t total_memory, vm_talloc **out);
const vm_talloc_config *vm_talloc_settings(const vm_talloc *a);
/* Returns: bytes of a block that a request of `bytes` uses. */
uint64_t vm_talloc_round(const vm_talloc_config *config, uint64_t bytes);
/* Returns: bytes of the segment that the native allocator creates if no block has room for `size` bytes, rounded. */
uint64_t vm_talloc_segment(uint64_t size);

/* Returns: whether allocation depends on sizes only, the two pools are independent, and allocating and freeing a block
 * leaves nothing but a segment. */
bool vm_talloc_is_plain(const vm_talloc *a);
/* Returns: whether steps that free all they allocate change only counters, provided the device neither creates nor
 * frees a segment: free blocks always merge. */
bool vm_talloc_forgets(const vm_talloc *a);

/* *address is 0 for 0 bytes. Returns: VM_ENOMEM with vm_talloc_last_oom() if the simulated device is full (after
 * freeing cached segments, as PyTorch does); VM_ENOMEM without it if this machine is. */
vm_status vm_talloc_malloc(vm_talloc *a, uint64_t bytes, uint64_t stream, uint64_t *address);
/* VM_EINVAL if address was not allocated, or was freed before. */
vm_status vm_talloc_free(vm_talloc *a, uint64_t address);
/* Frees a block that another stream still uses: no longer allocated, but active until vm_talloc_free. */
vm_status vm_talloc_free_request(vm_talloc *a, uint64_t address);
vm_status vm_talloc_empty_cache(vm_talloc *a);
/* Tags the blocks and events that follow with an index of the caller's names. */
void vm_talloc_tag(vm_talloc *a, uint32_t tag);

/* ---- statistics, under the names of torch.cuda.memory_stats ---- */

/* Counters, then in the same order their bytes. */
typedef enum vm_talloc_kind {
    VM_TALLOC_ALLOCATION,
    VM_TALLOC_SEGMENT,
    VM_TALLOC_ACTIVE,
    VM_TALLOC_INACTIVE_SPLIT,
    VM_TALLOC_ALLOCATED_BYTES,
    VM_TALLOC_RESERVED_BYTES,
    VM_TALLOC_ACTIVE_BYTES,
    VM_TALLOC_INACTIVE_SPLIT_BYTES,
    VM_TALLOC_REQUESTED_BYTES,
    VM_TALLOC_KINDS
} vm_talloc_kind;

typedef enum vm_talloc_pool { VM_TALLOC_ALL, VM_TALLOC_SMALL, VM_TALLOC_LARGE, VM_TALLOC_POOLS } vm_talloc_pool;

extern const char *const vm_talloc_kind_name[VM_TALLOC_KINDS], *const vm_talloc_pool_name[VM_TALLOC_POOLS];

typedef struct vm_talloc_stat {
    int64_t current, peak;
    uint64_t allocated, freed; /* in total; enough steps may exceed int64_t, as in PyTorch */
} vm_talloc_stat;

typedef struct vm_talloc_stats {
    vm_talloc_stat of[VM_TALLOC_KINDS][VM_TALLOC_POOLS];
    vm_talloc_stat oversize_allocations, oversize_segments;
    int64_t num_alloc_retries, num_ooms, num_sync_all_streams, num_device_alloc, num_device_free;
    uint64_t least_refused; /* the fewest bytes in total that the device could not hold; 0: it was never full */
} vm_talloc_stats;

const vm_talloc_stats *vm_talloc_get_stats(const vm_talloc *a);
/* Adds again what was allocated and freed between two earlier counts. */
void vm_talloc_count_again(vm_talloc *a, const vm_talloc_stats *before, const vm_talloc_stats *after);
void vm_talloc_reset_peak(vm_talloc *a);

typedef struct vm_talloc_oom {
    uint64_t requested, wanted;    /* by the caller; from the device */
    uint64_t total, free, allowed; /* of the device; allowed is 0 if not set, total 0 if unlimited */
    uint64_t allocated, reserved;
    uint32_t tag; /* of the failed request */
} vm_talloc_oom;

/* NULL unless the last call on `a` filled the simulated device. */
const vm_talloc_oom *vm_talloc_last_oom(const vm_talloc *a);

/* ---- many steps at once ---- */

typedef enum vm_talloc_op {
    VM_TALLOC_MALLOC,
    VM_TALLOC_FREE,
    VM_TALLOC_EMPTY_CACHE,
    VM_TALLOC_RESET_PEAK
} vm_talloc_op;

typedef struct vm_talloc_step {
    uint32_t op, id; /* id: the caller's number of a tensor, an index into address[] */
    uint64_t bytes, stream;
} vm_talloc_step;

/* address: [ids], in and out. Stops at the first failure; *done: how many steps succeeded. */
vm_status vm_talloc_run(vm_talloc *a, const vm_talloc_step *step, size_t steps, uint64_t *address, size_t ids,
                        size_t *done);

/* ---- contents of a snapshot ---- */

typedef enum vm_talloc_action {
    VM_TALLOC_ALLOC,
    VM_TALLOC_FREE_REQUESTED,
    VM_TALLOC_FREE_COMPLETED,
    VM_TALLOC_SEGMENT_ALLOC,
    VM_TALLOC_SEGMENT_FREE,
    VM_TALLOC_SEGMENT_MAP,
    VM_TALLOC_SEGMENT_UNMAP,
    VM_TALLOC_OOM,
    VM_TALLOC_ACTIONS
} vm_talloc_action;

extern const char *const vm_talloc_action_name[VM_TALLOC_ACTIONS];

typedef struct vm_talloc_event {
    uint64_t address; /* of OOM: bytes that the device still has */
    uint64_t size;    /* of a block: as requested */
    uint64_t stream;
    uint32_t tag;
    vm_talloc_action action;
} vm_talloc_event;

/* Borrowed until the next call that changes a. */
const vm_talloc_event *vm_talloc_events(const vm_talloc *a, size_t *count);

typedef enum vm_talloc_state { VM_TALLOC_FREE_BLOCK, VM_TALLOC_PENDING, VM_TALLOC_LIVE } vm_talloc_state;

typedef struct vm_talloc_block {
    uint64_t address, size, requested, stream;
    uint32_t tag;
    vm_talloc_state state;
    bool small, expandable;
    bool first; /* first of its segment; of an expandable one: of a mapped stretch */
} vm_talloc_block;

/* Returns: the number of blocks. Fills block[], unless NULL, with all of them by address. */
size_t vm_talloc_blocks(const vm_talloc *a, vm_talloc_block *block);

/* ---- for replays: impose the decisions of the driver and of another process ---- */

/* Puts the next new segment (or expandable reservation) at `address` if that is free; 0 cancels. */
vm_status vm_talloc_place(vm_talloc *a, uint64_t address);
/* Returns: whether some cached segment is whole. vm_talloc_release frees the one at `address`, or VM_EINVAL. */
bool vm_talloc_has_whole_segment(const vm_talloc *a);
vm_status vm_talloc_release(vm_talloc *a, uint64_t address);
/* Recreates a segment: address, size, stream and small of *segment; block: [blocks] its live or pending blocks by
 * address (address, size, requested, tag, state). Gaps between them are free. */
vm_status vm_talloc_restore(vm_talloc *a, const vm_talloc_block *segment, const vm_talloc_block *block, size_t blocks);

#endif
