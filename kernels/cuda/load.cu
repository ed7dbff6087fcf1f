/* load: a stripe of x as the convolution needs it: normalised, activated, converted, with zeros around.
 *
 * Memory bandwidth limits it. A thread stays with one vector of 8 channels, so it reads their scale and shift once, and
 * walks over the pixels. It loads a few pixels before it uses the first, so that many loads are in flight. Neighbouring
 * threads have neighbouring vectors, then neighbouring pixels: their loads are adjacent. */
#include "pixels.h"

template <typename T, bool ROWS>
VM_DEVICE void vm_load(const vm_load_args &a) {
    constexpr int AT_ONCE = ROWS ? 8 / sizeof(T) : 1;
    const uint32_t vectors = a.channels / 8, lanes = min(vectors, (uint32_t)VM_CUDA_LANES);
    const uint32_t block_pixels = VM_CUDA_THREADS / lanes, step = gridDim.x * block_pixels, pixels = a.rows * a.width;
    const uint32_t first =
        threadIdx.x / lanes < block_pixels ? blockIdx.x * block_pixels + threadIdx.x / lanes : pixels;
    const uint32_t step_rows = step / a.width, step_columns = step % a.width;

    for (uint32_t vector = threadIdx.x % lanes; vector < vectors; vector += lanes) {
        const uint32_t c = vector * 8;
        float scale[8], shift[8];
        if (a.scale && c < a.x_c) {
            vm_load8(scale, a.scale + c);
            vm_load8(shift, a.shift + c);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) scale[i] = a.in_scale, shift[i] = a.in_shift;
        }

        uint32_t row = a.top + first / a.width,
                 column = first % a.width; /* of x; above x it wraps to huge numbers, outside too */
        for (uint32_t pixel = first; pixel < pixels; pixel += AT_ONCE * step) {
            vm_eight<T> own[AT_ONCE];
            uint32_t from[AT_ONCE]; /* in the whole tensor */
            float factor[AT_ONCE];
            bool inside[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const uint32_t x = a.left + column;
                inside[j] = pixel + j * step < pixels && row < a.x_h && x < a.x_w && c < a.x_c;
                from[j] = row * a.x_row + x;
                factor[j] = ROWS && a.factor && inside[j] ? a.factor[from[j] - a.first_factor] : 1;
                const size_t at = ROWS ? (size_t)vm_ring_row(a.x_ring, row) * a.x_row + x : 0;
                if (ROWS && inside[j]) own[j] = vm_take8(static_cast<const T *>(a.x) + at * a.x_pitch + c);
                row += step_rows;
                column += step_columns;
                if (column >= a.width) column -= a.width, row++;
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (pixel + j * step >= pixels) break;
                float v[8] = {};
                if (inside[j]) {
                    if constexpr (ROWS) vm_open8(v, own[j]);
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        if (!ROWS && c + i < a.x_c) v[i] = vm_user_number(a, from[j], c + i);
                        v[i] = fmaf(v[i] * factor[j], scale[i], shift[i]);
                        v[i] = vm_activated<T>(a.act, v[i]) * a.multiply;
                    }
                    if (c + 8 > a.x_c) { /* memory beyond x's channels may hold anything */
#pragma unroll
                        for (int i = 0; i < 8; i++) v[i] = c + i < a.x_c ? v[i] : 0;
                    }
                }
                vm_store8(static_cast<T *>(a.out) + (size_t)(pixel + j * step) * a.channels + c, v);
            }
        }
    }
}

#define VM_LOAD(type, T)                                                             \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS, 3) vm_load_##type(vm_load_args a) { \
        if (a.format == VM_ROWS)                                                     \
            vm_load<T, true>(a);                                                     \
        else                                                                         \
            vm_load<T, false>(a);                                                    \
    }
VM_LOAD(f32, float)
VM_LOAD(f16, vm_half)
VM_LOAD(bf16, vm_bfloat16)
