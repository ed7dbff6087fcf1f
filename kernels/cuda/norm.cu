/* merge: turns the partial sums of x's producer into one scale and shift per channel, which load applies: together they
 * are GroupNorm.
 *
 * Each group has several blocks, so every multiprocessor has work. A thread sums its own share of the parts, in one
 * pass with many loads in flight. The means are summed minus the first of them, in double, which has enough digits for
 * the cancellation at the end. Shares are added in a fixed order, those of blocks by the last block to arrive: the same
 * bits every time, on every GPU. */
#include <math.h>

#include "device.h"

VM_KERNEL __launch_bounds__(VM_CUDA_THREADS, 1) vm_merge(vm_merge_args a) {
    constexpr int AT_ONCE = 16, SHARES = VM_CUDA_THREADS * VM_MERGE_BLOCKS;
    __shared__ double shares[3][VM_CUDA_THREADS];
    __shared__ bool last;
    const uint32_t me = threadIdx.x, padded = VM_ROUND_UP(a.c, VM_BLOCK), width = a.c / a.groups;
    const uint32_t first = blockIdx.x * width, step_parts = SHARES / width, step = SHARES % width;
    const float *const means = a.stats + VM_BLOCK + first, *const m2s = means + padded;
    const float base = means[0];

    double count = 0, sum = 0, square = 0;
    const uint32_t share = blockIdx.y * VM_CUDA_THREADS + me;
    uint32_t part = share / width, channel = share % width;
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
    if (me == 0) {
        for (int i = 0; i < 3; i++) a.sums[(blockIdx.x * VM_MERGE_BLOCKS + blockIdx.y) * 3 + i] = shares[i][0];
        last = vm_arrives_last(a.arrived, a.groups * VM_MERGE_BLOCKS);
    }
    __syncthreads();
    if (!last) return;

    for (uint32_t c = me; c < padded; c += VM_CUDA_THREADS) {
        const uint32_t group = min(c, a.c - 1) / width;
        const volatile double *sums = a.sums + group * VM_MERGE_BLOCKS * 3;
        double all[3] = {0, 0, 0};
        for (int i = 0; i < VM_MERGE_BLOCKS * 3; i++) all[i % 3] += sums[i];
        const double mean = all[1] / all[0], variance = all[2] / all[0] - mean * mean, r = 1 / sqrt(variance + a.eps);
        a.scale[c] = c < a.c ? (float)(r * a.gamma[c]) : 0;
        a.shift[c] = c < a.c ? (float)(a.beta[c] - (a.stats[VM_BLOCK + group * width] + mean) * r * a.gamma[c]) : 0;
    }
}
