/* conv: a whole pass in one kernel on tensor cores: normalise and activate, convolve, add, round, store, measure.
 *
 * A block takes items, a tile of pixels by some channels each, one after another. For each it walks over x's channels
 * in chunks of 64 and over the filter's taps:
 *
 *   chunk of x with its halo  --copied--> shared memory --f, in place--> read at the pixels that each tap shifts to
 *   filters at a tap, of the chunk  --copied--> a ring in shared memory
 *
 * f is normalisation and SiLU. x is read and transformed once for all taps and for OUTS channels of y, without an
 * im2col copy. Copies and f run ahead of the products, from one item into the next: while one chunk is multiplied, the
 * next is copied and then transformed. Half of a multiprocessor's warps transform before they multiply and the others
 * after, so the tensor cores and the other units are always busy. There is one barrier for each tap. The residual is
 * prefetched before an item's products, and added after them. Of two blocks on a multiprocessor one begins a little
 * later, and multiplies while the other ends its item.
 *
 * A warp with 64 pixels x 64 channels reads 4 KiB from shared memory for 32 products of 16 x 8 x 16. Smaller tiles read
 * more for each product, which limits their speed. A block with 256 pixels x 128 channels reads a filter from the L2
 * cache once for 256 pixels. */
#include "conv_tile.h"

template <typename S>
VM_DEVICE void vm_conv_fragments(uint32_t x[S::M][4], uint32_t w[S::N / 2][4], const char *shared, uint32_t x_at,
                                 uint32_t w_at, int step) {
    x_at ^= step << 5;
    w_at ^= step << 5;
#pragma unroll
    for (int m = 0; m < S::M; m++) vm_ldmatrix_x4(x[m], shared + x_at + m * S::STRIDE * S::WIDTH * S::LINE);
#pragma unroll
    for (int n = 0; n < S::N / 2; n++) vm_ldmatrix_x4(w[n], shared + w_at + n * 16 * S::LINE);
}

