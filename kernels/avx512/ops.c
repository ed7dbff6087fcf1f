/* AVX-512F: 14 pixels by 2 vectors of 16 floats, 28 of the 32 registers accumulate. */
#include "activate.h"

#define VM_LANES 16
#define VM_PIXELS 14
#define VM_VECTORS 2
#define VM_OPS vm_cpu_avx512
#define VM_NO_LESS(BOUND, X) _mm512_max_ps(BOUND, X) /* the second of two where one is NaN */
#define VM_NO_MORE(BOUND, X) _mm512_min_ps(BOUND, X)
#define VM_SCALED(X, N) _mm512_scalef_ps(X, N) /* X * 2^N */
#define VM_WIDEN(HALF) ((vu)_mm512_cvtepu16_epi32((__m256i)(HALF)))
#define VM_NARROW(BITS) ((vh)_mm512_cvtepi32_epi16((__m512i)(BITS)))
#define VM_ACTIVATED(DTYPE, ACT, X) ((vf)vm_activated(ACT, (__m512)(X), DTYPE == VM_F16)) /* of halves */
#include "../simd/ops.h"
