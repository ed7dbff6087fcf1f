/* store: the convolution's output, with bias and residual, into y; and the sums that the next GroupNorm needs.
 *
 * A block has one part of the stripe and up to VM_CUDA_LANES vectors of 8 channels. Neighbouring threads have
 * neighbouring vectors. Threads with the same vector take turns at the part's pixels (a thread's share of them is its
 * pixel lane), and load a few before they use the first, so that many loads are in flight.
 *
 * A thread sums its values minus the first of them, and the squares of these differences. The first is one of the
 * values, so the mean is about as near to it as the values are to each other. Little cancels at the end, however large
 * the mean is. The pixel lanes are merged by Chan's formula in a fixed order: the same bits every time. */
#include "pixels.h"

/* Stores, and leaves the stored values in v. */
template <typename T>
VM_DEVICE void vm_store8_rounded(T *p, float v[8]) {
    if constexpr (sizeof(T) == 4) {
        vm_store8(p, v);
    } else {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pairs[i] = vm_pack<T>(v[2 * i], v[2 * i + 1]);
            vm_unpack<T>(v + 2 * i, pairs[i]);
        }
        vm_store16(p, {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
}

/* Merges the pixel lanes' counts, means and squared deviations, and writes them as this part's. All threads of the
 * block must call it, for it has barriers; a thread without pixels has n = 0. */
VM_DEVICE void vm_leave_part(const vm_store_args &a, float n, float mean[8], float m2[8], uint32_t lanes, uint32_t c) {
    __shared__ float ns[VM_CUDA_THREADS], means[8][VM_CUDA_THREADS], m2s[8][VM_CUDA_THREADS];
    const uint32_t me = threadIdx.x, pixel_lane = me / lanes, pixel_lanes = VM_CUDA_THREADS / lanes;
    uint32_t half = 1;
    while (2 * half < pixel_lanes) half *= 2;
    for (; half; half /= 2) {
        if (pixel_lane >= half && pixel_lane < 2 * half) {
            ns[me] = n;
#pragma unroll
            for (int i = 0; i < 8; i++) means[i][me] = mean[i], m2s[i][me] = m2[i];
        }
        __syncthreads();
        const uint32_t from = me + half * lanes;
        if (pixel_lane < half && pixel_lane + half < pixel_lanes && ns[from] > 0) {
            const float share = ns[from] / (n + ns[from]);
#pragma unroll
            for (int i = 0; i < 8; i++) vm_merge_sums(n, share, mean[i], m2[i], means[i][from], m2s[i][from]);
            n += ns[from];
        }
    }
    if (pixel_lane) return;
    float *part = a.stats + blockIdx.x * vm_stats_floats(a.y_c);
    if (c == 0) part[0] = n;
    vm_store8(part + VM_BLOCK + c, mean);
    vm_store8(part + VM_BLOCK + VM_ROUND_UP(a.y_c, VM_BLOCK) + c, m2);
}

/* Origins of a stripe's pixels: the first pixel's, and that of the pixel at the ring's first row. */
struct vm_stripe {
    size_t first;
    uint32_t end, ring;
};

VM_DEVICE vm_stripe vm_stripe_of(const vm_store_args &a, vm_ring_rows ring) {
    const uint32_t row = vm_ring_row(ring, a.row0);
    return {(size_t)row * a.y_w, ring.rows ? (ring.rows - row) * a.y_w : UINT32_MAX, ring.rows * a.y_w};
}

VM_DEVICE size_t vm_stripe_pixel(const vm_stripe &s, uint32_t at) { return s.first + at - (at >= s.end ? s.ring : 0); }

template <typename T, bool ROWS>
VM_DEVICE void vm_store(const vm_store_args &a) {
    constexpr int AT_ONCE = ROWS ? 8 / sizeof(T) : 1;
    const uint32_t vectors = ROWS ? VM_ROUND_UP(a.y_c, VM_BLOCK) / 8 : (a.y_c + 7) / 8;
    const uint32_t lanes = min(vectors - blockIdx.y * VM_CUDA_LANES, (uint32_t)VM_CUDA_LANES);
    const uint32_t c = (blockIdx.y * VM_CUDA_LANES + threadIdx.x % lanes) * 8;
    const uint32_t pixel_lane = threadIdx.x / lanes, pixel_lanes = VM_CUDA_THREADS / lanes;
    const uint32_t begin = blockIdx.x * a.part_pixels, end = min(begin + a.part_pixels, a.rows * a.y_w);
    const uint32_t first = pixel_lane < pixel_lanes ? begin + pixel_lane : end;
    const uint32_t step_rows = pixel_lanes / a.y_w, step_columns = pixel_lanes % a.y_w;
    const size_t y0 = (size_t)a.row0 * a.y_w;
    const vm_stripe y_at = vm_stripe_of(a, a.y_ring), add_at = vm_stripe_of(a, a.add_ring);

    float bias[8], base[8], sum[8], square[8];
    if (a.bias) vm_load8(bias, a.bias + c);
#pragma unroll
    for (int i = 0; i < 8; i++) bias[i] = a.bias ? bias[i] * a.bias_scale : 0, base[i] = sum[i] = square[i] = 0;

    bool finite = true;
    uint32_t row = first / a.y_w, column = first % a.y_w; /* of the stripe */
    for (uint32_t pixel = first; pixel < end; pixel += AT_ONCE * pixel_lanes) {
        vm_eight<T> raw[AT_ONCE], add[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint32_t at = pixel + j * pixel_lanes;
            uint32_t from = at;
            if (a.up) {
                from = (row / 2 + row % 2) * (a.y_w / 2 + 1) + column / 2 + column % 2; /* of four phases each */
                from = from * 4 + row % 2 * 2 + column % 2;
                row += step_rows;
                column += step_columns;
                if (column >= a.y_w) column -= a.y_w, row++;
            }
            if (at < end) raw[j] = vm_take8(static_cast<const T *>(a.raw) + (size_t)from * a.channels + c);
            if (at < end && a.add)
                add[j] = vm_take8(static_cast<const T *>(a.add) + vm_stripe_pixel(add_at, at) * a.add_pitch + c);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint32_t at = pixel + j * pixel_lanes;
            if (at >= end) break;
            float v[8];
            vm_open8(v, raw[j]);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] += bias[i];
            if (a.add) {
                float more[8];
                vm_open8(more, add[j]);
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] += more[i];
            }
            if (a.relu) {
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = v[i] < 0 ? 0 : v[i];
            }
            if constexpr (ROWS) {
                vm_store8_rounded(static_cast<T *>(a.y) + vm_stripe_pixel(y_at, at) * a.y_pitch + c, v);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    v[i] = c + i < a.y_c ? vm_store_number(a, (size_t)a.y_h * a.y_w, y0 + at, c + i,
                                                           fmaf(v[i], a.out_scale, a.out_shift))
                                         : 0;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                finite = finite && isfinite(v[i]);
                if (at == first) base[i] = v[i];
                const float d = v[i] - base[i];
                sum[i] += d;
                square[i] = fmaf(d, d, square[i]);
            }
        }
    }
    if (!finite) vm_atomic_or(a.flags, 1);
    if (!ROWS || !a.stats) return;

    const float n = first < end ? (end - first + pixel_lanes - 1) / pixel_lanes : 0, over = n > 0 ? 1 / n : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float d = sum[i] * over;
        base[i] += d; /* the mean, and the sum of squared deviations */
        square[i] = fmaf(-d, sum[i], square[i]);
    }
    vm_leave_part(a, n, base, square, lanes, c);
}

#define VM_STORE(type, T)                                                              \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS, 2) vm_store_##type(vm_store_args a) { \
        if (a.format == VM_ROWS)                                                       \
            vm_store<T, true>(a);                                                      \
        else                                                                           \
            vm_store<T, false>(a);                                                     \
    }
VM_STORE(f32, float)
VM_STORE(f16, vm_half)
VM_STORE(bf16, vm_bfloat16)
