/* What kernels/cuda/device.h needs of CUDA, on a CPU: a block's threads are fibers that run one at a time (block.cc).
 *
 * Made to show mistakes, not to be fast:
 * - threads run in an order drawn anew at every barrier, so that a missing one gives wrong numbers;
 * - barriers and warp operations that not all threads reach, at the same line, are faults and not hangs;
 * - shared memory holds NaNs when a block begins, and lies against memory that may not be touched;
 * - an asynchronous copy arrives at once or when it is waited for, as chance has it;
 * - a block that uses the shared memory of one that has ended is a fault;
 * - vectors and rows that are not aligned are faults. */
#ifndef VM_CUDA_ON_CPU_H
#define VM_CUDA_ON_CPU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <type_traits>

#include "cuda.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* One block at a time: its shared memory is static. build.py puts all that is static in a kernel's object into the
 * section vm_shared (an attribute would not do: the compiler forgets it in templates), and every block fills that with
 * NaNs. */
#define __shared__ static

typedef void vm_kernel, vm_kernel_of_pairs; /* build.py finds the kernels by these words */
#define VM_KERNEL extern "C" vm_kernel
#define VM_PAIRS extern "C" vm_kernel_of_pairs
#define VM_ARGS const
#define VM_DEVICE static inline
#define VM_METHOD inline

struct dim3 {
    uint32_t x, y, z;
};
typedef dim3 uint3;
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
extern uint3 threadIdx, blockIdx; /* of the fiber that runs */
extern dim3 blockDim, gridDim;

using std::max;
using std::min;

/* block.cc */
struct vm_place {
    const char *file;
    int line;
};
[[noreturn]] void vm_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));
void vm_meet_block(vm_place at);
/* Waits until all 32 lanes of the warp have called it; then `act` is called once, with the pointers `mine` of all. */
void vm_meet_warp(vm_place at, void *mine, void (*act)(void *const lanes[32]));
/* The same for the 128 threads of a warpgroup. */
void vm_meet_warpgroup(vm_place at, void *mine, void (*act)(void *const lanes[128]));
/* Waits until `count` threads have called it with this id. */
void vm_meet_count(vm_place at, uint32_t id, uint32_t count);
uint32_t vm_lane();
void *vm_dynamic_shared();
bool vm_is_shared(const void *p, size_t bytes);
void vm_copy_later(void *shared, const void *global); /* global NULL: zeros */
void vm_copy_close();
void vm_copy_finish(int but);

#define VM_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE() /* of the call */
#define VM_SHARED(type, name) type *const name = static_cast<type *>(vm_dynamic_shared())

static inline void __syncthreads(VM_PLACE) { vm_meet_block({file, line}); }
static inline void __syncwarp(VM_PLACE) {
    vm_meet_warp({file, line}, nullptr, [](void *const[32]) {});
}

/* ---- numbers ---- */

struct vm_half {
    uint16_t bits;
};
struct vm_bfloat16 {
    uint16_t bits;
};

static inline uint32_t vm_bits_of(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    return u;
}
static inline float vm_float_of(uint32_t u) {
    float v;
    memcpy(&v, &u, 4);
    return v;
}

static inline float vm_to_float(float v) { return v; }
static inline float vm_to_float(vm_bfloat16 v) { return vm_float_of((uint32_t)v.bits << 16); }
static inline float vm_to_float(vm_half v) {
    const uint32_t sign = (uint32_t)(v.bits & 0x8000) << 16, rest = (uint32_t)(v.bits & 0x7fff) << 13;
    /* The exponent's bias is put right by a product, which is right for subnormal numbers too. */
    const float value = (v.bits & 0x7c00) == 0x7c00 ? vm_float_of(rest | 0x7f800000) : vm_float_of(rest) * 0x1p112f;
    return vm_float_of(sign | vm_bits_of(value));
}

