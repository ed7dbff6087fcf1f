/* Makes the factors for AVX512_BF16 and AMX, from rows of any type. It takes a fifth to a half as long as the products,
 * so it computes only the precision that remains: a half has 8 bits, a half and its rest 16. */
#include <immintrin.h>

#include "../cpu.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 widened(vm_dtype dtype, const void *x, size_t i) {
    if (dtype == VM_F32) return _mm512_loadu_ps((const float *)x + i);
    const __m256i half = _mm256_loadu_si256((const __m256i_u *)((const uint16_t *)x + i));
    if (dtype == VM_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

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
INLINE __m512 activated(vm_act act, __m512 x, bool exact) {
    if (act == VM_ACT_SILU) return _mm512_mul_ps(x, sigmoid(x, exact));
    if (act == VM_ACT_RELU) return _mm512_max_ps(_mm512_setzero_ps(), x); /* NaN where the second is */
    if (act != VM_ACT_BOUND) return x;
    const __m512 share = sigmoid(_mm512_mul_ps(x, _mm512_set1_ps(2 / 3.f)), true);
    return _mm512_fmsub_ps(share, _mm512_set1_ps(6), _mm512_set1_ps(3));
}

INLINE __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

INLINE void load_as(vm_dtype dtype, bool scaled, vm_act act, bool split, uint16_t *y, uint16_t *rest,
                    const vm_source *from) {
    const void *x = from->x;
    const __m512 scale = scaled ? _mm512_loadu_ps(from->scale) : _mm512_set1_ps(1);
    const __m512 shift = scaled ? _mm512_loadu_ps(from->shift) : _mm512_setzero_ps();
    for (size_t p = 0, pixels = from->pixels; p < pixels; p++) {
        __m512 v = widened(dtype, x, p * VM_BLOCK);
        if (scaled && from->factor) v = _mm512_mul_ps(v, _mm512_set1_ps(from->factor[p]));
        if (scaled) v = _mm512_fmadd_ps(v, scale, shift);
        if (act) v = activated(act, v, split);
        const __m256i half = narrow(v);
        _mm256_storeu_si256((__m256i_u *)(y + 2 * p * VM_BLOCK), half);
        if (split)
            _mm256_storeu_si256((__m256i_u *)(rest + 2 * p * VM_BLOCK),
                                narrow(_mm512_sub_ps(v, widened(VM_BF16, &half, 0))));
    }
}

INLINE void load_dtype(vm_dtype dtype, uint16_t *y, uint16_t *rest, const vm_source *from) {
    const bool scaled = from->scale, split = rest;
    if (from->act == VM_ACT_SILU && scaled && split)
        load_as(dtype, true, VM_ACT_SILU, true, y, rest, from);
    else if (from->act == VM_ACT_SILU && scaled)
        load_as(dtype, true, VM_ACT_SILU, false, y, rest, from);
    else if (split)
        load_as(dtype, scaled, from->act, true, y, rest, from);
    else
        load_as(dtype, scaled, from->act, false, y, rest, from);
}

void vm_load_pairs_avx512bf16(void *y, void *rest, const vm_source *from) {
    switch (from->dtype) {
    case VM_F32: load_dtype(VM_F32, y, rest, from); break;
    case VM_F16: load_dtype(VM_F16, y, rest, from); break;
    default: load_dtype(VM_BF16, y, rest, from); break;
    }
}
