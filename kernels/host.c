/* The host as a device: its memory, its packed weights, and runs that are done when they return.
 *
 *   convolution, linear   [out/16][in/16][taps][min(16, in)][16 out]   (zero where out or in end)
 *   vector                [c/16][16]
 *
 * Tensors lie end to end, so the three projections of an attention are one convolution with three times the channels.
 * Packing only moves numbers: get_weight returns bit for bit what set_weight was given. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

/* ---- memory: from 1 MiB up a mapping of its own, advised to huge pages ---- */

enum { MAPPED_FROM = 1 << 20, HUGE_PAGE = 2 << 20 };

static size_t in_pages(size_t bytes) { return vm_round_up(bytes, (size_t)sysconf(_SC_PAGESIZE)); }

/* Mapped blocks are aligned to huge pages by trimming a larger mapping. */
static vm_status take(const vm_backend *b, size_t bytes, void **out) {
    (void)b;
    *out = NULL;
    if (bytes < MAPPED_FROM) {
        *out = aligned_alloc(VM_ALIGN, VM_ROUND_UP(VM_MAX(bytes, 1), VM_ALIGN));
        if (*out) memset(*out, 0, bytes);
        return VM_OK;
    }
    const size_t length = in_pages(bytes), whole = vm_sum(length, HUGE_PAGE);
    char *map = whole > PTRDIFF_MAX ? MAP_FAILED
                                    : mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return VM_OK;
    char *block = (char *)VM_ROUND_UP((uintptr_t)map, HUGE_PAGE);
    if (block > map) munmap(map, (size_t)(block - map));
    munmap(block + length, (size_t)(map + whole - (block + length)));
#ifdef MADV_HUGEPAGE
    madvise(block, length, MADV_HUGEPAGE); /* advice: a kernel without huge pages may refuse it */
#endif
    *out = block;
    return VM_OK;
}

static void give(const vm_backend *b, void *block, size_t bytes) {
    (void)b;
    if (bytes < MAPPED_FROM)
        free(block);
    else
        munmap(block, in_pages(bytes));
}

/* ---- weights ---- */

static size_t taps_of(const vm_weight *w) { return w->ksize * w->ksize; }
static size_t depth_of(const vm_weight *w) { return VM_MIN(w->in, VM_BLOCK); }

static size_t weight_bytes(const vm_backend *b, const vm_weight *w) {
    (void)b;
    return VM_PRODUCT(VM_BLOCKS(w->out) * VM_BLOCK, VM_BLOCKS(w->in), taps_of(w), depth_of(w), sizeof(float));
}

/* Where element (o, i, tap) of the file's layout lies in the packed copy. */
static size_t packed_at(const vm_weight *w, size_t o, size_t i, size_t tap) {
    const size_t block = (o / VM_BLOCK * VM_BLOCKS(w->in) + i / VM_BLOCK) * taps_of(w) + tap;
    return (block * depth_of(w) + i % VM_BLOCK) * VM_BLOCK + o % VM_BLOCK;
}

static vm_status set_weight(const vm_backend *b, const vm_weight *w, void *to, vm_dtype dtype, const void *data) {
    (void)b;
    size_t n = 0;
    for (size_t o = 0; o < w->out; o++)
        for (size_t i = 0; i < w->in; i++)
            for (size_t tap = 0; tap < taps_of(w); tap++)
                ((float *)to)[packed_at(w, o, i, tap)] = vm_element(dtype, data, n++);
    return VM_OK;
}

static vm_status get_weight(const vm_backend *b, const vm_weight *w, const void *from, float *data) {
    (void)b;
    for (size_t o = 0; o < w->out; o++)
        for (size_t i = 0; i < w->in; i++)
            for (size_t tap = 0; tap < taps_of(w); tap++) *data++ = ((const float *)from)[packed_at(w, o, i, tap)];
    return VM_OK;
}

/* ---- runs: nothing is enqueued, for every call is done when it returns ---- */

static vm_status start(const vm_backend *b, void *stream) {
    (void)b, (void)stream;
    return VM_OK;
}

static vm_status finish(const vm_backend *b, const vm_exec *exec, bool wait, bool *overflow) {
    (void)b, (void)exec, (void)wait;
    *overflow = false; /* floats do not overflow where weights and pixels are sane */
    return VM_OK;
}

static vm_status begin(const vm_backend *b, uint64_t key, bool *replayed) {
    (void)b, (void)key;
    *replayed = false;
    return VM_OK;
}

static vm_status end(const vm_backend *b, uint64_t key, vm_status so_far) {
    (void)b, (void)key;
    return so_far;
}

static vm_status step_enqueued(const vm_backend *b, size_t step, size_t rows, const vm_exec *exec) {
    (void)b, (void)step, (void)rows, (void)exec;
    return VM_OK;
}

static void seconds(const vm_backend *b, size_t step, double *seconds) { (void)b, (void)step, (void)seconds; }

static vm_status copy(const vm_backend *b, void *to, const void *from, size_t bytes) {
    (void)b;
    memcpy(to, from, bytes);
    return VM_OK;
}

const vm_device vm_host = {.align = VM_ALIGN,
                           .addressable = true,
                           .take = take,
                           .give = give,
                           .weight_bytes = weight_bytes,
                           .set_weight = set_weight,
                           .get_weight = get_weight,
                           .start = start,
                           .finish = finish,
                           .begin = begin,
                           .end = end,
                           .step_enqueued = step_enqueued,
                           .seconds = seconds,
                           .send = copy,
                           .fetch = copy,
                           .error = vm_error};
