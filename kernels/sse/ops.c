/* SSE2, which every x86-64 has: 6 pixels by 2 vectors of 4 floats, 12 of the 16 registers accumulate. */
#include <immintrin.h>

#define VM_LANES 4
#define VM_PIXELS 6
#define VM_VECTORS 2
#define VM_OPS vm_cpu_sse
#define VM_NO_LESS(BOUND, X) _mm_max_ps(BOUND, X) /* the second of two where one is NaN */
#define VM_NO_MORE(BOUND, X) _mm_min_ps(BOUND, X)
#include "../simd/ops.h"
