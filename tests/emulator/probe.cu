/* Kernels that test the emulator and would give the same on a GPU; those from vm_probe_race on are wrong on purpose. */
#include "device.h"

struct probe_args {
    const void *in;
    void *out;
    uint32_t n;
};

/* ---- right ---- */

/* out[i] = in[255 - i] of a block of 256, through shared memory of both kinds, `n` times. */
template <typename T>
VM_DEVICE void reverse(T *dynamic, const T *in, T *out, uint32_t n) {
    __shared__ T fixed[256];
    const uint32_t i = threadIdx.x;
    dynamic[i] = in[i];
    for (uint32_t k = 0; k < n; k++) {
        __syncthreads();
        fixed[i] = dynamic[255 - i];
        __syncthreads();
        dynamic[i] = k + 1 < n ? fixed[255 - i] : fixed[i];
    }
    out[i] = dynamic[i];
}
VM_KERNEL __launch_bounds__(256) vm_probe_reverse(probe_args a) {
    VM_SHARED(float, dynamic);
    const size_t at = (size_t)blockIdx.x * 256;
    reverse(dynamic, (const float *)a.in + at, (float *)a.out + at, a.n);
}

/* out: (block, thread) as the kernel sees them, x fastest. */
VM_KERNEL vm_probe_indices(probe_args a) {
    const uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    ((uint32_t *)a.out)[block * threads + thread] = block * threads + thread;
}

VM_KERNEL vm_probe_shuffle(probe_args a) {
    const uint32_t i = threadIdx.x;
    ((float *)a.out)[i] = vm_shuffle_xor(((const float *)a.in)[i], (int)a.n);
}

/* in: 32 rows of 8 numbers; out: [2][32 lanes][4]: as they are, and transposed. */
VM_KERNEL vm_probe_ldmatrix(probe_args a) {
    VM_SHARED(uint4, rows);
    uint32_t *const out = (uint32_t *)a.out;
    const uint32_t lane = threadIdx.x;
    rows[lane] = vm_load16((const uint4 *)a.in + lane);
    __syncwarp();
    vm_ldmatrix_x4(out + lane * 4, rows + lane);
    vm_ldmatrix_x4_trans(out + 128 + lane * 4, rows + lane);
}

/* in: a [16][16], b [8][16] (columns of the second factor); out += a b, [16][8]. */
template <typename T>
VM_DEVICE void mma(const probe_args &args) {
    VM_SHARED(T, shared);
    const uint32_t lane = threadIdx.x, group = lane / 4, t = lane % 4 * 2;
    float *const out = (float *)args.out;
    for (uint32_t i = lane; i < 48; i += 32) vm_copy_async(shared + i * 8, (const T *)args.in + i * 8, true);
    for (uint32_t i = 48 + lane; i < 64; i += 32) vm_copy_async(shared + i * 8, nullptr, false);
    vm_copy_commit();
    vm_copy_wait<0>();
    __syncthreads();
    uint32_t a[4], b[4];
    vm_ldmatrix_x4(a, shared + lane % 16 * 16 + lane / 16 * 8);
    vm_ldmatrix_x4(b, shared + 256 + lane % 8 * 16 + lane / 8 % 2 * 8 + lane / 16 * 128); /* b[2], b[3]: the zeros */
    float d[4], zero[4] = {};
    for (int part = 0; part < 4; part++) d[part] = out[(group + part / 2 * 8) * 8 + t + part % 2];
    vm_mma_16816<T>(d, a, b);
    vm_mma_16816<T>(zero, a, b + 2);
    for (int part = 0; part < 4; part++) out[(group + part / 2 * 8) * 8 + t + part % 2] = d[part] + zero[part];
}
VM_KERNEL vm_probe_mma_f16(probe_args a) { mma<vm_half>(a); }
VM_KERNEL vm_probe_mma_bf16(probe_args a) { mma<vm_bfloat16>(a); }