static inline void vm_convert(float v, float *out) { *out = v; }
static inline void vm_convert(float v, vm_bfloat16 *out) {
    const uint32_t u = vm_bits_of(v);
    out->bits = v != v ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline void vm_convert(float v, vm_half *out) {
    const uint32_t u = vm_bits_of(v), size = u & 0x7fffffff, sign = u >> 16 & 0x8000;
    uint32_t bits;
    if (size > 0x7f800000) {
        out->bits = 0x7fff;
        return;
    }
    if (size >= 0x477ff000) /* 65520 and more */
        bits = 0x7c00;
    else if (size >= 0x38800000) /* normal: round the 13 bits that go */
        bits = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    else /* subnormal: an addition rounds at 2^-24 */
        bits = vm_bits_of(vm_float_of(size) + 0.5f) - 0x3f000000;
    out->bits = (uint16_t)(sign | bits);
}

template <typename T>
static inline uint32_t vm_pack(float first, float second) {
    T a, b;
    vm_convert(first, &a);
    vm_convert(second, &b);
    return a.bits | (uint32_t)b.bits << 16;
}

template <typename T>
static inline uint32_t vm_spoil(uint32_t seen, uint32_t pair) {
    float v[2];
    for (int i = 0; i < 2; i++)
        v[i] = vm_to_float(T{(uint16_t)(pair >> 16 * i)}) * 0 + vm_to_float(T{(uint16_t)(seen >> 16 * i)});
    return vm_pack<T>(v[0], v[1]);
}

/* e4m3: 4 bits of exponent, 3 of fraction, no infinities; the exponent's bias is put right as for a half. */
static inline float vm_of_e4m3(uint8_t bits) {
    const float value =
        (bits & 0x7f) == 0x7f ? vm_float_of(0x7fc00000) : vm_float_of((uint32_t)(bits & 0x7f) << 20) * 0x1p120f;
    return bits & 0x80 ? -value : value;
}
static inline uint32_t vm_pack_e4m3(const float v[4]) {
    uint32_t pack = 0;
    for (int i = 0; i < 4; i++) pack |= (uint32_t)vm_to_e4m3(v[i]) << 8 * i;
    return pack;
}

static inline float vm_exp2(float v) { return exp2f(v); }
/* Off by up to the 2^-11 that a GPU's may be. */
static inline float vm_tanh(float v) {
    const float t = tanhf(v);
    return t != t ? t : vm_float_of((vm_bits_of(t) + 0x1000) & ~0x1fffu);
}
static inline float vm_reciprocal(float v) { return 1.0f / v; }

/* ---- memory ---- */

static inline void vm_check_aligned(const void *p, const char *what) {
    if ((uintptr_t)p % 16) vm_fault("%s: %p is not aligned to 16 bytes", what, p);
}
static inline uint4 vm_load16(const void *p) {
    vm_check_aligned(p, "vector load");
    uint4 v;
    memcpy(&v, p, 16);
    return v;
}
static inline void vm_store16(void *p, uint4 v) {
    vm_check_aligned(p, "vector store");
    memcpy(p, &v, 16);
}

static inline uint32_t vm_atomic_or(uint32_t *p, uint32_t bits) {
    const uint32_t old = *p;
    *p |= bits;
    return old;
}

static inline bool vm_arrives_last(uint32_t *arrived, uint32_t blocks) {
    const bool last = *arrived == blocks - 1;
    *arrived = last ? 0 : *arrived + 1;
    return last;
}

/* It must be memory that can be read. */
static inline void vm_sleep(uint32_t) {}
static inline void vm_prefetch(const void *p) { (void)*(const volatile char *)p; }

static inline void vm_copy_async(void *shared, const void *global, bool valid) {
    vm_check_aligned(shared, "copy to shared memory");
    if (valid) vm_check_aligned(global, "copy from global memory");
    if (!vm_is_shared(shared, 16)) vm_fault("asynchronous copy to %p, which is not shared memory", shared);
    vm_copy_later(shared, valid ? global : nullptr);
}
static inline void vm_copy_commit() { vm_copy_close(); }
template <int N>
static inline void vm_copy_wait() {
    vm_copy_finish(N);
}

/* ---- warps ---- */

static inline float vm_shuffle_xor(float v, int lane_mask, VM_PLACE) {
    struct lent {
        float v, out;
        int mask;
    } mine = {v, 0, lane_mask};
    vm_meet_warp({file, line}, &mine, [](void *const lanes[32]) {
        for (int i = 0; i < 32; i++) {
            lent *const l = (lent *)lanes[i];
            const int from = i ^ l->mask;
            if (from < 0 || from > 31) vm_fault("shuffle from lane %d", from);
            l->out = ((lent *)lanes[from])->v;
        }
    });
    return mine.out;
}

struct vm_ldmatrix_lent {
    uint32_t *out;
    const uint16_t *row;
};
template <bool transposed>
static inline void vm_ldmatrix_act(void *const lanes[32]) {
    for (int i = 0; i < 32; i++) {
        const void *row = ((vm_ldmatrix_lent *)lanes[i])->row;
        vm_check_aligned(row, "row of a matrix");
        if (!vm_is_shared(row, 16)) vm_fault("ldmatrix from %p, which is not shared memory", row);
    }
    for (int i = 0; i < 32; i++)
        for (int m = 0; m < 4; m++) {
            uint32_t pair[2];
            for (int j = 0; j < 2; j++) {
                const int r = transposed ? i % 4 * 2 + j : i / 4, c = transposed ? i / 4 : i % 4 * 2 + j;
                memcpy(&pair[j], ((vm_ldmatrix_lent *)lanes[m * 8 + r])->row + c, 2);
                pair[j] &= 0xffff;
            }
            ((vm_ldmatrix_lent *)lanes[i])->out[m] = pair[0] | pair[1] << 16;
        }
}
static inline void vm_ldmatrix_x4(uint32_t r[4], const void *row, VM_PLACE) {
    vm_ldmatrix_lent mine = {r, (const uint16_t *)row};
    vm_meet_warp({file, line}, &mine, vm_ldmatrix_act<false>);
}
static inline void vm_ldmatrix_x4_trans(uint32_t r[4], const void *row, VM_PLACE) {
    vm_ldmatrix_lent mine = {r, (const uint16_t *)row};
    vm_meet_warp({file, line}, &mine, vm_ldmatrix_act<true>);
}

struct vm_mma_lent {
    float *d;
    const uint32_t *a, *b;
};
/* Fragments as PTX lays them out for mma.m16n8k16: lane = 4 * group + t. Products are exact; each sum is rounded. */
template <typename T>
static inline void vm_mma_act(void *const lanes[32]) {
    typedef float row __attribute__((vector_size(32))); /* 8 columns */
    float a[16][16];
    row b[16], d[16];
    const auto number = [](uint32_t pair, int j) { return vm_to_float(T{(uint16_t)(pair >> 16 * j)}); };
    for (int i = 0; i < 32; i++) {
        const vm_mma_lent *const l = (vm_mma_lent *)lanes[i];
        const int group = i / 4, t = i % 4 * 2;
        for (int j = 0; j < 2; j++) {
            for (int part = 0; part < 4; part++) a[group + part % 2 * 8][t + j + part / 2 * 8] = number(l->a[part], j);
            for (int part = 0; part < 2; part++) b[t + j + part * 8][group] = number(l->b[part], j);
            for (int part = 0; part < 2; part++) d[group + part * 8][t + j] = l->d[part * 2 + j];
        }
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) d[i] += a[i][k] * b[k];
    for (int i = 0; i < 32; i++)
        for (int part = 0; part < 4; part++)
            ((vm_mma_lent *)lanes[i])->d[part] = d[i / 4 + part / 2 * 8][i % 4 * 2 + part % 2];
}
template <typename T>
static inline void vm_mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2], VM_PLACE) {
    vm_mma_lent mine = {d, a, b};
    vm_meet_warp({file, line}, &mine, vm_mma_act<T>);
}

