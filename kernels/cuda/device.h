/* The vocabulary of our kernels: the few operations that differ between element types and GPU generations, under one
 * name each.
 *
 * With VM_EMULATED (tests/emulator) the same sources are compiled for the CPU, one fiber per thread, so every kernel is
 * tested without a GPU. Kernels therefore use only this header, and of CUDA only threadIdx, blockIdx, blockDim,
 * gridDim, __syncthreads, __syncwarp, __shared__, __launch_bounds__, min, max and the functions of <math.h>. A kernel
 * is VM_KERNEL name(structure args) { ... }, and its name is its symbol. VM_PAIRS instead of VM_KERNEL: blocks run in
 * clusters of two; such a kernel has only dynamic shared memory. */
#ifndef VM_DEVICE_H
#define VM_DEVICE_H

#include "cuda.h"

#ifdef VM_EMULATED
#include "cuda_on_cpu.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#define VM_KERNEL extern "C" __global__ void
#define VM_PAIRS extern "C" __global__ void __cluster_dims__(2, 1, 1)
#define VM_ARGS const __grid_constant__ /* of a structure that contains a vm_tensor_map */
#define VM_DEVICE static __device__ __forceinline__
#define VM_METHOD __device__ __forceinline__ /* of a structure */

/* Storage types. Sums are in float. */
struct vm_half {
    unsigned short bits;
};
struct vm_bfloat16 {
    unsigned short bits;
};

VM_DEVICE float vm_to_float(float v) { return v; }
VM_DEVICE float vm_to_float(vm_half v) { return __half2float(__ushort_as_half(v.bits)); }
VM_DEVICE float vm_to_float(vm_bfloat16 v) { return __uint_as_float((uint32_t)v.bits << 16); }

VM_DEVICE uint32_t vm_bits_of(float v) { return __float_as_uint(v); }
VM_DEVICE float vm_float_of(uint32_t bits) { return __uint_as_float(bits); }

VM_DEVICE void vm_convert(float v, float *out) { *out = v; }
VM_DEVICE void vm_convert(float v, vm_half *out) { out->bits = __half_as_ushort(__float2half_rn(v)); }
VM_DEVICE void vm_convert(float v, vm_bfloat16 *out) { out->bits = __bfloat16_as_ushort(__float2bfloat16_rn(v)); }

/* Two numbers of 2 bytes as in a fragment: the first in the low half. */
template <typename T>
VM_DEVICE uint32_t vm_pack(float first, float second) {
    if constexpr (std::is_same<T, vm_bfloat16>::value) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
        return __bfloat16_as_ushort(pair.x) | (uint32_t)__bfloat16_as_ushort(pair.y) << 16;
    } else {
        const __half2 pair = __floats2half2_rn(first, second);
        return __half_as_ushort(pair.x) | (uint32_t)__half_as_ushort(pair.y) << 16;
    }
}

/* pair * 0 + seen: becomes and stays NaN once a number is not finite. */
template <typename T>
VM_DEVICE uint32_t vm_spoil(uint32_t seen, uint32_t pair) {
    uint32_t out;
    if constexpr (std::is_same<T, vm_bfloat16>::value) {
#if __CUDA_ARCH__ >= 800
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0), "r"(seen));
#else
        __trap(); /* the host refuses bfloat16 there */
        out = seen;
#endif
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0), "r"(seen));
    }
    return out;
}

/* Off by a few units in the last place; subnormal numbers become zero. */
VM_DEVICE float vm_exp2(float v) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
    return out;
}
/* Relative error at most 2^-11; infinite numbers give 1 and -1. */
VM_DEVICE float vm_tanh(float v) {
    float out;
    asm("tanh.approx.f32 %0, %1;" : "=f"(out) : "f"(v));
    return out;
}
VM_DEVICE float vm_reciprocal(float v) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
    return out;
}

VM_DEVICE uint4 vm_load16(const void *p) { return *static_cast<const uint4 *>(p); }
VM_DEVICE void vm_store16(void *p, uint4 v) { *static_cast<uint4 *>(p) = v; }
VM_DEVICE uint32_t vm_atomic_or(uint32_t *p, uint32_t bits) { return atomicOr(p, bits); }
/* Called by one thread of each of `blocks` blocks. Returns: whether all others have called it. Their earlier writes can
 * then be read as volatile. *arrived is 0 before the first call and after the last. */