/* n vectors of 8. */
template <typename From, typename To>
VM_DEVICE void convert(const probe_args &a) {
    float v[8];
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += gridDim.x * blockDim.x) {
        vm_load8(v, (const From *)a.in + i * 8);
        vm_store8((To *)a.out + i * 8, v);
    }
}
VM_KERNEL vm_probe_to_f16(probe_args a) { convert<float, vm_half>(a); }
VM_KERNEL vm_probe_to_bf16(probe_args a) { convert<float, vm_bfloat16>(a); }
VM_KERNEL vm_probe_from_f16(probe_args a) { convert<vm_half, float>(a); }
VM_KERNEL vm_probe_from_bf16(probe_args a) { convert<vm_bfloat16, float>(a); }

/* out[i] = 2 * out[i] + 1 for i < n. */
VM_KERNEL vm_probe_step(probe_args a) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) ((float *)a.out)[i] = 2 * ((float *)a.out)[i] + 1;
}

/* Two groups of copies, of which one is waited for at a time; out = in, 2 x 256 vectors. */
VM_KERNEL vm_probe_groups(probe_args a) {
    VM_SHARED(uint4, s);
    const uint32_t i = threadIdx.x;
    for (uint32_t k = 0; k < 2; k++) {
        vm_copy_async(s + k * 256 + i, (const uint4 *)a.in + k * 256 + i, true);
        vm_copy_commit();
    }
    vm_copy_wait<1>();
    vm_store16((uint4 *)a.out + i, s[i]);
    vm_copy_wait<0>();
    vm_store16((uint4 *)a.out + 256 + i, s[256 + i]);
}

#ifdef VM_HAS_WGMMA
/* map: boxes of 32 x 1 x 64 numbers. */
struct probe_map_args {
    vm_tensor_map map;
    void *out;
    uint32_t column, part, row;
};
enum { BOX = 32 * 64 };

/* Both blocks of a pair copy a box to both, the second's 64 columns further; out [blocks][2 boxes][32][64]. */
VM_PAIRS __launch_bounds__(128, 1) vm_probe_boxes(VM_ARGS probe_map_args a) {
    VM_SHARED(uint16_t, boxes);
    uint64_t *const full = reinterpret_cast<uint64_t *>(boxes + 2 * BOX), *const empty = full + 1;
    const uint32_t rank = vm_pair_rank();
    uint16_t *const out = static_cast<uint16_t *>(a.out) + blockIdx.x * 2 * BOX;
    if (threadIdx.x == 0) {
        vm_barrier_init(full, 1);
        vm_barrier_init(empty, blockDim.x);
        vm_fence_barriers();
    }
    vm_meet_pair();
    for (uint32_t turn = 0; turn < 2; turn++) {
        if (threadIdx.x == 0) {
            vm_barrier_expect(full, 2 * BOX * 2);
            vm_copy_box(boxes + rank * BOX, &a.map, a.column + rank * 64 + turn, a.part, a.row, full, true);
        }
        vm_barrier_wait(full, turn);
        for (uint32_t i = threadIdx.x; i < 2 * BOX; i += blockDim.x) {
            const uint16_t got = boxes[vm_swizzled(i * 2) / 2];
            out[i] = turn ? out[i] + got : got;
        }
        vm_barrier_arrive_there(empty); /* the other block may copy to this one again */
        vm_barrier_wait(empty, turn);
        __syncthreads(); /* and this one to itself */
    }
    vm_meet_pair();
}

/* In rows of 256 numbers: a and b, 64 rows of 64 numbers, and v, 32 rows. out: [64][64] = a b^T, then [64][256] += a v
 * with a's first 32 columns. */
