/* attention_wgmma: computes the same as attention.cu, on Hopper GPUs, by blocks in pairs.
 *
 * A block owns 64 queries: o of 64 x 512 floats is half of the register file. Both blocks of a pair read the same keys
 * and values, so each copies half of every stage from the L2 cache to both. Two warpgroups multiply:
 *
 *   s[query][key] = q k^T     64 of a tile's 128 keys for each warpgroup
 *   p = exp2(s * scale - top)     both exchange the rows' maxima, and p, in shared memory
 *   o[query][channel] += p v      256 of 512 channels for each warpgroup, all keys
 *
 * One thread starts all copies. Each warpgroup has its own ring of stages of 16 KiB: 64 keys x 128 channels, or 32
 * values x 256 channels. p of the next tile is computed while the tensor cores multiply this tile's p and v.
 *
 * The limits by calculation, for a tile of 128 keys: 4096 cycles of the tensor cores; 5400 cycles of shared memory, at
 * 128 bytes each (2048 to write 256 KiB of keys and values; 2048 to read q and k, with 64 columns per product; 1280 to
 * read p and v). So at most 0.76 of the tensor cores' rate. At 500 TFLOP/s on 132 multiprocessors at 1.7 GHz a tile may
 * take 7500 cycles: 35 bytes per cycle enter each multiprocessor, of 64, and the L2 cache delivers 3.9 TB/s. Single
 * blocks would need 7.8. No GPU has run this. */
#include "softmax.h"

#ifdef VM_HAS_WGMMA

enum {
    VM_PAIR_TILE = 64 * 128,                           /* bytes of 64 rows x 64 numbers, swizzled */
    VM_PAIR_BOX = VM_PAIR_BOX_ROWS * 128,              /* bytes of a copy */
    VM_PAIR_GROUPS = 2,                                /* warpgroups that multiply, */
    VM_PAIR_MULTIPLY = 128 * VM_PAIR_GROUPS,           /* and their threads */
    VM_PAIR_CHUNK = VM_PAIR_STAGE / VM_PAIR_TILE * 64, /* channels of the keys in a stage */
    VM_PAIR_VALUES = VM_PAIR_STAGE / 4 / 128,          /* values in a stage, of 4 x 64 channels */
    VM_PAIR_RING = VM_ATTENTION_CHANNELS / 64 * VM_PAIR_TILE,
    VM_PAIR_P = VM_PAIR_RING + VM_PAIR_GROUPS * VM_PAIR_STAGES * VM_PAIR_STAGE,
    VM_PAIR_TOPS = VM_PAIR_P + 2 * VM_PAIR_GROUPS * VM_PAIR_TILE,
    VM_PAIR_BARRIERS = VM_PAIR_TOPS + VM_PAIR_GROUPS * VM_PAIR_QUERIES * 4
};
/* Registers of a thread that copies and of one that multiplies, as in conv_wgmma.cu. */
enum { VM_PAIR_FEWER = 40, VM_PAIR_MORE = 232 };
static_assert(VM_PAIR_FEWER + 2 * VM_PAIR_MORE <= 3 * VM_PAIR_REGISTERS, "there are no more registers");
static_assert(VM_PAIR_BARRIERS + (4 * VM_PAIR_STAGES + 1) * 8 == VM_PAIR_SHARED, "as cuda.h");
static_assert(VM_PAIR_STAGE == 4 * VM_PAIR_BOX && VM_PAIR_CHUNK == 128, "copies of one kind");

/* full, empty: [warpgroup][stage]. A stage is empty when four warps of both blocks have left it. */
struct vm_pair_barriers {
    uint64_t *queries, *full, *empty;
};

