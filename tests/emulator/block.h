/* What the emulator's parts share: kernels by name, running one, and memory that shows when its surroundings were written
 * to. */
#ifndef VM_BLOCK_H
#define VM_BLOCK_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* build.py appends one of these to a source for each of its kernels. */
struct vm_entry {
    const char *name;
    size_t args_bytes;
    void (*run)(const void *args);
    bool pairs; /* of blocks */
    const vm_entry *next;
    static const vm_entry *first;

    vm_entry(const char *name, size_t args_bytes, void (*run)(const void *), bool pairs)
        : name(name), args_bytes(args_bytes), run(run), pairs(pairs), next(first) {
        first = this;
    }
    static const vm_entry *find(const char *name);
};

template <typename Args, void (*kernel)(Args)>
struct vm_entry_of : vm_entry {
    vm_entry_of(const char *name, bool pairs) : vm_entry(name, sizeof(Args), call, pairs) {}
    static void call(const void *args) {
        Args own; /* aligned as it wants to be */
        memcpy(&own, args, sizeof own);
        kernel(own);
    }
};
template <typename Args>
Args vm_args_of(void (*)(Args));

bool vm_grid_fits(const uint32_t grid[3], const uint32_t block[3]);
enum vm_outcome { VM_RAN, VM_REFUSED, VM_FAULT, VM_ILLEGAL_ADDRESS };
/* Runs a grid, block after block. What went wrong is said by emulator_error(). */
vm_outcome vm_run_grid(const vm_entry *kernel, const uint32_t grid[3], const uint32_t block[3], size_t shared_bytes,
                       const void *args);

/* Writes a vm_tensor_map (cuda.h) of numbers of 2 bytes, for boxes whose rows are swizzled: dims and box have three
 * numbers, strides two, in bytes. Returns: why a GPU would refuse it, or NULL. */
const char *vm_map_write(void *map, const void *first, const uint64_t *dims, const uint64_t *strides,
                         const uint32_t *box);

/* Memory that ends (up to `align` bytes) where a page begins that may not be touched. Filled with 0xff: NaNs. */
void *vm_guarded_take(size_t bytes, size_t align);
bool vm_guarded_whole(const void *p, size_t bytes, size_t align); /* were the bytes beside it left alone? */
void vm_guarded_give(void *p, size_t bytes, size_t align);

extern "C" const char *emulator_error();

#endif