VM_DEVICE bool vm_arrives_last(uint32_t *arrived, uint32_t blocks) {
    __threadfence();
    const bool last = atomicInc(arrived, blocks - 1) == blocks - 1;
    __threadfence();
    return last;
}

/* Starts to prefetch *p from memory into the L2 cache: a hint. */
VM_DEVICE void vm_prefetch(const void *p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

/* Sleeps about this long, at most twice as long. */
VM_DEVICE void vm_sleep(uint32_t nanoseconds) { __nanosleep(nanoseconds); }

/* The block's dynamic shared memory. The alignment is that of swizzled matrices; CUDA's usual one is as large. */
extern __shared__ __align__(1024) uint4 vm_all_shared[];
#define VM_SHARED(type, name) type *const name = reinterpret_cast<type *>(vm_all_shared)

VM_DEVICE uint32_t vm_shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

/* Copies 16 bytes into shared memory, zeros if !valid (global is not read then). Readable after vm_copy_wait and a
 * barrier; before sm_80 at once. */
VM_DEVICE void vm_copy_async(void *shared, const void *global, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(vm_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
#else
    vm_store16(shared, valid ? vm_load16(global) : make_uint4(0, 0, 0, 0));
#endif
}
VM_DEVICE void vm_copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
/* Waits until all but the last N groups that this thread committed have arrived. */
template <int N>
VM_DEVICE void vm_copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* ---- operations of a whole warp ---- */

VM_DEVICE float vm_shuffle_xor(float v, int lane_mask) { return __shfl_xor_sync(0xffffffffu, v, lane_mask); }

/* Loads four 8x8 matrices of 2-byte numbers; lane 8 m + r gives the address of row r of matrix m. r[m] of a lane holds
 * (row lane / 4, columns lane % 4 * 2 and the next) of matrix m; with _trans, of its transpose. */
VM_DEVICE void vm_ldmatrix_x4(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(vm_shared_address(row))
                 : "memory");
}
VM_DEVICE void vm_ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(vm_shared_address(row))
                 : "memory");
}

/* d += a b of 16x16 by 16x8 numbers, in the fragments of PTX's mma.m16n8k16 (row, col). */
template <typename T>
VM_DEVICE void vm_mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    constexpr bool half = std::is_same<T, vm_half>::value;
    static_assert(half || std::is_same<T, vm_bfloat16>::value, "half or bfloat16");
#if __CUDA_ARCH__ >= 800
#define VM_MMA(TYPES)                                     \
    asm("mma.sync.aligned.m16n8k16.row.col." TYPES        \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])  \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (half)
        VM_MMA("f32.f16.f16.f32");
    else
        VM_MMA("f32.bf16.bf16.f32");
#undef VM_MMA
#else
    if (!half) __trap(); /* the host refuses bfloat16 there */
    for (int k = 0; k < 2; k++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

#endif /* VM_EMULATED */

/* ---- warps that do different work, and Hopper's warpgroups (only compute capability 9.0) ---- */

#if defined(VM_EMULATED) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VM_HAS_WGMMA 1
#endif

#ifndef VM_EMULATED
/* A barrier in shared memory: a phase ends when `count` threads have arrived. A wait for a phase's parity returns at
 * once if that phase has ended; the phase before the first has parity 1. */
VM_DEVICE void vm_barrier_init(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(vm_shared_address(barrier)), "r"(count) : "memory");
}
VM_DEVICE void vm_barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(vm_shared_address(barrier)) : "memory");
}
/* Arrives, and makes the phase also wait for `bytes` bytes of vm_copy_bulk. */
VM_DEVICE void vm_barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(vm_shared_address(barrier)), "r"(bytes)
                 : "memory");
}
VM_DEVICE void vm_barrier_wait(uint64_t *barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(vm_shared_address(barrier)),
        "r"(parity)
        : "memory");
}
/* Makes this thread's writes to shared memory readable by wgmma, once others know of them. */
VM_DEVICE void vm_fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* COUNT threads, whole warps, wait for each other. id: 1 to 15. */
template <int COUNT>
VM_DEVICE void vm_meet_some(uint32_t id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

/* The first lane's v: tells the compiler that it is uniform in the warp. */
VM_DEVICE uint32_t vm_of_warp(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }

#ifdef VM_HAS_WGMMA
/* Starts to copy a multiple of 16 bytes; the barrier counts the bytes that have arrived. wgmma may read them then. */
VM_DEVICE void vm_copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     vm_shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(vm_shared_address(barrier))
                 : "memory");
}