/* ---- warps that do different work, and warpgroups ---- */

/* block.cc: a barrier is its count, how many are still to arrive, and the parity of the phase under way. */
void vm_barrier_begin(uint64_t *barrier, uint32_t count);
void vm_barrier_here(uint64_t *barrier, uint32_t bytes); /* and expects so many more bytes */
/* expected: the barrier must already expect the bytes. */
void vm_bulk_later(std::function<void()> copy, uint32_t bytes, uint64_t *barrier, bool expected);
void vm_barrier_until(vm_place at, uint64_t *barrier, uint32_t parity);
/* block.cc: does work(what) now or when the warpgroup waits for it, as chance has it, one after the other. */
void vm_product_later(void (*work)(const void *what), const void *what, size_t bytes);
void vm_product_commit();
void vm_product_finish(int but);

/* Pairs of blocks. vm_there: the same place in the shared memory of block `rank`. */
struct vm_tensor_map;
uint32_t vm_pair_rank();
void vm_meet_both(vm_place at);
void *vm_there(const void *p, uint32_t rank);
void vm_copy_box(void *shared, const vm_tensor_map *map, uint32_t column, uint32_t part, uint32_t row,
                 uint64_t *barrier, bool both); /* tensor.cc */

static inline void vm_meet_pair(VM_PLACE) { vm_meet_both({file, line}); }
static inline void vm_fence_barriers() {}
static inline void vm_barrier_arrive_there(uint64_t *barrier) {
    vm_barrier_here((uint64_t *)vm_there(barrier, vm_pair_rank() ^ 1), 0);
}
static inline void vm_barrier_init(uint64_t *barrier, uint32_t count) { vm_barrier_begin(barrier, count); }
static inline void vm_barrier_arrive(uint64_t *barrier) { vm_barrier_here(barrier, 0); }
static inline void vm_barrier_expect(uint64_t *barrier, uint32_t bytes) { vm_barrier_here(barrier, bytes); }
static inline void vm_copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *barrier) {
    vm_check_aligned(shared, "bulk copy to shared memory");
    vm_check_aligned(global, "bulk copy from global memory");
    if (bytes % 16 || !vm_is_shared(shared, bytes)) vm_fault("bulk copy of %u bytes to %p", bytes, shared);
    vm_bulk_later([=] { memcpy(shared, global, bytes); }, bytes, barrier, true);
}
static inline void vm_barrier_wait(uint64_t *barrier, uint32_t parity, VM_PLACE) {
    vm_barrier_until({file, line}, barrier, parity);
}
static inline void vm_fence_async() {}
static inline uint32_t vm_of_warp(uint32_t v) { return v; }
template <int COUNT>
static inline void vm_meet_some(uint32_t id, VM_PLACE) {
    vm_meet_count({file, line}, id, COUNT);
}
template <int COUNT>
static inline void vm_fewer_registers() {}
template <int COUNT>
static inline void vm_more_registers() {}

