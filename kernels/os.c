/* Memory by the page. */
#define _GNU_SOURCE
#include "os.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { MAPPED_FROM = 1 << 20 };

#ifdef _WIN32
#include <malloc.h>
#include <windows.h>

static void *small(size_t bytes) { return _aligned_malloc(bytes, VM_ALIGN); }
static void give_small(void *block) { _aligned_free(block); }
static void *map(size_t bytes) { return VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

static void unmap(void *block, size_t bytes) {
    (void)bytes;
    VirtualFree(block, 0, MEM_RELEASE);
}
#else
static void *small(size_t bytes) { return aligned_alloc(VM_ALIGN, bytes); }
static void give_small(void *block) { free(block); }

#ifdef __wasm__ /* one memory that only grows */
static void *map(size_t bytes) {
    void *block = small(vm_round_up(bytes, VM_ALIGN));
    return block ? memset(block, 0, bytes) : NULL;
}

static void unmap(void *block, size_t bytes) {
    (void)bytes;
    free(block);
}
#else
#include <sys/mman.h>
#include <unistd.h>

enum { HUGE_PAGE = 2 << 20 };

static size_t in_pages(size_t bytes) { return vm_round_up(bytes, (size_t)sysconf(_SC_PAGESIZE)); }
static void unmap(void *block, size_t bytes) { munmap(block, in_pages(bytes)); }

/* Aligned to huge pages by trimming a larger mapping. */
static void *map(size_t bytes) {
    const size_t length = in_pages(bytes), whole = vm_sum(length, HUGE_PAGE);
    if (whole > PTRDIFF_MAX) return NULL;
    char *all = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return NULL;
    char *block = (char *)VM_ROUND_UP((uintptr_t)all, HUGE_PAGE);
    if (block > all) munmap(all, (size_t)(block - all));
    munmap(block + length, (size_t)(all + whole - (block + length)));
#ifdef MADV_HUGEPAGE
    madvise(block, length, MADV_HUGEPAGE); /* only a hint: a kernel without huge pages may refuse it */
#endif
    return block;
}
#endif
#endif

void *vm_os_take(size_t bytes) {
    if (bytes >= MAPPED_FROM) return map(bytes);
    void *block = small(VM_ROUND_UP(VM_MAX(bytes, 1), VM_ALIGN));
    if (block) memset(block, 0, bytes);
    return block;
}

void vm_os_give(void *block, size_t bytes) {
    if (bytes < MAPPED_FROM)
        give_small(block);
    else
        unmap(block, bytes);
}