template <typename T>
VM_DEVICE void products(const probe_map_args &args) {
    VM_SHARED(char, shared);
    uint64_t *const full = reinterpret_cast<uint64_t *>(shared + 8 * BOX * 2);
    if (threadIdx.x == 0) {
        vm_barrier_init(full, 1);
        vm_fence_async();
        vm_barrier_expect(full, 8 * BOX * 2);
        for (uint32_t i = 0; i < 8; i++)
            vm_copy_box(shared + i * BOX * 2, &args.map, i < 4 ? 0 : (i - 4) * 64, 0, i < 4 ? i * 32 : 128, full,
                        false);
    }
    __syncthreads();
    vm_barrier_wait(full, 0);
    const uint64_t a = vm_matrix_swizzled(shared, 0), b = vm_matrix_swizzled(shared + 2 * BOX * 2, 0);
    const uint64_t v = vm_matrix_swizzled(shared + 4 * BOX * 2, BOX * 2);
    float *const out = static_cast<float *>(args.out), *const more = out + 64 * 64;
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    const auto at = [&](int n, int e) { return row + e / 2 * 8 + (n * 8 + column + e % 2) * 64; };
    float d[8][4] = {}, o[32][4];
    for (int i = 0; i < 128; i++) o[i / 4][i % 4] = more[at(i / 4, i % 4)];
    vm_wgmma_hold(o);
    vm_wgmma_begin();
    vm_wgmma<T, 8, false, false>(d, a, b);
#pragma unroll
    for (uint32_t i = 1; i < 4; i++) vm_wgmma<T, 8, false, true>(d, vm_matrix_at(a, i * 32), vm_matrix_at(b, i * 32));
    vm_wgmma_commit();
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) vm_wgmma<T, 32, true, true>(o, vm_matrix_at(a, i * 32), vm_matrix_at(v, i * 2048));
    vm_wgmma_commit();
    vm_wgmma_wait<1>();
    vm_wgmma_hold(d);
    for (int i = 0; i < 32; i++) out[at(i / 4, i % 4)] = d[i / 4][i % 4];
    vm_wgmma_wait<0>();
    vm_wgmma_hold(o);
    for (int i = 0; i < 128; i++) more[at(i / 4, i % 4)] = o[i / 4][i % 4];
}
VM_KERNEL __launch_bounds__(128, 1) vm_probe_products_f16(VM_ARGS probe_map_args a) { products<vm_half>(a); }
VM_KERNEL __launch_bounds__(128, 1) vm_probe_products_bf16(VM_ARGS probe_map_args a) { products<vm_bfloat16>(a); }

/* out: [64][128] = a b^T of e4m3 with 32 n columns, all in the sums of the tensor cores. In planes of 16 columns: a has
 * 64 rows, b 128. */
VM_KERNEL __launch_bounds__(128, 1) vm_probe_products_e4m3(probe_args args) {
    VM_SHARED(char, shared);
    const uint32_t first_b = 2 * args.n * 64 * 16, bytes = 3 * first_b;
    for (uint32_t i = threadIdx.x * 16; i < bytes; i += 128 * 16)
        vm_store16(shared + i, vm_load16(static_cast<const char *>(args.in) + i));
    vm_fence_async();
    __syncthreads();
    const uint64_t a = vm_matrix(shared, 128, 64 * 16), b = vm_matrix(shared + first_b, 128, 128 * 16);
    float d[16][4];
    vm_wgmma_begin();
    vm_wgmma_e4m3<16, false>(d, a, b);
    for (uint32_t i = 1; i < args.n; i++)
        vm_wgmma_e4m3<16, true>(d, vm_matrix_at(a, i * 2 * 64 * 16), vm_matrix_at(b, i * 2 * 128 * 16));
    vm_wgmma_commit();
    vm_wgmma_wait<0>();
    vm_wgmma_hold(d);
    const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < 64; i++)
        static_cast<float *>(args.out)[(row + i % 4 / 2 * 8) * 128 + i / 4 * 8 + column + i % 2] = d[i / 4][i % 4];
}
#endif

/* ---- wrong ---- */

