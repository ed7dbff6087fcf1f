/* move: numbers of a loaded stripe to other channels and pixels of the raw stripe, single or as means (vm_move).
 *
 * A thread makes 8 neighbouring channels of a pixel at a time, and neighbouring threads neighbouring channels, then
 * pixels. Means add up in float, in the order of their numbers. */
#include "device.h"

template <typename T>
VM_DEVICE float vm_moved(const vm_move_args &a, uint32_t row, uint32_t column, size_t c) {
    const T *const x = static_cast<const T *>(a.x);
    const uint32_t side = a.move.side;
    if (a.up || (!a.down && a.y_c > a.x_c)) {
        const size_t at = a.up ? vm_move_at(a.move, a.y_c, c, a.move.frames - 1, row % side, column % side) : c;
        const size_t pixel = a.up ? (size_t)(row / side) * a.x_w + column / side : (size_t)row * a.x_w + column;
        return vm_to_float(x[pixel * a.x_pitch + at / a.share]);
    }
    float sum = 0;
    for (size_t i = 0; i < a.share; i++) {
        size_t from = c * a.share + i, r = 0, s = 0;
        if (a.down && vm_move_from(a.move, a.x_c, from, &from, &r, &s) + 1 != a.move.frames) continue;
        const size_t pixel = a.down ? (row * side + r) * a.x_w + column * side + s : (size_t)row * a.x_w + column;
        sum += vm_to_float(x[pixel * a.x_pitch + from]) * (1 / (float)a.share);
    }
    return sum;
}

template <typename T>
VM_DEVICE void vm_move_rows(const vm_move_args &a) {
    const uint32_t vectors = a.channels / 8, all = a.rows * a.y_w * vectors;
    for (uint32_t i = blockIdx.x * VM_CUDA_THREADS + threadIdx.x; i < all; i += gridDim.x * VM_CUDA_THREADS) {
        const uint32_t pixel = i / vectors, c = i % vectors * 8;
        float v[8];
        for (uint32_t j = 0; j < 8; j++) v[j] = c + j < a.y_c ? vm_moved<T>(a, pixel / a.y_w, pixel % a.y_w, c + j) : 0;
        vm_store8(static_cast<T *>(a.out) + (size_t)pixel * a.channels + c, v);
    }
}

#define VM_MOVE(type, T) \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_move_##type(vm_move_args a) { vm_move_rows<T>(a); }
VM_MOVE(f32, float)
VM_MOVE(f16, vm_half)
VM_MOVE(bf16, vm_bfloat16)