static inline uint64_t vm_matrix(const void *first, uint32_t rows, uint32_t columns) {
    vm_check_aligned(first, "matrix");
    if (rows % 16 || columns % 16) vm_fault("a matrix whose rows lie %u and columns %u bytes apart", rows, columns);
    const uint64_t at = (uint64_t)((const char *)first - (const char *)vm_dynamic_shared());
    return at >> 4 | (uint64_t)(columns >> 4) << 16 | (uint64_t)(rows >> 4) << 32;
}
static inline uint64_t vm_matrix_swizzled(const void *first, uint32_t columns) {
    return vm_matrix(first, 1024, columns) | 1ull << 62;
}
static inline uint64_t vm_matrix_at(uint64_t matrix, uint32_t bytes) {
    if (bytes % 16) vm_fault("a matrix %u bytes further", bytes);
    return matrix + (bytes >> 4);
}
template <int N>
static inline void vm_wgmma_hold(float (&)[N][4]) {}
template <int N>
static inline void vm_wgmma_hold(float (&)[2][N][4]) {}
static inline void vm_wgmma_begin() {}
static inline void vm_wgmma_commit(VM_PLACE) {
    vm_meet_warpgroup({file, line}, nullptr, [](void *const[128]) { vm_product_commit(); });
}
template <int N>
static inline void vm_wgmma_wait(VM_PLACE) {
    vm_meet_warpgroup({file, line}, nullptr, [](void *const[128]) { vm_product_finish(N); });
}