template <typename T, typename S>
VM_DEVICE void vm_convolve(const vm_conv_args &a, char *shared) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = warp % S::ACROSS, down = warp / S::ACROSS;
    const uint32_t taps = a.k * a.k;
    const uint32_t h = a.up ? a.x_h : a.y_h, w = a.up ? a.x_w : a.y_w, items = a.items;
    float *const sums = reinterpret_cast<float *>(shared + S::SUMS);

    /* The next chunk's copy was begun before those of the last filters, and copies arrive in order. So the chunk is
     * there when the ring has come round to the last taps, and f is spread over these taps. */
    const bool changes = a.scale || a.multiply != 1;
    const uint32_t first = min(taps - 1, max(taps / 2, (uint32_t)S::STAGES - 1));
    const uint32_t each = (S::EACH + taps - first - 1) / (taps - first);
    const bool second = blockIdx.x >= (gridDim.x + 1) / 2;
    const bool early = taps > 1 && (S::THREADS < VM_CUDA_THREADS ? !second : warp < S::THREADS / 64);
    static_assert(S::STAGES <= 4, "a chunk arrives within four taps");

    vm_conv_input in;
    vm_conv_filter f;
    vm_conv_input_at<S>(a, in, blockIdx.x, items);
    vm_conv_filter_at<S>(a, f, blockIdx.x, items);
    if (in.item < items) vm_conv_fetch_input<T, S>(a, in, shared);
    vm_copy_commit();
    for (int i = 0; i < S::STAGES - 1; i++) {
        vm_conv_fetch_filter<T, S>(a, f, shared + S::RING + i * S::FILTER, items);
        vm_copy_commit();
    }
    /* If a multiprocessor has two blocks of four warps, the second begins later. They share the tensor cores evenly, so
     * the distance between them stays. Each multiprocessor gets its first block before one gets a second. */
    if (second && vm_conv_apart(S::THREADS, a.in_c * taps, items / gridDim.x)) vm_sleep(VM_CONV_LEAD);
    vm_copy_wait<S::STAGES - 2>();
    if (changes && in.item < items) vm_conv_transform<T, S>(a, in, shared, 0, S::EACH);
    __syncthreads();

    const auto next_input = [&](char *to) {
        if (in.item >= items) return;
        if (++in.chunk * VM_CONV_CHUNK >= a.in_c) vm_conv_input_at<S>(a, in, in.item + gridDim.x, items);
        if (in.item < items) vm_conv_fetch_input<T, S>(a, in, to);
    };
    vm_conv_fetch_filter<T, S>(a, f, shared + S::RING + (S::STAGES - 1) * S::FILTER, items);
    next_input(shared + S::INPUT);
    vm_copy_commit();

    /* The lane's row of the matrices that ldmatrix reads: of x, 16 pixels of a tile row by 16 channels; of w, 16
     * filters by 16. */
    const auto x_at = [&](uint32_t buffer, uint32_t i, uint32_t j) {
        return buffer * S::INPUT + vm_conv_place<S>(down * S::M * S::STRIDE + i, lane % 16 * S::STRIDE + j, lane / 16);
    };
    const uint32_t w_row = across * S::N * 8 + vm_conv_filter_of(lane % 8, lane / 16);
    const uint32_t w_lane = S::RING + vm_conv_filter_place<S>(w_row, lane / 8 % 2);

    uint32_t slot = 0, buffer = 0, x_now = x_at(0, 0, 0), xf[2][S::M][4], wf[2][S::N / 2][4];
    for (uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
        const vm_conv_item at = vm_conv_item_of<S>(a, item);
        if (a.add) vm_conv_prefetch<T, S>(a, at);
        float d[S::M][S::N][4];
#pragma unroll
        for (int i = 0; i < 2 * S::N; i++) {
            const uint32_t o = at.out + across * S::N * 8 + vm_conv_channel(i);
            const float bias = a.bias && o < VM_ROUND_UP(a.y_c, VM_BLOCK) ? a.bias[o] * a.bias_scale : 0;
#pragma unroll
            for (int r = 0; r < 2 * S::M; r++) d[r / 2][i / 2][r % 2 * 2 + i % 2] = bias;
        }
        vm_conv_fragments<S>(xf[0], wf[0], shared, x_now, w_lane + slot * S::FILTER, 0);
        for (uint32_t c = 0; c < a.in_c; c += VM_CONV_CHUNK) {
            uint32_t i = 0, j = 0; /* the tap */
#pragma unroll 1
            for (uint32_t tap = 0; tap < taps; tap++) {
                const uint32_t was = slot, w_now = w_lane + slot * S::FILTER;
#pragma unroll
                for (int step = 0; step < 4; step++) {
                    if ((step == 0 || step == 2) && early == (step == 0) && changes && tap >= first &&
                        in.item < items) {
                        if (taps == 1) vm_copy_wait<0>();
                        const int from = (int)((tap - first) * each);
                        vm_conv_transform<T, S>(a, in, shared + (buffer ^ 1) * S::INPUT, from,
                                                min(from + (int)each, (int)S::EACH));
                    }
                    if (step < 3) {
                        vm_conv_fragments<S>(xf[(step + 1) & 1], wf[(step + 1) & 1], shared, x_now, w_now, step + 1);
                    } else {
                        /* Wait until all warps have read this tap's filters, and the next tap's have arrived. */
                        if (taps == 1)
                            vm_copy_wait<0>();
                        else
                            vm_copy_wait<S::STAGES - 2>();
                        __syncthreads();
                        slot = slot + 1 == S::STAGES ? 0 : slot + 1;
                        if (++j == a.k) j = 0, i++;
                        if (i == a.k) i = 0, buffer ^= 1;
                        x_now = x_at(buffer, i, j);
                        vm_conv_fragments<S>(xf[0], wf[0], shared, x_now, w_lane + slot * S::FILTER, 0);
                    }
#pragma unroll
                    for (int m = 0; m < S::M; m++)
#pragma unroll
                        for (int n = 0; n < S::N; n++)
                            vm_mma_16816<T>(d[m][n], xf[step & 1][m], wf[step & 1][n / 2] + n % 2 * 2);
                }
                vm_conv_fetch_filter<T, S>(a, f, shared + S::RING + was * S::FILTER, items);
                if (tap + 1 == taps) next_input(shared + (buffer ^ 1) * S::INPUT);
                vm_copy_commit();
            }
        }
        if (S::OUTS == VM_BLOCK && a.format != VM_ROWS)
            vm_conv_finish<T, S, S::OUTS == VM_BLOCK, false>(a, d, at, sums);
        else if (at.row + S::ROWS <= h && at.column + VM_CONV_COLUMNS <= w && at.out + S::OUTS <= a.y_c)
            vm_conv_finish<T, S, false, true>(a, d, at, sums);
        else
            vm_conv_finish<T, S, false, false>(a, d, at, sums);
    }
}

#define VM_CONV(type, T, rows, outs, stride, warps, across, stages, resident)                                       \
    VM_KERNEL __launch_bounds__(warps * 32, resident) vm_conv_##type##_##rows##x##outs##_##stride(vm_conv_args a) { \
        VM_SHARED(char, shared);                                                                                    \
        vm_convolve<T, vm_conv_shape<rows, outs, stride, warps, across, stages>>(a, shared);                        \
    }
/* Of the tile that knows the user's pixels, the kernel for videos too. */
#define VM_CONV_VIDEO(type, T)                                                           \
    VM_KERNEL __launch_bounds__(256, 2) vm_conv_##type##_16x16_1_video(vm_conv_args a) { \
        VM_SHARED(char, shared);                                                         \
        vm_convolve<T, vm_conv_shape<16, VM_BLOCK, 1, 8, 1, 4, true>>(a, shared);        \
    }
VM_CONV_VIDEO(f16, vm_half)
VM_CONV_VIDEO(bf16, vm_bfloat16)

#define VM_CONV_BOTH(rows, outs, stride, warps, across, stages, resident, cost) \
    VM_CONV(f16, vm_half, rows, outs, stride, warps, across, stages, resident)  \
    VM_CONV(bf16, vm_bfloat16, rows, outs, stride, warps, across, stages, resident)
VM_CONV_TILES(VM_CONV_BOTH)
