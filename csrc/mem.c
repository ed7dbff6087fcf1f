/* The only allocator of the core: categories, peaks, huge pages, fault injection.
 *
 * live[] counts what is in use, reserved what is held from the system. They differ by the arena,
 * which is reserved whole and used pass by pass. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "vm.h"

enum { MAPPED_FROM = 1 << 20, HUGE_PAGE = 2 << 20 };

struct vm_mem {
    size_t references;
    const vm_backend *device; /* whose memory; NULL for the host's */
    vm_usage usage;
};

/* One lock for all accounts, held for a few additions: a fork waits for it, so that no child begins with it held. */
static pthread_mutex_t accounts = PTHREAD_MUTEX_INITIALIZER;
static void lock(void) { pthread_mutex_lock(&accounts); }
static void unlock(void) { pthread_mutex_unlock(&accounts); }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(lock, unlock, unlock); }

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
    mem->device = backend && backend->device ? backend : NULL;
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
    bool last = --mem->references == 0;
    unlock();
    if (!last) return;
    free(mem);
}

/* A block from the system; mapped blocks are aligned to huge pages by trimming a larger mapping. */
static void *take(size_t bytes) {
    if (injected_fault()) return NULL;
    if (bytes < MAPPED_FROM) {
        void *block = aligned_alloc(VM_ALIGN, VM_ROUND_UP(VM_MAX(bytes, 1), VM_ALIGN));
        if (block) memset(block, 0, bytes);
        return block;
    }
    if (bytes > SIZE_MAX - 2 * HUGE_PAGE) return NULL;
    size_t length = VM_ROUND_UP(bytes, 4096), whole = length + HUGE_PAGE;
    char *map = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return NULL;
    char *block = (char *)VM_ROUND_UP((uintptr_t)map, HUGE_PAGE);
    if (block > map) munmap(map, (size_t)(block - map));
    munmap(block + length, (size_t)(map + whole - (block + length)));
#ifdef MADV_HUGEPAGE
    madvise(block, length, MADV_HUGEPAGE); /* advice: a kernel without huge pages may refuse it */
#endif
    return block;
}

static void give(void *block, size_t bytes) {
    if (bytes < MAPPED_FROM)
        free(block);
    else
        munmap(block, VM_ROUND_UP(bytes, 4096));
}

static void account(vm_mem *mem, vm_category category, size_t bytes, bool more) {
    vm_usage *u = &mem->usage;
    u->live[category] += more ? bytes : -bytes;
    size_t now = 0, peak = 0;
    for (int c = 0; c < VM_CATEGORIES; c++) now += u->live[c], peak += u->peak[c];
    if (now > peak) memcpy(u->peak, u->live, sizeof u->peak);
}

static vm_status out_of_memory(size_t bytes) {
    return vm_fail(VM_ENOMEM, "memory: the system has no %zu bytes (%.1f MiB) to give", bytes, (double)bytes / 1048576);
}

vm_status vm_mem_reserve(vm_mem *mem, size_t bytes, void **out) {
    vm_status s = VM_OK;
    if (!mem->device)
        *out = take(bytes);
    else if (injected_fault())
        *out = NULL;
    else if ((s = mem->device->device->take(mem->device, bytes, out)))
        return vm_fail(s, "%s", mem->device->device->error());
    if (!*out) return out_of_memory(bytes);
    lock();
    mem->usage.reserved += bytes;
    unlock();
    return VM_OK;
}

void vm_mem_unreserve(vm_mem *mem, void *block, size_t bytes) {
    if (!block) return;
    if (mem->device)
        mem->device->device->give(mem->device, block);
    else
        give(block, bytes);
    lock();
    mem->usage.reserved -= bytes;
    unlock();
}

void vm_mem_use(vm_mem *mem, vm_category category, size_t bytes) {
    lock();
    account(mem, category, bytes, true);
    unlock();
}

void vm_mem_unuse(vm_mem *mem, vm_category category, size_t bytes) {
    lock();
    account(mem, category, bytes, false);
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

size_t vm_mem_room(size_t count) {
    size_t room = count ? 16 : 0;
    while (room < count) room *= 2;
    return room;
}

vm_status vm_mem_grow(vm_mem *mem, vm_category category, void **array, size_t count, size_t item_bytes) {
    if (count < vm_mem_room(count)) return VM_OK;
    void *wider;
    vm_status s = vm_mem_alloc(mem, category, vm_mem_room(count + 1) * item_bytes, &wider);
    if (s) return s;
    if (count) memcpy(wider, *array, count * item_bytes);
    vm_mem_free(mem, category, *array, vm_mem_room(count) * item_bytes);
    *array = wider;
    return VM_OK;
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
