/* The products of pairs of bfloat16 (vm_gemm of cpu.h with a pair in the place of a number): x and w point to pairs of 4
 * bytes, two neighbouring channels, the first in the lower half; strides count pairs; x_step is 1, depth at most 16. */
#ifndef VM_PRODUCTS_H
#define VM_PRODUCTS_H

#include "cpu.h"

/* One way to multiply. */
typedef struct vm_products {
    size_t max_pixels; /* of one gemm call */
    size_t steps;      /* of a sum that is best made in one call: so many keep their weights in L1, or all */
    void (*gemm)(const vm_gemm *g);
    /* `rounds` rounds of independent multiply-adds on registers alone: the floor that benchmarks
     * measure against. Returns the floating-point operations done; *sink keeps them from being dropped. */
    double (*burn)(size_t rounds, float *sink);
} vm_products;

extern const vm_products vm_pairs_ref;
#ifdef VM_HAVE_X86
extern const vm_products vm_pairs_avx512bf16, vm_pairs_amx;
/* Whether this processor has AMX, and whether it, the system and this process's permission let its tiles be used. */
bool vm_amx_present(void);
bool vm_amx_permitted(void);
extern const bool vm_amx_emulated; /* for tests, on any processor (VAEMEM_EMULATE_AMX) */
#endif

#endif
