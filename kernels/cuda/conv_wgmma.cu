/* conv_wgmma: computes the same as conv.cu, for stride 1, on Hopper GPUs. Their tensor cores read both factors from
 * shared memory.
 *
 * A block has four warpgroups. The first two multiply: each has 8 of the tile's 16 rows, as two products of 64 pixels
 * (8 rows by 8 columns) by 128 or 96 channels, and ends its rows as conv.cu does. They share x and filters. The first
 * is some taps ahead of the second (lead), so one multiplies while the other adds, rounds, stores and measures. One
 * alone keeps the tensor cores busy. In the other two warpgroups, one thread has filters copied into a
 * ring, one tap of a chunk after another, and seven warps normalise and activate chunks of 64 channels of x with their
 * halo.
 *
 *   full_x, empty_x: two chunks of x           full_w, empty_w: the slots of the ring
 *   ahead: the first warpgroup has its lead in the chunk
 *   x        [8 planes][18][18][8 channels]    a tap's pixels are 16 bytes apart in a row,
 *   filter   [8 planes][outs][8 channels]      and rows 288: no other copy is made of them
 *
 * A video's 3x3x3 convolution has pictures of frames and columns, and the channels of three rows. With 96 channels they
 * are four and a half chunks: half of the last one is not multiplied. */
#include "conv_tile.h"

#ifdef VM_HAS_WGMMA

enum {
    VM_WGMMA_WIDTH = VM_CONV_COLUMNS + 2,
    VM_WGMMA_PIXELS = VM_WGMMA_WIDTH * 18,
    VM_WGMMA_PLANES = VM_CONV_CHUNK / 8,
    VM_WGMMA_INPUT = VM_WGMMA_PLANES * VM_WGMMA_PLANE,
    VM_WGMMA_RING = 2 * VM_WGMMA_INPUT, /* a multiple of 128 */
    VM_WGMMA_SUMS = VM_WGMMA_RING + VM_WGMMA_STAGES * VM_WGMMA_FILTER,
    VM_WGMMA_GROUP_SUMS = 4 * (2 * 128 + 4) * 4,
    VM_WGMMA_BARRIERS = VM_WGMMA_SUMS + 2 * VM_WGMMA_GROUP_SUMS,
    VM_WGMMA_THREADS = 512, /* 256 multiply, a warp's first thread copies filters, seven warps prepare x */
    VM_WGMMA_INPUTS = 224
};
static_assert(VM_WGMMA_BARRIERS + (2 * VM_WGMMA_STAGES + 6) * 8 == VM_WGMMA_SHARED, "as cuda.h");

/* One of the two warpgroups' part of a tile, in the terms of conv_tile.h's shapes. */
template <int OUTS_, bool VIDEO_, bool E4M3_>
struct vm_wgmma_shape {
    static constexpr int ROWS = 8, OUTS = OUTS_, STRIDE = 1, THREADS = 128, ACROSS = 1, DOWN = 4, M = 2, N = OUTS / 8;
    static constexpr bool VIDEO = VIDEO_, E4M3 = E4M3_;
    VM_DEVICE void meet() { vm_meet_some<THREADS>(1 + threadIdx.x / THREADS); }
    /* The tile that both share. */
    struct tile {
        static constexpr int ROWS = 16, OUTS = OUTS_;
        static constexpr bool VIDEO = VIDEO_;
    };
    /* Bytes of a plane of filters, and of a slot of the ring. */
    static constexpr uint32_t PLANE = OUTS * 16, FILTER = OUTS * VM_CONV_CHUNK * 2;
    static_assert(FILTER <= VM_WGMMA_FILTER, "as cuda.h");
    /* Channels of a chunk, and of a plane; a thread prepares one of PARTS vectors of a pixel. */
    static constexpr uint32_t CHUNK = VM_CONV_CHUNK * (E4M3 ? 2 : 1), WIDE = CHUNK / 8, PARTS = CHUNK / 8;
    static constexpr uint32_t STEP = VM_WGMMA_INPUTS / PARTS; /* pixels between a thread's */
    static constexpr int BATCH = E4M3 ? 2 : 4;                /* vectors that a thread loads at a time */
    /* Registers of a thread that prepares and of one that multiplies. Two warpgroups can only get what the other two
     * give up: they would wait for more forever. */
    static constexpr int FEWER = E4M3 && OUTS == 128 ? 48 : 72, MORE = 256 - FEWER;
    static_assert(2 * FEWER + 2 * MORE <= 4 * VM_WGMMA_REGISTERS, "there are no more registers");
};

