/* pixel_norm: the half of a pixel norm that is not done on load: 1 over each pixel's length, and each channel's sqrt(c)
 * * gamma. Load and our own convolution multiply by both.
 *
 * Eight lanes read a pixel, 128 bytes of halves at a time, and sum squares in float in the order of the channels. Their
 * sums are added in a fixed order: the same bits every time. Memory bandwidth limits it. */
#include <math.h>

#include "device.h"

template <typename T>
VM_DEVICE void vm_pixel_norm(const vm_pixel_norm_args &a) {
    constexpr uint32_t LANES = 8, AT_ONCE = VM_CUDA_THREADS / LANES;
    const uint32_t lane = threadIdx.x % LANES, padded = VM_ROUND_UP(a.c, VM_BLOCK);
    for (uint32_t first = blockIdx.x * AT_ONCE; first < a.pixels; first += gridDim.x * AT_ONCE) {
        const uint32_t pixel = first + threadIdx.x / LANES;
        const uint32_t at = a.first + pixel, ring = at >= a.ring_pixels ? a.ring_pixels : 0;
        const T *const x = static_cast<const T *>(a.x) + (size_t)(at - ring) * a.x_pitch;
        float sum = 0;
#pragma unroll 4
        for (uint32_t c = lane * 8; c < a.c && pixel < a.pixels; c += LANES * 8) {
            float v[8];
            vm_load8(v, x + c);
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) /* memory beyond x's channels may hold anything */
                if (c + i < a.c) sum = fmaf(v[i], v[i], sum);
        }
        for (uint32_t other = LANES / 2; other; other /= 2) sum += vm_shuffle_xor(sum, other);
        const float length = sqrtf(sum + a.under);
        if (lane == 0 && pixel < a.pixels) a.factor[pixel] = 1 / (length < a.least ? a.least : length); /* NaN stays */
    }
    if (blockIdx.x) return;
    for (uint32_t c = threadIdx.x; c < padded; c += VM_CUDA_THREADS) {
        a.scale[c] = c < a.c ? (float)(sqrt((double)a.c) * (a.gamma ? a.gamma[c] : 1)) : 0;
        a.shift[c] = 0;
    }
}

#define VM_PIXEL_NORM(type, T) \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_pixel_norm_##type(vm_pixel_norm_args a) { vm_pixel_norm<T>(a); }
VM_PIXEL_NORM(f32, float)
VM_PIXEL_NORM(f16, vm_half)
VM_PIXEL_NORM(bf16, vm_bfloat16)
