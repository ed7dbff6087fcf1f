/* Sizes on the simulated machine: its bytes, elements and pixels have 64 bits on every host. Only counts of things in
 * this machine's memory are size_t.
 *
 * These are kernels.h's sums and products in 64 bits. An overflow stays UINT64_MAX through every further sum and
 * product, except a product with 0. vm_trace_take and the lookups refuse it. */
#ifndef VM_SIZES_H
#define VM_SIZES_H

#include <inttypes.h>

#include "../../kernels/kernels.h"

static inline uint64_t vm_sum64(uint64_t a, uint64_t b) {
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

static inline uint64_t vm_product64_of(const uint64_t *factor, size_t factors) {
    uint64_t product = 1;
    for (size_t i = 0; i < factors; i++)
        if (__builtin_mul_overflow(product, factor[i], &product)) return UINT64_MAX;
    return product;
}
#define VM_PRODUCT64(...) \
    vm_product64_of((const uint64_t[]){__VA_ARGS__}, sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t))

/* Rounds up to a multiple of `align`. */
static inline uint64_t vm_round_up64(uint64_t size, uint64_t align) {
    return size > UINT64_MAX - align ? UINT64_MAX : VM_ROUND_UP(size, align);
}

#endif
