/* Tensors of weights in the layout of the GPU's passes, made on the host one at a time:
 *
 *   convolution   [out][k][k][in]        out and in padded with zeros to multiples of VM_BLOCK
 *   after nearest 2x  [4][out][2][2][in] one 2x2 filter for each parity of the output's row and column
 *   either            in blocks (vm_conv_filter_at) if vm_gpu_blocked
 *   e4m3 (vm_gpu_fp8) in blocks of pairs, then [out] floats: a power of two for each filter, which makes the filter's
 *                     largest number more than half of 448, e4m3's largest, and not more than it
 *   vector        [out] floats, padded likewise
 *   of videos     [out][slice][k][k][in]; without slices for earlier frames, rows and columns are exchanged
 *                 3x3x3 in blocks: the taps are slices and rows, and each column has channels of its own
 *
 * Each of three convolutions in one (qkv) is padded. Filters over time keep only the last slice, unless the model is of
 * videos. These filters are for rows that are the picture's columns (frames.c).
 *
 * Over an image with doubled pixels, a 3x3 filter meets every source pixel under several taps. Summing those first
 * gives four 2x2 filters: the same in real arithmetic, and 16 products instead of 36. Taps are summed in float and
 * rounded once. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

/* Returns: inputs of a filter at one of its taps, in blocks. */
static size_t blocked_in(const vm_weight *w) { return vm_padded(w->in) * vm_weight_slices(w); }

static bool blocked(const vm_backend *b, const vm_weight *w) {
    if (w->vector || (w->frames && !w->past)) return false;
    return vm_gpu_blocked(b->self, w->ksize, blocked_in(w), vm_weight_lanes(w));
}

static bool is_fp8(const vm_backend *b, const vm_weight *w) {
    const bool allowed = w->fp8 && !w->vector && !w->frames && !w->up;
    return vm_gpu_fp8(b->self, allowed, w->ksize, vm_padded(w->in), vm_weight_lanes(w));
}

size_t vm_gpu_weight_bytes(const vm_backend *b, const vm_weight *w) {
    const size_t lanes = vm_weight_lanes(w);
    if (w->vector) return lanes * sizeof(float);
    if (is_fp8(b, w)) return vm_gpu_fp8_bytes(lanes, vm_padded(w->in), 9) + lanes * sizeof(float);
    if (blocked(b, w))
        return vm_conv_blocked(w->up ? 4 : 1, lanes, blocked_in(w), w->up ? 4 : w->ksize * w->ksize) *
               vm_dtype_bytes(b->dtype);
    return lanes * (w->up ? 16 : w->ksize * w->ksize) * vm_weight_slices(w) * vm_padded(w->in) *
           vm_dtype_bytes(b->dtype);
}

/* A tensor in a file, element by element. */
typedef struct source {
    vm_dtype dtype;
    const void *data;
    bool finite; /* so far */
} source;

static float read(source *from, size_t i) {
    const float v = vm_element(from->dtype, from->data, i);
    from->finite &= isfinite(v) != 0;
    return v;
}

/* Returns: a tap of the folded filter; its nine taps begin at element `first`. */
static float folded(source *from, size_t first, size_t phase, size_t tap) {
    size_t y0, y1, x0, x1;
    float sum = 0;
    vm_folded_taps(phase / 2, tap / 2, &y0, &y1);
    vm_folded_taps(phase % 2, tap % 2, &x0, &x1);
    for (size_t y = y0; y <= y1; y++)
        for (size_t x = x0; x <= x1; x++) sum += read(from, first + y * 3 + x);
    return sum;
}