struct vm_wgmma_barriers {
    uint64_t *full_x, *empty_x, *full_w, *empty_w, *ahead;
};

/* ---- the warps that prepare x ---- */

/* A chunk of x with its halo: its origin in x, and what the thread's plane meets. */
struct vm_wgmma_chunk {
    int32_t top, left;
    uint32_t plane; /* of a video's y */
    vm_conv_source from;
};

/* Returns: whether the thread has number i of the chunk's pixels, and its place in x. */
template <typename S>
VM_DEVICE bool vm_wgmma_pixel(const vm_conv_args &a, const vm_wgmma_chunk &at, uint32_t i, uint32_t &y, uint32_t &x) {
    const uint32_t row = i / VM_WGMMA_WIDTH, column = i % VM_WGMMA_WIDTH;
    y = at.top + row;
    x = at.left + column;
    const bool within = vm_conv_within<S>(a, y, x);
    return row < 15 + a.k && column < VM_CONV_COLUMNS - 1 + a.k && within && at.from.some;
}

/* Copies an unchanged chunk. All copies of a thread are under way together. */
template <typename T, typename S>
VM_DEVICE void vm_wgmma_copy(const vm_conv_args &a, const vm_wgmma_chunk &at, uint32_t first, char *to) {
    const T *const from = static_cast<const T *>(a.x) + at.from.c;
#pragma unroll 1
    for (uint32_t i = first; i < VM_WGMMA_PIXELS; i += S::STEP) {
        uint32_t y, x;
        const bool some = vm_wgmma_pixel<S>(a, at, i, y, x);
        vm_copy_async(to + i * 16, some ? from + vm_conv_x_pixel<S>(a, at.from, y, x) * a.x_pitch : a.x, some);
    }
    vm_copy_commit();
    vm_copy_wait<0>();
}

/* The change to a chunk. SILU, with a norm, is the most frequent: no choice at each number. A video's norm is one of
 * pixels, an image's is one of groups then. */
enum vm_wgmma_change { VM_WGMMA_SILU, VM_WGMMA_ANY };

/* Prefetches the chunk that begins with channel c into the L2 cache; a video's may lie in several rows. */
template <typename T, typename S>
VM_DEVICE void vm_wgmma_prefetch(const vm_conv_args &a, vm_wgmma_chunk at, uint32_t c, uint32_t thread) {
    const uint32_t end = min(c + S::CHUNK, a.in_c);
    for (; c < end; c += S::VIDEO ? a.x_c - at.from.c : (uint32_t)VM_CONV_CHUNK) {
        at.from = vm_conv_source_of<S>(a, at.plane, c);
        for (uint32_t i = thread; i < VM_WGMMA_PIXELS; i += VM_WGMMA_INPUTS) {
            uint32_t y, x;
            if (!vm_wgmma_pixel<S>(a, at, i, y, x)) continue;
            vm_prefetch(static_cast<const T *>(a.x) + vm_conv_x_pixel<S>(a, at.from, y, x) * a.x_pitch + at.from.c);
        }
    }
}

/* Waits until the chunk's place is empty, after prefetching its first numbers. */
template <typename T, typename S, vm_wgmma_change CHANGE>
VM_DEVICE void vm_wgmma_input(const vm_conv_args &a, const vm_wgmma_chunk &at, uint32_t first, char *to,
                              uint64_t *empty, uint32_t parity) {
    constexpr int BATCH = S::BATCH;
    constexpr bool FACTORS = CHANGE == VM_WGMMA_ANY || S::VIDEO;
    const T *const from = static_cast<const T *>(a.x) + at.from.c;
    float scale[8], shift[8];
    if (a.scale && at.from.some) {
        vm_load8(scale, a.scale + at.from.c);
        vm_load8(shift, a.shift + at.from.c);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) scale[j] = 1, shift[j] = 0;
    }
