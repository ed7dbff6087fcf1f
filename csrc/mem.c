/* The only allocator of the core: categories, peaks, fault injection. The memory itself is a device's (vm_device.take).
 *
 * live[] counts bytes in use, reserved counts bytes held from the system. They differ by the arena, which is reserved
 * whole and used pass by pass, and by at most 8 MiB of spare blocks. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "vm.h"

struct vm_mem {
    size_t references;
    const vm_device *device; /* the device of the memory */
    const vm_backend *backend;
    vm_usage usage;
};

/* One lock for all accounts, held for a few additions. A fork waits for it, so no child begins with it held. */
static pthread_mutex_t accounts = PTHREAD_MUTEX_INITIALIZER;
static void lock(void) { pthread_mutex_lock(&accounts); }
static void unlock(void) { pthread_mutex_unlock(&accounts); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(lock, unlock, unlock); }

static vm_mem common = {.references = 1, .device = &vm_host};
vm_mem *const vm_mem_common = &common;

static atomic_size_t fail_countdown;

size_t vm_mem_fail_at(size_t nth) { return atomic_exchange(&fail_countdown, nth); }

static bool injected_fault(void) {
    size_t n = atomic_load(&fail_countdown);
    while (n && !atomic_compare_exchange_weak(&fail_countdown, &n, n - 1)) {
    }
    return n == 1;
}

vm_mem *vm_mem_new(const vm_backend *backend) {
    vm_mem *mem = injected_fault() ? NULL : calloc(1, sizeof *mem);
    if (!mem) {
        vm_fail(VM_ENOMEM, "memory: no %zu bytes for an account", sizeof *mem);
        return NULL;
    }
    mem->references = 1;
    mem->device = backend->device;
    mem->backend = backend;
    return mem;
}

vm_mem *vm_mem_retain(vm_mem *mem) {
    lock();
    mem->references++;
    unlock();
    return mem;
}

void vm_mem_release(vm_mem *mem) {
    if (!mem) return;
    lock();
    const bool last = --mem->references == 0;
    unlock();
    if (last) free(mem);
}

/* The last blocks freed to the common account, for requests of the same size. Predictions allocate the same sizes
 * repeatedly; the C library would return them to the system, which clears each page anew. */
enum { SPARES = 8, SPARE_FROM = 64 << 10, SPARE_TO = 1 << 20 };

static struct spare {
    void *block;
    size_t bytes;
} spare[SPARES];
static size_t oldest; /* the next to free */

static bool is_spared(const vm_mem *mem, size_t bytes) {
    return mem == &common && bytes >= SPARE_FROM && bytes <= SPARE_TO;
}

/* Returns: a spare block, cleared; NULL if none has this size. */
static void *take_spare(size_t bytes) {
    void *block = NULL;
    lock();
    for (size_t i = 0; i < SPARES && !block; i++)
        if (spare[i].bytes == bytes) block = spare[i].block, spare[i] = (struct spare){0};
    unlock();
    return block ? memset(block, 0, bytes) : NULL;
}

/* Keeps a freed block in the oldest place. Returns: the old entry, without a block if it was empty. */
static struct spare keep_spare(struct spare kept) {
    lock();
    struct spare *const place = &spare[oldest++ % SPARES], old = *place;
    *place = kept;
    unlock();
    return old;
}

static size_t held(const vm_mem *mem, size_t bytes) { return mem->backend ? vm_held(mem->backend, bytes) : bytes; }

vm_status vm_mem_reserve(vm_mem *mem, size_t bytes, void **out) {
    *out = NULL;
    if (bytes > PTRDIFF_MAX) return vm_fail(VM_EOVERFLOW, "memory: expected at most %td bytes, got more", PTRDIFF_MAX);
    bytes = held(mem, bytes);
    const bool fails = injected_fault();
    if (!fails && is_spared(mem, bytes) && (*out = take_spare(bytes))) return VM_OK;
    vm_status s = fails ? VM_OK : mem->device->take(mem->backend, bytes, out);
    if (s) return vm_device_fail(mem->device, s, NULL);
    if (!*out)
        return vm_fail(VM_ENOMEM, "memory: the system has no %zu bytes (%.1f MiB) to give", bytes,
                       (double)bytes / 1048576);
    lock();
    mem->usage.reserved += bytes;
    unlock();
    return VM_OK;
}