/* The block's number in its pair: 0 or 1. */
VM_DEVICE uint32_t vm_pair_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* All threads of both blocks wait for each other. Before a block uses the other's shared memory, and before it ends. */
VM_DEVICE void vm_meet_pair() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* Makes barriers that this thread has begun visible to the other block and to copies, after vm_meet_pair. */
VM_DEVICE void vm_fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
/* Arrives at the barrier at the same place in the other block's shared memory. That orders execution, not ordinary
 * writes: they would need a release for the whole cluster, which waits for all memory. */
VM_DEVICE void vm_barrier_arrive_there(uint64_t *barrier) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(vm_shared_address(barrier)),
        "r"(vm_pair_rank() ^ 1)
        : "memory");
}
/* Starts to copy the map's box at (column, part, row). Barriers count its bytes as vm_copy_bulk's. With both, the box
 * goes to the same place in both blocks' shared memory, and each block's barrier counts it. */
VM_DEVICE void vm_copy_box(void *shared, const vm_tensor_map *map, uint32_t column, uint32_t part, uint32_t row,
                           uint64_t *barrier, bool both) {
    if (both)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(vm_shared_address(shared)),
            "l"(map), "r"(vm_shared_address(barrier)), "r"(column), "r"(part), "r"(row), "h"((unsigned short)3)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(vm_shared_address(shared)),
            "l"(map), "r"(vm_shared_address(barrier)), "r"(column), "r"(part), "r"(row)
            : "memory");
}

/* Sets the registers of each thread of the warpgroup. */
template <int COUNT>
VM_DEVICE void vm_fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
VM_DEVICE void vm_more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* Rows of 8 numbers of 2 bytes, 16 bytes each. Eight rows are adjacent; the next eight are `rows` bytes further, the
 * next 8 columns `columns` bytes further. */
VM_DEVICE uint64_t vm_matrix(const void *first, uint32_t rows, uint32_t columns) {
    return (uint64_t)(vm_shared_address(first) >> 4) | (uint64_t)(columns >> 4) << 16 | (uint64_t)(rows >> 4) << 32;
}
/* Rows of 64 numbers of 2 bytes, 128 bytes each, in swizzled order (vm_swizzled). Eight rows are 1024 bytes, at a
 * multiple of that; the next eight follow. The next 64 columns are `columns` bytes further. A product takes 16 columns,
 * from `first` on, of every row; or if transposed 16 rows. */
