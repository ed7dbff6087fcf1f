/* Operations on pixels that several kernels share. */
#ifndef VM_PIXELS_H
#define VM_PIXELS_H

#include <math.h>

#include <type_traits>

#include "device.h"

/* v / (1 + e^-v), which is h + h tanh h for h = v / 2.
 *
 * vm_tanh has a relative error of 2^-11, so h tanh h is off by less than |v| 2^-12. That suffices for bfloat16: storing
 * rounds numbers near v by up to |v| 2^-9. For float16 (|v| 2^-12) it would be another rounding. So float16 and float32
 * compute SiLU exactly to some units of float's last place, with two special functions instead of one. If e^-v is so
 * small that exp2 gives 0, it does not change the 1. */
template <typename T>
VM_DEVICE float vm_silu(float v) {
    if constexpr (std::is_same<T, vm_bfloat16>::value) {
        const float h = 0.5f * v;
        return fmaf(h, vm_tanh(h), h);
    }
    return v * vm_reciprocal(1 + vm_exp2(v * -(float)M_LOG2E));
}

template <typename T>
VM_DEVICE float vm_activated(uint32_t act, float v) {
    if (act == VM_ACT_SILU) return vm_silu<T>(v);
    if (act == VM_ACT_RELU) return v < 0 ? 0 : v;
    if (act == VM_ACT_BOUND) return 3 - 6 * vm_reciprocal(1 + vm_exp2(v * (float)(2 * M_LOG2E / 3)));
    return v;
}

/* Returns: the row or column that stands for `at`: only one beyond the first or the last is mirrored. */
VM_DEVICE int32_t vm_mirrored(int32_t at, int32_t count) {
    if (at == -1) return min(1, count - 1);
    return at == count ? max(count - 2, 0) : at;
}

/* Merges mean and squared deviations of other numbers (b) into those of n numbers. share: b's part of all. */
VM_DEVICE void vm_merge_sums(float n, float share, float &mean, float &m2, float b_mean, float b_m2) {
    const float delta = b_mean - mean;
    mean = fmaf(delta, share, mean);
    m2 += fmaf(delta * delta, n * share, b_m2);
}

/* Reads one number of the user's pixels. */
template <typename Args>
VM_DEVICE float vm_user_number(const Args &a, size_t pixel, uint32_t c) {
    const size_t at = c * a.x_plane + pixel;
    switch (a.format) {
    case VM_F32_NCHW: return static_cast<const float *>(a.x)[at];
    case VM_F16_NCHW: return vm_to_float(static_cast<const vm_half *>(a.x)[at]);
    case VM_BF16_NCHW: return vm_to_float(static_cast<const vm_bfloat16 *>(a.x)[at]);
    default: /* v / 127.5 - 1, but the subtraction uses whole numbers, and is exact */
        return (2 * static_cast<const uint8_t *>(a.x)[pixel * a.x_c + c] - 255) * (1 / 255.0f);
    }
}

/* Writes one number into the user's pixels. plane: numbers from channel to channel. Returns: the number as stored or,
 * for bytes, which cannot be infinite, the number before rounding: the caller checks it for overflow. */
template <typename Args>
VM_DEVICE float vm_store_number(const Args &a, size_t plane, size_t pixel, uint32_t c, float v) {
    const size_t at = c * plane + pixel;
    v = vm_clamped(a.clamp, c, v);
    switch (a.format) {
    case VM_F32_NCHW: static_cast<float *>(a.y)[at] = v; return v;
    case VM_F16_NCHW: return vm_to_float(static_cast<vm_half *>(a.y)[at] = vm_from_float<vm_half>(v));
    case VM_BF16_NCHW: return vm_to_float(static_cast<vm_bfloat16 *>(a.y)[at] = vm_from_float<vm_bfloat16>(v));
    default: /* NaN becomes 0 */
        static_cast<uint8_t *>(a.y)[pixel * a.y_c + c] = (uint8_t)rintf(fminf(fmaxf((v + 1) * 127.5f, 0), 255));
        return v;
    }
}

/* Eight channels in memory format. Kernels hold these while loads are in flight, and convert them to floats afterwards:
 * halves take half the registers, and no load waits for an earlier conversion. */
template <typename T>
struct vm_eight {
    uint4 words[sizeof(T) / 2];
};

template <typename T>
VM_DEVICE vm_eight<T> vm_take8(const T *p) {
    vm_eight<T> e;
#pragma unroll
    for (int i = 0; i < (int)sizeof(T) / 2; i++) e.words[i] = vm_load16(p + i * 16 / sizeof(T));
    return e;
}

template <typename T>
VM_DEVICE void vm_open8(float v[8], const vm_eight<T> &e) {
    vm_load8(v, reinterpret_cast<const T *>(e.words));
}

#endif
