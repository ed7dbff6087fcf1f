/* Attention with one wide head by online softmax: y = softmax(q k^T * scale) v, without an n x n matrix.
 *
 * A block owns some queries and walks over tiles of keys:
 *
 *   s[query][key] = q k^T                     keys in chunks of 128 bytes of channels
 *   p = exp2(s * scale - top)                 top: the row's maximum so far; sums in float before p is rounded
 *   o[query][channel] = o * keep + p v        values in chunks of a few keys, keep = exp2(old top - new top)
 *
 * Chunks of keys, then of values, pass through one ring in shared memory, so copies run ahead of the products in both
 * phases. o stays in registers: a warp has all the queries and an eighth of the channels, so each value is read from
 * shared memory once for all queries. These reads limit the kernels. More queries would help, but o of 128 queries x
 * 512 channels would fill the whole register file.
 *
 * The 16-byte vectors of a row in shared memory are permuted, v ^ (row & 7). So the same vector of eight rows, which
 * one ldmatrix reads, lies in eight different groups of banks.
 *
 * f16 and bf16 use tensor cores and keep the queries in shared memory. f32 is plain fmaf on registers and streams its
 * queries along with the keys, so one shape fits every device. Launch: vm_attention_choose in cuda.h. */
#include "softmax.h"

enum { VM_WARPS = VM_CUDA_THREADS / 32, VM_LINE = 128 /* bytes of a row of queries or keys in a chunk */ };

/* ---- shared memory ---- */

template <int VECTORS, typename T>
VM_DEVICE T *vm_vector(T *tile, int row, int vector) {
    return tile + (row * VECTORS + (vector ^ (row & 7))) * (16 / (int)sizeof(T));
}

/* Starts to copy ROWS x COLUMNS of x [n][pitch] from (row, column); zeros beyond n and beyond `channels`. */
template <int ROWS, int COLUMNS, typename T>
VM_DEVICE void vm_copy_tile(T *to, const T *x, uint32_t n, uint32_t channels, uint32_t pitch, uint32_t row,
                            uint32_t column) {
    constexpr int LANES = 16 / sizeof(T), VECTORS = COLUMNS / LANES;
    static_assert(ROWS * VECTORS % VM_CUDA_THREADS == 0, "every thread copies as much");
#pragma unroll
    for (int i = 0; i < ROWS * VECTORS / VM_CUDA_THREADS; i++) {
        const uint32_t at = i * VM_CUDA_THREADS + threadIdx.x, r = at / VECTORS, v = at % VECTORS;
        const uint32_t from_row = row + r, from_column = column + v * LANES;
        const bool valid = from_row < n && from_column < channels;
        vm_copy_async(vm_vector<VECTORS>(to, r, v), valid ? x + (size_t)from_row * pitch + from_column : x, valid);
    }
}

/* The stream of chunks: of each tile of KEYS keys, line after line of the keys (with lines of QUERIES queries before
 * them, unless these stay in shared memory: 0), then V_KEYS x V_CHANNELS of the values at a time. */
template <typename T, int QUERIES, int KEYS, int V_KEYS, int V_CHANNELS, int STAGES>
struct vm_ring {
    static constexpr int COLUMNS = VM_LINE / sizeof(T), PARTS = VM_ATTENTION_CHANNELS / V_CHANNELS;
    static constexpr int CHUNK = V_KEYS * V_CHANNELS; /* elements */
    static_assert((QUERIES + KEYS) * COLUMNS == CHUNK, "chunks of keys and of values share the ring");
    const T *x;
    T *shared;
    uint32_t n, channels, pitch, query;
    uint32_t key;            /* of the next chunk to fetch: its tile's first, */
    uint32_t part, k_parts;  /* and its place in the tile */
    uint32_t fetched, taken; /* slots */
};