VM_DEVICE uint64_t vm_matrix_swizzled(const void *first, uint32_t columns) {
    return (uint64_t)(vm_shared_address(first) >> 4) | (uint64_t)(columns >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           1ull << 62;
}
/* The matrix `bytes` further, a multiple of 16. */
VM_DEVICE uint64_t vm_matrix_at(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }

/* Four numbers of e4m3, the first in the lowest byte. More than 448 becomes 448; NaN stays NaN. */
VM_DEVICE uint32_t vm_pack_e4m3(const float v[4]) {
    unsigned short low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
    return low | (uint32_t)high << 16;
}

/* Keeps the compiler from moving or retyping sums between products, which would stall them. */
template <int N>
VM_DEVICE void vm_wgmma_hold(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
template <int N>
VM_DEVICE void vm_wgmma_hold(float (&d)[2][N][4]) {
    vm_wgmma_hold(d[0]);
    vm_wgmma_hold(d[1]);
}
/* Before the first product with registers that other code has written. */
VM_DEVICE void vm_wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
VM_DEVICE void vm_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until all but the last N groups of products are done. */
template <int N>
VM_DEVICE void vm_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* d += a b of 64x16 by 16 x 8N numbers, by a warpgroup: each warp has 16 rows. d[i][n][2 * HALF + e] is row lane / 4
 * + 8 i of these and column 8 n + lane % 4 * 2 + e. b is passed transposed. N: 12 or 16. */
template <typename T, int N, int HALF>
VM_DEVICE void vm_wgmma_64(float (&d)[2][N][4], uint64_t a, uint64_t b) {
#define VM_WGMMA_D(n) \
    "+f"(d[0][n][2 * HALF]), "+f"(d[0][n][2 * HALF + 1]), "+f"(d[1][n][2 * HALF]), "+f"(d[1][n][2 * HALF + 1])
#define VM_WGMMA_D12                                                                                         \
    VM_WGMMA_D(0), VM_WGMMA_D(1), VM_WGMMA_D(2), VM_WGMMA_D(3), VM_WGMMA_D(4), VM_WGMMA_D(5), VM_WGMMA_D(6), \
        VM_WGMMA_D(7), VM_WGMMA_D(8), VM_WGMMA_D(9), VM_WGMMA_D(10), VM_WGMMA_D(11)
#define VM_WGMMA_48                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define VM_WGMMA_96(TYPES)                                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n96k16." TYPES " {" VM_WGMMA_48 "}, %48, %49, 1, 1, 1, 0, 0;" \
                 : VM_WGMMA_D12                                                                                 \
                 : "l"(a), "l"(b))
#define VM_WGMMA_128(TYPES)                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {" VM_WGMMA_48               \
                 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, " \
                 "%63}, %64, %65, 1, 1, 1, 0, 0;"                                                \
                 : VM_WGMMA_D12, VM_WGMMA_D(12), VM_WGMMA_D(13), VM_WGMMA_D(14), VM_WGMMA_D(15)  \
                 : "l"(a), "l"(b))
    static_assert(N == 12 || N == 16, "96 or 128 columns");
    constexpr bool F16 = std::is_same<T, vm_half>::value;
    if constexpr (N == 12 && F16)
        VM_WGMMA_96("f32.f16.f16");
    else if constexpr (N == 12)
        VM_WGMMA_96("f32.bf16.bf16");
    else if constexpr (F16)
        VM_WGMMA_128("f32.f16.f16");
    else
        VM_WGMMA_128("f32.bf16.bf16");
#undef VM_WGMMA_D
#undef VM_WGMMA_D12
#undef VM_WGMMA_48
#undef VM_WGMMA_96
#undef VM_WGMMA_128
}

/* d = a b, or with ADD d += a b: 64x16 by 16 x 8N numbers, by a warpgroup; each warp has 16 rows. d[n][2 * i + e] is
 * row lane / 4 + 8 i of these and column 8 n + lane % 4 * 2 + e. b is passed transposed, with ROWS as it is. N: 8, 32.
 */
template <typename T, int N, bool ROWS, bool ADD>
VM_DEVICE void vm_wgmma(float (&d)[N][4], uint64_t a, uint64_t b) {
#define VM_WGMMA_D8(n)                                                                                            \
    VM_WGMMA_D(n), VM_WGMMA_D(n + 1), VM_WGMMA_D(n + 2), VM_WGMMA_D(n + 3), VM_WGMMA_D(n + 4), VM_WGMMA_D(n + 5), \
        VM_WGMMA_D(n + 6), VM_WGMMA_D(n + 7)
#define VM_WGMMA_D(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define VM_WGMMA_32(TYPES)                                                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." TYPES                                                   \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "                                            \
                 "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, " \
                 "%31}, %32, %33, %34, 1, 1, 0, %35;"                                                              \
                 : VM_WGMMA_D8(0)                                                                                  \
                 : "l"(a), "l"(b), "n"((int)ADD), "n"((int)ROWS))
#define VM_WGMMA_128(TYPES)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16." TYPES                               \
                 " {"                                                                           \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "  \
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "  \
                 "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "  \
                 "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "  \
                 "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "  \
                 "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, " \
                 "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "     \
                 "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"                   \
                 "}, %128, %129, %130, 1, 1, 0, %131;"                                          \
                 : VM_WGMMA_D8(0), VM_WGMMA_D8(8), VM_WGMMA_D8(16), VM_WGMMA_D8(24)             \
                 : "l"(a), "l"(b), "n"((int)ADD), "n"((int)ROWS))
    static_assert(N == 8 || N == 32, "64 or 256 columns");
    constexpr bool F16 = std::is_same<T, vm_half>::value;
    if constexpr (N == 8 && F16)
        VM_WGMMA_32("f32.f16.f16");
    else if constexpr (N == 8)
        VM_WGMMA_32("f32.bf16.bf16");
    else if constexpr (F16)
        VM_WGMMA_128("f32.f16.f16");
    else
        VM_WGMMA_128("f32.bf16.bf16");
