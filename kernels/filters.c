/* Weights: from a file's layout to the packed one, which is the same for every instruction set, and from that to rows
 * of factors.
 *
 *   float32    [out/16][slice][in/16][taps][min(16, in)][16 out]
 *   halves     [out/16][slice][in/32][taps][min(16, in/2)][16 out][2 in]    two input channels side by side
 *   vector     [c/16][16], float32
 *
 * Padding is zero. Tensors lie end to end, so the three projections of an attention are one convolution with three
 * times the channels. */
#include <math.h>
#include <string.h>

#include "cpu.h"

/* The layout of a packed filter: steps of one or two input channels, up to 16 of them in a block. */
typedef struct layout {
    size_t each, depth, blocks; /* channels in a step, steps in a block, blocks */
} layout;

static layout layout_of(vm_dtype dtype, size_t in) {
    const size_t each = dtype == VM_F32 ? 1 : 2, steps = (in + each - 1) / each;
    return (layout){each, VM_MIN(steps, VM_BLOCK), VM_BLOCKS(steps)};
}

/* slice: counted through the blocks of output channels. Returns: where the numbers of 16 output channels begin; they
 * are l->each apart. */
static size_t packed_at(const layout *l, size_t taps, size_t slice, size_t i, size_t tap) {
    const size_t step = i / l->each, at = (slice * l->blocks + step / VM_BLOCK) * taps + tap;
    return (at * l->depth + step % VM_BLOCK) * VM_BLOCK * l->each + i % l->each;
}

static size_t weight_at(const layout *l, const vm_weight *w, size_t o, size_t slice, size_t i, size_t tap) {
    const size_t lane = vm_weight_lane(w, o);
    return packed_at(l, w->ksize * w->ksize, lane / VM_BLOCK * vm_weight_slices(w) + slice, i, tap) +
           lane % VM_BLOCK * l->each;
}

static vm_dtype packed_dtype(vm_dtype dtype, const vm_weight *w) { return w->vector ? VM_F32 : dtype; }

size_t vm_packed_bytes(vm_dtype dtype, const vm_weight *w) {
    dtype = packed_dtype(dtype, w);
    const layout l = layout_of(dtype, w->in);
    return VM_PRODUCT(vm_weight_lanes(w), vm_weight_slices(w), l.blocks, w->ksize, w->ksize, l.depth, l.each,
                      vm_dtype_bytes(dtype));
}

vm_status vm_pack(vm_dtype dtype, const vm_weight *w, void *to, vm_dtype from, const void *data, bool *rounded) {
    dtype = packed_dtype(dtype, w);
    const layout l = layout_of(dtype, w->in);
    const size_t taps = w->ksize * w->ksize, slices = vm_weight_slices(w);
    bool exact = true, fits = true;
    size_t n = 0;
    for (size_t o = 0; o < w->out; o++)
        for (size_t i = 0; i < w->in; i++) {
            n += (w->past + 1 - slices) * taps;
            for (size_t tap = 0; tap < slices * taps; tap++) {
                const float value = vm_element(from, data, n++);
                const size_t at = weight_at(&l, w, o, tap / taps, i, tap % taps);
                vm_set_element(dtype, to, at, value);
                const float kept = vm_element(dtype, to, at);
                exact &= kept == value || (kept != kept && value != value);
                fits &= isfinite(kept) || !isfinite(value);
            }
        }
    *rounded = !exact;
    return fits ? VM_OK
                : vm_fail(VM_EINVAL, VM_EXPECTED("", "numbers within %s's range", "larger ones"), vm_dtype_name(dtype));
}

void vm_unpack(vm_dtype dtype, const vm_weight *w, const void *from, float *data) {
    dtype = packed_dtype(dtype, w);
    const layout l = layout_of(dtype, w->in);
    const size_t taps = w->ksize * w->ksize, slices = vm_weight_slices(w);
    for (size_t o = 0; o < w->out; o++)
        for (size_t i = 0; i < w->in; i++) {
            for (size_t tap = 0; tap < (w->past + 1 - slices) * taps; tap++) *data++ = 0;
            for (size_t tap = 0; tap < slices * taps; tap++)
                *data++ = vm_element(dtype, from, weight_at(&l, w, o, tap / taps, i, tap % taps));
        }
}

vm_filter vm_filter_of(const vm_work *work) {
    const vm_pass *p = work->pass;
    return (vm_filter){work->at.weight, work->cpu->dtype, p->x.c, (size_t)(p->ksize * p->ksize),
                       p->skipped + p->slices};
}

void vm_filter_row(float row[VM_BLOCK], const vm_filter *f, size_t block, size_t slice, size_t i, size_t tap) {
    const layout l = layout_of(f->dtype, f->in);
    memset(row, 0, VM_BLOCK * sizeof *row);
    if (i >= f->in) return;
    const size_t at = packed_at(&l, f->taps, block * f->slices + slice, i, tap);
    for (size_t o = 0; o < VM_BLOCK; o++) row[o] = vm_element(f->dtype, f->weight, at + o * l.each);
}

const float *vm_filter_block(float *to, const vm_cpu_ops *ops, const vm_filter *f, size_t block, size_t slice,
                             size_t x_block) {
    const layout l = layout_of(f->dtype, f->in);
    const size_t first = x_block * VM_BLOCK, n = VM_MIN(f->in, VM_BLOCK) * VM_BLOCK;
    slice += block * f->slices;
    if (f->dtype == VM_F32) return (const float *)f->weight + packed_at(&l, f->taps, slice, first, 0);
    const size_t steps = VM_MIN(l.depth - first / 2 % VM_BLOCK, VM_BLOCK / 2), filled = 2 * steps * VM_BLOCK;
    for (size_t tap = 0; tap < f->taps; tap++) {
        ops->unpack(to + tap * n, f->dtype, (const uint16_t *)f->weight + packed_at(&l, f->taps, slice, first, tap),
                    steps);
        if (filled < n) memset(to + tap * n + filled, 0, (n - filled) * sizeof *to);
    }
    return to;
}