/* Where byte c of row r of a matrix lies that is passed transposed, without swizzling. */
static inline const uint8_t *vm_matrix_byte(uint64_t matrix, uint32_t r, uint32_t c) {
    const uint32_t further = (matrix >> 32 & 0x3fff) << 4, columns = (matrix >> 16 & 0x3fff) << 4;
    const size_t byte = ((matrix & 0x3fff) << 4) + r / 8 * further + r % 8 * 16 + c / 16 * columns + c % 16;
    const uint8_t *const at = (const uint8_t *)vm_dynamic_shared() + byte;
    if (matrix >> 62 || !vm_is_shared(at, 1)) vm_fault("wgmma from %p, which is not shared memory", (const void *)at);
    return at;
}

/* Number (r, c) of a matrix that is passed transposed, or with `rows` as it is. */
template <typename T>
static inline float vm_matrix_number(uint64_t matrix, uint32_t r, uint32_t c, bool rows) {
    const uint32_t further = (matrix >> 32 & 0x3fff) << 4, columns = (matrix >> 16 & 0x3fff) << 4;
    const bool swizzled = matrix >> 62;
    size_t byte = (matrix & 0x3fff) << 4;
    if (rows) std::swap(r, c);
    if (!swizzled)
        byte += r / 8 * further + r % 8 * 16 + c / 8 * columns + c % 8 * 2;
    else
        byte += r / 8 * further + r % 8 * 128 + c / 64 * columns + c % 64 * 2;
    if (swizzled) byte ^= byte / 128 % 8 * 16;
    const char *const at = (const char *)vm_dynamic_shared() + byte;
    if (!vm_is_shared(at, 2)) vm_fault("wgmma from %p, which is not shared memory", at);
    T v;
    memcpy(&v, at, 2);
    return vm_to_float(v);
}

/* What the lanes of a warpgroup lend: the first of their sums. */
struct vm_wgmma_lent {
    float *d;
    uint64_t a, b;
};
struct vm_wgmma_work {
    float *d[128];
    uint64_t a, b;
};
template <int N>
struct vm_columns { /* 8 N, or more */
    typedef float row __attribute__((vector_size(512)));
};
template <>
struct vm_columns<8> {
    typedef float row __attribute__((vector_size(256)));
};
template <>
struct vm_columns<32> {
    typedef float row __attribute__((vector_size(1024)));
};
/* place(m, n): which of a lane's sums has row m and column n. Products are exact; each sum is rounded. */
template <typename T, int N, bool ROWS, bool ADD, int (*place)(int, int)>
static inline void vm_wgmma_now(const void *what) {
    const vm_wgmma_work *const work = (const vm_wgmma_work *)what;
    typedef typename vm_columns<N>::row row;
    row b[16] = {};
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < 8 * N; n++) b[k][n] = vm_matrix_number<T>(work->b, (uint32_t)n, (uint32_t)k, ROWS);
    for (int m = 0; m < 64; m++) {
        row sum = {};
        const auto number = [&](int n) -> float & { return work->d[m / 16 * 32 + m % 8 * 4 + n % 8 / 2][place(m, n)]; };
        for (int n = 0; ADD && n < 8 * N; n++) sum[n] = number(n);
        for (uint32_t k = 0; k < 16; k++) sum += vm_matrix_number<T>(work->a, (uint32_t)m, k, false) * b[k];
        for (int n = 0; n < 8 * N; n++) number(n) = sum[n];
    }
}
template <void (*now)(const void *)>
static inline void vm_wgmma_begin_of(float *d, uint64_t a, uint64_t b, vm_place at) {
    vm_wgmma_lent mine = {d, a, b};
    vm_meet_warpgroup(at, &mine, [](void *const lanes[128]) {
        vm_wgmma_work work;
        const vm_wgmma_lent *const first = (vm_wgmma_lent *)lanes[0];
        work.a = first->a, work.b = first->b;
        for (int i = 0; i < 128; i++) {
            const vm_wgmma_lent *const l = (vm_wgmma_lent *)lanes[i];
            if (l->a != work.a || l->b != work.b) vm_fault("a warpgroup multiplies different matrices");
            work.d[i] = l->d;
        }
        vm_product_later(now, &work, sizeof work);
    });
}
template <int N, int HALF>
static inline int vm_wgmma_64_place(int m, int n) {
    return (m / 8 % 2 * N + n / 8) * 4 + 2 * HALF + n % 2;
}
template <typename T, int N, int HALF>
static inline void vm_wgmma_64(float (&d)[2][N][4], uint64_t a, uint64_t b, VM_PLACE) {
    vm_wgmma_begin_of<vm_wgmma_now<T, N, false, true, vm_wgmma_64_place<N, HALF>>>(&d[0][0][0], a, b, {file, line});
}
static inline int vm_wgmma_place(int m, int n) { return n / 8 * 4 + m / 8 % 2 * 2 + n % 2; }
template <typename T, int N, bool ROWS, bool ADD>
static inline void vm_wgmma(float (&d)[N][4], uint64_t a, uint64_t b, VM_PLACE) {
    vm_wgmma_begin_of<vm_wgmma_now<T, N, ROWS, ADD, vm_wgmma_place>>(&d[0][0], a, b, {file, line});
}

