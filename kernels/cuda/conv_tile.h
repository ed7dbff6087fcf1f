/* The parts of conv.cu: the layout of shared memory, and the copies into it. */
#ifndef VM_CONV_TILE_H
#define VM_CONV_TILE_H

#include "pixels.h"

typedef uint64_t __attribute__((may_alias)) vm_long; /* four numbers */

/* The shape of a kernel; cuda.h lists them. A warp has M tile rows of 16 pixels by N times 8 channels. */
template <int ROWS_, int OUTS_, int STRIDE_, int WARPS, int ACROSS_, int STAGES_, bool VIDEO_ = false>
struct vm_conv_shape {
    static constexpr int ROWS = ROWS_, OUTS = OUTS_, STRIDE = STRIDE_, STAGES = STAGES_;
    static constexpr bool VIDEO = VIDEO_;
    static constexpr int THREADS = WARPS * 32, ACROSS = ACROSS_, DOWN = WARPS / ACROSS;
    VM_DEVICE void meet() { __syncthreads(); } /* the threads of a tile wait for each other */
    static constexpr int M = ROWS / DOWN, N = OUTS / ACROSS / 8;
    static_assert(M * DOWN == ROWS && N * 8 * ACROSS == OUTS && N % 2 == 0, "warps share the tile evenly");

    static constexpr int LINE = VM_CONV_CHUNK * 2, VECTORS = LINE / 16; /* bytes of a pixel or filter in a chunk */
    static constexpr int WIDTH = (VM_CONV_COLUMNS - 1) * STRIDE + 3, PIXELS = ((ROWS - 1) * STRIDE + 3) * WIDTH;
    static constexpr int EACH = (PIXELS * VECTORS + THREADS - 1) / THREADS; /* vectors per thread */
    static constexpr int STEP = THREADS / VECTORS;                          /* pixels between them */

    /* Shared memory: two chunks of x, the ring of filters, sums. */
    static constexpr int INPUT = PIXELS * LINE, FILTER = OUTS * LINE, RING = 2 * INPUT, SUMS = RING + STAGES * FILTER;
    static_assert(SUMS + DOWN * (2 * OUTS + 4) * 4 == VM_CONV_SHARED(ROWS, OUTS, STRIDE, DOWN, STAGES), "as cuda.h");
};

/* A block's unit of work: a tile of pixels (with up, of x) and some channels. plane: the row of a video's y; `row` is a
 * frame then. */
struct vm_conv_item {
    uint32_t part, phase, row, column, out, plane;
};

/* item: among those to be computed. */
template <typename S>
VM_DEVICE vm_conv_item vm_conv_item_of(const vm_conv_args &a, uint32_t item) {
    item += a.first_item;
    const uint32_t outs = (a.y_c + S::OUTS - 1) / S::OUTS;
    const uint32_t columns = ((a.up ? a.x_w : a.y_w) + VM_CONV_COLUMNS - 1) / VM_CONV_COLUMNS;
    const uint32_t part = item / outs, tile = a.up ? part / 4 : part, row = tile / columns;
    const uint32_t rows = S::VIDEO ? (a.y_h + S::ROWS - 1) / S::ROWS : 0;
    return {part,
            a.up ? part % 4 : 0,
            (S::VIDEO ? row % rows : row) * S::ROWS,
            tile % columns * VM_CONV_COLUMNS,
            item % outs * S::OUTS,
            S::VIDEO ? row / rows : 0};
}

/* ---- x ---- */

/* What a vector of the filters' channels meets: x's channel c, and where the row of a video begins, in pixels of x
 * and of a.factor. some: there is such a channel and row. */
struct vm_conv_source {
    uint32_t c;
    bool some;
    size_t x, factor;
};

template <typename S>
VM_DEVICE vm_conv_source vm_conv_source_of(const vm_conv_args &a, uint32_t plane, uint32_t channel) {
    if (!S::VIDEO) return {channel, channel < a.in_c, 0, 0};
    const uint32_t slice = channel / a.x_c;
    int32_t row = (int32_t)(plane + slice) - 1;
    if (a.mirrored) row = vm_mirrored(row, (int32_t)a.x_rows);
    const bool some = channel < a.in_c && (uint32_t)row < a.x_rows;
    const size_t pixels = (size_t)a.x_h * a.x_w;
    return {channel - slice * a.x_c, some, some ? vm_ring_row(a.x_ring, row) * pixels : 0, some ? row * pixels : 0};
}

