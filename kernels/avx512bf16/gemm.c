/* AVX512_BF16: the tiles of ../avx512, each step with a pair of bfloat16 in the place of a float. vdpbf16ps adds the
 * product of the upper halves and then that of the lower ones to a float, rounding each time: on a Zen 5 exactly plain
 * C's bits. But it flushes subnormal numbers to zero. */
#include <immintrin.h>

#define VM_LANES 16
#define VM_PIXELS 14
#define VM_VECTORS 2
#define VM_MULTIPLY(SUM, X, W) ((SUM) = (vf)_mm512_dpbf16_ps((__m512)(SUM), (__m512bh)(X), (__m512bh)(W)))
#define VM_ROUND(X) ((vh)(__m256i)_mm512_cvtneps_pbh((__m512)(X)))
#include "../simd/gemm.h"
#include "../simd/winograd.h"

VM_TRANSFORMS(winograd, VM_BF16, TWO, TWO, VM_TWO_TWO)
VM_TRANSFORMS(upsampled, VM_BF16, UP, UP, VM_UPSAMPLED)

static double burn(size_t rounds, float *sink) {
    vf sum[16]; /* 12 in flight were too few for two ports of a Zen 5 */
    UNROLL for (int j = 0; j < 16; j++) sum[j] = splat((float)j);
    vf a = splat(0.5f), b = splat(0.25f);
    for (size_t i = 0; i < rounds; i++) {
        UNROLL for (int j = 0; j < 16; j++) VM_MULTIPLY(sum[j], a, b);
        __asm__("" : "+v"(a), "+v"(b)); /* hides from the compiler that it is the same product again */
    }
    for (int j = 0; j < 16; j++)
        for (int l = 0; l < VM_LANES; l++) *sink += sum[j][l];
    return 4.0 * 16 * VM_LANES * (double)rounds;
}

const vm_products vm_pairs_avx512bf16 = {1,    VM_PIXELS, VM_ROWS_FLAT, VM_STEPS, gemm, vm_load_pairs_avx512bf16,
                                         burn, &winograd, &upsampled,   NULL};
