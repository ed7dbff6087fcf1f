/* Makes the factors for AVX512_BF16 and AMX, from rows of any type. It takes a fifth to a half as long as the products,
 * so it computes only the precision that remains: a half has 8 bits, a half and its rest 16. */
#include <immintrin.h>

#include "../avx512/activate.h"

INLINE __m512 widened(vm_dtype dtype, const void *x, size_t i) {
    if (dtype == VM_F32) return _mm512_loadu_ps((const float *)x + i);
    const __m256i half = _mm256_loadu_si256((const __m256i_u *)((const uint16_t *)x + i));
    if (dtype == VM_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
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
        if (act) v = vm_activated(act, v, split);
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