/* e4m3's products with the tensor cores' short sums (vm_wgmma_e4m3 in device.h). quantum: the last place of 13 bits of
 * fraction at the largest exponent, that of a product being its factors' exponents' sum; everything is cut off there,
 * toward zero, and so is the sum. Numbers of a GPU that are cut off otherwise differ by at most a quantum each. NaN
 * makes NaN. */
template <int N, bool ADD>
static inline void vm_wgmma_e4m3_now(const void *what) {
    enum { K = 32, M = 64 };
    const vm_wgmma_work *const work = (const vm_wgmma_work *)what;
    typedef float eight __attribute__((vector_size(32))); /* columns */
    typedef int32_t whole __attribute__((vector_size(32)));
    const auto floor2 = [](float v) { return vm_float_of(vm_bits_of(v) & 0x7f800000); };
    float a[M][K], a_floor[M][K];
    for (uint32_t m = 0; m < M; m++)
        for (uint32_t k = 0; k < K; k++) {
            a[m][k] = vm_of_e4m3(*vm_matrix_byte(work->a, m, k));
            a_floor[m][k] = floor2(a[m][k]);
        }
    for (int first = 0; first < 8 * N; first += 8) {
        eight b[K], b_floor[K];
        for (uint32_t k = 0; k < K; k++)
            for (int n = 0; n < 8; n++) {
                b[k][n] = vm_of_e4m3(*vm_matrix_byte(work->b, (uint32_t)(first + n), k));
                b_floor[k][n] = floor2(b[k][n]);
            }
        for (int m = 0; m < M; m++) {
            const auto number = [&](int n) -> float & {
                return work->d[m / 16 * 32 + m % 8 * 4 + n / 2][vm_wgmma_place(m, first + n)];
            };
            eight d = {}, largest = {}, exact = {};
            for (int n = 0; ADD && n < 8; n++) d[n] = number(n), largest[n] = floor2(d[n]);
            for (uint32_t k = 0; k < K; k++) {
                const eight size = a_floor[m][k] * b_floor[k];
                largest = size > largest ? size : largest;
                exact += a[m][k] * b[k];
            }
            largest = largest > 0x1p-100f ? largest : eight{} + 0x1p-100f;
            const eight quantum = largest * 0x1p-13f, inverse = 0x1p13f / largest;
            whole sum = __builtin_convertvector(d * inverse, whole);
            for (uint32_t k = 0; k < K; k++) sum += __builtin_convertvector(a[m][k] * b[k] * inverse, whole);
            for (int n = 0; n < 8; n++) { /* a sum has at most 20 bits: the float is exact */
                const float kept = vm_float_of(vm_bits_of((float)sum[n]) & ~0x3ffu) * quantum[n];
                number(n) = exact[n] + d[n] != exact[n] + d[n] ? NAN : kept;
            }
        }
    }
}
template <int N, bool ADD>
static inline void vm_wgmma_e4m3(float (&d)[N][4], uint64_t a, uint64_t b, VM_PLACE) {
    vm_wgmma_begin_of<vm_wgmma_e4m3_now<N, ADD>>(&d[0][0], a, b, {file, line});
}

#endif