#pragma unroll 1
    for (uint32_t i = first; i < VM_WGMMA_PIXELS; i += BATCH * S::STEP) {
        uint4 got[BATCH];
        uint32_t some = 0;
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            uint32_t y, x;
            got[u] = {0, 0, 0, 0};
            if (vm_wgmma_pixel<S>(a, at, i + u * S::STEP, y, x)) {
                got[u] = vm_load16(from + vm_conv_x_pixel<S>(a, at.from, y, x) * a.x_pitch);
                some |= 1u << u;
            }
        }
        if (i == first) vm_barrier_wait(empty, parity);
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            const uint32_t pixel = i + u * S::STEP;
            float v[8];
            vm_unpack<T>(v, got[u].x);
            vm_unpack<T>(v + 2, got[u].y);
            vm_unpack<T>(v + 4, got[u].z);
            vm_unpack<T>(v + 6, got[u].w);
            if (FACTORS && a.factor && some >> u & 1) {
                uint32_t y, x;
                vm_wgmma_pixel<S>(a, at, pixel, y, x);
                const float factor = vm_conv_factor<S>(a, at.from, y, x);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] *= factor;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = fmaf(v[j], scale[j], shift[j]);
                v[j] = CHANGE == VM_WGMMA_SILU ? vm_silu<T>(v[j])
                                               : vm_activated<T>(a.act, v[j]) * (S::E4M3 ? 1 : a.multiply);
            }
            if constexpr (S::E4M3) {
                const vm_long made = vm_pack_e4m3(v) | (vm_long)vm_pack_e4m3(v + 4) << 32;
                if (pixel < VM_WGMMA_PIXELS) *reinterpret_cast<vm_long *>(to + pixel * 16) = some >> u & 1 ? made : 0;
                continue;
            }
            const uint4 made = {vm_pack<T>(v[0], v[1]), vm_pack<T>(v[2], v[3]), vm_pack<T>(v[4], v[5]),
                                vm_pack<T>(v[6], v[7])};
            if (pixel < VM_WGMMA_PIXELS) vm_store16(to + pixel * 16, some >> u & 1 ? made : uint4{0, 0, 0, 0});
        }
    }
}

template <typename T, typename S>
VM_DEVICE void vm_wgmma_prepare(const vm_conv_args &a, char *shared, const vm_wgmma_barriers &bars) {
    const uint32_t thread = threadIdx.x - (VM_WGMMA_THREADS - VM_WGMMA_INPUTS);
    const uint32_t part = thread % S::PARTS * 8, first = thread / S::PARTS;
    const uint32_t place = part / S::WIDE * VM_WGMMA_PLANE + part % S::WIDE * (16 / S::WIDE);
    const bool changes = S::E4M3 || a.scale || a.multiply != 1 || a.act;
    const bool silu = a.act == VM_ACT_SILU && (S::E4M3 || a.multiply == 1) && (S::VIDEO || !a.factor);
    vm_wgmma_turn<2> turn;
    const auto chunk_of = [&](uint32_t item) {
        const vm_conv_item of = vm_conv_item_of<typename S::tile>(a, item);
        return vm_wgmma_chunk{(int32_t)(of.row + of.phase / 2) - (int32_t)a.pad_y,
                              (int32_t)(of.column + of.phase % 2) - (int32_t)a.pad_x,
                              of.plane,
                              {}};
    };
    for (uint32_t item = blockIdx.x; item < a.items; item += gridDim.x) {
        vm_wgmma_chunk at = chunk_of(item);
#pragma unroll 1
        for (uint32_t c = 0; c < a.in_c; c += S::CHUNK) {
            if (c + S::CHUNK < a.in_c)
                vm_wgmma_prefetch<T, S>(a, at, c + S::CHUNK, thread);
            else if (item + gridDim.x < a.items)
                vm_wgmma_prefetch<T, S>(a, chunk_of(item + gridDim.x), 0, thread);
            at.from = vm_conv_source_of<S>(a, at.plane, c + part);
            char *const to = shared + turn.at * VM_WGMMA_INPUT + place;
            uint64_t *const empty = bars.empty_x + turn.at;
            if (!changes) {
                vm_barrier_wait(empty, turn.parity ^ 1);
                vm_wgmma_copy<T, S>(a, at, first, to);
            } else if (silu)
                vm_wgmma_input<T, S, VM_WGMMA_SILU>(a, at, first, to, empty, turn.parity ^ 1);
            else
                vm_wgmma_input<T, S, VM_WGMMA_ANY>(a, at, first, to, empty, turn.parity ^ 1);
            vm_fence_async();
            vm_barrier_arrive(bars.full_x + turn.at);
            turn.next();
        }
    }
}

/* ---- the thread that copies filters ---- */

