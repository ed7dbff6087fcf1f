/* AVX-512F: 14 pixels by 2 vectors of 16 floats, 28 of the 32 registers accumulate. */
#define VM_LANES 16
#define VM_PIXELS 14
#define VM_VECTORS 2
#define VM_OPS vm_cpu_avx512
#include "../simd/ops.h"
