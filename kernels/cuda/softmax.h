/* The online softmax of the kernels of attention: LANES neighbouring lanes of several warps share a row of scores. */
#ifndef VM_SOFTMAX_H
#define VM_SOFTMAX_H

#include <math.h>

#include "device.h"

/* For each of a thread's rows of scores: the maximum times scale, and the thread's own share of the sum. */
template <int ROWS>
struct vm_rows {
    int row[ROWS];
    float top[ROWS], sum[ROWS];
};

/* Before the first tile. */
template <int ROWS>
VM_DEVICE vm_rows<ROWS> vm_no_rows(int first, int step) {
    vm_rows<ROWS> r;
#pragma unroll
    for (int i = 0; i < ROWS; i++) r.row[i] = first + i * step, r.top[i] = -INFINITY, r.sum[i] = 0;
    return r;
}

/* Writes the maxima of warp `warp`'s scores to tops [warps][queries] in shared memory. */
template <int LANES, int ROWS, int COLUMNS>
VM_DEVICE void vm_leave_tops(const float (&s)[ROWS][COLUMNS], const vm_rows<ROWS> &r, float *tops, int queries,
                             int warp) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float top = s[i][0];
#pragma unroll
        for (int j = 1; j < COLUMNS; j++) top = fmaxf(top, s[i][j]);
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2) top = fmaxf(top, vm_shuffle_xor(top, mask));
        if (threadIdx.x % LANES == 0) tops[warp * queries + r.row[i]] = top;
    }
}

/* After a barrier: turns the tile's scores into probabilities * 2^shift, and updates maxima and sums. keep: the factors
 * that the rows' earlier probabilities still get. NaN or a maximum of +Inf makes the row NaN; if all scores are -Inf
 * the sum stays 0. */
template <int WARPS, int ROWS, int COLUMNS>
VM_DEVICE void vm_exponents(float (&s)[ROWS][COLUMNS], vm_rows<ROWS> &r, float (&keep)[ROWS], float scale, float shift,
                            const float *tops, int queries) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float top = tops[r.row[i]];
#pragma unroll
        for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w * queries + r.row[i]]);
        top = fmaxf(r.top[i], top * scale);
        const float base = top == -INFINITY ? 0 : top;
        keep[i] = vm_exp2(r.top[i] - base);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) sum += s[i][j] = vm_exp2(fmaf(s[i][j], scale, shift - base));
        r.sum[i] = fmaf(r.sum[i], keep[i], sum);
        r.top[i] = top;
    }
}

/* Writes every warp's share of the rows' sums to sums [warps][queries]. */
template <int LANES, int ROWS>
VM_DEVICE void vm_leave_sums(const vm_rows<ROWS> &r, float *sums, int queries, int warp) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float sum = r.sum[i];
#pragma unroll
        for (int mask = 1; mask < LANES; mask *= 2) sum += vm_shuffle_xor(sum, mask);
        if (threadIdx.x % LANES == 0) sums[warp * queries + r.row[i]] = sum;
    }
}

typedef uint32_t __attribute__((may_alias)) vm_word;

template <typename T>
VM_DEVICE void vm_store_pair(T *to, float a, float b) {
    *reinterpret_cast<vm_word *>(to) = vm_pack<T>(a, b);
}

#endif