template <typename S>
VM_DEVICE void vm_wgmma_filters(const vm_conv_args &a, char *shared, const vm_wgmma_barriers &bars) {
    const uint32_t taps = a.k * a.k, blocks = (a.in_c + S::CHUNK - 1) / S::CHUNK * taps;
    const uint32_t outs = VM_ROUND_UP(a.y_c, VM_BLOCK), in = S::E4M3 ? a.in_c / 2 : a.in_c;
    vm_wgmma_turn<VM_WGMMA_STAGES> turn;
    for (uint32_t item = blockIdx.x; item < a.items; item += gridDim.x) {
        const vm_conv_item at = vm_conv_item_of<typename S::tile>(a, item);
        const char *from =
            static_cast<const char *>(a.w) + 2 * vm_conv_filter_at(outs, in, taps, at.phase, at.out, 0, 0);
#pragma unroll 1
        for (uint32_t block = 0; block < blocks; block++, from += S::FILTER) {
            vm_barrier_wait(bars.empty_w + turn.at, turn.parity ^ 1);
            vm_barrier_expect(bars.full_w + turn.at, S::FILTER);
            vm_copy_bulk(shared + VM_WGMMA_RING + turn.at * S::FILTER, from, S::FILTER, bars.full_w + turn.at);
            turn.next();
        }
    }
}

/* ---- the two warpgroups that multiply ---- */

template <uint32_t COUNT>
using vm_wgmma_steps = std::integral_constant<uint32_t, COUNT>;

/* Frees what belongs to an item, unread. */
template <typename S>
VM_DEVICE void vm_wgmma_pass(const vm_conv_args &a, const vm_wgmma_barriers &bars, vm_wgmma_turn<2> &x,
                             vm_wgmma_turn<VM_WGMMA_STAGES> &w) {
    const bool first = threadIdx.x % 32 == 0;
#pragma unroll 1
    for (uint32_t c = 0; c < a.in_c; c += S::CHUNK, x.next()) {
        vm_barrier_wait(bars.full_x + x.at, x.parity);
#pragma unroll 1
        for (uint32_t tap = 0; tap < a.k * a.k; tap++, w.next()) {
            vm_barrier_wait(bars.full_w + w.at, w.parity);
            __syncwarp(); /* all lanes have seen this round: the next one changes the parity */
            if (first) vm_barrier_arrive(bars.empty_w + w.at);
        }
        if (first) vm_barrier_arrive(bars.empty_x + x.at);
    }
}

/* Adds the products of a chunk at one tap to d. STEPS: the chunk's channels in units of 32 bytes, known to the compiler
 * because wgmma allows no branches in between. The products are under way when this function returns. Products of e4m3
 * are done: one half of the pixels after the other, they are summed by themselves and then added, because the tensor
 * cores' sums have few bits. */
template <typename T, typename S, uint32_t STEPS>
VM_DEVICE void vm_wgmma_tap(float (&d)[2][S::N][4], uint64_t x, uint64_t w) {
    const uint32_t x_step = 2 * VM_WGMMA_PLANE, w_step = 2 * S::PLANE;
    if constexpr (S::E4M3) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint64_t x_half = vm_matrix_at(x, half * 8 * 16);
            float sum[S::N][4];
            vm_wgmma_begin();
            vm_wgmma_e4m3<S::N, false>(sum, x_half, w);
#pragma unroll
            for (uint32_t step = 1; step < STEPS; step++)
                vm_wgmma_e4m3<S::N, true>(sum, vm_matrix_at(x_half, step * x_step), vm_matrix_at(w, step * w_step));
            vm_wgmma_commit();
            vm_wgmma_wait<0>();
            vm_wgmma_hold(sum);
#pragma unroll
            for (int i = 0; i < 4 * S::N; i++) d[i % 4 / 2][i / 4][half * 2 + i % 2] += sum[i / 4][i % 4];
        }
    } else {
        vm_wgmma_begin();
#pragma unroll
        for (uint32_t step = 0; step < STEPS; step++) {
            vm_wgmma_64<T, S::N, 0>(d, vm_matrix_at(x, step * x_step), vm_matrix_at(w, step * w_step));
            vm_wgmma_64<T, S::N, 1>(d, vm_matrix_at(x, step * x_step + 8 * 16), vm_matrix_at(w, step * w_step));
        }
        vm_wgmma_commit();
    }
}

