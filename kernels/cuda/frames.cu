/* Passes over videos: x into the planes of plain 2D convolutions, their output into y, moves, and filters for a picture
 * that lies the other way (vm_planes in cuda.h).
 *
 * Memory bandwidth limits all of them. A thread takes a vector of 8 channels at a time; neighbouring threads have
 * neighbouring vectors, then neighbouring columns. */
#include "pixels.h"

/* Where vector i of a tensor [d][c][b][a][vectors] lies: the vector, and at: the places in a, b, c and d. */
struct vm_index {
    uint32_t vector, at[4];
};

VM_DEVICE vm_index vm_index_of(uint32_t i, uint32_t vectors, uint32_t a, uint32_t b, uint32_t c) {
    vm_index p;
    p.vector = i % vectors, i /= vectors;
    p.at[0] = i % a, i /= a;
    p.at[1] = i % b, i /= b;
    p.at[2] = i % c;
    p.at[3] = i / c;
    return p;
}

template <typename T>
VM_DEVICE void vm_gather(const vm_gather_args &a) {
    const vm_planes &p = a.to;
    const uint32_t vectors = a.channels / 8, slices = p.slices, all = p.planes * p.lines * p.width * slices * vectors;
    for (uint32_t i = blockIdx.x * VM_CUDA_THREADS + threadIdx.x; i < all; i += gridDim.x * VM_CUDA_THREADS) {
        const vm_index at = vm_index_of(i, vectors, slices, p.width, p.lines);
        const int32_t s = (int32_t)at.at[0], line = (int32_t)at.at[2], plane = (int32_t)at.at[3];
        int32_t row = p.row0 + p.row_plane * plane + p.row_line * line + p.row_slice * s;
        int32_t frame = p.frame0 + p.frame_plane * plane + p.frame_line * line + p.frame_slice * s;
        int32_t column = p.left + (int32_t)at.at[1];
        const int32_t rows = (int32_t)a.x_h, columns = (int32_t)a.x_w, frames = (int32_t)a.x_f;
        if (a.held) frame = max(min(frame, frames - 1), 0);
        /* those further out belong to no output, and their rows may not be there */
        if (a.mirrored) row = vm_mirrored(row, rows), column = vm_mirrored(column, columns);
        const uint32_t c = at.vector * 8;
        float v[8] = {};
        if (row >= 0 && row < rows && column >= 0 && column < columns && frame >= (int32_t)a.frame_least &&
            frame < frames && c < a.x_c) {
            if (a.format == VM_ROWS) {
                const size_t line_of = (size_t)vm_ring_row(a.x_ring, (uint32_t)row) * frames + frame;
                vm_load8(v, static_cast<const T *>(a.x) + (line_of * columns + column) * a.x_pitch + c);
            } else {
                const size_t pixel = row * a.row_step + column * a.column_step + frame * a.frame_step;
                for (uint32_t j = 0; j < 8 && c + j < a.x_c; j++) v[j] = vm_user_number(a, pixel, c + j);
            }
            const size_t own = ((size_t)row * frames + frame) * columns + column - a.first_factor;
            const float factor = a.factor ? a.factor[own] : 1;
#pragma unroll
            for (uint32_t j = 0; j < 8; j++) {
                const float scale = a.scale ? a.scale[c + j] : a.in_scale,
                            shift = a.shift ? a.shift[c + j] : a.in_shift;
                v[j] = vm_activated<T>(a.act, fmaf(v[j] * factor, scale, shift)) * a.multiply;
                if (c + j >= a.x_c) v[j] = 0; /* memory beyond x's channels may hold anything */
            }
        }
        vm_store8(static_cast<T *>(a.out) + (size_t)i * 8, v);
    }
}

template <typename T>
VM_DEVICE void vm_scatter(const vm_scatter_args &a) {
    const bool own = a.format == VM_ROWS;
    const uint32_t vectors = (own ? VM_ROUND_UP(a.y_c, VM_BLOCK) : VM_ROUND_UP(a.y_c, 8)) / 8;
    const uint32_t frames = a.frame_end - a.frame_first, all = a.rows * frames * a.y_w * vectors;
    bool finite = true;
    for (uint32_t i = blockIdx.x * VM_CUDA_THREADS + threadIdx.x; i < all; i += gridDim.x * VM_CUDA_THREADS) {
        const vm_index at = vm_index_of(i, vectors, a.y_w, frames, a.rows);
        const uint32_t c = at.vector * 8, column = at.at[0], frame = at.at[1] + a.frame_first, r = at.at[2];
        const uint32_t row = a.row0 + r, nth = at.at[1];
        uint32_t plane = r, line = nth, q = column, group = 0; /* of raw */
        if (a.halves) line = nth / 2, group = nth % 2;
        if (a.by_frame) plane = frame, line = r;
        if (a.up) {
            line = row / 2 - a.row0 / 2 + row % 2, q = column / 2 + column % 2;
            group = row % 2 * 2 + column % 2;
        }
        const size_t pixel_of = ((size_t)plane * a.lines + line) * a.width + q;
        float v[8], more[8] = {};
        vm_load8(v, static_cast<const T *>(a.raw) + (pixel_of * a.groups + group) * a.channels + c);
        const size_t in_row = (size_t)frame * a.y_w + column, row_pixels = (size_t)a.y_f * a.y_w;
        if (a.add)
            vm_load8(more, static_cast<const T *>(a.add) +
                               (vm_ring_row(a.add_ring, row) * row_pixels + in_row) * a.add_pitch + c);
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
            const uint32_t lane = (a.halves ? group * a.channels : 0) + c + j;
            v[j] += (a.bias ? a.bias[lane] * a.bias_scale : 0) + more[j];
            if (a.relu) v[j] = v[j] < 0 ? 0 : v[j];
        }
        if (own) {
            T *const to = static_cast<T *>(a.y) + (vm_ring_row(a.y_ring, row) * row_pixels + in_row) * a.y_pitch + c;
            vm_store8(to, v);
            vm_load8(v, to); /* as rounded */
        } else {
            const size_t pixel = row * a.row_step + column * a.column_step + frame * a.frame_step;
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                v[j] = c + j < a.y_c ? vm_store_number(a, a.y_plane, pixel, c + j, fmaf(v[j], a.out_scale, a.out_shift))
                                     : 0;
        }
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) finite = finite && isfinite(v[j]);
    }
    if (!finite) vm_atomic_or(a.flags, 1);
}