/* The thread that copies. The blocks' parts of a stage: of keys 64 of its channels, of values 128. */
VM_DEVICE void vm_pair_copy(const vm_attention_pairs_args &a, char *shared, const vm_pair_barriers &bars) {
    const uint32_t rank = vm_pair_rank(), query = blockIdx.x * VM_PAIR_QUERIES;
    const uint32_t chunks = (a.of.channels + VM_PAIR_CHUNK - 1) / VM_PAIR_CHUNK;
    vm_barrier_expect(bars.queries, chunks * 2 * VM_PAIR_TILE);
    for (uint32_t i = 0; i < 4 * chunks; i++)
        vm_copy_box(shared + i * VM_PAIR_BOX, &a.map, i / 2 * 64, 0, query + i % 2 * VM_PAIR_BOX_ROWS, bars.queries,
                    false);
    vm_wgmma_turn<VM_PAIR_STAGES> turn;
    /* Copies this block's two boxes of a stage to both blocks. The second one begins `columns` and `rows` further. */
    const auto stage = [&](uint32_t group, uint32_t to, uint32_t part, uint32_t column, uint32_t columns, uint32_t row,
                           uint32_t rows) {
        const uint32_t at = group * VM_PAIR_STAGES + turn.at;
        char *const box = shared + VM_PAIR_RING + at * VM_PAIR_STAGE + to;
        vm_barrier_wait(bars.empty + at, turn.parity ^ 1);
        vm_barrier_expect(bars.full + at, VM_PAIR_STAGE);
        vm_copy_box(box, &a.map, column, part, row, bars.full + at, true);
        vm_copy_box(box + VM_PAIR_BOX, &a.map, column + columns, part, row + rows, bars.full + at, true);
    };
    const auto keys = [&](uint32_t key) {
#pragma unroll 1
        for (uint32_t c = 0; c < chunks; c++, turn.next())
            for (uint32_t group = 0; group < VM_PAIR_GROUPS; group++)
                stage(group, rank * VM_PAIR_TILE, 1, c * VM_PAIR_CHUNK + rank * 64, 0, key + group * 64,
                      VM_PAIR_BOX_ROWS);
    };
    const auto values = [&](uint32_t key) {
#pragma unroll 1
        for (uint32_t i = 0; i < VM_PAIR_KEYS; i += VM_PAIR_VALUES, turn.next())
            for (uint32_t group = 0; group < VM_PAIR_GROUPS; group++)
                stage(group, rank * 2 * VM_PAIR_BOX, 2, group * 256 + rank * 128, 64, key + i, 0);
    };
    keys(0);
#pragma unroll 1
    for (uint32_t key = 0; key < a.of.n; key += VM_PAIR_KEYS) {
        if (key + VM_PAIR_KEYS < a.of.n) keys(key + VM_PAIR_KEYS);
        values(key);
    }
}

/* One of the two warpgroups that multiply. */
template <typename T>
struct vm_pair_group {
    const vm_attention_args &a;
    char *shared;
    uint64_t *full, *empty; /* its own */
    uint32_t group, lane, chunks;
    uint64_t q, ring_k, ring_v;
    vm_wgmma_turn<VM_PAIR_STAGES> next, last; /* the stages to multiply next, and to leave next */
    uint32_t held = 0;                        /* stages in between */
    vm_rows<2> rows;
    float keep[2];

    VM_METHOD vm_pair_group(const vm_attention_args &args, char *shared_, const vm_pair_barriers &bars)
        : a(args), shared(shared_) {
        group = vm_of_warp(threadIdx.x / 128), lane = threadIdx.x % 32;
        full = bars.full + group * VM_PAIR_STAGES, empty = bars.empty + group * VM_PAIR_STAGES;
        chunks = (a.channels + VM_PAIR_CHUNK - 1) / VM_PAIR_CHUNK;
        char *const ring = shared + VM_PAIR_RING + group * VM_PAIR_STAGES * VM_PAIR_STAGE;
        q = vm_matrix_swizzled(shared, 0), ring_k = vm_matrix_swizzled(ring, 0);
        ring_v = vm_matrix_swizzled(ring, VM_PAIR_BOX);
        rows = vm_no_rows<2>((int)(threadIdx.x / 32 % 4 * 16 + lane / 4), 8);
    }