/* Returns: whether x has the pixel. Of a video's, y and x become those of the one that stands for it. */
template <typename S>
VM_DEVICE bool vm_conv_within(const vm_conv_args &a, uint32_t &y, uint32_t &x) {
    if constexpr (S::VIDEO) {
        if (a.held) y = (uint32_t)max(min((int32_t)y, (int32_t)a.x_h - 1), 0);
        if (a.mirrored) x = (uint32_t)vm_mirrored((int32_t)x, (int32_t)a.x_w);
    }
    return y < a.x_h && x < a.x_w;
}

/* Returns: the number of the pixel in x. */
template <typename S>
VM_DEVICE size_t vm_conv_x_pixel(const vm_conv_args &a, const vm_conv_source &from, uint32_t y, uint32_t x) {
    return S::VIDEO ? from.x + y * a.x_w + x : (size_t)vm_ring_row(a.x_ring, y) * a.x_w + x;
}
template <typename S>
VM_DEVICE float vm_conv_factor(const vm_conv_args &a, const vm_conv_source &from, uint32_t y, uint32_t x) {
    return a.factor[from.factor + (size_t)y * a.x_w + x - a.first_factor];
}

/* The chunk whose copy was begun last; `item` is beyond the last one if there is none. A thread copies, then
 * transforms, one vector of the chunk's channels at every STEPth pixel. */
struct vm_conv_input {
    uint32_t item, chunk, plane;
    int32_t top, left;
};

template <typename S>
VM_DEVICE vm_conv_source vm_conv_source_of(const vm_conv_args &a, const vm_conv_input &in) {
    return vm_conv_source_of<S>(a, in.plane, in.chunk * VM_CONV_CHUNK + threadIdx.x % S::VECTORS * 8);
}

template <typename S>
VM_DEVICE void vm_conv_input_at(const vm_conv_args &a, vm_conv_input &in, uint32_t item, uint32_t items) {
    in.item = item;
    in.chunk = 0;
    if (item >= items) return;
    const vm_conv_item at = vm_conv_item_of<S>(a, item);
    in.plane = at.plane;
    in.top = (int32_t)(at.row * S::STRIDE + at.phase / 2) - (int32_t)a.pad_y;
    in.left = (int32_t)(at.column * S::STRIDE + at.phase % 2) - (int32_t)a.pad_x;
}

/* The thread's i-th vector. */
struct vm_conv_vector {
    uint32_t at;    /* in the chunk's memory, bytes */
    uint32_t y, x;  /* in x */
    bool any, some; /* within reach of the taps, and within x */
};

/* Where a vector lies. A pixel's vectors are permuted by its column, so the same vector of eight neighbours, which one
 * ldmatrix reads, lies in eight different groups of banks. Rows are at a constant distance. */
template <typename S>
VM_DEVICE uint32_t vm_conv_place(uint32_t row, uint32_t column, uint32_t vector) {
    return (row * S::WIDTH + column) * S::LINE + ((vector ^ (column / S::STRIDE & 7)) << 4);
}

template <typename S>
VM_DEVICE vm_conv_vector vm_conv_vector_of(const vm_conv_args &a, const vm_conv_input &in, const vm_conv_source &from,
                                           int i) {
    const uint32_t pixel = i * S::STEP + threadIdx.x / S::VECTORS, row = pixel / S::WIDTH, column = pixel % S::WIDTH;
    const uint32_t v = threadIdx.x % S::VECTORS;
    uint32_t y = in.top + row, x = in.left + column;
    const bool any = row < (S::ROWS - 1) * S::STRIDE + a.k && column < (VM_CONV_COLUMNS - 1) * S::STRIDE + a.k;
    const bool some = any && vm_conv_within<S>(a, y, x) && from.some;
    return {vm_conv_place<S>(row, column, v), y, x, any, some};
}

