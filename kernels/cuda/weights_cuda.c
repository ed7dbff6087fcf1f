/* Tensors of weights as the GPU's passes want them, made on the host one at a time:
 *
 *   convolution   [out][k][k][in]        out and in padded with zeros to multiples of VM_BLOCK
 *   after nearest 2x  [4][out][2][2][in] one 2x2 filter for each parity of the output's row and column
 *   vector        [out] floats, padded likewise
 *
 * A 3x3 filter over an image whose pixels were doubled meets every source pixel under several taps. Summing those first
 * gives four 2x2 filters: the same in real arithmetic, and 16 products instead of 36. Taps are summed in float and rounded
 * once. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"

size_t vm_gpu_weight_bytes(vm_dtype dtype, const vm_weight *w) {
    if (w->vector) return vm_padded(w->out) * sizeof(float);
    return vm_padded(w->out) * (w->up ? 16 : w->ksize * w->ksize) * vm_padded(w->in) * vm_dtype_bytes(dtype);
}

/* Round to nearest even; a number too large becomes infinite. */
static uint16_t half_of(float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* 65520 and above */
    if (bits < 0x38800000) {                      /* below 2^-14: a multiple of 2^-24 */
        const float steps = rintf(fabsf(v) * 0x1p24f);
        return (uint16_t)(sign | (uint16_t)steps);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

static uint16_t bfloat16_of(float v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* false where v does not fit. */
static bool put(vm_dtype dtype, void *out, size_t i, float v) {
    if (dtype == VM_F32) {
        ((float *)out)[i] = v;
        return true;
    }
    const uint16_t bits = dtype == VM_F16 ? half_of(v) : bfloat16_of(v), exponent = dtype == VM_F16 ? 0x7c00 : 0x7f80;
    ((uint16_t *)out)[i] = bits;
    return (bits & exponent) != exponent;
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

/* Which of three taps in a row (first to last) fall on tap `a` of parity `phase`: 0 | 1 2 and 0 1 | 2. */
static void folded_taps(size_t phase, size_t a, size_t *first, size_t *last) {
    *first = a == 0 ? 0 : phase + 1;
    *last = a == 0 ? phase : 2;
}

/* Tap of the folded filter whose nine taps begin at element `first`. */
static float folded(source *from, size_t first, size_t phase, size_t tap) {
    size_t y0, y1, x0, x1;
    float sum = 0;
    folded_taps(phase / 2, tap / 2, &y0, &y1);
    folded_taps(phase % 2, tap % 2, &x0, &x1);
    for (size_t y = y0; y <= y1; y++)
        for (size_t x = x0; x <= x1; x++) sum += read(from, first + y * 3 + x);
    return sum;
}

vm_status vm_gpu_pack_weight(vm_dtype dtype, const vm_weight *w, void *out, vm_dtype file_dtype, const void *data) {
    source from = {file_dtype, data, true};
    bool fits = true;
    memset(out, 0, vm_gpu_weight_bytes(dtype, w));
    const size_t file_taps = w->ksize * w->ksize, phases = w->up ? 4 : 1, taps = w->up ? 4 : file_taps;
    const size_t in = w->vector ? 1 : vm_padded(w->in);
    for (size_t phase = 0; phase < phases; phase++)
        for (size_t o = 0; o < w->out; o++)
            for (size_t tap = 0; tap < taps; tap++)
                for (size_t i = 0; i < w->in; i++) {
                    const size_t first = (o * w->in + i) * file_taps;
                    const float v = w->up ? folded(&from, first, phase, tap) : read(&from, first + tap);
                    const size_t at = ((phase * vm_padded(w->out) + o) * taps + tap) * in + i;
                    fits &= put(w->vector ? VM_F32 : dtype, out, at, v);
                }
    if (!from.finite) return vm_fail(VM_EINVAL, "want finite numbers, got Inf or NaN");
    return fits ? VM_OK : vm_fail(VM_EINVAL, "want numbers within float16's range (65504), got larger ones");
}
