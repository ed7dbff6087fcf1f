/* SSE2, which every x86-64 has: 6 pixels by 2 vectors of 4 floats, 12 of the 16 registers accumulate. */
#define VM_LANES 4
#define VM_PIXELS 6
#define VM_VECTORS 2
#define VM_OPS vm_cpu_sse
#include "../simd/ops.h"