template <typename T, int QUERIES, int KEYS, int V_KEYS, int V_CHANNELS, int STAGES>
VM_DEVICE void vm_fetch(vm_ring<T, QUERIES, KEYS, V_KEYS, V_CHANNELS, STAGES> &g) {
    using ring = vm_ring<T, QUERIES, KEYS, V_KEYS, V_CHANNELS, STAGES>;
    T *to = g.shared + g.fetched * ring::CHUNK;
    if (g.key < g.n) {
        if (g.part < g.k_parts) {
            const uint32_t column = g.part * ring::COLUMNS;
            if constexpr (QUERIES > 0)
                vm_copy_tile<QUERIES, ring::COLUMNS>(to, g.x, g.n, g.channels, g.pitch, g.query, column);
            vm_copy_tile<KEYS, ring::COLUMNS>(to + QUERIES * ring::COLUMNS, g.x + g.channels, g.n, g.channels, g.pitch,
                                              g.key, column);
        } else {
            const uint32_t part = g.part - g.k_parts;
            vm_copy_tile<V_KEYS, V_CHANNELS>(to, g.x + 2 * (size_t)g.channels, g.n, g.channels, g.pitch,
                                             g.key + part / ring::PARTS * V_KEYS, part % ring::PARTS * V_CHANNELS);
        }
        if (++g.part == g.k_parts + KEYS / V_KEYS * ring::PARTS) g.part = 0, g.key += KEYS;
    }
    vm_copy_commit(); /* possibly empty: vm_take counts groups */
    g.fetched = g.fetched + 1 == STAGES ? 0 : g.fetched + 1;
}

/* Returns: the next chunk, valid until the next call. Every thread of the block must call. */
template <typename T, int QUERIES, int KEYS, int V_KEYS, int V_CHANNELS, int STAGES>
VM_DEVICE T *vm_take(vm_ring<T, QUERIES, KEYS, V_KEYS, V_CHANNELS, STAGES> &g) {
    vm_copy_wait<STAGES - 2>();
    __syncthreads(); /* all have copied their part of this chunk and finished the one before, which frees its slot */
    vm_fetch(g);
    T *chunk = g.shared + g.taken * V_KEYS * V_CHANNELS;
    g.taken = g.taken + 1 == STAGES ? 0 : g.taken + 1;
    return chunk;
}

/* ---- softmax ---- */

/* The steps of softmax.h for a tile's scores; keeps: [queries] in shared memory, readable after the next barrier. This
 * is warp `warp`. */
template <int LANES, int WARPS, int ROWS, int COLUMNS>
VM_DEVICE void vm_softmax(float (&s)[ROWS][COLUMNS], vm_rows<ROWS> &r, float scale, float shift, float *tops,
                          float *keeps, int queries, int warp) {
    float keep[ROWS];
    vm_leave_tops<LANES>(s, r, tops, queries, warp);
    __syncthreads();
    vm_exponents<WARPS>(s, r, keep, scale, shift, tops, queries);
    if (threadIdx.x % LANES == 0 && warp == 0)
#pragma unroll
        for (int i = 0; i < ROWS; i++) keeps[r.row[i]] = keep[i];
}

/* ---- f16 and bf16 ---- */

/* Scores: 2 x 4 warps, each with half the queries and a quarter of the keys. The fragment of lane l of a 16 x 8 product
 * holds rows l / 4 and l / 4 + 8, columns l % 4 * 2 and the next. */