#ifdef VM_HAS_WGMMA
/* The first block does not wait for the second one, which uses its shared memory. */
VM_PAIRS __launch_bounds__(128, 1) vm_probe_ends(VM_ARGS probe_map_args a) {
    VM_SHARED(uint64_t, barrier);
    if (threadIdx.x == 0) {
        vm_barrier_init(barrier, blockDim.x);
        vm_fence_barriers();
    }
    vm_meet_pair();
    if (vm_pair_rank() == 0) return;
    for (uint32_t i = 0; i < 32; i++) __syncthreads();
    vm_barrier_arrive_there(barrier);
    *static_cast<uint32_t *>(a.out) = 1;
}
#endif

/* out[i] = in[neighbour], one barrier short. */
VM_KERNEL vm_probe_race(probe_args a) {
    __shared__ float s[256];
    const uint32_t i = threadIdx.x;
    s[i] = ((const float *)a.in)[i];
    ((float *)a.out)[i] = s[i ^ a.n];
}
VM_KERNEL vm_probe_no_wait(probe_args a) {
    VM_SHARED(uint4, s);
    const uint32_t i = threadIdx.x;
    vm_copy_async(s + i, (const uint4 *)a.in + i, true);
    vm_copy_commit();
    vm_copy_wait<1>();
    vm_store16((uint4 *)a.out + i, s[i]);
}
/* A buffer that others may still read is filled anew. */
VM_KERNEL vm_probe_too_early(probe_args a) {
    VM_SHARED(uint4, s);
    const uint32_t i = threadIdx.x;
    s[i] = ((const uint4 *)a.in)[i];
    __syncthreads();
    const uint4 mine = s[255 - i];
    vm_copy_async(s + i, (const uint4 *)a.in + 256 + i, true);
    vm_copy_commit();
    vm_copy_wait<0>();
    vm_store16((uint4 *)a.out + i, mine);
}
VM_KERNEL vm_probe_uninitialised(probe_args a) {
    __shared__ float s[256];
    if (a.n) s[threadIdx.x] = 1; /* in the block before */
    ((float *)a.out)[threadIdx.x] = s[threadIdx.x];
}
template <typename T>
__device__ T *of_a_template() {
    __shared__ T s[256];
    return s;
}
VM_KERNEL vm_probe_uninitialised_of(probe_args a) {
    float *const s = of_a_template<float>();
    if (a.n) s[threadIdx.x] = 1;
    ((float *)a.out)[threadIdx.x] = s[threadIdx.x];
}
VM_KERNEL vm_probe_exits(probe_args a) {
    if (threadIdx.x >= a.n) return;
    __syncthreads();
}
VM_KERNEL vm_probe_two_barriers(probe_args a) {
    if (threadIdx.x < a.n)
        __syncthreads();
    else
        __syncthreads();
}
VM_KERNEL vm_probe_half_a_warp(probe_args a) {
    float v = 1;
    if (threadIdx.x % 32 < a.n) v = vm_shuffle_xor(v, 1);
    __syncthreads();
    ((float *)a.out)[threadIdx.x] = v;
}
VM_KERNEL vm_probe_mixed(probe_args a) {
    float v = 1;
    if (threadIdx.x % 32 < a.n)
        v = vm_shuffle_xor(v, 1);
    else
        __syncwarp();
    ((float *)a.out)[threadIdx.x] = v;
}
VM_KERNEL vm_probe_beside(probe_args a) {
    VM_SHARED(float, s);
    s[threadIdx.x + a.n] = 1;
}
VM_KERNEL vm_probe_misaligned(probe_args a) {
    float v[8];
    vm_load8(v, (const float *)a.in + a.n);
    vm_store8((float *)a.out, v);
}
VM_KERNEL vm_probe_not_shared(probe_args a) {
    uint32_t r[4];
    vm_ldmatrix_x4(r, (const uint4 *)a.in + threadIdx.x);
    vm_store16((uint4 *)a.out + threadIdx.x, {r[0], r[1], r[2], r[3]});
}
VM_KERNEL vm_probe_divides(probe_args a) { ((uint32_t *)a.out)[threadIdx.x] = threadIdx.x / a.n; }
