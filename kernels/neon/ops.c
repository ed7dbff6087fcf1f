/* Advanced SIMD, which every AArch64 has: 6 pixels by 4 vectors of 4 floats, 24 of the 32 registers accumulate. */
#define VM_LANES 4
#define VM_PIXELS 6
#define VM_VECTORS 4
#define VM_OPS vm_cpu_neon
#include "../simd/ops.h"
