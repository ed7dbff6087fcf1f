/* AVX2 with FMA: 6 pixels by 2 vectors of 8 floats, 12 of the 16 registers accumulate. */
#include <immintrin.h>

#define VM_LANES 8
#define VM_PIXELS 6
#define VM_VECTORS 2
#define VM_OPS vm_cpu_avx2
#define VM_NO_LESS(BOUND, X) _mm256_max_ps(BOUND, X) /* the second of two where one is NaN */
#define VM_NO_MORE(BOUND, X) _mm256_min_ps(BOUND, X)
#include "../simd/ops.h"
