/* The host as a device: its memory, its packed weights, and synchronous runs. */
#include <string.h>

#include "cpu.h"
#include "os.h"

static vm_status take(const vm_backend *b, size_t bytes, void **out) {
    (void)b;
    *out = vm_os_take(bytes);
    return VM_OK;
}

static void give(const vm_backend *b, void *block, size_t bytes) {
    (void)b;
    vm_os_give(block, bytes);
}

/* ---- weights ---- */

static size_t weight_bytes(const vm_backend *b, const vm_weight *w) { return vm_packed_bytes(b->dtype, w); }

static vm_status set_weight(const vm_backend *b, const vm_weight *w, void *to, vm_dtype dtype, const void *data,
                            bool *rounded) {
    return vm_pack(b->dtype, w, to, dtype, data, rounded);
}

static vm_status get_weight(const vm_backend *b, const vm_weight *w, const void *from, float *data) {
    vm_unpack(b->dtype, w, from, data);
    return VM_OK;
}

/* ---- runs: nothing is enqueued, every call is complete when it returns ---- */

static vm_status start(const vm_backend *b, void *stream) {
    (void)b, (void)stream;
    return VM_OK;
}

static vm_status finish(const vm_backend *b, const vm_exec *exec, bool wait, bool *overflow) {
    (void)b, (void)exec, (void)wait;
    (void)overflow; /* storing sets it (vm_operands.overflow) */
    return VM_OK;
}

static vm_status begin(const vm_backend *b, uint64_t key, bool *replayed) {
    (void)b, (void)key;
    *replayed = false;
    return VM_OK;
}

static vm_status end(const vm_backend *b, uint64_t key, vm_status so_far) {
    (void)b, (void)key;
    return so_far;
}

static vm_status step_enqueued(const vm_backend *b, size_t step, size_t rows, const vm_exec *exec) {
    (void)b, (void)step, (void)rows, (void)exec;
    return VM_OK;
}

static void seconds(const vm_backend *b, size_t step, double *seconds) { (void)b, (void)step, (void)seconds; }

static vm_status copy(const vm_backend *b, void *to, const void *from, size_t bytes) {
    (void)b;
    memcpy(to, from, bytes);
    return VM_OK;
}

static vm_status blend(const vm_backend *b, void *stream, const vm_blend_args *a) {
    (void)b, (void)stream;
    const vm_shape image = {.c = a->y_c, .h = a->y_h, .w = a->y_w, .f = 1};
    const bool bytes = a->format == VM_U8_NHWC;
    const size_t item_bytes = VM_PRODUCT(image.c, image.h, image.w, bytes ? 1 : sizeof(float));
    for (size_t plane = 0; plane < (size_t)a->batch * a->y_c; plane++)
        for (uint32_t i = 0; i < a->h; i++)
            for (uint32_t j = 0; j < a->w; j++) {
                const float v = vm_blended(a, plane, i, j);
                if (i < a->step && j < a->step)
                    vm_store_number(bytes, (char *)a->y + plane / image.c * item_bytes, &image, a->clamp,
                                    (a->top + i) * image.w + a->left + j, plane % image.c, v);
            }
    return VM_OK;
}

const vm_device vm_host = {.align = VM_ALIGN,
                           .addressable = true,
                           .take = take,
                           .give = give,
                           .weight_bytes = weight_bytes,
                           .set_weight = set_weight,
                           .get_weight = get_weight,
                           .start = start,
                           .finish = finish,
                           .begin = begin,
                           .end = end,
                           .step_enqueued = step_enqueued,
                           .seconds = seconds,
                           .send = copy,
                           .fetch = copy,
                           .blend = blend,
                           .error = vm_error};