template <typename T, typename S>
VM_DEVICE void vm_conv_fetch_input(const vm_conv_args &a, const vm_conv_input &in, char *to) {
    const T *const x = static_cast<const T *>(a.x);
    const vm_conv_source from = vm_conv_source_of<S>(a, in);
#pragma unroll 4
    for (int i = 0; i < S::EACH; i++) {
        const vm_conv_vector v = vm_conv_vector_of<S>(a, in, from, i);
        const size_t pixel = vm_conv_x_pixel<S>(a, from, v.y, v.x);
        if (v.any) vm_copy_async(to + v.at, v.some ? x + pixel * a.x_pitch + from.c : x, v.some);
    }
}

/* Normalises and activates in place the thread's own vectors [from, to), which must have arrived. */
template <typename T, typename S>
VM_DEVICE void vm_conv_transform(const vm_conv_args &a, const vm_conv_input &in, char *chunk, int from, int to) {
    const vm_conv_source source = vm_conv_source_of<S>(a, in);
    if (!source.some) return;
    float scale[8], shift[8];
    if (a.scale) {
        vm_load8(scale, a.scale + source.c);
        vm_load8(shift, a.shift + source.c);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) scale[j] = 1, shift[j] = 0;
    }
#pragma unroll 1
    for (int i = from; i < to; i++) {
        const vm_conv_vector at = vm_conv_vector_of<S>(a, in, source, i);
        if (!at.some) continue; /* zeros stay zeros */
        T *const p = reinterpret_cast<T *>(chunk + at.at);
        const float factor = a.factor ? vm_conv_factor<S>(a, source, at.y, at.x) : 1;
        float v[8];
        vm_load8(v, p);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = fmaf(v[j] * factor, scale[j], shift[j]);
        if (a.act == VM_ACT_SILU) { /* tested once, not per number */
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = vm_silu<T>(v[j]) * a.multiply;
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = vm_activated<T>(a.act, v[j]) * a.multiply;
        }
        vm_store8(p, v);
    }
}

/* ---- filters ---- */

/* vm_conv_filter_column's inverse, within 16: the filter of a matrix's column. */
VM_DEVICE uint32_t vm_conv_filter_of(uint32_t column, bool second) { return column / 2 * 4 + second * 2 + column % 2; }
/* A lane's i-th channel, 16 for every four. */
VM_DEVICE uint32_t vm_conv_channel(uint32_t i) { return i / 4 * 16 + threadIdx.x % 4 * 4 + i % 4; }

/* Where a vector of a filter lies. The vectors are permuted so that the same vector of eight filters, which one
 * ldmatrix reads, lies in eight different groups of banks: this is the `column` of vm_conv_filter_of. */
template <typename S>
VM_DEVICE uint32_t vm_conv_filter_place(uint32_t filter, uint32_t vector) {
    return filter * S::LINE + ((vector ^ (filter / 2 & 6) ^ (filter & 1)) << 4);
}

/* The next slot of the ring: OUTS filters at one tap, of one chunk's channels. */
struct vm_conv_filter {
    uint32_t item, chunk, tap, out, phase;
};

template <typename S>
VM_DEVICE void vm_conv_filter_at(const vm_conv_args &a, vm_conv_filter &f, uint32_t item, uint32_t items) {
    f.item = item;
    f.chunk = f.tap = 0;
    if (item >= items) return;
    const vm_conv_item at = vm_conv_item_of<S>(a, item);
    f.out = at.out;
    f.phase = at.phase;
}