/* Number (row, frame, column, c) of a move's output; row counts from one that is a multiple of the square's side. */
template <typename T>
VM_DEVICE float vm_moved_number(const vm_frames_move_args &a, uint32_t row, uint32_t frame, uint32_t column,
                                uint32_t c) {
    const T *const x = static_cast<const T *>(a.x);
    const vm_move m = a.move;
    const uint32_t side = m.side, parts = m.frames * side * side;
    if (a.up || (!a.down && a.y_c > a.x_c)) {
        /* frames 2i - 1 and 2i are made of frame i */
        const uint32_t from = a.doubles ? (frame + 1) / 2 : frame, part = a.doubles && frame % 2 ? 0 : m.frames - 1;
        const uint32_t cycle = m.in_turn ? a.x_c / parts : a.y_c;
        const size_t at = a.up ? vm_move_at(m, a.y_c, c % cycle, part, row % side, column % side) : c;
        const size_t channel = at / a.share < a.x_c ? at / a.share : a.x_c - 1;
        const size_t pixel =
            ((size_t)(a.up ? row / side : row) * a.x_f + from) * a.x_w + (a.up ? column / side : column);
        return vm_to_float(x[pixel * a.x_pitch + channel]);
    }
    float sum = 0;
    for (uint32_t i = 0; i < a.share; i++) {
        size_t from = (size_t)c * a.share + i, r = 0, s = 0, part = m.frames - 1;
        if (a.down) part = vm_move_from(m, a.x_c, from, &from, &r, &s);
        int32_t at = a.halves ? 2 * (int32_t)frame - 1 + (int32_t)part : (int32_t)frame;
        if (!a.halves && part + 1 != m.frames) continue; /* zero */
        if (at < 0 && !a.held) continue;
        at = max(at, 0);
        const size_t pixel =
            ((a.down ? row * side + r : row) * a.x_f + at) * a.x_w + (a.down ? column * side + s : column);
        sum += vm_to_float(x[pixel * a.x_pitch + from]) * (1 / (float)a.share);
    }
    return sum;
}

template <typename T>
VM_DEVICE void vm_frames_move(const vm_frames_move_args &a) {
    const uint32_t vectors = a.channels / 8, all = a.rows * a.y_f * a.y_w * vectors;
    for (uint32_t i = blockIdx.x * VM_CUDA_THREADS + threadIdx.x; i < all; i += gridDim.x * VM_CUDA_THREADS) {
        const vm_index at = vm_index_of(i, vectors, a.y_w, a.y_f, a.rows);
        float v[8];
        for (uint32_t j = 0; j < 8; j++) {
            const uint32_t c = at.vector * 8 + j;
            v[j] = c < a.y_c ? vm_moved_number<T>(a, at.at[2], at.at[1], at.at[0], c) : 0;
        }
        vm_store8(static_cast<T *>(a.out) + (size_t)i * 8, v);
    }
}

/* Returns: where a vector of channels of tap (row, column) is. */
VM_DEVICE size_t vm_turned_at(const vm_turn_args &a, uint32_t filter, uint32_t row, uint32_t column, uint32_t vector) {
    if (a.outs)
        return vm_conv_filter_at(a.outs, 3 * a.channels, 9, 0, filter / 3, filter % 3 * 3 + row,
                                 column * a.channels + vector * 8);
    return (((size_t)filter * a.taps + row) * a.taps + column) * a.channels + vector * 8;
}

template <typename T>
VM_DEVICE void vm_turn(const vm_turn_args &a) {
    const uint32_t vectors = a.channels / 8, all = a.phases * a.filters * a.taps * a.taps * vectors;
    for (uint32_t i = blockIdx.x * VM_CUDA_THREADS + threadIdx.x; i < all; i += gridDim.x * VM_CUDA_THREADS) {
        const vm_index at = vm_index_of(i, vectors, a.taps, a.taps, a.filters);
        const uint32_t phase = a.phases == 4 ? at.at[3] % 2 * 2 + at.at[3] / 2 : at.at[3];
        const uint32_t b = at.at[0], row = at.at[1], filter = at.at[2];
        float v[8];
        vm_load8(v, static_cast<const T *>(a.from) + vm_turned_at(a, phase * a.filters + filter, b, row, at.vector));
        vm_store8(static_cast<T *>(a.to) + vm_turned_at(a, at.at[3] * a.filters + filter, row, b, at.vector), v);
    }
}

#define VM_FRAMES(type, T)                                                                                  \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_gather_##type(vm_gather_args a) { vm_gather<T>(a); }    \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_scatter_##type(vm_scatter_args a) { vm_scatter<T>(a); } \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_frames_move_##type(vm_frames_move_args a) {             \
        vm_frames_move<T>(a);                                                                               \
    }                                                                                                       \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_turn_##type(vm_turn_args a) { vm_turn<T>(a); }
VM_FRAMES(f32, float)
VM_FRAMES(f16, vm_half)
VM_FRAMES(bf16, vm_bfloat16)