/* 3x3 filters of an image. */
static void pack_fp8(const vm_weight *w, void *out, source *from) {
    const size_t lanes = vm_weight_lanes(w), in = vm_padded(w->in), each = w->in * 9;
    uint8_t *const factor = out;
    float *const scale = (float *)(factor + vm_gpu_fp8_bytes(lanes, in, 9));
    for (size_t o = 0; o < w->out; o++) {
        const size_t lane = vm_weight_lane(w, o);
        float largest = 0;
        int power = 0;
        const size_t first = o * each * (w->past + 1);
        for (size_t i = 0; i < w->in; i++)
            for (size_t tap = 0; tap < 9; tap++)
                largest = fmaxf(largest, fabsf(read(from, first + (i * (w->past + 1) + w->past) * 9 + tap)));
        if (largest > 0 && isfinite(largest)) power = frexpf(largest / 448, &power) > 0.5f ? power : power - 1;
        power = VM_MAX(power, -100); /* so that 2^power is a normal float */
        scale[lane] = ldexpf(1, power);
        for (size_t i = 0; i < w->in; i++)
            for (size_t tap = 0; tap < 9; tap++) {
                const float v = read(from, first + (i * (w->past + 1) + w->past) * 9 + tap);
                const size_t pair = vm_conv_filter_at((uint32_t)lanes, (uint32_t)in / 2, 9, 0, (uint32_t)lane,
                                                      (uint32_t)tap, (uint32_t)i / 2);
                factor[2 * pair + i % 2] = vm_to_e4m3(ldexpf(v, -power));
            }
    }
}

vm_status vm_gpu_pack_weight(const vm_backend *b, const vm_weight *w, void *out, vm_dtype dtype, const void *data) {
    source from = {dtype, data, true};
    const vm_dtype kept = w->vector ? VM_F32 : b->dtype;
    bool fits = true;
    memset(out, 0, vm_gpu_weight_bytes(b, w));
    if (is_fp8(b, w)) {
        pack_fp8(w, out, &from);
        ((vm_gpu *)b->self)->fp8_weights++;
        return from.finite ? VM_OK : vm_fail(VM_EINVAL, VM_EXPECTED("", "finite numbers", "Inf or NaN"));
    }
    const size_t file_taps = w->ksize * w->ksize, phases = w->up ? 4 : 1, taps = w->up ? 4 : file_taps;
    const size_t in = w->vector ? 1 : vm_padded(w->in), lanes = vm_weight_lanes(w);
    const bool in_blocks = blocked(b, w), turns = w->frames && !w->past && !w->vector;
    const size_t kept_slices = w->vector ? 1 : vm_weight_slices(w), side = w->up ? 2 : w->ksize;
    for (size_t phase = 0; phase < phases; phase++)
        for (size_t o = 0; o < w->out; o++)
            for (size_t slice_tap = 0; slice_tap < kept_slices * taps; slice_tap++)
                for (size_t i = 0; i < w->in; i++) {
                    const size_t tap = slice_tap % taps, slice = w->past + 1 - kept_slices + slice_tap / taps;
                    const size_t first = ((o * w->in + i) * (w->past + 1) + slice) * file_taps;
                    const size_t across = turns ? tap % side * side + tap / side : tap;
                    const size_t parity = turns ? phase % 2 * 2 + phase / 2 : phase;
                    const float v = w->up ? folded(&from, first, parity, across) : read(&from, first + across);
                    const size_t lane = vm_weight_lane(w, o);
                    /* of a video's three columns each has channels of its own */
                    const size_t columns = kept_slices, in_tap = slice_tap % columns * in + i;
                    const size_t at = in_blocks ? vm_conv_filter_at((uint32_t)lanes, (uint32_t)blocked_in(w),
                                                                    (uint32_t)taps, (uint32_t)phase, (uint32_t)lane,
                                                                    (uint32_t)(slice_tap / columns), (uint32_t)in_tap)
                                                : ((phase * lanes + lane) * kept_slices * taps + slice_tap) * in + i;
                    vm_set_element(kept, out, at, v);
                    fits &= isfinite(vm_element(kept, out, at)) != 0;
                }
    if (!from.finite) return vm_fail(VM_EINVAL, VM_EXPECTED("", "finite numbers", "Inf or NaN"));
    return fits ? VM_OK
                : vm_fail(VM_EINVAL, VM_EXPECTED("", "numbers within %s's range", "larger ones"), vm_dtype_name(kept));
}