template <typename T, typename S>
VM_DEVICE void vm_conv_fetch_filter(const vm_conv_args &a, vm_conv_filter &f, char *to, uint32_t items) {
    if (f.item >= items) return;
    const uint32_t taps = a.k * a.k, outs = VM_ROUND_UP(a.y_c, VM_BLOCK);
    const uint32_t v = threadIdx.x % S::VECTORS, first = threadIdx.x / S::VECTORS, c = f.chunk * VM_CONV_CHUNK + v * 8;
    const T *const w = static_cast<const T *>(a.w);
    /* vm_conv_choose ensures that the filters' numbers fit in 32 bits. In blocks, only rows and planes move within the
     * loop; a tile with more outs than a block continues in the next tile's blocks. */
    const uint32_t chunks = (a.in_c + VM_CONV_CHUNK - 1) / VM_CONV_CHUNK, wide = vm_conv_filters(outs);
    const uint32_t step = taps * a.in_c, next = chunks * taps * wide * VM_CONV_CHUNK;
    const uint32_t from = a.blocked ? (uint32_t)vm_conv_filter_at(outs, a.in_c, taps, f.phase, f.out, f.tap, c) -
                                          vm_conv_filter_column(f.out % wide) * 8
                                    : (f.phase * outs + f.out + first) * step + f.tap * a.in_c + c;
    const uint32_t in_block = f.out % wide + first;
#pragma unroll
    for (int i = 0; i < S::OUTS; i += S::STEP) {
        const uint32_t row = i + first, of = in_block + i;
        if (S::OUTS % S::STEP && row >= S::OUTS) break;
        const bool some = f.out + row < outs && c < a.in_c;
        const uint32_t tile = wide == 96 ? of / 96 : of / VM_CONV_FILTERS;
        const uint32_t further = a.blocked ? tile * next + vm_conv_filter_column(of - tile * wide) * 8 : i * step;
        vm_copy_async(to + vm_conv_filter_place<S>(row, v), w + (some ? from + further : 0), some);
    }
    if (++f.tap < taps) return;
    f.tap = 0;
    if (++f.chunk * VM_CONV_CHUNK < a.in_c) return;
    vm_conv_filter_at<S>(a, f, f.item + gridDim.x, items);
}

/* ---- y ---- */

/* Returns: the number of the item's pixel in y, or in the residual. */
template <typename S>
VM_DEVICE size_t vm_conv_y_pixel(const vm_conv_args &a, vm_ring_rows ring, const vm_conv_item &at, uint32_t row,
                                 uint32_t column) {
    const size_t line = S::VIDEO ? (size_t)vm_ring_row(ring, at.plane) * a.y_h + row : vm_ring_row(ring, row);
    return line * a.y_w + column;
}

/* Prefetches the item's residual into the L2 cache. */
template <typename T, typename S>
VM_DEVICE void vm_conv_prefetch(const vm_conv_args &a, const vm_conv_item &at) {
    enum { LINE = 64 }; /* numbers in 128 bytes */
    const uint32_t step = a.up ? 2 : 1;
#pragma unroll 1
    for (uint32_t pixel = threadIdx.x % S::THREADS; pixel < S::ROWS * VM_CONV_COLUMNS; pixel += S::THREADS) {
        const uint32_t row = (at.row + pixel / VM_CONV_COLUMNS) * step + at.phase / 2;
        const uint32_t column = (at.column + pixel % VM_CONV_COLUMNS) * step + at.phase % 2;
        if (row >= a.y_h || column >= a.y_w) continue;
        const size_t from_pixel = vm_conv_y_pixel<S>(a, a.add_ring, at, row, column);
        const T *const from = static_cast<const T *>(a.add) + from_pixel * a.add_pitch + at.out;
#pragma unroll 1
        for (uint32_t c = 0; c < S::OUTS && at.out + c < a.y_c; c += LINE) vm_prefetch(from + c);
    }
}

/* Merges the sums of lanes with the same channels (they differ in lane / 4). Of COUNT channels a lane keeps one half,
 * merged with its partner's, and gives the partner the other; then a quarter, then an eighth. */
template <int COUNT, int MASK>
VM_DEVICE void vm_conv_share(float &n, float *mean, float *m2) {
    constexpr int KEEP = COUNT > 1 ? COUNT / 2 : 1;
    const bool high = threadIdx.x & MASK;
    const float other = vm_shuffle_xor(n, MASK), share = n + other > 0 ? other / (n + other) : 0;
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
        constexpr int UP = COUNT > 1 ? KEEP : 0;
        const float b_mean = vm_shuffle_xor(high ? mean[i] : mean[i + UP], MASK);
        const float b_m2 = vm_shuffle_xor(high ? m2[i] : m2[i + UP], MASK);
        if (high) mean[i] = mean[i + UP], m2[i] = m2[i + UP];
        vm_merge_sums(n, share, mean[i], m2[i], b_mean, b_m2);
    }
    n += other;
    if constexpr (MASK > 4) vm_conv_share<KEEP, MASK / 2>(n, mean, m2);
}

/* Adds the residual, rounds and writes y. d then holds the numbers as stored, and zeros for pixels and channels outside
 * y. WHOLE: the tile has none of those. */