    VM_METHOD float *tops() const { return reinterpret_cast<float *>(shared + VM_PAIR_TOPS); }
    /* p of a tile: 64 keys, and 64. */
    VM_METHOD char *p(uint32_t tile) const { return shared + VM_PAIR_P + tile % 2 * VM_PAIR_GROUPS * VM_PAIR_TILE; }
    VM_DEVICE void meet() { vm_meet_some<VM_PAIR_MULTIPLY>(1); }

    /* Waits for all products but the last N stages', and leaves the stages of the others. */
    template <int N>
    VM_METHOD void finish() {
        vm_wgmma_wait<N>();
#pragma unroll 1
        for (; held > N; held--, last.next())
            if (lane == 0) {
                vm_barrier_arrive(empty + last.at);
                vm_barrier_arrive_there(empty + last.at);
            }
    }
    VM_METHOD void start() {
        vm_barrier_wait(full + next.at, next.parity);
        vm_wgmma_begin();
    }
    VM_METHOD void end() {
        vm_wgmma_commit();
        next.next();
        held++;
    }

    /* s (+)= q k^T over the channels of chunk c. */
    template <bool ADD>
    VM_METHOD void score(float (&s)[8][4], uint32_t c) {
        const uint64_t q_now = vm_matrix_at(q, c * 2 * VM_PAIR_TILE), k = vm_matrix_at(ring_k, next.at * VM_PAIR_STAGE);
        start();
        if (!ADD) vm_wgmma<T, 8, false, false>(s, q_now, k);
#pragma unroll
        for (uint32_t i = !ADD; i < 8; i++) {
            const uint32_t at = i / 4 * VM_PAIR_TILE + i % 4 * 32;
            vm_wgmma<T, 8, false, true>(s, vm_matrix_at(q_now, at), vm_matrix_at(k, at));
        }
        end();
    }
    /* o += p v over the keys of a stage, the i-th of a tile. */
    VM_METHOD void weigh(float (&o)[32][4], uint64_t p_tile, uint32_t i) {
        const uint64_t p_now = vm_matrix_at(p_tile, i / 2 * VM_PAIR_TILE + i % 2 * 64);
        const uint64_t v = vm_matrix_at(ring_v, next.at * VM_PAIR_STAGE);
        start();
#pragma unroll
        for (uint32_t step = 0; step < 2; step++)
            vm_wgmma<T, 32, true, true>(o, vm_matrix_at(p_now, step * 32), vm_matrix_at(v, step * 2048));
        end();
    }