template <typename T, typename S>
VM_DEVICE void vm_wgmma_multiply(const vm_conv_args &a, char *shared, const vm_wgmma_barriers &bars) {
    const uint32_t group = vm_of_warp(threadIdx.x / S::THREADS), lane = threadIdx.x % 32, taps = a.k * a.k;
    const uint32_t h = a.up ? a.x_h : a.y_h, width = a.up ? a.x_w : a.y_w;
    float *const sums = reinterpret_cast<float *>(shared + VM_WGMMA_SUMS + group * VM_WGMMA_GROUP_SUMS);
    const uint64_t x_first =
        vm_matrix(shared + group * S::ROWS * VM_WGMMA_WIDTH * 16, VM_WGMMA_WIDTH * 16, VM_WGMMA_PLANE);
    const uint64_t w_first = vm_matrix(shared + VM_WGMMA_RING, 128, S::PLANE);
    vm_wgmma_turn<2> x;
    vm_wgmma_turn<VM_WGMMA_STAGES> w;
    for (uint32_t item = blockIdx.x; item < a.items; item += gridDim.x) {
        vm_conv_item at = vm_conv_item_of<typename S::tile>(a, item);
        const uint32_t columns = (width + VM_CONV_COLUMNS - 1) / VM_CONV_COLUMNS, phases = a.up ? 4 : 1;
        at.row += group * S::ROWS;
        at.part = (at.row / S::ROWS * columns + at.column / VM_CONV_COLUMNS) * phases + at.phase;
        if (at.row >= h) { /* none of its rows is y's: let the others go on */
            vm_wgmma_pass<S>(a, bars, x, w);
            continue;
        }
        if (a.add) vm_conv_prefetch<T, S>(a, at);
        float d[2][S::N][4];
#pragma unroll
        for (int i = 0; i < 2 * S::N; i++) {
            const uint32_t o = at.out + vm_conv_channel(i);
            const bool biased = !S::E4M3 && a.bias && o < VM_ROUND_UP(a.y_c, VM_BLOCK);
            const float bias = biased ? a.bias[o] * a.bias_scale : 0;
#pragma unroll
            for (int r = 0; r < 2 * S::M; r++) d[r / 2][i / 2][r % 2 * 2 + i % 2] = bias;
        }
        vm_wgmma_hold(d);
        uint64_t *left_w = nullptr, *left_x = nullptr; /* read by the products before the last ones */
        const auto chunk = [&](auto STEPS) {
            vm_barrier_wait(bars.full_x + x.at, x.parity);
            if (a.lead && group == 1) vm_barrier_wait(bars.ahead + x.at, x.parity);
            uint64_t x_now = vm_matrix_at(x_first, x.at * VM_WGMMA_INPUT);
            uint32_t j = 0;
#pragma unroll 1
            for (uint32_t tap = 0; tap < taps; tap++) {
                vm_barrier_wait(bars.full_w + w.at, w.parity);
                const uint64_t w_now = vm_matrix_at(w_first, w.at * S::FILTER);
                vm_wgmma_tap<T, S, decltype(STEPS)::value>(d, x_now, w_now);
                uint64_t *const this_w = bars.empty_w + w.at;
                if constexpr (!S::E4M3) vm_wgmma_wait<1>();
                if (lane == 0 && (S::E4M3 || left_w)) vm_barrier_arrive(S::E4M3 ? this_w : left_w);
                if (lane == 0 && left_x) vm_barrier_arrive(left_x);
                if (lane == 0 && group == 0 && tap + 1 == a.lead) vm_barrier_arrive(bars.ahead + x.at);
                left_w = this_w;
                left_x = nullptr;
                w.next();
                x_now = vm_matrix_at(x_now, 16);
                if (++j == a.k) {
                    j = 0;
                    x_now = vm_matrix_at(x_now, (VM_WGMMA_WIDTH - a.k) * 16);
                }
            }
            left_x = bars.empty_x + x.at;
            x.next();
        };
        const uint32_t rest = (a.in_c % S::CHUNK + S::CHUNK / 4 - 1) / (S::CHUNK / 4);
#pragma unroll 1
        for (uint32_t i = 0; i < a.in_c / S::CHUNK; i++) chunk(vm_wgmma_steps<4>());
        if (rest == 1) chunk(vm_wgmma_steps<1>());
        if (rest == 2) chunk(vm_wgmma_steps<2>());
        if (rest == 3) chunk(vm_wgmma_steps<3>());
        if (S::E4M3 && rest == 4) chunk(vm_wgmma_steps<4>());
        vm_wgmma_wait<0>();
        float sum[2][S::N]
                 [4]; /* the epilogue takes numbers apart, and d would be kept as integers from the beginning */
#pragma unroll
        for (int i = 0; i < 8 * S::N; i++)
            sum[i / 4 / S::N][i / 4 % S::N][i % 4] = d[i / 4 / S::N][i / 4 % S::N][i % 4];
        vm_wgmma_hold(sum);
        if constexpr (S::E4M3) {
#pragma unroll
            for (int i = 0; i < 2 * S::N; i++) {
                const uint32_t o = at.out + vm_conv_channel(i);
                const bool some = o < VM_ROUND_UP(a.y_c, VM_BLOCK);
                const float scale = some ? a.w_scale[o] * a.multiply : 0;
                const float bias = some && a.bias ? a.bias[o] * a.bias_scale : 0;
#pragma unroll
                for (int r = 0; r < 2 * S::M; r++) {
                    float &of = sum[r / 2][i / 2][r % 2 * 2 + i % 2];
                    of = fmaf(of, scale, bias);
                }
            }
        }
        if (lane == 0) {
            if (!S::E4M3) vm_barrier_arrive(left_w);
            vm_barrier_arrive(left_x);
        }
        if (at.row + S::ROWS <= h && at.column + VM_CONV_COLUMNS <= width && at.out + S::OUTS <= a.y_c)
            vm_conv_finish<T, S, false, true>(a, sum, at, sums);
        else
            vm_conv_finish<T, S, false, false>(a, sum, at, sums);
        if (a.stats) S::meet(); /* before the sums are overwritten */
    }
}