template <typename T, typename S, bool PIXELS, bool WHOLE>
VM_DEVICE void vm_conv_store(const vm_conv_args &a, float (&d)[S::M][S::N][4], const vm_conv_item &at, uint32_t row0,
                             uint32_t out) {
    const uint32_t lane = threadIdx.x % 32, step = a.up ? 2 : 1, outs = VM_ROUND_UP(a.y_c, VM_BLOCK);
    const uint32_t mine = vm_conv_channel(0);
    const T *const add = static_cast<const T *>(a.add);
    T *const y = static_cast<T *>(a.y);

    const auto pixel_of = [&](int r, vm_ring_rows ring, bool &some, bool of_user) {
        const uint32_t row = (row0 + r / 2) * step + at.phase / 2;
        const uint32_t column = (at.column + lane / 4 + r % 2 * 8) * step + at.phase % 2;
        some = WHOLE || (row < a.y_h && column < a.y_w);
        return of_user ? (size_t)(at.plane * a.row_step + row * a.frame_step + column * a.column_step)
                       : vm_conv_y_pixel<S>(a, ring, at, row, column);
    };
    uint32_t more[2][S::N / 2][2] = {};
    const auto fetch = [&](int r) {
        bool some;
        const size_t from = pixel_of(r, a.add_ring, some, false) * a.add_pitch + out + mine;
#pragma unroll
        for (int n = 0; n < S::N / 2; n++)
            if (WHOLE || (some && out + n * 16 < outs)) {
                const vm_long u = *reinterpret_cast<const vm_long *>(add + from + n * 16);
                more[r & 1][n][0] = (uint32_t)u;
                more[r & 1][n][1] = (uint32_t)(u >> 32);
            }
    };

    float nonfinite = 0; /* becomes and stays NaN once a number is not finite: v * 0 is 0 for all others */
    uint32_t seen = 0;   /* the same for stored pairs */
    if (add) fetch(0);
#pragma unroll
    for (int r = 0; r < 2 * S::M; r++) {
        bool some;
        const size_t pixel = pixel_of(r, a.y_ring, some, PIXELS && S::VIDEO);
        if (add && r + 1 < 2 * S::M) fetch(r + 1);
#pragma unroll
        for (int n = 0; n < S::N; n += 2) {
            const bool here = WHOLE || (some && out + n * 8 < outs);
            float *const v[2] = {&d[r / 2][n][r % 2 * 2], &d[r / 2][n + 1][r % 2 * 2]};
            if (add) {
                float more_v[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    vm_unpack<T>(more_v, more[r & 1][n / 2][e]);
                    v[e][0] += more_v[0];
                    v[e][1] += more_v[1];
                }
            }
            if (a.relu) {
#pragma unroll
                for (int e = 0; e < 4; e++) v[e / 2][e % 2] = v[e / 2][e % 2] < 0 ? 0 : v[e / 2][e % 2];
            }
            if constexpr (PIXELS) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const uint32_t c = out + vm_conv_channel(2 * n + e);
                    const float scaled = fmaf(v[e / 2][e % 2], a.out_scale, a.out_shift);
                    const size_t plane = S::VIDEO ? a.y_plane : (size_t)a.y_h * a.y_w;
                    v[e / 2][e % 2] = some && c < a.y_c ? vm_store_number(a, plane, pixel, c, scaled) : 0;
                    nonfinite = fmaf(v[e / 2][e % 2], 0.0f, nonfinite);
                }
            } else {
                const uint32_t pairs[2] = {vm_pack<T>(v[0][0], v[0][1]), vm_pack<T>(v[1][0], v[1][1])};
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const uint32_t stored = here ? pairs[e] : 0;
                    vm_unpack<T>(v[e], stored);
                    seen = vm_spoil<T>(seen, stored);
                }
                if (here)
                    *reinterpret_cast<vm_long *>(y + pixel * a.y_pitch + out + n * 8 + mine) =
                        pairs[0] | (vm_long)pairs[1] << 32;
            }
        }
    }
    float last[2];
    vm_unpack<T>(last, seen);
    if (nonfinite != 0 || last[0] != 0 || last[1] != 0) vm_atomic_or(a.flags, 1);
}

/* The sums of the item's pixels and channels, its part for the next GroupNorm: first within a lane, then between lanes,
 * then between warps. */
