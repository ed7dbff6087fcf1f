/* Vectors of VM_LANES floats (16, 8 or 4), in the compiler's vector extension. */
#ifndef VM_VECTORS_H
#define VM_VECTORS_H

#include "../cpu.h"

#define VM_SUBS (VM_BLOCK / VM_LANES) /* vectors in a block */

typedef float vf __attribute__((vector_size(4 * VM_LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VM_LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * VM_LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * VM_LANES), aligned(2), may_alias));

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif
#define UNROLL _Pragma("GCC unroll 16")

/* v - 0 rather than v + 0: the compiler may drop only the first (-0 + 0 is 0). */
INLINE vf splat(float v) { return v - (vf){0}; }
INLINE vf at(const float *p) { return *(const vf *)p; }
INLINE void put(float *p, vf v) { *(vf *)p = v; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vu pick_bits(vi mask, vu yes, vu no) { return (yes & (vu)mask) | (no & ~(vu)mask); }

/* 16 bits to 32, and the lower half of 32. One instruction; the compiler would use several. */
#ifndef VM_WIDEN
#define VM_WIDEN(HALF) __builtin_convertvector(HALF, vu)
#define VM_NARROW(BITS) __builtin_convertvector(BITS, vh)
#endif

/* Rounds to nearest, ties to even; NaN stays. Returns: the bits of bfloat16, in lanes of 32 bits. */
INLINE vu round_to_bfloat16(vf x) {
    const vu bits = (vu)x, size = bits & 0x7fffffff;
    return pick_bits((vi)(size > 0x7f800000), bits | 0x400000, bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#endif
