/* blend: a tile into the image, blended with its neighbours (vm_blend_args in kernels.h). Any one-dimensional grid of
 * VM_CUDA_THREADS threads.
 *
 * A thread owns all numbers of a channel that are multiples of `step` apart, and handles them in order: no other thread
 * reads the borders that it writes. */
#include "pixels.h"

VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_blend(vm_blend_args a) {
    const uint32_t own_h = min(a.step, a.h), own_w = min(a.step, a.w);
    const size_t count = (size_t)a.batch * a.y_c * own_h * own_w, stride = (size_t)gridDim.x * VM_CUDA_THREADS;
    for (size_t k = (size_t)blockIdx.x * VM_CUDA_THREADS + threadIdx.x; k < count; k += stride) {
        const size_t plane = k / own_w / own_h, item = plane / a.y_c, image = (size_t)a.y_h * a.y_w;
        const uint32_t c = (uint32_t)(plane % a.y_c), top = (uint32_t)(k / own_w % own_h), left = (uint32_t)(k % own_w);
        for (uint32_t i = top; i < a.h; i += a.step) {
            for (uint32_t j = left; j < a.w; j += a.step) {
                const float v = vm_blended(&a, plane, i, j);
                const size_t pixel = (size_t)(a.top + i) * a.y_w + a.left + j;
                if (i == top && j == left)
                    vm_store_number(a, image, item * image * (a.format == VM_U8_NHWC ? 1 : a.y_c) + pixel, c, v);
            }
        }
    }
}
