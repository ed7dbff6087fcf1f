/* Activations that compute only the precision that remains in a half, for loads. */
#include <immintrin.h>

#include "../cpu.h"

#define INLINE static inline __attribute__((always_inline))

/* 1 / (1 + e^-x), within 2^-12 of it, or 2^-20 if exact and x above -16 (2^-18 below). e^-x is 2^(n + f), with n an
 * integer and 0 <= f < 1: a polynomial in f, which is 2^f within 2^-13.7 or 2^-22.6 (the least possible largest
 * relative error of its degree), times 2^n, which scalef makes of n + f. */
INLINE __m512 sigmoid(__m512 x, bool exact) {
    static const float near[] = {0x1.3f96a4p-4f, 0x1.cefc4cp-3f, 0x1.64444cp-1f, 0x1.fff632p-1f};
    static const float nearer[] = {0x1.ec320ap-10f, 0x1.26900cp-7f, 0x1.c95456p-5f,
                                   0x1.ebd5a8p-3f,  0x1.62e4f6p-1f, 0x1.fffffep-1f};
    const float *c = exact ? nearer : near;
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    const __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(c[0]);
    for (size_t i = 1; i < (exact ? 6 : 4); i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c[i]));
    const __m512 sum = _mm512_add_ps(_mm512_scalef_ps(p, t), _mm512_set1_ps(1));
    __m512 inverse = _mm512_rcp14_ps(sum);
    if (exact) { /* Newton's step, a third of a division's time; infinite sums skip it */
        const __mmask16 small = _mm512_cmp_ps_mask(t, _mm512_set1_ps(126), _CMP_LT_OQ);
        const __m512 error = _mm512_fnmadd_ps(sum, inverse, _mm512_set1_ps(1));
        inverse = _mm512_mask_fmadd_ps(inverse, small, error, inverse);
    }
    return inverse;
}

/* exact: of SiLU. An Inf stays Inf or becomes NaN, which is correct: -Inf * 0. */
INLINE __m512 vm_activated(vm_act act, __m512 x, bool exact) {
    if (act == VM_ACT_SILU) return _mm512_mul_ps(x, sigmoid(x, exact));
    if (act == VM_ACT_RELU) return _mm512_max_ps(_mm512_setzero_ps(), x); /* NaN where the second is */
    if (act != VM_ACT_BOUND) return x;
    const __m512 share = sigmoid(_mm512_mul_ps(x, _mm512_set1_ps(2 / 3.f)), true);
    return _mm512_fmsub_ps(share, _mm512_set1_ps(6), _mm512_set1_ps(3));
}