void vm_mem_unreserve(vm_mem *mem, void *block, size_t bytes) {
    if (!block) return;
    struct spare gone = {block, held(mem, bytes)};
    if (is_spared(mem, gone.bytes)) gone = keep_spare(gone);
    if (!gone.block) return;
    mem->device->give(mem->backend, gone.block, gone.bytes);
    lock();
    mem->usage.reserved -= gone.bytes;
    unlock();
}

void vm_mem_use(vm_mem *mem, vm_category category, size_t bytes) {
    vm_usage *u = &mem->usage;
    size_t now = 0, peak = 0;
    lock();
    u->live[category] += bytes;
    for (int c = 0; c < VM_CATEGORIES; c++) now += u->live[c], peak += u->peak[c];
    if (now > peak) memcpy(u->peak, u->live, sizeof u->peak);
    unlock();
}

void vm_mem_unuse(vm_mem *mem, vm_category category, size_t bytes) {
    lock();
    mem->usage.live[category] -= bytes;
    unlock();
}

vm_status vm_mem_alloc(vm_mem *mem, vm_category category, size_t bytes, void **out) {
    vm_status s = vm_mem_reserve(mem, bytes, out);
    if (s == VM_OK) vm_mem_use(mem, category, bytes);
    return s;
}

void vm_mem_free(vm_mem *mem, vm_category category, void *block, size_t bytes) {
    if (!block) return;
    vm_mem_unuse(mem, category, bytes);
    vm_mem_unreserve(mem, block, bytes);
}

size_t vm_mem_capacity(size_t count) {
    size_t capacity = count ? 16 : 0;
    while (capacity < count) capacity *= 2;
    return capacity;
}

/* Returns: whether `count` items fill a growing array's capacity. */
static bool is_full(size_t count) { return !count || (count >= 16 && !(count & (count - 1))); }

vm_status vm_mem_grow(vm_mem *mem, vm_category category, void **array, size_t count, size_t item_bytes) {
    if (!is_full(count)) return VM_OK;
    void *wider;
    vm_status s = vm_mem_alloc(mem, category, vm_mem_capacity(count + 1) * item_bytes, &wider);
    if (s) return s;
    if (count) memcpy(wider, *array, count * item_bytes);
    vm_mem_free(mem, category, *array, vm_mem_capacity(count) * item_bytes);
    *array = wider;
    return VM_OK;
}

/* Scratch follows its stored size. */
vm_status vm_scratch_new(size_t items, size_t item_bytes, void *out) {
    const size_t bytes = vm_sum(VM_PRODUCT(items, item_bytes), VM_ALIGN);
    char *block;
    *(void **)out = NULL;
    vm_status s = vm_mem_alloc(vm_mem_common, VM_SCRATCH, bytes, (void **)&block);
    if (s) return s;
    *(size_t *)(void *)block = bytes;
    *(void **)out = block + VM_ALIGN;
    return VM_OK;
}

vm_status vm_scratch_widen(void *array, size_t count, size_t items, size_t item_bytes) {
    void **old = array, *wider;
    vm_status s = vm_scratch_new(items, item_bytes, &wider);
    if (s) return s;
    if (count) memcpy(wider, *old, count * item_bytes);
    vm_scratch_free(*old);
    *old = wider;
    return VM_OK;
}

vm_status vm_scratch_grow(void *array, size_t count, size_t item_bytes) {
    return is_full(count) ? vm_scratch_widen(array, count, vm_mem_capacity(count + 1), item_bytes) : VM_OK;
}

void vm_scratch_free(void *scratch) {
    if (!scratch) return;
    char *block = (char *)scratch - VM_ALIGN;
    vm_mem_free(vm_mem_common, VM_SCRATCH, block, *(const size_t *)(const void *)block);
}

void vm_mem_reset_peak(vm_mem *mem) {
    lock();
    memcpy(mem->usage.peak, mem->usage.live, sizeof mem->usage.peak);
    unlock();
}

vm_usage vm_mem_usage(vm_mem *mem) {
    lock();
    vm_usage u = mem->usage;
    unlock();
    return u;
}