    /* p of a tile from its s. */
    VM_METHOD void soften(const float (&s)[8][4], uint32_t tile, float shift) {
        const uint32_t first = tile * VM_PAIR_KEYS + group * 64 + lane % 4 * 2;
        float e[2][16];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 16; j++)
                e[i][j] = first + j / 2 * 8 + j % 2 < a.n ? s[j / 2][i * 2 + j % 2] : -INFINITY;
        vm_leave_tops<4>(e, rows, tops(), VM_PAIR_QUERIES, (int)group);
        meet();
        vm_exponents<VM_PAIR_GROUPS>(e, rows, keep, a.scale * (float)M_LOG2E, shift, tops(), VM_PAIR_QUERIES);
        char *const to = p(tile) + group * VM_PAIR_TILE;
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 16; j += 2)
                vm_store_pair(reinterpret_cast<T *>(to + vm_swizzled(rows.row[i] * 128 + j * 8 + lane % 4 * 4)),
                              e[i][j], e[i][j + 1]);
        vm_fence_async();
    }
    VM_METHOD void rescale(float (&o)[32][4]) const {
#pragma unroll
        for (int i = 0; i < 128; i++) o[i / 4][i % 4] *= keep[i / 2 % 2];
    }

    /* The products of a tile with its p. MORE: and the scores of the next tile. */
    template <bool MORE>
    VM_METHOD void attend(float (&o)[32][4], uint32_t tile, float shift) {
        float s[8][4];
        if (MORE) score<false>(s, 0);
        if (keep[0] != 1 || keep[1] != 1) rescale(o); /* seldom, once the largest scores were met */
        vm_wgmma_hold(o);
#pragma unroll 1
        for (uint32_t c = 1; MORE && c < chunks; c++) {
            score<true>(s, c);
            finish<1>();
        }
        meet(); /* both warpgroups' p is there */
        const uint64_t p_tile = vm_matrix_swizzled(p(tile), 0);
        weigh(o, p_tile, 0);
        weigh(o, p_tile, 1);
        finish<2>();
        if (MORE) {
            vm_wgmma_hold(s);
            soften(s, tile + 1, shift);
        }
        weigh(o, p_tile, 2);
        finish<1>();
        weigh(o, p_tile, 3);
        finish<0>(); /* as nvcc wants it before it lets rescale run during products of s */
        vm_wgmma_hold(o);
    }

    VM_METHOD void run(uint64_t *queries, float shift) {
        const uint32_t query = blockIdx.x * VM_PAIR_QUERIES, tiles = (a.n + VM_PAIR_KEYS - 1) / VM_PAIR_KEYS;
        float o[32][4] = {}, s[8][4];
        vm_barrier_wait(queries, 0);
        score<false>(s, 0);
#pragma unroll 1
        for (uint32_t c = 1; c < chunks; c++) {
            finish<1>();
            score<true>(s, c);
        }
        finish<0>();
        vm_wgmma_hold(s);
        soften(s, 0, shift);
#pragma unroll 1
        for (uint32_t tile = 0; tile + 1 < tiles; tile++) attend<true>(o, tile, shift);
        attend<false>(o, tiles - 1, shift);
        vm_leave_sums<4>(rows, tops(), VM_PAIR_QUERIES, (int)group);
        meet();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float over = 1 / (tops()[rows.row[i]] + tops()[VM_PAIR_QUERIES + rows.row[i]]);
            if (query + rows.row[i] >= a.n) continue;
            T *const y = static_cast<T *>(a.y) + (size_t)(query + rows.row[i]) * a.y_pitch;
#pragma unroll
            for (int j = 0; j < 32; j++) {
                const uint32_t c = group * 256 + j * 8;
                if (c < a.channels) vm_store_pair(y + c + lane % 4 * 2, o[j][i * 2] * over, o[j][i * 2 + 1] * over);
            }
        }
    }
};

template <typename T>
VM_DEVICE void vm_attend_in_pairs(const vm_attention_pairs_args &a, char *shared, float shift) {
    uint64_t *const first = reinterpret_cast<uint64_t *>(shared + VM_PAIR_BARRIERS);
    const vm_pair_barriers bars = {first, first + 1, first + 1 + VM_PAIR_GROUPS * VM_PAIR_STAGES};
    if (threadIdx.x == 0) {
        vm_barrier_init(bars.queries, 1);
        for (int i = 0; i < VM_PAIR_GROUPS * VM_PAIR_STAGES; i++)
            vm_barrier_init(bars.full + i, 1), vm_barrier_init(bars.empty + i, 8);
        vm_fence_barriers();
    }
    vm_meet_pair();
    if (vm_of_warp(threadIdx.x / 128) < VM_PAIR_GROUPS) {
        vm_more_registers<VM_PAIR_MORE>();
        vm_pair_group<T>(a.of, shared, bars).run(bars.queries, shift);
        vm_meet_pair();
    } else {
        vm_fewer_registers<VM_PAIR_FEWER>();
        if (threadIdx.x == VM_PAIR_MULTIPLY) vm_pair_copy(a, shared, bars);
        vm_meet_pair(); /* the other block may still copy to this one's shared memory, or arrive at its barriers */
    }
}

/* shift: as in attention.cu. */
#define VM_ATTENTION_PAIRS(type, T, shift)                                                                          \
    VM_PAIRS __launch_bounds__(VM_PAIR_THREADS, 1) vm_attention_##type##_pairs(VM_ARGS vm_attention_pairs_args a) { \
        VM_SHARED(char, shared);                                                                                    \
        vm_attend_in_pairs<T>(a, shared, shift);                                                                    \
    }
VM_ATTENTION_PAIRS(f16, vm_half, 14)
VM_ATTENTION_PAIRS(bf16, vm_bfloat16, 0)

#endif