#undef VM_WGMMA_D8
#undef VM_WGMMA_32
#undef VM_WGMMA_128
}

/* The same with 64x32 by 32 x 8N numbers of e4m3, b passed transposed: a core matrix of 8 rows has 16 columns. N: 12 or
 * 16.
 *
 * The sums have fewer bits than float32's. As measured on Hopper (DeepSeek-V3's report, 3.5.2; SageAttention2, 3.2),
 * the products and d are shifted to the largest exponent among them, what lies below its 13th bit of fraction is cut
 * off, and the sum keeps 13 bits of fraction too. */
template <int N, bool ADD>
VM_DEVICE void vm_wgmma_e4m3(float (&d)[N][4], uint64_t a, uint64_t b) {
    static_assert(N == 12 || N == 16, "96 or 128 columns");
#define VM_WGMMA_D4(n) VM_WGMMA_D(n), VM_WGMMA_D(n + 1), VM_WGMMA_D(n + 2), VM_WGMMA_D(n + 3)
#define VM_WGMMA_48                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47"
    if constexpr (N == 12)
        asm volatile("wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {" VM_WGMMA_48 "}, %48, %49, %50, 1, 1;"
                     : VM_WGMMA_D4(0), VM_WGMMA_D4(4), VM_WGMMA_D4(8)
                     : "l"(a), "l"(b), "n"((int)ADD));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" VM_WGMMA_48
                     ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                     "%64, %65, %66, 1, 1;"
                     : VM_WGMMA_D4(0), VM_WGMMA_D4(4), VM_WGMMA_D4(8), VM_WGMMA_D4(12)
                     : "l"(a), "l"(b), "n"((int)ADD));
#undef VM_WGMMA_D
#undef VM_WGMMA_D4
#undef VM_WGMMA_48
}
#endif
#endif

/* A place in a ring, and the parity of its round. */
template <int COUNT>
struct vm_wgmma_turn {
    uint32_t at = 0, parity = 0;
    VM_METHOD void next() {
        if (++at == COUNT) at = 0, parity ^= 1;
    }
};

/* Rounds to nearest, ties to even; overflow is infinite; NaN stays NaN. */
template <typename T>
VM_DEVICE T vm_from_float(float v) {
    T out;
    vm_convert(v, &out);
    return out;
}

/* Where byte `at` of a matrix lies in swizzled order: 16-byte vector v of row r at v ^ (r & 7), rows of 128 bytes. */
VM_DEVICE uint32_t vm_swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

/* The inverse of vm_pack. */
template <typename T>
VM_DEVICE void vm_unpack(float v[2], uint32_t pair) {
    T number;
    number.bits = static_cast<uint16_t>(pair);
    v[0] = vm_to_float(number);
    number.bits = static_cast<uint16_t>(pair >> 16);
    v[1] = vm_to_float(number);
}

/* Eight numbers at an address aligned to 16 bytes. */
template <typename T>
VM_DEVICE void vm_load8(float v[8], const T *p) {
    const uint4 u = vm_load16(p);
    if constexpr (sizeof(T) == 4) {
        const uint4 w = vm_load16(p + 4);
        const uint32_t words[8] = {u.x, u.y, u.z, u.w, w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = vm_float_of(words[i]);
    } else {
        vm_unpack<T>(v, u.x);
        vm_unpack<T>(v + 2, u.y);
        vm_unpack<T>(v + 4, u.z);
        vm_unpack<T>(v + 6, u.w);
    }
}
template <typename T>
VM_DEVICE void vm_store8(T *p, const float v[8]) {
    if constexpr (sizeof(T) == 4) {
        vm_store16(p, {vm_bits_of(v[0]), vm_bits_of(v[1]), vm_bits_of(v[2]), vm_bits_of(v[3])});
        vm_store16(p + 4, {vm_bits_of(v[4]), vm_bits_of(v[5]), vm_bits_of(v[6]), vm_bits_of(v[7])});
    } else {
        vm_store16(p, {vm_pack<T>(v[0], v[1]), vm_pack<T>(v[2], v[3]), vm_pack<T>(v[4], v[5]), vm_pack<T>(v[6], v[7])});
    }
}

#endif
