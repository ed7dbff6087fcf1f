/* Launches that images and videos share. */
#include <assert.h>
#include <math.h>

#include "gpu.h"

vm_status vm_gpu_launch(vm_gpu *g, CUfunction kernel, size_t x, size_t y, size_t threads, size_t shared, void *args) {
    if (x > INT32_MAX || y > 65535) return vm_fail(VM_EINVAL, "CUDA: a grid of %zu x %zu blocks is too large", x, y);
    g->launches++;
    return vm_driver_check(g->d,
                           g->d->LaunchKernel(kernel, (unsigned)x, (unsigned)y, 1, (unsigned)threads, 1, 1,
                                              (unsigned)shared, g->stream, (void *[]){args}, NULL),
                           "launching a kernel");
}

vm_ring_rows vm_gpu_ring(const vm_view *v, size_t first) {
    if (v->ring == SIZE_MAX) return (vm_ring_rows){0, 0};
    return (vm_ring_rows){(uint32_t)(first % v->ring) - (uint32_t)first, (uint32_t)v->ring};
}

vm_status vm_gpu_pixel_norm(vm_gpu *g, const vm_pass *p, const vm_operands *at, float *factor, float *scale,
                            size_t first, size_t end) {
    const vm_ring_rows ring = vm_gpu_ring(&at->x, first);
    const size_t in_row = p->x.f * p->x.w, pixels = (end - first) * in_row;
    const bool rms = p->norm == VM_NORM_RMS;
    vm_pixel_norm_args a = {.x = at->x.data,
                            .gamma = at->gamma,
                            .factor = factor,
                            .scale = scale,
                            .shift = scale + vm_padded(p->x.c),
                            .first = vm_ring_row(ring, (uint32_t)first) * (uint32_t)in_row,
                            .pixels = (uint32_t)pixels,
                            .ring_pixels = ring.rows * (uint32_t)in_row,
                            .c = (uint32_t)p->x.c,
                            .x_pitch = (uint32_t)(at->x.row / in_row),
                            .least = rms ? 0 : p->eps * p->x_scale,
                            .under = rms ? p->eps * p->x_scale * p->x_scale * (float)p->x.c : 0};
    const size_t blocks = (pixels + VM_CUDA_THREADS / 8 - 1) / (VM_CUDA_THREADS / 8);
    const size_t most = (size_t)g->multiprocessors * 32;
    return vm_gpu_launch(g, g->kernel[VM_KERNEL_PIXEL_NORM], VM_MIN(blocks, most), 1, VM_CUDA_THREADS, 0, &a);
}

/* x's numbers [n][3][channels], for attention_wgmma.cu. */
static vm_status map_attention(vm_gpu *g, const vm_attention_args *a, vm_tensor_map *out) {
    static_assert(sizeof *out == sizeof(CUtensorMap), "as the driver's");
    const bool half = g->backend.dtype == VM_F16;
    const cuuint64_t dims[] = {a->channels, 3, a->n}, strides[] = {2 * a->channels, 2 * (cuuint64_t)a->pitch};
    const cuuint32_t box[] = {64, 1, VM_PAIR_BOX_ROWS}, steps[] = {1, 1, 1};
    VM_TRY(g,
           TensorMapEncodeTiled(
               (CUtensorMap *)out, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
               (void *)(uintptr_t)a->x, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
           "describing attention's input");
    return VM_OK;
}

vm_status vm_gpu_attention(vm_gpu *g, const vm_pass *p, const vm_operands *at) {
    const size_t c = p->x.c / 3, n = p->x.h * p->x.w;
    vm_attention_pairs_args a = {
        .of = {.x = at->x.data,
               .y = at->y.data,
               .n = (uint32_t)n,
               .channels = (uint32_t)c,
               .pitch = (uint32_t)(at->x.row / p->x.w),
               .y_pitch = (uint32_t)(at->y.row / p->y.w),
               .scale = (float)(1 / (sqrt((double)p->scale_channels) * p->x_scale * p->x_scale))}};
    const vm_status s = g->attention.pairs ? map_attention(g, &a.of, &a.map) : VM_OK;
    if (s) return s;
    return vm_gpu_launch(g, g->kernel[VM_KERNEL_ATTENTION], vm_attention_blocks(g->attention, n), 1,
                         g->attention.threads, vm_attention_shared(g->backend.dtype, g->attention, (uint32_t)c),
                         g->attention.pairs ? (void *)&a : &a.of);
}