template <typename T, int QUERIES, int KEYS, int V_CHANNELS, int STAGES>
VM_DEVICE void vm_attend(const vm_attention_args &a, T *shared, float shift) {
    constexpr int LINE = VM_LINE / 16, COLUMNS = VM_LINE / sizeof(T), STEP = 16; /* keys or channels in an mma */
    constexpr int SM = QUERIES / 32, SN = KEYS / 32;                 /* 16 x 8 products in a warp's scores */
    constexpr int OM = QUERIES / 16, ON = V_CHANNELS / 8 / VM_WARPS; /* and in its part of o, for one chunk of values */
    constexpr int PARTS = VM_ATTENTION_CHANNELS / V_CHANNELS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half_row = warp / 4, quarter = warp % 4;
    const uint32_t query = blockIdx.x * QUERIES, k_parts = (a.channels + COLUMNS - 1) / COLUMNS;
    const T *x = static_cast<const T *>(a.x);

    T *q = shared, *ring = q + k_parts * QUERIES * COLUMNS, *p = ring + STAGES * STEP * V_CHANNELS;
    float *tops = reinterpret_cast<float *>(p + QUERIES * KEYS), *keeps = tops + 4 * QUERIES;
    vm_ring<T, 0, KEYS, STEP, V_CHANNELS, STAGES> g = {x, ring, a.n, a.channels, a.pitch, query, 0, 0, k_parts, 0, 0};
    for (uint32_t c = 0; c < k_parts; c++)
        vm_copy_tile<QUERIES, COLUMNS>(q + c * QUERIES * COLUMNS, x, a.n, a.channels, a.pitch, query, c * COLUMNS);
    for (int i = 0; i < STAGES - 1; i++) vm_fetch(g);

    float o[PARTS][OM][ON][4] = {};
    vm_rows<2 * SM> rows = vm_no_rows<2 * SM>(half_row * QUERIES / 2 + lane / 4, 8);

    for (uint32_t key = 0; key < a.n; key += KEYS) {
        float d[SM][SN][4] = {};
        for (uint32_t c = 0; c < k_parts; c++) {
            const T *k = vm_take(g), *qc = q + c * QUERIES * COLUMNS;
#pragma unroll
            for (int step = 0; step < COLUMNS / STEP; step++) {
                uint32_t qf[SM][4];
#pragma unroll
                for (int m = 0; m < SM; m++)
                    vm_ldmatrix_x4(
                        qf[m], vm_vector<LINE>(qc, half_row * QUERIES / 2 + m * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
                for (int j = 0; j < SN; j += 2) {
                    uint32_t kf[4];
                    vm_ldmatrix_x4(kf, vm_vector<LINE>(k, quarter * KEYS / 4 + j * 8 + lane / 16 * 8 + lane % 8,
                                                       step * 2 + lane / 8 % 2));
#pragma unroll
                    for (int m = 0; m < SM; m++) {
                        vm_mma_16816<T>(d[m][j], qf[m], kf);
                        vm_mma_16816<T>(d[m][j + 1], qf[m], kf + 2);
                    }
                }
            }
        }

        float s[2 * SM][2 * SN];
#pragma unroll
        for (int i = 0; i < 2 * SM; i++)
#pragma unroll
            for (int j = 0; j < 2 * SN; j++) {
                const uint32_t at = key + quarter * KEYS / 4 + j / 2 * 8 + lane % 4 * 2 + j % 2;
                s[i][j] = at < a.n ? d[i / 2][j / 2][i % 2 * 2 + j % 2] : -INFINITY;
            }
        vm_softmax<4, 4>(s, rows, a.scale * (float)M_LOG2E, shift, tops, keeps, QUERIES, quarter);
#pragma unroll
        for (int i = 0; i < 2 * SM; i++)
#pragma unroll
            for (int j = 0; j < 2 * SN; j += 2)
                vm_store_pair(vm_vector<KEYS / 8>(p, rows.row[i], quarter * KEYS / 32 + j / 2) + lane % 4 * 2, s[i][j],
                              s[i][j + 1]);
        __syncthreads();

#pragma unroll
        for (int i = 0; i < 2 * OM; i++) {
            const float keep = keeps[i * 8 + lane / 4];
            if (keep == 1) continue; /* the usual case, once the largest scores were met */
#pragma unroll
            for (int j = 0; j < PARTS * ON; j++) {
                o[j / ON][i / 2][j % ON][i % 2 * 2] *= keep;
                o[j / ON][i / 2][j % ON][i % 2 * 2 + 1] *= keep;
            }
        }
        for (int step = 0; step < KEYS / STEP; step++) {
            uint32_t pf[OM][4];
#pragma unroll
            for (int m = 0; m < OM; m++)
                vm_ldmatrix_x4(pf[m], vm_vector<KEYS / 8>(p, m * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const T *v = vm_take(g);
#pragma unroll
                for (int j = 0; j < ON; j += 2) {
                    uint32_t vf[4];
                    vm_ldmatrix_x4_trans(vf, vm_vector<V_CHANNELS / 8>(v, lane % 16, warp * ON + j + lane / 16));
#pragma unroll
                    for (int m = 0; m < OM; m++) {
                        vm_mma_16816<T>(o[part][m][j], pf[m], vf);
                        vm_mma_16816<T>(o[part][m][j + 1], pf[m], vf + 2);
                    }
                }
            }
        }
    }

    vm_leave_sums<4>(rows, tops, QUERIES, quarter);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * OM; i++) {
        const int row = i * 8 + lane / 4;
        const float *sum = tops + row;
        const float over = 1 / (sum[0] + sum[QUERIES] + sum[2 * QUERIES] + sum[3 * QUERIES]);
        if (query + row >= a.n) continue;
        T *y = static_cast<T *>(a.y) + (size_t)(query + row) * a.y_pitch;
#pragma unroll
        for (int j = 0; j < PARTS * ON; j++) {
            const uint32_t c = j / ON * V_CHANNELS + (warp * ON + j % ON) * 8;
            const float *pair = &o[j / ON][i / 2][j % ON][i % 2 * 2];
            if (c < a.channels) vm_store_pair(y + c + lane % 4 * 2, pair[0] * over, pair[1] * over);
        }
    }
}

/* shift: half has no normal numbers below 2^-14. With the largest probability at 2^14 instead of 1, those down to 2^-28
 * of it are still normal and keep all their bits. */
#define VM_ATTENTION(type, T, queries, keys, v_channels, stages, shift)                                          \
    VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_attention_##type##_##queries##x##keys(vm_attention_args a) { \
        VM_SHARED(T, shared);                                                                                    \
        vm_attend<T, queries, keys, v_channels, stages>(a, shared, shift);                                       \
    }
VM_ATTENTION(f16, vm_half, 64, 128, 512, 4, 14)
VM_ATTENTION(f16, vm_half, 64, 64, 256, 3, 14)
VM_ATTENTION(f16, vm_half, 32, 64, 256, 3, 14)
VM_ATTENTION(bf16, vm_bfloat16, 64, 128, 512, 4, 0)
VM_ATTENTION(bf16, vm_bfloat16, 64, 64, 256, 3, 0)

/* ---- f32 ---- */

struct alignas(16) vm_float4 {
    float v[4];
};

VM_DEVICE vm_float4 vm_load4(const float *from) { return *reinterpret_cast<const vm_float4 *>(from); }

/* Scores: 4 x 2 warps of 16 queries x 32 keys, 4 x 4 of them per thread. o: 4 x 2 warps of 16 queries x 256 channels,
 * all 16 and 8 per thread. Probabilities are p[key][query]; 4 more numbers per row of p put eight keys' writes in
 * different banks. */
VM_KERNEL __launch_bounds__(VM_CUDA_THREADS) vm_attention_f32_64x64(vm_attention_args a) {
    constexpr int QUERIES = 64, KEYS = 64, V_KEYS = 8, STAGES = 2, R = 4, ROWS = 16, P_PITCH = QUERIES + 4;
    constexpr int LINE = VM_LINE / 16, COLUMNS = VM_LINE / sizeof(float), WIDTH = VM_ATTENTION_CHANNELS / 4;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = warp / 2 * ROWS, side = warp % 2;
    const uint32_t query = blockIdx.x * QUERIES, k_parts = (a.channels + COLUMNS - 1) / COLUMNS;

    VM_SHARED(float, ring);
    float *p = ring + STAGES * V_KEYS * VM_ATTENTION_CHANNELS, *tops = p + KEYS * P_PITCH, *keeps = tops + 2 * QUERIES;
    vm_ring<float, QUERIES, KEYS, V_KEYS, VM_ATTENTION_CHANNELS, STAGES> g = {
        static_cast<const float *>(a.x), ring, a.n, a.channels, a.pitch, query, 0, 0, k_parts, 0, 0};
    for (int i = 0; i < STAGES - 1; i++) vm_fetch(g);

    float o[ROWS][2][4] = {};
    vm_rows<R> rows = vm_no_rows<R>(row0 + lane / 8, 4);

    for (uint32_t key = 0; key < a.n; key += KEYS) {
        float s[R][R] = {};
        for (uint32_t c = 0; c < k_parts; c++) {
            const float *q = vm_take(g), *k = q + QUERIES * COLUMNS;
#pragma unroll 4
            for (int v = 0; v < LINE; v++) {
                vm_float4 qv[R];
#pragma unroll
                for (int i = 0; i < R; i++) qv[i] = vm_load4(vm_vector<LINE>(q, rows.row[i], v));
#pragma unroll
                for (int j = 0; j < R; j++) {
                    const vm_float4 kv = vm_load4(vm_vector<LINE>(k, side * 32 + lane % 8 + j * 8, v));
#pragma unroll
                    for (int i = 0; i < R; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) s[i][j] = fmaf(qv[i].v[e], kv.v[e], s[i][j]);
                }
            }
        }

#pragma unroll
        for (int j = 0; j < R; j++)
            if (key + side * 32 + lane % 8 + j * 8 >= a.n)
#pragma unroll
                for (int i = 0; i < R; i++) s[i][j] = -INFINITY;
        vm_softmax<8, 2>(s, rows, a.scale * (float)M_LOG2E, 0, tops, keeps, QUERIES, side);
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < R; j++) p[(side * 32 + lane % 8 + j * 8) * P_PITCH + rows.row[i]] = s[i][j];
        __syncthreads();

#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float keep = keeps[row0 + i];
            if (keep == 1) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) o[i][j / 4][j % 4] *= keep;
        }
        for (int step = 0; step < KEYS; step += V_KEYS) {
            const float *v = vm_take(g);
#pragma unroll 4 /* no more: o takes half of the registers */
            for (int i = 0; i < V_KEYS; i++) {
                const vm_float4 v0 = vm_load4(vm_vector<WIDTH>(v, i, side * 64 + lane));
                const vm_float4 v1 = vm_load4(vm_vector<WIDTH>(v, i, side * 64 + 32 + lane));
#pragma unroll
                for (int r = 0; r < ROWS; r += 4) {
                    const vm_float4 pv = vm_load4(p + (step + i) * P_PITCH + row0 + r);
#pragma unroll
                    for (int e = 0; e < 16; e++) {
                        o[r + e / 4][0][e % 4] = fmaf(pv.v[e / 4], v0.v[e % 4], o[r + e / 4][0][e % 4]);
                        o[r + e / 4][1][e % 4] = fmaf(pv.v[e / 4], v1.v[e % 4], o[r + e / 4][1][e % 4]);
                    }
                }
            }
        }
    }

    vm_leave_sums<8>(rows, tops, QUERIES, side);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const float over = 1 / (tops[row0 + i] + tops[QUERIES + row0 + i]);
        if (query + row0 + i >= a.n) continue;
        float *y = static_cast<float *>(a.y) + (size_t)(query + row0 + i) * a.y_pitch;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t c = (side * 64 + j * 32 + lane) * 4;
            vm_float4 out;
#pragma unroll
            for (int e = 0; e < 4; e++) out.v[e] = o[i][j][e] * over;
            if (c < a.channels) *reinterpret_cast<vm_float4 *>(y + c) = out;
        }
    }
}
