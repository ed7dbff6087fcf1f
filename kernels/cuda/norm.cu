/* merge: from the partial sums that the producer of x left to one scale and shift a channel, which load applies:
 * together they are GroupNorm.
 *
 * A block merges one group, in one pass over its parts, with many loads under way at once. The means are summed less
 * the first of them, in double, which has digits enough for what cancels at the end. Every thread sums its own share of
 * the parts, and shares are added in a fixed order: the same bits every time. */
#include <math.h>

#include "device.h"

VM_KERNEL __launch_bounds__(VM_CUDA_THREADS, 1) vm_merge(vm_merge_args a) {
    constexpr int AT_ONCE = 16;
    __shared__ double shares[3][VM_CUDA_THREADS];
    const uint32_t me = threadIdx.x, padded = VM_ROUND_UP(a.c, VM_BLOCK), width = a.c / a.groups;
    const uint32_t first = blockIdx.x * width, step_parts = VM_CUDA_THREADS / width, step = VM_CUDA_THREADS % width;
    const float *const means = a.stats + VM_BLOCK + first, *const m2s = means + padded;
    const float base = means[0];

    double count = 0, sum = 0, square = 0;
    uint32_t part = me / width, channel = me % width;
    while (part < a.parts) {
        float n[AT_ONCE], mean[AT_ONCE], m2[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const bool here = part < a.parts;
            const size_t at = part * vm_stats_floats(a.c);
            n[j] = here ? a.stats[at] : 0;
            mean[j] = here ? means[at + channel] : 0;
            m2[j] = here ? m2s[at + channel] : 0;
            part += step_parts;
            channel += step;
            if (channel >= width) channel -= width, part++;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const double d = (double)mean[j] - base, nd = n[j] * d;
            count += n[j];
            sum += nd;
            square += nd * d + m2[j];
        }
    }

    shares[0][me] = count;
    shares[1][me] = sum;
    shares[2][me] = square;
    for (uint32_t half = VM_CUDA_THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (me < half)
            for (int i = 0; i < 3; i++) shares[i][me] += shares[i][me + half];
    }
    __syncthreads();

    const double mean = shares[1][0] / shares[0][0], variance = shares[2][0] / shares[0][0] - mean * mean;
    const double r = 1 / sqrt(variance + a.eps);
    for (uint32_t c = first + me; c < first + width; c += VM_CUDA_THREADS) {
        a.scale[c] = (float)(r * a.gamma[c]);
        a.shift[c] = (float)(a.beta[c] - (base + mean) * r * a.gamma[c]);
    }
    if (blockIdx.x == 0)
        for (uint32_t c = a.c + me; c < padded; c += VM_CUDA_THREADS) a.scale[c] = a.shift[c] = 0;
}