template <typename T, typename S>
VM_DEVICE void vm_wgmma_convolve(const vm_conv_args &a, char *shared) {
    uint64_t *const first = reinterpret_cast<uint64_t *>(shared + VM_WGMMA_BARRIERS);
    const vm_wgmma_barriers bars = {first, first + 2, first + 4, first + 4 + VM_WGMMA_STAGES,
                                    first + 4 + 2 * VM_WGMMA_STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            vm_barrier_init(bars.full_x + i, VM_WGMMA_INPUTS), vm_barrier_init(bars.empty_x + i, 8),
                vm_barrier_init(bars.ahead + i, 4);
        for (int i = 0; i < VM_WGMMA_STAGES; i++)
            vm_barrier_init(bars.full_w + i, 1), vm_barrier_init(bars.empty_w + i, 8);
        vm_fence_async(); /* makes them visible to bulk copies */
    }
    __syncthreads();
    const uint32_t warp = vm_of_warp(threadIdx.x / 32);
    if (warp < 8) {
        vm_more_registers<S::MORE>();
        vm_wgmma_multiply<T, S>(a, shared, bars);
    } else {
        vm_fewer_registers<S::FEWER>();
        if (warp == 8) {
            if (threadIdx.x % 32 == 0) vm_wgmma_filters<S>(a, shared, bars);
        } else
            vm_wgmma_prepare<T, S>(a, shared, bars);
    }
}

#define VM_CONV_WGMMA(name, T, outs, video, e4m3)                                     \
    VM_KERNEL __launch_bounds__(VM_WGMMA_THREADS, 1) vm_conv_##name(vm_conv_args a) { \
        VM_SHARED(char, shared);                                                      \
        vm_wgmma_convolve<T, vm_wgmma_shape<outs, video, e4m3>>(a, shared);           \
    }
#define VM_CONV_WGMMA_ALL(type, T)                             \
    VM_CONV_WGMMA(type##_wgmma_128, T, 128, false, false)      \
    VM_CONV_WGMMA(type##_wgmma_96, T, 96, false, false)        \
    VM_CONV_WGMMA(type##_wgmma_128_video, T, 128, true, false) \
    VM_CONV_WGMMA(type##_wgmma_96_video, T, 96, true, false)   \
    VM_CONV_WGMMA(type##_e4m3_128, T, 128, false, true)        \
    VM_CONV_WGMMA(type##_e4m3_96, T, 96, false, true)
VM_CONV_WGMMA_ALL(f16, vm_half)
VM_CONV_WGMMA_ALL(bf16, vm_bfloat16)

#endif