template <typename S, bool WHOLE>
VM_DEVICE void vm_conv_measure(const vm_conv_args &a, const float (&d)[S::M][S::N][4], const vm_conv_item &at,
                               uint32_t row0, float *sums) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % S::THREADS / 32;
    const uint32_t across = warp % S::ACROSS, down = warp / S::ACROSS;
    const uint32_t h = a.up ? a.x_h : a.y_h, w = a.up ? a.x_w : a.y_w, outs = VM_ROUND_UP(a.y_c, VM_BLOCK);
    float valid[2 * S::M], pixels = 0, n = 0;
#pragma unroll
    for (int r = 0; r < 2 * S::M; r++) {
        valid[r] = WHOLE || (row0 + r / 2 < h && at.column + lane / 4 + r % 2 * 8 < w) ? 1 : 0;
        pixels += valid[r];
    }
    const float over = pixels > 0 ? 1 / pixels : 0;
    /* sums: [DOWN] counts, then means and deviations of each. At most 16 of a lane's channels are summed at a time: all
     * of them would need more registers than there are. */
    constexpr int PIECES = S::N > 8 ? S::N / (S::N % 8 ? 4 : 8) : 1, COUNT = 2 * S::N / PIECES,
                  KEPT = COUNT >= 8 ? COUNT / 8 : 1;
    const uint32_t first = lane / 4 * COUNT / 8; /* of the lane's COUNT channels, the first that it keeps */
    float *const mine = sums + S::DOWN * 4 + down * 2 * S::OUTS;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        float mean[COUNT], m2[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int of = piece * COUNT + i;
            mean[i] = m2[i] = 0;
#pragma unroll
            for (int r = 0; r < 2 * S::M; r++) mean[i] += d[r / 2][of / 2][r % 2 * 2 + of % 2];
            mean[i] *= over;
#pragma unroll
            for (int r = 0; r < 2 * S::M; r++) {
                const float deviation = valid[r] > 0 ? d[r / 2][of / 2][r % 2 * 2 + of % 2] - mean[i] : 0;
                m2[i] = fmaf(deviation, deviation, m2[i]);
            }
        }
        n = pixels;
        vm_conv_share<COUNT, 16>(n, mean, m2);
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            const uint32_t c = across * S::N * 8 + vm_conv_channel(piece * COUNT + first + i);
            if (COUNT < 8 && lane & 4)
                continue; /* two lanes have the same sums, rounded in another order: one writes */
            mine[c] = mean[i];
            mine[S::OUTS + c] = m2[i];
        }
    }
    if (lane == 0 && across == 0) sums[down] = n;
    S::meet();

    static_assert(S::OUTS <= S::THREADS, "a channel's sums are merged by a thread of its own");
    const uint32_t c = threadIdx.x % S::THREADS;
    if (c >= S::OUTS || at.out + c >= outs) return;
    float count = sums[0], all = sums[S::DOWN * 4 + c], all2 = sums[S::DOWN * 4 + S::OUTS + c];
#pragma unroll
    for (int i = 1; i < S::DOWN; i++) {
        const float *const b = sums + S::DOWN * 4 + i * 2 * S::OUTS + c;
        const float share = sums[i] > 0 ? sums[i] / (count + sums[i]) : 0;
        vm_merge_sums(count, share, all, all2, b[0], b[S::OUTS]);
        count += sums[i];
    }
    float *const part = a.stats + at.part * vm_stats_floats(a.y_c);
    if (at.out + c == 0) part[0] = count;
    part[VM_BLOCK + at.out + c] = all;
    part[VM_BLOCK + outs + at.out + c] = all2;
}

template <typename T, typename S, bool PIXELS, bool WHOLE>
VM_DEVICE void vm_conv_finish(const vm_conv_args &a, float (&d)[S::M][S::N][4], const vm_conv_item &at, float *sums) {
    const uint32_t warp = threadIdx.x % S::THREADS / 32, row0 = at.row + warp / S::ACROSS * S::M;
    vm_conv_store<T, S, PIXELS, WHOLE>(a, d, at, row0, at.out + warp % S::ACROSS * S::N * 8);
    if (!PIXELS && a.stats) vm_conv_measure<S, WHOLE>(a, d, at, row0, sums);
}

#endif
