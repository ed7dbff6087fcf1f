/* AVX2 with FMA: 6 pixels by 2 vectors of 8 floats, 12 of the 16 registers accumulate. */
#define VM_LANES 8
#define VM_PIXELS 6
#define VM_VECTORS 2
#define VM_OPS vm_cpu_avx2
#include "../simd/ops.h"
